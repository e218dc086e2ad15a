"""From a checkpoint to a folder that from_pretrained (and PEFT) loads without this toolkit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open

from toolkit.errors import InputError, RunFailed
from toolkit.launch.identity import saved_recipe
from toolkit.model.load import bare_model, build_config
from toolkit.model.processor import load_processor, pad_token_of
from toolkit.model.sources import NotByPart
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.rooms import Option, asked_options, option_named
from toolkit.strategies import resolve, simplest
from toolkit.training.card import model_card
from toolkit.training.export_check import Compared, compare_export, trained_model
from toolkit.training.finding import all_checkpoints, first_valid, whole_manifest
from toolkit.training.finding import best as best_checkpoint
from toolkit.training.merge import merge_whole
from toolkit.training.streamed import Job, name_base, name_classes, one_dtype, write_in_turn
from toolkit.training.tensor_folder import read_index

T = TypeVar("T")


def push_folder(folder: str, repository: str) -> None:
    """Upload to a model repository of the hub, created if needed. Raises RunFailed; ``folder`` is not changed."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True, private=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # its errors have no common base: connection, authentication, names, quota
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
        raise RunFailed(
            f"--push {repository}: {text}\n{folder} is complete; to retry the upload: hf upload {repository} {folder}"
        ) from None


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""``--dtype``, also by torch's names."""


@dataclass(frozen=True)
class Written:
    """An export that was written."""

    kind: str
    """``adapter``, ``merged model`` or ``full model``."""
    resolved: Resolved
    """The recipe for one CPU process."""
    built_whole: str | None
    """Why the whole model was built in memory; None if it was not."""
    compared: Compared | str
    """How its logits compare with those of the trained model; why they were not compared, if they were not."""


def export(
    source: Path,
    output: Path,
    *,
    merged: bool = False,
    best: bool = False,
    dequantise: bool = False,
    weights_of: str | None = None,
    dtype: str | None = None,
) -> Written:
    """Write adapter, merged or full model, and compare what was written with what was trained.

    ``weights_of``: an option whose weights are exported in place of those that trained (``Option.shadow``).
    ``dtype``: of a merged model, the base's if None; of a full one, that in which it trains. Raises InputError if
    ``source`` is not a valid checkpoint or ``output`` exists, RunFailed if a trained tensor is missing, or if the
    export answers otherwise than the trained model; then nothing is left.
    """
    empty_target(output)
    option = None if weights_of is None else option_named(weights_of)
    if weights_of is not None and (option is None or option.shadow is None):
        raise InputError(f"--{weights_of}: this installation has no toolkit/options/{weights_of}")

    def use(folder: Path) -> Written:
        return _export(folder, output, merged=merged, dequantise=dequantise, weights_of=option, dtype=dtype)

    return with_checkpoint(source, use, best=best)


