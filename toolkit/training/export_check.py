"""An export is compared with what was trained: logits of a few rows from the checkpoint's model, and from the written
folder as transformers and PEFT load it. One model at a time is in memory."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.data.collate import Slot, collate
from toolkit.data.files import local_files
from toolkit.data.formats import Example
from toolkit.data.opening import open_parts
from toolkit.data.samples import with_features
from toolkit.data.sources import Which, named_sources
from toolkit.errors import InputError, RunFailed, first_line
from toolkit.launch.host_memory import available_bytes
from toolkit.model.load import bare_model, build_config, load_base, set_padding, switch_off_cache
from toolkit.model.new_tokens import new_tokens
from toolkit.model.packed_layers import packed_weights
from toolkit.model.silence import peft_asks
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.pooling import pooled_token
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.rooms import Option
from toolkit.tasks import task_of
from toolkit.tasks.base import Drawn
from toolkit.tasks.labels import Labels
from toolkit.training.finding import read_statistics, tensors_of, whole_manifest
from toolkit.training.preparation import prepare_model
from toolkit.training.streamed import Job

ROWS = 2
TOKENS = 64
"""Of each row: all layers and weights answer already, and a CPU computes them in seconds."""
SAFETY = 4.0
"""Rounding moves a weight by up to half an epsilon of the dtype that it is written in, and the perturbation that
measures what this does moves every one by just that much, so it overstates; four is room for its being one draw of
signs."""
FLOOR = 64 * torch.finfo(torch.float32).eps
"""Where nothing is rounded: sums of float32 in another order (a merged weight's product against two products)."""
_AT_ONCE = 1 << 20
"""Elements of a weight that are moved at a time."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Compared:
    """How the logits of an export differ from those of the trained model, relative to their norm, at most."""

    rows: str
    """What was computed."""
    error: float
    tolerance: float
    why: str
    """What explains an error of the tolerance."""
    memory_bytes: int
    """What the larger of both models takes."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"logits of {self.rows} are the trained model's within {self.error:.1e} "
            f"({self.why} explains {self.tolerance:.1e})"
        )


@torch.no_grad()
def compare_export(job: Job, kind: str, processor: Any) -> Compared | str:
    """Compare what ``job`` has written with its checkpoint's model; why not, in one line, where a model does not fit
    the memory that is available. Raises RunFailed where they answer differently."""
    taken, left = _bytes(job), _available()
    if left is not None and taken > left:
        return (
            f"not compared with the trained model, which takes {taken / 2**30:.1f} GiB of memory in float32 where "
            f"{left / 2**30:.1f} GiB are available"
        )
    tensors, rows = _inputs(job, processor)
    trained: Any = trained_model(job.resolved, job.folder, job.pad_token_id, job.weights_of)
    rounded = _adapted(trained) if job.merged else None
    projections = _projections(trained) if kind == "adapter" else {}
    right = _logits(trained, tensors)
    del trained
    gc.collect()
    if not right.isfinite().all():
        raise RunFailed(f"{job.folder}: the trained model's logits are not finite; export an earlier checkpoint")
    exported = _exported(job, kind, processor)
    found = _logits(exported, tensors)
    dtype = torch.float32 if kind == "adapter" or (job.dtype is None and not job.merged) else _written_dtype(job)
    _perturb(exported, rounded, dtype)
    _perturb_projections(exported, projections)
    noise = _apart(_logits(exported, tensors), found)
    del exported
    gc.collect()
    error = _apart(found, right)
    half = dtype != torch.float32 or bool(projections)
    tolerance = SAFETY * noise if half else max(SAFETY * noise, FLOOR)
    name = str(dtype).removeprefix("torch.")
    why = f"rounding weights to {name}" if half else "another order of float32 sums"
    if projections:
        why = "rounding the adapter's frozen projections to 16 bits, in training"
    if not math.isfinite(error) or error > tolerance:
        raise RunFailed(
            f"the exported {kind} is not what was trained: logits of {rows} differ by {error:.2g} from those of the "
            f"checkpoint's model, where {why} explains {tolerance:.2g}; nothing was written"
        )
    return Compared(rows, error, tolerance, why, taken)


def trained_model(
    resolved: Resolved, folder: Path, pad_token_id: int | None = None, weights_of: Option | None = None
) -> nn.Module:
    """The recipe's model with a checkpoint's weights, or those that an option kept, complete, on the CPU."""
    model = prepare_model(resolved, pad_token_id).model
    parameters = dict(model.named_parameters())
    missing = {name for name, parameter in parameters.items() if parameter.requires_grad}
    with torch.no_grad():
        for name, tensor in tensors_of(folder, weights_of):
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise RunFailed(f"{folder}: {name}: the model has no tensor of this name and shape")
            parameters[name].copy_(tensor)
            missing.discard(name)
    read_statistics(model, folder, whole_manifest(folder, when_read=True))
    if missing:
        raise RunFailed(f"{folder}: {len(missing)} trained tensors are missing, for example {sorted(missing)[0]}")
    return model.eval()


