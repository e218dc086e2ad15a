"""What is known of a model without importing torch: its config file and its block classes.

Block classes (what FSDP wraps and checkpointing recomputes) are found in the syntax tree of the installed transformers,
or of the model's own code; nothing is executed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.recipe.hub import hub_problem, is_reachable, is_refusal
from toolkit.recipe.schema import Model


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model's configuration; None if its config does not contain them or is not available."""

    config: dict[str, Any] | None
    folder: Path | None
    why_unknown: str | None = None
    refused: bool = False
    """The hub has no such model, or does not give it to this login: no run can load it."""

    @property
    def model_type(self) -> str | None:
        return None if self.config is None else self.config.get("model_type")

    @property
    def hidden_size(self) -> int | None:
        """Width of the residual stream, under any of its config names."""
        config = self.config or {}
        nested = config.get("text_config")
        for source in (config, nested if isinstance(nested, dict) else {}):
            for key in ("hidden_size", "d_model", "n_embd", "dim"):
                if isinstance(source.get(key), int):
                    return source[key]
        return None


def model_facts(model: Model) -> ModelFacts:
    """Read the config of a recipe's model: inline, from a folder, from the hub cache, or from the hub.

    Raises InputError if a folder does not exist or has no readable config.
    """
    if model.config is not None:
        return ModelFacts(dict(model.config), None)
    assert model.path is not None
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return _from_folder(folder)
    if looks_local(model.path):
        raise InputError(f"model.path: no folder {model.path}")
    return _from_hub(model.path, model.revision)


def looks_local(path: str) -> bool:
    """Whether a name can only be that of a folder, not of something on the hub."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith("/")


def _from_folder(folder: Path) -> ModelFacts:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model.path: {file}: {error.strerror}; a model's folder holds its config.json") from None
    except ValueError as error:
        raise InputError(f"model.path: {file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"model.path: {file}: not a JSON object")
    return ModelFacts(config, folder)


def _from_hub(repo: str, revision: str | None) -> ModelFacts:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    if isinstance(cached, str):
        return _from_folder(Path(cached).parent)
    if constants.HF_HUB_OFFLINE:
        return ModelFacts(None, None, f"{repo} is not in the hub's cache and HF_HUB_OFFLINE is set")
    if not is_reachable(constants.ENDPOINT):
        return ModelFacts(None, None, f"{repo}: no such folder here, and {constants.ENDPOINT} cannot be reached")
    try:
        file = hf_hub_download(repo, "config.json", revision=revision, etag_timeout=3)
    except Exception as error:  # whatever the network does, the reason is kept and reported where it matters
        problem = hub_problem(repo, error)
        told = problem or f"{repo}: no such folder here, and its config could not be read: {_first_line(error)}"
        return ModelFacts(None, None, told, is_refusal(error))
    return _from_folder(Path(file).parent)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def block_classes(facts: ModelFacts) -> tuple[str, ...]:
    """Names of the model's repeated block classes, or () if they are not known.

    transformers marks blocks twice: ``_no_split_modules`` (which also names embeddings) and the base class
    ``GradientCheckpointingLayer``. Blocks are the classes in both, else those of the second, else those of the first.
    A model may be made of others, wholly (LLaVA of CLIP and Llama) or in part (SmolVLM sees by itself and writes by
    Llama): the blocks of its parts are among its own.
    """
    found: list[str] = []
    for source in model_sources(facts):
        marked, checkpointed = _marks(source)
        both = tuple(name for name in marked if name in checkpointed)
        if both or checkpointed or marked:
            found += both or tuple(sorted(checkpointed)) or marked
            break
    for part in (facts.config or {}).values():
        if isinstance(part, dict) and "model_type" in part:
            found += block_classes(ModelFacts(part, None))
    return tuple(dict.fromkeys(found))


def model_sources(facts: ModelFacts) -> list[Path]:
    """The files of the model's code: transformers', or those that come with the model; none where unknown."""
    if facts.folder is not None and (facts.config or {}).get("auto_map"):
        return sorted(facts.folder.glob("modeling_*.py"))
    package = _transformers_models()
    if package is None or facts.model_type is None:
        return []
    special = _special_modules()
    module = special.get(facts.model_type, facts.model_type.replace("-", "_"))
    return sorted((package / module).glob("modeling_*.py"))


def supports_sdpa(facts: ModelFacts) -> bool:
    """Whether the model's code supports torch's scaled_dot_product_attention; True where it is not known."""
    sources = model_sources(facts)
    return not sources or any(_marked_sdpa(source) for source in sources)


def config_default(facts: ModelFacts, key: str) -> Any:
    """The value that transformers' config class of this model type has for ``key`` where a config does not say it; None
    where it has none, or none that is written as a constant."""
    package = _transformers_models()
    if package is None or facts.model_type is None:
        return None
    module = _special_modules().get(facts.model_type, facts.model_type.replace("-", "_"))
    sources = (package / module).glob("configuration_*.py")
    found = [_constants(source).get((facts.model_type, key)) for source in sources]
    return next((value for value in found if value is not None), None)


def config_name(facts: ModelFacts, key: str) -> str:
    """The name that this model type's config files have for ``key``, which its code may read under another one
    (GPT-2's ``n_positions`` is ``max_position_embeddings`` there)."""
    package = _transformers_models()
    if package is None or facts.model_type is None or key in (facts.config or {}):
        return key
    module = _special_modules().get(facts.model_type, facts.model_type.replace("-", "_"))
    sources = (package / module).glob("configuration_*.py")
    return next((name for source in sources if (name := _names(source).get((facts.model_type, key)))), key)


@functools.cache
def _names(source: Path) -> dict[tuple[str, str], str]:
    """By model type and key, the names of ``attribute_map`` in the config classes of a file."""
    names: dict[tuple[str, str], str] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        values: dict[str, Any] = {}
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
            for target in targets:
                if isinstance(target, ast.Name) and target.id in ("model_type", "attribute_map"):
                    try:
                        values[target.id] = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
                    except ValueError:
                        continue  # computed from another class's
        if "model_type" in values:
            names |= {(values["model_type"], key): name for key, name in values.get("attribute_map", {}).items()}
    return names


@functools.cache
def _constants(source: Path) -> dict[tuple[str, str], Any]:
    """By model type and key the constants that the config classes of a file set in their bodies."""
    constants: dict[tuple[str, str], Any] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        values: dict[str, Any] = {}
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign):
                targets: list[ast.expr] = [statement.target]
            elif isinstance(statement, ast.Assign):
                targets = statement.targets
            else:
                continue
            value = _constant(statement.value)
            if value is not _NONE:
                values |= {target.id: value for target in targets if isinstance(target, ast.Name)}
        constants |= {(values["model_type"], key): value for key, value in values.items() if "model_type" in values}
    return constants


