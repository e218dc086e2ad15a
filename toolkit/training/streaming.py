"""A whole model from a checkpoint to the files that from_pretrained loads, one tensor after another: the model itself
has no memory, and a file is written while its tensors are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.disk import flush_to_disk
from toolkit.model.sources import NotByPart
from toolkit.training.safetensors_file import bytes_of, content_of, header
from toolkit.upstream.transformers import not_saved

FILE_BYTES = 5 * 10**9
"""Of one file, unless a tensor is larger."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Source:
    """One tensor of a model, and the tensors that transformers saves it as (names, without memory)."""

    name: str
    saved: Tensors

    @property
    def bytes(self) -> int:
        return sum(bytes_of(tensor) for tensor in self.saved.values())


def sources(model: Any) -> list[Source] | None:
    """The tensors of a model without memory, each with those that ``save_pretrained`` makes of it (transformers 5.23.0:
    fused experts are saved one by one). None where it makes one out of several: those are not written in turn."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = not_saved(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    state = remove_tied_weights_from_state_dict(state, model)
    found = [Source(name, revert_weight_conversion(model, {name: tensor})) for name, tensor in state.items()]
    together = revert_weight_conversion(model, dict(state))
    apart = {name: tensor.shape for source in found for name, tensor in source.saved.items()}
    same = apart == {name: tensor.shape for name, tensor in together.items()}
    return found if same and sum(len(source.saved) for source in found) == len(apart) else None


def write_model(model: Any, parts: list[Source], read: Callable[[str], torch.Tensor], folder: Path) -> None:
    """Write config and weights as ``save_pretrained`` does. ``read`` gives a tensor of the model by name, in the dtype
    of the model; one at a time is in memory, and what is saved of it."""
    from transformers.core_model_loading import revert_weight_conversion

    def saved(part: Source) -> Tensors:
        made: Tensors = revert_weight_conversion(model, {part.name: read(part.name)})
        return made

    model.save_pretrained(folder, state_dict={})
    files = _divided(in_order(parts))
    names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    for name, held in zip(names, files, strict=True):
        write_file(folder / name, held, saved)
    if len(files) > 1:
        places = {key: name for name, held in zip(names, files, strict=True) for part in held for key in part.saved}
        total = {"total_size": sum(part.bytes for part in parts)}
        index = json.dumps({"metadata": total, "weight_map": dict(sorted(places.items()))}, indent=2)
        (folder / "model.safetensors.index.json").write_text(index + "\n", encoding="utf-8")


def in_order(parts: list[Source]) -> list[Source]:
    """Wider elements first: each tensor then begins at a multiple of its element's size."""
    return sorted(parts, key=lambda part: -max(tensor.element_size() for tensor in part.saved.values()))


def write_file(path: Path, parts: list[Source], saved: Callable[[Source], Tensors]) -> None:
    """Write a safetensors file, one part after another. ``saved`` gives the tensors of a part; raises NotByPart if one
    of them is not of the shape and dtype that were announced."""
    with path.open("wb") as file:
        file.write(header((key, tensor) for part in parts for key, tensor in part.saved.items()))
        for part in parts:
            made = saved(part)
            for key, expected in part.saved.items():
                tensor = made.pop(key)
                if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                    raise NotByPart(f"{key} becomes {tensor.dtype} {tuple(tensor.shape)}")
                file.write(content_of(tensor))
                del tensor
    flush_to_disk(path)


def _divided(parts: list[Source]) -> list[list[Source]]:
    files: list[list[Source]] = [[]]
    size = 0
    for part in parts:
        if files[-1] and size + part.bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(part)
        size += part.bytes
    return files