def exported_adapter(resolved: Resolved, folder: Path, base: Any, linears: dict[str, nn.Linear] | None = None) -> Any:
    """The adapter in ``folder`` on ``base``, as PEFT loads it. ``linears``: of a base whose weights are packed in 4
    bits once the adapter wraps them, as in training."""
    from peft import PeftModel

    with peft_asks():
        adapted = PeftModel.from_pretrained(base, str(folder)).eval()
    if linears and resolved.base is not None:
        resolved.base.pack(adapted, linears, resolved)
    return adapted


def _exported(job: Job, kind: str, processor: Any) -> Any:
    """What was written, as transformers and PEFT load it."""
    import transformers

    resolved, spec = job.resolved, job.resolved.recipe.model
    auto = getattr(transformers, task_of(spec.task).auto_class)
    options: dict[str, Any] = {"attn_implementation": spec.attention, "trust_remote_code": spec.trust_remote_code}
    if kind != "adapter":
        return auto.from_pretrained(str(job.writing), dtype=torch.float32, **options).eval()
    if spec.path is None or resolved.base is not None:  # nothing to load; packed as in training
        base: Any = load_base(resolved, job.pad_token_id)
        linears = {} if resolved.base is None else resolved.base.linears(base, resolved)
        return _unrounded(exported_adapter(resolved, job.writing, base, linears), job.writing)
    frozen = getattr(torch, resolved.precision.frozen)
    config = build_config(resolved)
    base = auto.from_pretrained(spec.path, config=config, dtype=frozen, revision=spec.revision, **options)
    if job.pad_token_id is not None:
        set_padding(base.config, job.pad_token_id, resolved)
    tokenizer = getattr(processor, "tokenizer", processor)
    if resolved.recipe.tokenizer.added and len(tokenizer) > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return _unrounded(exported_adapter(resolved, job.writing, base), job.writing)


def _unrounded(adapted: Any, folder: Path) -> Any:
    """``adapted`` in float32, with the values of the adapter in ``folder`` once more: PEFT keeps some adapters in the
    dtype of their base, which a host chooses, and computes others from the base in it."""
    from peft import load_peft_weights, set_peft_model_state_dict

    _in_float32(adapted)
    set_peft_model_state_dict(adapted, load_peft_weights(str(folder), device="cpu"))
    return adapted