def _export(
    folder: Path, output: Path, *, merged: bool, dequantise: bool, weights_of: Option | None, dtype: str | None
) -> Written:
    """``export`` of one checkpoint, each tensor of which is validated when it is read: raises Damaged, and nothing is
    left."""
    manifest = whole_manifest(folder, when_read=True)
    recipe = saved_recipe(folder, manifest)
    if merged and recipe.adapter is None:
        raise InputError("--merged: this run trained every weight, so there is no adapter to merge")
    if merged and recipe.adapter is not None and not METHODS[recipe.adapter.method].merges:
        raise InputError(
            f"--merged: {recipe.adapter.method} cannot be merged into the base weights; export the adapter alone"
        )
    if dtype is not None and recipe.adapter is not None and not merged:
        raise InputError("--dtype: an adapter is written as it trains; add --merged, or leave --dtype out")
    asked = _dtype(dtype)
    resolved = resolve(alone(recipe), str(folder), device="cpu")
    quantised = resolved.base_storage is not None
    if merged and quantised and not dequantise:
        raise InputError(
            "--merged: cannot merge into 4-bit weights; add --dequantise to merge the adapter into the "
            "base's dequantised weights (16 or 32 bits each), or export the adapter alone"
        )
    if dequantise and not (merged and quantised):
        raise InputError("--dequantise: requires --merged and a run on a base in 4 bits (adapter.method: qlora)")
    # Earlier versions padded with the tokenizer's own token, and trained a classifier to pool before it.
    earlier = "pad_token" not in manifest
    tokenizer = load_processor(recipe, own_padding=earlier)
    pad = pad_token_of(tokenizer)
    if earlier and (resolved.facts.config or {}).get("pad_token_id") is not None:
        pad = None
    if merged:
        asked = asked or base_dtype(resolved)
        check_shared(resolved, read_index(folder, manifest)[0])
    writing = output.with_name(f".{output.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    job = Job(resolved, folder, manifest, pad, writing, weights_of, merged=merged, dtype=asked)
    try:
        kind, reason = _written(job)
        tokenizer.save_pretrained(writing)
        text = f"{kind}, {weights_of.shadow.exported}" if weights_of and weights_of.shadow else kind
        card = model_card(text, recipe, resolved, manifest, folder.absolute().parents[1])
        (writing / "README.md").write_text(card, encoding="utf-8")
        compared = compare_export(job, kind, tokenizer)
        if output.exists():
            output.rmdir()
        writing.rename(output)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return Written(kind, resolved, reason, compared)


def _dtype(name: str | None) -> torch.dtype | None:
    known = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name is not None and name not in known:
        raise InputError(f"--dtype: {name!r} is none of {', '.join(DTYPES)}")
    return None if name is None else known[name]


def base_dtype(resolved: Resolved) -> torch.dtype:
    """The dtype of the base model's files: as its config or its first weight has it. Of a base with random weights, the
    one in which frozen weights train."""
    config = build_config(resolved)
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if named is None and resolved.recipe.model.path is not None:
        files = sorted(Path(resolved.recipe.model.path).expanduser().glob("*.safetensors"))
        named = next((found for file in files if (found := _first_dtype(file)) is not None), None)
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    return named if named is not None else getattr(torch, resolved.precision.frozen)


def _first_dtype(file: Path) -> torch.dtype | None:
    """Of the first floating tensor of more than 8 bits; None without."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if (dtype := opened.get_tensor(name).dtype) in DTYPES.values():  # mapped, not read
                return dtype
    return None


_COPY = re.compile(r"^(modules_to_save|token_adapter|trainable_tokens\w*)\b")
"""What an adapter trains in a copy, or in rows of one: PEFT unties it when it is merged."""


def check_shared(resolved: Resolved, trained: Iterable[str]) -> None:
    """Raise InputError where an adapter is on a weight that several modules share: merged, it would change all of them.
    Which modules share one is what the model says, built without weights; one that cannot be built so is compared once
    it is merged."""
    adapter = resolved.recipe.adapter
    if adapter is None or adapter.options.get("ensure_weight_tying"):
        return
    model = bare_model(resolved)
    if model is None:
        return
    modules = dict(model.named_modules())
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    shared: dict[str, set[str]] = {}
    for tensor in trained:
        parts = tensor.removeprefix("base_model.model.").split(".")
        count = next((count for count in range(len(parts), 0, -1) if ".".join(parts[:count]) in modules), 0)
        name, rest = ".".join(parts[:count]), ".".join(parts[count:])
        for parameter in modules[name].parameters(recurse=False) if count and not _COPY.match(rest) else ():
            if len(owners[id(parameter)]) > 1:
                shared.setdefault(name, set()).update(owners[id(parameter)])
    if shared:
        adapted, sharing = sorted(_last(shared)), sorted(_last(set().union(*shared.values())))
        raise InputError(
            f"--merged: {' and '.join(sharing)} share one weight in this model, and the adapter changes "
            f"{' and '.join(adapted)} apart from it: merged, each would change the other. Export the adapter alone, or "
            "train with adapter.options: {ensure_weight_tying: true}, or with adapter.modules_to_save"
        )


def _last(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _written(job: Job) -> tuple[str, str | None]:
    """Write the model; returns the kind, and why the whole model was built in memory."""
    try:
        return write_in_turn(job), None
    except NotByPart as problem:
        reason = str(problem)
    shutil.rmtree(job.writing, ignore_errors=True)
    model = trained_model(job.resolved, job.folder, job.pad_token_id, job.weights_of)
    name_classes(model, job.manifest)
    return write_model(model, job.resolved.recipe, job.writing, merged=job.merged, dtype=job.dtype), reason


def write_model(model: Any, recipe: Recipe, folder: Path, *, merged: bool, dtype: torch.dtype | None = None) -> str:
    if recipe.adapter is None:
        model.config.use_cache = True
        one_dtype(model, dtype)
        model.save_pretrained(folder)
        return "full model"
    if not merged:
        model.save_pretrained(folder)
        name_base(folder, recipe)
        return "adapter"
    whole: Any = merge_whole(model, dtype)
    whole.config.use_cache = True
    whole.save_pretrained(folder)
    return "merged model"


def empty_target(output: Path) -> None:
    """Raise InputError if there is something in the folder that is to be written."""
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise InputError(f"{output}: already exists; choose a new folder")


def with_checkpoint(source: Path, use: Callable[[Path], T], *, best: bool) -> T:
    """``use`` of a checkpoint, or of the newest or best one of a run. Damaged ones of a run are reported and skipped:
    ``use`` raises Damaged. Raises InputError if there is none."""
    if not source.is_dir():
        raise InputError(f"{source}: no such folder; expected a checkpoint or a run folder")
    if best:
        found = best_checkpoint(source / "checkpoints") or best_checkpoint(source)
        if found is None:
            raise InputError(
                f"{source}: --best: no checkpoint has a held-out loss; set data.eval, and let "
                "run.eval_every divide run.save_every"
            )
        return use(found)
    for folder in (source, source / "checkpoints"):
        if (folder / "manifest.json").exists():
            return use(folder)
        if (used := first_valid(reversed(all_checkpoints(folder)), print, use)) is not None:
            return used[1]
    raise InputError(f"{source}: contains no checkpoint (run.save_every: 0 saves none)")


def alone(recipe: Recipe) -> Recipe:
    """The recipe for one CPU process: the strategy no longer matters."""
    content = recipe.model_dump(mode="json")
    content["strategy"] = {
        "name": simplest(lambda strategy: not strategy.traits.distributed),
        "wrap": recipe.strategy.wrap,
    }
    content["machine"] = {"device": "cpu", "processes": 1, "nodes": 1}
    content["batch"] = {}
    content |= {"activation_checkpointing": "none", "compile": False}
    # Modules that options replace compute what the model's own do, and others change nothing that is trained.
    for option, _ in asked_options(recipe):
        if option.before_adapters or option.free:
            option.remove(content)
    # Attentions of GPUs compute what the model's own does.
    content["model"]["attention"] = "eager"
    return Recipe.model_validate(content)
