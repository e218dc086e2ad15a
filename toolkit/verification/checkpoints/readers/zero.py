"""DeepSpeed's checkpoints of ZeRO 1 to 3: flat partitions by rank, put together tensor by tensor.

The layout is that of ``deepspeed.utils.zero_to_fp32`` (deepspeed 0.19.8). That module unpickles without
``weights_only`` and builds whole groups in memory; here the files are mapped, DeepSpeed's classes are replaced by
stubs, and a tensor is assembled when it is compared. The moments have the layout of the float32 weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.verification.checkpoints.contents import MOMENTS, Checkpoint, StoredTensor
from toolkit.verification.checkpoints.readers.files import load_torch, stored
from toolkit.verification.checkpoints.readers.optimizer import (
    add_optimizer,
    add_rates,
    add_schedule,
    add_step,
    is_optimizer,
)

CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)
"""What `torch.serialization.get_unsafe_globals_in_checkpoint` lists for files of deepspeed 0.19.8."""

_OPTIMIZER = re.compile(r"(\w*zero_pp_rank_)(\d+)(_mp_rank_)(\d+)(_optim_states\.pt)")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def is_zero(folder: Path) -> bool:
    """Whether DeepSpeed wrote ``folder`` (a tag such as ``global_step100``)."""
    return any(folder.glob("*_optim_states.pt")) or any(folder.glob("*mp_rank_*_model_states.pt"))


def read_zero(folder: Path) -> Checkpoint:
    """One tag of DeepSpeed's. Raises InputError if a rank's file is missing or cannot be read."""
    models = models_by_rank(folder)
    optimizers = _by_rank(folder, _OPTIMIZER)
    if not models:
        raise InputError(f"{folder}: no mp_rank_00_model_states.pt: incomplete; copy the whole folder")
    first = load_torch(models[min(models)], CLASSES)
    if not isinstance(first, dict) or "module" not in first:
        raise InputError(f"{models[min(models)]}: not a model state of DeepSpeed: it has no key module")
    found = Checkpoint(folder, "DeepSpeed")
    add_step(found, (first.get("global_steps") or 0) - (first.get("skipped_steps") or 0))
    add_schedule(found, first.get("lr_scheduler"))
    found.compute = compute_dtype(first.get("ds_config") or {})
    found.order = tuple(first["module"])
    if not optimizers:
        return _without_shards(found, first)
    shards = _shards(optimizers)
    _Assembly(found, folder, models, first, shards).run()
    return found


def models_by_rank(folder: Path) -> dict[int, Path]:
    """The files of the model's states by rank. Raises InputError for model parallelism."""
    return _by_rank(folder, _MODEL)


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found = {}
    for file in sorted(folder.iterdir()):
        match = pattern.fullmatch(file.name)
        if match is None:
            continue
        *_, parallel = [group for group in match.groups() if group and group.isdigit()]
        if int(parallel):
            raise InputError(
                f"{file}: model parallelism is not supported; convert the checkpoint with ds_to_universal.py"
            )
        rank = match.group(2) if pattern is _OPTIMIZER else match.group(1)
        found[int(rank or 0)] = file
    return found


def compute_dtype(config: Mapping[str, Any]) -> str:
    """The dtype of the forward pass in DeepSpeed's configuration."""
    for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if isinstance(config.get(key), dict) and config[key].get("enabled") is True:
            return dtype
    autocast = config.get("torch_autocast")
    if isinstance(autocast, dict) and autocast.get("enabled") is True:
        return str(autocast.get("dtype", "bfloat16")).removeprefix("torch.")
    return "float32"


