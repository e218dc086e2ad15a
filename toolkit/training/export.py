"""From a checkpoint to a folder that from_pretrained (and PEFT) loads without this toolkit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from toolkit.errors import InputError, RunFailed
from toolkit.launch.identity import saved_recipe
from toolkit.model.batch_norm import batch_norms, statistics
from toolkit.model.load import build_config
from toolkit.model.nf4 import nf4_layers
from toolkit.model.processor import load_processor, pad_token_of
from toolkit.model.sources import NotByPart
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, simplest
from toolkit.training.card import model_card
from toolkit.training.finding import all_checkpoints, first_valid, tensors_of, whole_manifest
from toolkit.training.finding import best as best_checkpoint
from toolkit.training.merge import merge_and_unload, merge_dequantised, merged_by_peft
from toolkit.training.session import prepare_model
from toolkit.training.streamed import Job, name_base, name_classes, one_dtype, write_in_turn
from toolkit.training.tensor_folder import TensorReader, read_index

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


def export(
    source: Path,
    output: Path,
    *,
    merged: bool = False,
    best: bool = False,
    dequantise: bool = False,
    ema: bool = False,
) -> tuple[str, Resolved, str | None]:
    """Write adapter, merged or full model; returns the kind, the recipe it was trained with, and why the whole model
    was built in memory, None if it was not.

    Raises InputError if ``source`` is not a valid checkpoint or ``output`` exists, RunFailed if a trained tensor is
    missing.
    """
    empty_target(output)

    def use(folder: Path) -> tuple[str, Resolved, str | None]:
        return _export(folder, output, merged=merged, dequantise=dequantise, ema=ema)

    return with_checkpoint(source, use, best=best)


def _export(
    folder: Path, output: Path, *, merged: bool, dequantise: bool, ema: bool
) -> tuple[str, Resolved, str | None]:
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
    resolved = resolve(alone(recipe), str(folder), device="cpu")
    quantised = resolved.base_storage is not None
    if merged and quantised and not dequantise:
        raise InputError(
            "--merged: cannot merge into 4-bit weights; add --dequantise to merge the adapter into the "
            "base's dequantised weights (16 or 32 bits each), or export the adapter alone"
        )
    if dequantise and not (merged and quantised):
        raise InputError("--dequantise: requires --merged and a run on a base in 4 bits (adapter.method: qlora)")
    if merged:
        _check_tied(resolved, read_index(folder, manifest)[0])
    # Earlier versions padded with the tokenizer's own token, and trained a classifier to pool before it.
    earlier = "pad_token" not in manifest
    tokenizer = load_processor(recipe, own_padding=earlier)
    pad = pad_token_of(tokenizer)
    if earlier and (resolved.facts.config or {}).get("pad_token_id") is not None:
        pad = None
    writing = output.with_name(f".{output.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    job = Job(resolved, folder, manifest, pad, writing, average=ema, merged=merged)
    try:
        kind, reason = _written(job)
        tokenizer.save_pretrained(writing)
        text = kind if not ema else f"{kind}, averaged weights"
        card = model_card(text, resolved, manifest, folder.absolute().parents[1])
        (writing / "README.md").write_text(card, encoding="utf-8")
        if output.exists():
            output.rmdir()
        writing.rename(output)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return kind, resolved, reason


_EDGE = re.compile(
    r"(?:^|\.)(\w*emb\w*|\w*head|wte|shared|output)\.(?!modules_to_save|token_adapter|trainable_tokens)\w"
)
"""A trained tensor of an adapter that is on an embedding or a head."""


def _check_tied(resolved: Resolved, trained: Iterable[str]) -> None:
    """Raise InputError where an adapter is on a weight that two modules share: merged, it would change both."""
    adapter = resolved.recipe.adapter
    if adapter is None or adapter.options.get("ensure_weight_tying"):
        return
    outside = [name for name in trained if not re.search(r"\.\d+\.", name)]
    edges = sorted({found.group(1) for name in outside if (found := _EDGE.search(name))})
    if not edges:
        return
    if getattr(build_config(resolved, None).get_text_config(), "tie_word_embeddings", False):
        raise InputError(
            f"--merged: the model's embedding and head share one weight, and the adapter changes {' and '.join(edges)} "
            "apart from it: merged, each would change the other. Export the adapter alone, or train with "
            "adapter.options: {ensure_weight_tying: true}, or with adapter.modules_to_save"
        )


def _written(job: Job) -> tuple[str, str | None]:
    """Write the model; returns the kind, and why the whole model was built in memory."""
    try:
        return write_in_turn(job), None
    except NotByPart as problem:
        reason = str(problem)
    shutil.rmtree(job.writing, ignore_errors=True)
    model = trained_model(job.resolved, job.folder, job.pad_token_id, average=job.average)
    name_classes(model, job.manifest)
    return _write(model, job.resolved.recipe, job.writing, merged=job.merged), reason


def trained_model(
    resolved: Resolved, folder: Path, pad_token_id: int | None = None, *, average: bool = False
) -> nn.Module:
    """The recipe's model with a checkpoint's weights, or their averages, complete, on the CPU."""
    model = prepare_model(resolved, pad_token_id).model
    parameters = dict(model.named_parameters())
    missing = {name for name, parameter in parameters.items() if parameter.requires_grad}
    with torch.no_grad():
        for name, tensor in tensors_of(folder, average):
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise RunFailed(f"{folder}: {name}: the model has no tensor of this name and shape")
            parameters[name].copy_(tensor)
            missing.discard(name)
    manifest = whole_manifest(folder, when_read=True)
    running = TensorReader(folder, read_index(folder, manifest)[1], manifest["files"])
    for name, value in statistics(batch_norms(model)).items():
        if name not in running:
            raise RunFailed(f"{folder}: {name}: the checkpoint has no such running statistic")
        value.copy_(running.get(name))
    if missing:
        raise RunFailed(f"{folder}: {len(missing)} trained tensors are missing, for example {sorted(missing)[0]}")
    return model.eval()


def _write(model: Any, recipe: Recipe, folder: Path, *, merged: bool) -> str:
    if recipe.adapter is None:
        model.config.use_cache = True
        one_dtype(model)
        model.save_pretrained(folder)
        return "full model"
    if not merged:
        model.save_pretrained(folder)
        name_base(folder, recipe)
        return "adapter"
    whole: Any = merge_dequantised(model) if nf4_layers(model) else merged_by_peft(partial(merge_and_unload, model))
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
    content |= {"activation_checkpointing": "none", "activation_offload": False, "compile": False, "fp8": False}
    return Recipe.model_validate(content)