def _inputs(job: Job, processor: Any) -> tuple[Tensors, str]:
    """What the models compute, and what it is: the first rows of the recipe's data, or random ones where the data are
    not on this disk. New tokens are among them."""
    recipe, task = job.resolved.recipe, task_of(job.resolved.recipe.model.task)
    examples, pad_id, why = _drawn(job), job.pad_token_id or 0, ""
    for which in ("eval", "train"):
        try:
            examples, pad_id = _read(recipe, which, processor)
            said = f"{len(examples)} rows of data.{which}"
            break
        except Exception as error:  # whatever has become of the data since
            why = first_line(error)
    else:
        said = f"{ROWS} random rows (no data to read: {why})"
    tensors = dict(collate(examples, Slot([*range(len(examples))], 0, 0, 0, 1), task.name, pad_id).tensors)
    labels = tensors.pop("labels")
    if task.labels is Labels.TARGET:
        tensors["decoder_input_ids"] = labels.clamp(min=0)
    added = new_tokens(job.resolved)
    if added is not None and "input_ids" in tensors:
        row = tensors["input_ids"][0]
        ids = torch.tensor(added.ids[: len(row) // 2], dtype=row.dtype)
        row[: len(ids)] = ids
    return tensors, said


def _read(recipe: Recipe, which: Which, processor: Any) -> tuple[list[Example], int]:
    """The first samples of ``data.train`` or ``data.eval``, and the id of the padding token. Raises InputError, or
    whatever reading raises, where they are not local files that can be read."""
    data = recipe.data.model_copy(update={"streaming": True, "packing": False})
    if task_of(recipe.model.task).media is None:
        data = data.model_copy(update={"max_length": min(data.max_length, TOKENS)})
    short = recipe.model_copy(update={"data": data})
    for one in named_sources(short, which):
        if local_files(one.spec, one.key) is None:
            raise InputError(f"{one.key}: {one.spec} is not read again to compare an export")
    source, formatter = open_parts(short, which, processor).parts[0]
    made = (example for row in source.rows() for example in formatter.examples(row))
    examples = [with_features(example, formatter.reader) for example in islice(made, ROWS)]
    if not examples:
        raise InputError(f"data.{which}: no rows")
    return examples, formatter.pad_id


def _drawn(job: Job) -> list[Example]:
    """Random samples: ids of the vocabulary that are not special; features of a model that takes no ids."""
    recipe, draw = job.resolved.recipe, random.Random(0)
    task, config = task_of(recipe.model.task), build_config(job.resolved)
    pooled = pooled_token(recipe, ModelFacts(config.to_dict(), job.resolved.facts.folder))
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or 2 * TOKENS
    length = max(2, min(TOKENS, recipe.data.max_length, positions // 2))  # RoBERTa counts from the padding id on
    special = {value for key, value in config.to_dict().items() if "token" in key and isinstance(value, int)}
    ids = [one for one in range(3, min(getattr(text, "vocab_size", 0) or 0, 4096)) if one not in special]
    drawn = Drawn(draw, ids, length, recipe.model.num_labels or 2, recipe.data.format)
    examples = []
    for _ in range(ROWS):
        if task.media is not None and not task.media.tokens:
            examples.append(Example([], task.draw(drawn, []), features=task.media.draw(config.to_dict(), draw)))
            continue
        tokens = draw.choices(ids, k=length)
        if pooled is not None:
            tokens[-1] = pooled
        examples.append(Example(tokens, task.draw(drawn, tokens)))
    return examples


def _bytes(job: Job) -> int:
    """What a model takes in float32, with a copy of its largest weight; of a base that is packed an upper bound."""
    model = bare_model(job.resolved)
    if model is None:  # code of its own: by the files, which may have 16 bits
        return 2 * sum(file.stat().st_size for file in job.writing.glob("*.safetensors"))
    sizes = [parameter.numel() for parameter in model.parameters()]
    return 4 * (sum(sizes) + max(sizes))


def _available() -> int | None:
    """Bytes; None where the machine does not say."""
    try:
        return available_bytes()[0]
    except (OSError, KeyError, ValueError):
        return None


def _logits(model: nn.Module, tensors: Tensors) -> torch.Tensor:
    """Logits, float32. Weights are those of the model, computed with in float32: what its dtype rounds in products says
    nothing of the export."""
    _in_float32(model)
    switch_off_cache(model)
    logits: torch.Tensor = model(**tensors).logits
    return logits.float()


def _in_float32(model: nn.Module) -> None:
    packed = packed_weights(model)
    half = (torch.float16, torch.bfloat16)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in half and id(parameter) not in packed:
                parameter.data = parameter.data.float()
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in half:
                setattr(module, name, buffer.float())


def _adapted(model: Any) -> list[str]:
    """Names in the base model of the modules that an adapter changes."""
    base = model.get_base_model()
    names = [name for name, module in base.named_modules() if hasattr(module, "base_layer")]
    names += [name for name, module in base.named_modules() if hasattr(module, "original_module")]
    return [name.removesuffix(".token_adapter") for name in names]


def _perturb(model: nn.Module, names: Iterable[str] | None, dtype: torch.dtype) -> None:
    """Move weights by half an epsilon of ``dtype``, up or down at random, in place: of ``names``, or all."""
    draw, modules = torch.Generator().manual_seed(0), dict(model.named_modules())
    chosen = [model] if names is None else [modules[name] for name in names if name in modules]
    packed = packed_weights(model)
    moved: set[int] = set()
    for parameter in (p for module in chosen for p in module.parameters()):
        if id(parameter) in moved | packed or not parameter.is_floating_point():
            continue
        moved.add(id(parameter))
        parameter.data = parameter.data.contiguous()
        for part in parameter.data.view(-1).split(_AT_ONCE):
            signs = torch.randint(0, 2, part.shape, generator=draw).mul_(2).sub_(1)
            part.mul_(1 + signs * (torch.finfo(dtype).eps / 2))


def _projections(adapted: Any) -> dict[str, torch.dtype]:
    """The tensors of an adapter that do not train and are kept in 16 bits, by name: PEFT computes them anew."""
    prefix = getattr(adapted.base_model, "prefix", None)
    tensors = [*adapted.named_parameters(), *adapted.named_buffers()]
    half = (torch.float16, torch.bfloat16)
    return {
        name: tensor.dtype
        for name, tensor in tensors
        if prefix and prefix in name and tensor.dtype in half and not tensor.requires_grad
    }


def _perturb_projections(adapted: Any, dtypes: dict[str, torch.dtype]) -> None:
    """Move those tensors by half an epsilon of their dtype in training, in place."""
    draw, tensors = torch.Generator().manual_seed(1), dict([*adapted.named_parameters(), *adapted.named_buffers()])
    for name, dtype in dtypes.items():
        if (tensor := tensors.get(name)) is not None:
            signs = torch.randint(0, 2, tensor.shape, generator=draw).mul_(2).sub_(1)
            tensor.data.mul_(1 + signs * (torch.finfo(dtype).eps / 2))


def _written_dtype(job: Job) -> torch.dtype:
    return job.dtype or getattr(torch, job.resolved.precision.trainable)


def _apart(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest relative error of a row, by norms."""
    if found.shape != right.shape:
        return math.inf
    pairs = zip(found.double().flatten(1), right.double().flatten(1), strict=True)
    return max(((one - other).norm() / other.norm().clamp(min=1e-30)).item() for one, other in pairs)