def _without_shards(found: Checkpoint, first: Mapping[str, Any]) -> Checkpoint:
    """Stage 0 keeps the optimizer beside the model; `save_checkpoint` of a ZeRO engine never leaves the shards out."""
    found.format = "DeepSpeed, no ZeRO"
    found.weights = stored(first["module"])
    if any(not all(one.shape) for one in found.weights.values()):
        raise InputError(f"{found.path}: no *_optim_states.pt: incomplete; copy the files of every rank")
    if is_optimizer(first.get("optimizer")):
        add_optimizer(found, first["optimizer"])
    else:
        found.notes.append(f"{found.path}: no *_optim_states.pt: moments are not compared")
    return found


def _shards(files: Mapping[int, Path]) -> list[dict[str, Any]]:
    """The optimizer's part of every rank; raises InputError with the name of a file that is missing."""
    shards: dict[int, Any] = {}
    for rank, file in files.items():
        document = load_torch(file, CLASSES)
        shards[rank] = document.get("optimizer_state_dict") if isinstance(document, dict) else None
        if not isinstance(shards[rank], dict) or "partition_count" not in shards[rank]:
            raise InputError(f"{file}: not an optimizer state of ZeRO: it has no key partition_count")
    some = files[min(files)]
    count = shards[min(files)]["partition_count"]
    world = max(count) if isinstance(count, (list, tuple)) else int(count)
    for rank in range(world):
        if rank not in shards:
            name = _OPTIMIZER.sub(rf"\g<1>{rank}\g<3>\g<4>\g<5>", some.name)
            raise InputError(f"{some.parent / name}: missing: {len(shards)} of {world} ranks' files; copy every rank's")
    return [shards[rank] for rank in range(world)]


