"""Folders of torch.distributed.checkpoint (``.metadata`` and ``*.distcp``): FSDP's sharded state dicts.

torch's own reader unpickles ``.metadata`` and values that are not tensors; here an unpickler with a list of data
classes reads the former, and ``weights_only`` the latter.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.verification.checkpoints.contents import MOMENTS, Checkpoint, StoredTensor
from toolkit.verification.checkpoints.readers.files import unreadable
from toolkit.verification.checkpoints.readers.optimizer import add_rates, add_step

METADATA = ".metadata"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "torch": {"Size", "device", "strided"} | {str(one).removeprefix("torch.") for one in vars(torch).values()
                                              if isinstance(one, torch.dtype)},
}  # fmt: skip
_STATE = re.compile(r"(?:^|\.)state\.(?P<name>.+)\.(?P<key>[^.]+)$")
_GROUP = re.compile(r"(?:^|\.)param_groups\.(?P<group>.+)\.(?P<key>lr|initial_lr|weight_decay)$")
_OTHER = {"optimizer", "optim", "optimizers", "lr_scheduler", "scheduler", "dataloader", "train_state", "rng_state",
          "random_states"}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def has_dcp(folder: Path) -> bool:
    """Whether accelerate or the Trainer wrote FSDP's sharded state dicts into ``folder``."""
    return is_dcp(folder / "pytorch_model_fsdp_0")


def read_dcp(folder: Path) -> Checkpoint:
    """One folder, with weights, an optimizer's state, or both. Raises InputError if a file is missing or damaged."""
    found = Checkpoint(folder, "torch.distributed.checkpoint")
    add_dcp(found, folder)
    return found


def read_sharded(folder: Path) -> Checkpoint:
    """``pytorch_model_fsdp_0`` and ``optimizer_0`` in ``folder``."""
    found = Checkpoint(folder, "FSDP, sharded state dict")
    add_dcp(found, folder / "pytorch_model_fsdp_0")
    if is_dcp(folder / "optimizer_0"):
        add_dcp(found, folder / "optimizer_0")
    else:
        found.notes.append(f"{folder / 'optimizer_0'}: no {METADATA}: moments are not compared")
    return found


def add_dcp(found: Checkpoint, folder: Path) -> None:
    """Take over all that ``folder`` has."""
    metadata = _metadata(folder)
    places: dict[str, list[tuple[Any, Any]]] = {}
    for index, info in metadata.storage_data.items():
        places.setdefault(index.fqn, []).append((index, info))
    _check(folder, [info for one in places.values() for _, info in one])
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    steps: list[int] = []
    groups: dict[str, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        path = tuple(map(str, paths.get(key, (key,))))
        joined = ".".join(path)
        state, group = _STATE.search(joined), _GROUP.search(joined)
        if group is not None and not hasattr(entry, "size"):
            value = _bytes(folder, places[key][0][1])
            groups.setdefault(group["group"], {})[group["key"]] = value
        if not hasattr(entry, "size"):
            continue
        tensor = _tensor(folder, key, entry, places.get(key, []))
        if state is not None:
            if state["key"] in MOMENTS:
                found.moments[state["key"]][state["name"]] = tensor
            elif state["key"] == "step" and not steps:
                steps.append(int(tensor.read()))  # they are all the same but for tensors that never train
        elif group is None and not _OTHER & set(path[:-1]) and path[0].split(".")[0] not in _OTHER:
            found.weights[path[-1]] = tensor
    found.order = found.order or tuple(found.weights)
    add_step(found, max(steps, default=None))
    add_rates(found, list(groups.values()))


def _metadata(folder: Path) -> Any:
    file = folder / METADATA
    try:
        with file.open("rb") as opened:
            metadata = _Unpickler(opened).load()
    except OSError as error:
        raise unreadable(file, error) from None
    except pickle.UnpicklingError as error:
        if "." in str(error) and " " not in str(error):
            raise InputError(
                f"{file}: not loaded: it needs {error}, which is no part of a checkpoint's metadata"
            ) from None
        raise InputError(f"{file}: cannot be read: truncated or damaged; copy it again") from None
    except Exception:
        raise InputError(f"{file}: cannot be read: truncated or damaged; copy it again") from None
    if not hasattr(metadata, "state_dict_metadata") or not metadata.storage_data:
        raise InputError(f"{file}: not the metadata of torch.distributed.checkpoint")
    return metadata


def _check(folder: Path, infos: list[Any]) -> None:
    """Raise InputError with the name of a file that is missing or too short."""
    ends: dict[str, int] = {}
    for info in infos:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        if not file.is_file():
            raise InputError(f"{file}: missing: {METADATA} names {len(ends)} files; copy every rank's")
        if (size := file.stat().st_size) < end:
            raise InputError(f"{file}: truncated: {size} bytes, at least {end} expected; copy it again")


def _slice(folder: Path, info: Any) -> Any:
    file = folder / info.relative_path
    if getattr(info, "transform_descriptors", None):
        raise InputError(f"{file}: compressed values are not supported; save it without extensions")
    try:
        with file.open("rb") as opened:
            opened.seek(info.offset)
            return torch.load(io.BytesIO(opened.read(info.length)), map_location="cpu", weights_only=True)
    except OSError as error:
        raise unreadable(file, error) from None
    except Exception:
        raise InputError(
            f"{file}: cannot be read: damaged, or values that only a pickle can load; save it again"
        ) from None


def _bytes(folder: Path, info: Any) -> Any:
    try:
        return _slice(folder, info)
    except InputError:
        return None  # a setting of the optimizer that is not plain data: not needed


def _tensor(folder: Path, key: str, entry: Any, places: list[tuple[Any, Any]]) -> StoredTensor:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}

    def read() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        filled = 0
        for index, info in places:
            offset = tuple(index.offset) if index.offset is not None else (0,) * len(shape)
            part = _slice(folder, info)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != chunks.get(offset, tuple(part.shape)):
                raise InputError(
                    f"{folder / info.relative_path}: {key} has another shape than {METADATA} says; save it again"
                )
            target = whole
            for dimension, (start, size) in enumerate(zip(offset, part.shape, strict=True)):
                target = target.narrow(dimension, start, size)
            target.copy_(part)
            filled += part.numel()
        if filled < whole.numel():
            raise InputError(f"{folder}: {key} has {filled} of {whole.numel()} elements; copy every rank's files")
        return whole

    return StoredTensor(shape, dtype, read)
