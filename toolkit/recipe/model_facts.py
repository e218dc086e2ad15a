"""What is known of a model without importing torch: its config file, and what the source of the installed transformers,
or the model's own code, says of it; nothing is executed."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.recipe.hub import hub_problem, is_reachable, is_refusal
from toolkit.recipe.schema import Model


class _Unknown:
    """A value that neither a config nor its class's source says; false."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()


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
    def text(self) -> ModelFacts:
        """The facts of the part that reads text, where the config nests one (``text_config``); else these."""
        return self.part("text_config") or self

    def part(self, key: str) -> ModelFacts | None:
        """The facts of the config that this one nests as ``key``; None where it nests none."""
        nested = (self.config or {}).get(key)
        kind = _config_class(self).nested.get(key)
        if not isinstance(nested, dict) and kind is None:
            return None
        nested = nested if isinstance(nested, dict) else {}
        return ModelFacts({"model_type": kind} | nested if kind else nested, None, self.why_unknown)

    def value(self, key: str) -> Any:
        """The value that is in force for ``key``: of the config, under the name that its class gives ``key``, else the
        class's default. ``UNKNOWN`` where the class's source does not say it as a constant."""
        about, config = _config_class(self), self.config or {}
        own = about.renamed.get(key, key)
        names = (own, key, *(theirs for theirs, ours in about.renamed.items() if ours == own))
        return next((config[name] for name in names if name in config), about.defaults.get(own, UNKNOWN))

    @property
    def hidden_size(self) -> int | None:
        """Width of the residual stream, under any of its config names."""
        for part in (self, self.text):
            for key in ("hidden_size", "d_model", "n_embd", "dim"):
                if isinstance(found := part.value(key), int):
                    return found
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


def model_sources(facts: ModelFacts, name: str | None = None) -> list[Path]:
    """The files of the model's code: transformers', or those that come with the model; none where unknown. A type
    without code of its own (InternLM3 is a Llama) has that of its class ``name``."""
    if facts.folder is not None and (facts.config or {}).get("auto_map"):
        return sorted(facts.folder.glob("modeling_*.py"))
    package = _transformers_models()
    if package is None or facts.model_type is None:
        return []
    special = _special_modules()
    module = special.get(facts.model_type, facts.model_type.replace("-", "_"))
    return sorted((package / module).glob("modeling_*.py")) or ([] if name is None else _files_of(name))


@functools.cache
def _files_of(name: str) -> list[Path]:
    """The file of transformers that defines the model class ``name``."""
    package, line = _transformers_models(), f"\nclass {name}("
    files = [] if package is None else sorted(package.glob("*/modeling_*.py"))
    return [file for file in files if line in file.read_text(encoding="utf-8")]


def auto_class_of(facts: ModelFacts, auto_class: str) -> str | None:
    """The class that ``auto_class`` of transformers makes of a config: of one with images, AutoModelForCausalLM's may
    be the whole model or its text alone; None where it is not known."""
    own = (facts.config or {}).get("auto_map")
    if isinstance(own, dict):
        named = own.get(auto_class)
        return named.rpartition(".")[2] if isinstance(named, str) else None
    named = _auto_table("modeling_auto.py", _table_name(auto_class)).get(str(facts.model_type))
    return named[0] if isinstance(named, tuple | list) else named


@functools.cache
def _table_name(auto_class: str) -> str:
    """The table by model type that an auto class reads, as modeling_auto.py says it."""
    body = _auto_body("modeling_auto.py")
    mapping = next(
        (value.id for node in body if isinstance(node, ast.ClassDef) and node.name == auto_class
         for key, value in _assigned(node) if key == "_model_mapping" and isinstance(value, ast.Name)), None,
    )  # fmt: skip
    for node in body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == mapping for target in node.targets):
            named = [argument.id for argument in getattr(node.value, "args", []) if isinstance(argument, ast.Name)]
            return named[-1]
    return ""


def value_in_class(source: Path, name: str | None, attribute: str) -> Any:
    """What the body of class ``name`` in a file sets as ``attribute``, where it is a literal; else None."""
    return _class_values(source).get((name, attribute))


@functools.cache
def _class_values(source: Path) -> dict[tuple[str | None, str], Any]:
    found: dict[tuple[str | None, str], Any] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for attribute, value in _assigned(node):
            try:
                found[node.name, attribute] = ast.literal_eval(value)
            except ValueError:
                continue
    return found


def supports_sdpa(facts: ModelFacts) -> bool:
    """Whether the model's code supports torch's scaled_dot_product_attention; True where it is not known."""
    sources = model_sources(facts)
    return not sources or any(_marked_sdpa(source) for source in sources)