class _Assembly:
    """Puts one checkpoint together."""

    def __init__(
        self,
        found: Checkpoint,
        folder: Path,
        models: Mapping[int, Path],
        first: Mapping[str, Any],
        shards: Sequence[Mapping[str, Any]],
    ) -> None:
        self.found, self.folder, self.models, self.first, self.shards = found, folder, models, first, shards
        self.world = len(shards)
        stage: Any = shards[0].get("zero_stage")
        self.stage = int(stage.arguments[0] if hasattr(stage, "arguments") else stage)
        self.groups: list[Mapping[str, Any]] = list(first.get("param_shapes") or [])

    def run(self) -> None:
        found = self.found
        found.format = f"DeepSpeed ZeRO-{self.stage}, {self.world} ranks"
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        flat = [list(shard[key]) for shard in self.shards]
        buffers = set(self.first.get("buffer_names") or ())
        found.weights = {name: one for name, one in stored(self.first["module"]).items() if name in buffers}
        found.weights |= frozen_weights(self.folder, self.models, self.first, self.stage == 3, self.world) | self._cut(
            flat
        )
        optimizers = [self._optimizer(shard) for shard in self.shards]
        for moment in MOMENTS:
            parts: list[list[Any]] = [[values.get(moment) for values in one] for one in optimizers]
            if all(part is not None for rank in parts for part in rank) and all(len(r) == len(flat[0]) for r in parts):
                found.moments[moment] = self._cut(parts)
        if not found.has_moments:
            found.notes.append(f"{self.folder}: no exp_avg and exp_avg_sq in its shards: moments are not compared")
        for name in self.first.get("shared_params") or {}:
            found.weights.pop(name, None)  # tied: its weight has another name too

    def _optimizer(self, shard: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The optimizer's values of one rank by flat group."""
        kept = shard.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        if isinstance(kept, (list, tuple)):  # elastic checkpoints: values alone, by group
            return [one for one in kept if isinstance(one, dict)]
        if not isinstance(kept, dict):
            return []
        groups = [group for group in kept.get("param_groups", ()) if isinstance(group, dict)]
        add_rates(self.found, groups)
        for group, shapes in zip(groups, self.groups, strict=False):
            if isinstance(group.get("weight_decay"), (int, float)):
                self.found.decay |= dict.fromkeys(shapes, float(group["weight_decay"]))
        state = kept.get("state") or {}
        return [state[number] for number in sorted(state)]

    def _cut(self, flat: Sequence[Sequence[torch.Tensor]]) -> dict[str, StoredTensor]:
        """``flat``: by rank, then by flat group, one-dimensional. Tensors by name."""
        return self._cut_parameters(flat) if self.stage == 3 else self._cut_groups(flat)

    def _cut_groups(self, flat: Sequence[Sequence[torch.Tensor]]) -> dict[str, StoredTensor]:
        """ZeRO 1 and 2: a group is one vector, whose equal parts are the ranks'."""
        found = {}
        paddings = self.shards[0].get("param_alignment_paddings")
        for at, shapes in enumerate(self.groups):
            vector = [rank[at] for rank in flat]
            offset = 0
            for index, (name, shape) in enumerate(shapes.items()):
                found[name] = _assembled(self.folder, name, shape, [(vector, offset, math.prod(shape))])
                offset += math.prod(shape) + (paddings[at][index] if paddings else 0)
            available = sum(part.numel() for part in vector)
            align = 2 * self.world
            if math.ceil(offset / align) != math.ceil(available / align):
                raise InputError(
                    f"{self.folder}: group {at} has {available} elements, its parameters {offset}; save it again"
                )
        return found

    def _cut_parameters(self, flat: Sequence[Sequence[torch.Tensor]]) -> dict[str, StoredTensor]:
        """ZeRO 3: every parameter is split among the ranks, its last part padded."""
        found, offset = {}, 0
        for name, shape in ((n, s) for group in self.groups for n, s in group.items()):
            part = math.ceil(math.prod(shape) / self.world)
            found[name] = _assembled(self.folder, name, shape, [(rank, offset, part) for rank in flat])
            offset += part
        if offset != (available := sum(part.numel() for part in flat[0])):
            raise InputError(f"{self.folder}: a rank has {available} elements, its parameters {offset}; save it again")
        return found


def frozen_weights(
    folder: Path, models: Mapping[int, Path], first: Mapping[str, Any], split: bool, world: int
) -> dict[str, StoredTensor]:
    """Weights that do not train. ``models``: the model's states by rank, ``first`` the first one's contents.
    ``split``: each rank has a part of every one (ZeRO-3). Raises InputError if a rank's file is missing."""
    shapes = first.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    if not split:
        return {name: StoredTensor.of(first["frozen_param_fragments"][name]) for name in shapes}
    ranks = []
    for rank in range(world):
        if rank not in models:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            raise InputError(f"{folder / name}: missing: frozen weights are split; copy every rank's file")
        ranks.append(load_torch(models[rank], CLASSES)["frozen_param_fragments"])
    return {
        name: _assembled(folder, name, shape, [([rank[name]], 0, rank[name].numel()) for rank in ranks])
        for name, shape in shapes.items()
    }


def _assembled(
    folder: Path, name: str, shape: Sequence[int], pieces: list[tuple[Sequence[torch.Tensor], int, int]]
) -> StoredTensor:
    """``pieces``: of each vector (in consecutive parts), where to begin and how many elements to take."""

    def read() -> torch.Tensor:
        parts = [part for vector, start, count in pieces for part in _slices(vector, start, count)]
        whole = torch.cat(parts)[: math.prod(shape)]
        if whole.numel() < math.prod(shape):
            raise InputError(f"{folder}: {name} has {whole.numel()} of {math.prod(shape)} elements; save it again")
        return whole.view(tuple(shape))

    return StoredTensor(tuple(shape), pieces[0][0][0].dtype, read)


def _slices(vector: Sequence[torch.Tensor], start: int, count: int) -> list[torch.Tensor]:
    """``count`` elements from ``start`` on of a vector that is kept in consecutive parts."""
    found = []
    for part in vector:
        if start < part.numel() and count > 0:
            taken = part[start : start + count]
            found.append(taken)
            count -= taken.numel()
            start = 0
        else:
            start -= part.numel() if start >= part.numel() else 0
    return found