_NONE = object()


def _constant(node: ast.expr | None) -> Any:
    """The value of a constant, or of a product of two (``4096 * 32``); ``_NONE`` for whatever else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (node.left, node.right)
        if all(isinstance(side, ast.Constant) and isinstance(side.value, int) for side in sides):
            return node.left.value * node.right.value  # type: ignore[attr-defined]
    return _NONE


def has_batch_norm(facts: ModelFacts) -> bool:
    """Whether the model's code makes layers of batch normalisation; False where it is not known."""
    return any("nn.BatchNorm" in source.read_text(encoding="utf-8") for source in model_sources(facts))


@functools.cache
def _marked_sdpa(source: Path) -> bool:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is True:
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "_supports_sdpa" in names:
                return True
    return False


@functools.cache
def _transformers_models() -> Path | None:
    spec = importlib.util.find_spec("transformers")  # finds, does not import
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "models"


@functools.cache
def _special_modules() -> dict[str, str]:
    """transformers' own table of model types whose code lives in another type's module."""
    package = _transformers_models()
    if package is None:
        return {}
    tree = ast.parse((package / "auto" / "auto_mappings.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "SPECIAL_MODEL_TYPE_TO_MODULE_NAME" for target in node.targets
        ):
            assert isinstance(node.value, ast.Call)
            return dict(ast.literal_eval(node.value.args[0]))
    return {}


@functools.cache
def _marks(source: Path) -> tuple[tuple[str, ...], frozenset[str]]:
    marked: list[str] = []
    checkpointed = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        if any(isinstance(base, ast.Name) and base.id == "GradientCheckpointingLayer" for base in node.bases):
            checkpointed.add(node.name)
        for statement in node.body:
            if isinstance(statement, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "_no_split_modules" for target in statement.targets
            ):
                try:
                    marked += ast.literal_eval(statement.value) or []
                except ValueError:
                    continue  # computed at run time: the other mark decides
    return tuple(dict.fromkeys(marked)), frozenset(checkpointed)