@dataclass(frozen=True)
class _ConfigClass:
    """What the source of a config class says: ``defaults`` that are constants, ``renamed`` keys (``attribute_map``),
    the model types of ``nested`` configs."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    nested: Mapping[str, str] = field(default_factory=dict)


def _config_class(facts: ModelFacts) -> _ConfigClass:
    """The config class of a model; an empty one where its source is not known."""
    if facts.model_type is None:
        return _ConfigClass()
    if facts.folder is not None and (facts.config or {}).get("auto_map"):
        sources = sorted(facts.folder.glob("configuration_*.py"))
    elif (package := _transformers_models()) is not None:
        module = _special_modules().get(facts.model_type, facts.model_type.replace("-", "_"))
        sources = sorted((package / module).glob("configuration_*.py"))
    else:
        sources = []
    found = (_config_classes(source).get(facts.model_type) for source in sources)
    return next((about for about in found if about is not None), _ConfigClass())


def config_name(facts: ModelFacts, key: str) -> str:
    """The name that this model type's config files have for ``key``, which its code may read under another one
    (GPT-2's ``n_positions`` is ``max_position_embeddings`` there)."""
    return key if key in (facts.config or {}) else _config_class(facts).renamed.get(key, key)


@functools.cache
def _config_classes(source: Path) -> dict[str, _ConfigClass]:
    """The config classes of a file by model type. A class has what its bases in the file have."""
    bodies: dict[str, dict[str, ast.expr]] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            bases = (bodies.get(base.id, {}) for base in node.bases if isinstance(base, ast.Name))
            bodies[node.name] = {key: value for base in bases for key, value in base.items()} | dict(_assigned(node))
    kinds = {name: _constant(body.get("model_type")) for name, body in bodies.items()}
    found = {}
    for name, body in bodies.items():
        if not isinstance(kinds[name], str):
            continue
        values = {key: value for key, node in body.items() if (value := _constant(node)) is not UNKNOWN}
        renamed = {str(key): str(value) for key, value in _literals(body.get("attribute_map")).items()}
        nested = {str(key): _nested_type(node, kinds) for key, node in _entries(body.get("sub_configs_defaults"))}
        found[str(kinds[name])] = _ConfigClass(values, renamed, {key: kind for key, kind in nested.items() if kind})
    return found


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """What a class's body sets."""
    for statement in node.body:
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        value = getattr(statement, "value", None)
        if value is not None:
            yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))


def _constant(node: ast.expr | None) -> Any:
    """The value of a constant, or of a product of two (``4096 * 32``); UNKNOWN for whatever else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = [_constant(node.left), _constant(node.right)]
        return sides[0] * sides[1] if all(isinstance(side, int) for side in sides) else UNKNOWN
    try:
        value = UNKNOWN if node is None else ast.literal_eval(node)
    except ValueError:
        return UNKNOWN
    return value if isinstance(value, str | int | float | bool | None) else UNKNOWN


def _entries(node: ast.expr | None) -> list[tuple[Any, ast.expr]]:
    """Keys and values of a dictionary that is written out."""
    if not isinstance(node, ast.Dict):
        return []
    return [(_constant(key), value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]


def _literals(node: ast.expr | None) -> dict[Any, Any]:
    return {key: _constant(value) for key, value in _entries(node)}


def _nested_type(node: ast.expr, kinds: Mapping[str, Any]) -> str | None:
    """The model type of a nested config: of its class in the same file, or as ``SubConfigSpec(model_type=...)`` has
    it."""
    if isinstance(node, ast.Name):
        return kinds[node.id] if isinstance(kinds.get(node.id), str) else None
    words = node.keywords if isinstance(node, ast.Call) else []
    return next((str(_constant(word.value)) for word in words if word.arg == "model_type"), None)


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


def _special_modules() -> dict[str, str]:
    """transformers' own table of model types whose code lives in another type's module."""
    return _auto_table("auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")


@functools.cache
def _auto_table(file: str, name: str) -> dict[str, Any]:
    """A table by model type that a file of ``transformers/models/auto`` sets; empty without transformers."""
    for node in _auto_body(file):
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == name for target in node.targets):
            assert isinstance(node.value, ast.Call)
            return dict(ast.literal_eval(node.value.args[0]))
    return {}


@functools.cache
def _auto_body(file: str) -> list[ast.stmt]:
    package = _transformers_models()
    return [] if package is None else ast.parse((package / "auto" / file).read_text(encoding="utf-8")).body
