"""A folder of torch.distributed.checkpoint: the state dicts of FSDP, ``model`` and ``optimizer`` by name.

It has the names of ``torch.distributed.checkpoint.state_dict.get_state_dict`` (torch 2.13.0). torch's own writer writes
it, given tensors without memory; each is read when its turn comes.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint_export.contents import Contents
from toolkit.optimizers.base import ADAM

FILE_BYTES = 2**26
"""Of a file, unless a tensor is larger."""


def write_dcp(contents: Contents, folder: Path) -> None:
    """Write ``folder``, for ``dcp.load({"model": ..., "optimizer": ...}, checkpoint_id=folder)``.

    Memory: a tensor and the file before, which is one tensor too, or several of 64 MiB together.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save

    class InTurn(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            found = self.state_dict[index.fqn]
            path: Any = self.mappings[index.fqn]
            if not isinstance(found, torch.Tensor) or path[-1] == "step":
                return found
            return contents.read(path[1], "fp32") if path[0] == "model" else contents.read(path[2], path[3])

    class InFiles(FileSystemWriter):
        """torch's writer keeps all tensors of a file until it is written (``_write_files_from_queue``)."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            made: list[Any] = []
            for number, items in enumerate(_divided(plan.items)):
                prefix = type(plan.storage_data)(f"__{number}_")
                part = dataclasses.replace(plan, items=items, storage_data=prefix)
                made += super().write_data(part, planner).wait()
            done: Any = torch.futures.Future()
            done.set_result(made)
            return done

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, as intended
        # With several threads each would have a tensor.
        save(_described(contents), storage_writer=InFiles(folder, thread_count=1), planner=InTurn(), no_dist=True)


def _divided(items: list[Any]) -> list[list[Any]]:
    """Items of a plan by file. Tensors are float32; settings take next to nothing."""
    files: list[list[Any]] = [[]]
    size = 0
    for item in items:
        own = 0 if item.tensor_data is None else 4 * item.tensor_data.size.numel()
        if files[-1] and size + own > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(item)
        size += own
    return files


def _described(contents: Contents) -> dict[str, Any]:
    """The state dict, in which tensors have no values."""
    empty = {name: torch.empty(shape, device="meta") for name, shape in contents.shapes.items()}
    state = {
        name: {key: torch.empty_like(tensor) for key in ADAM} | {"step": torch.tensor(float(contents.counts[name]))}
        for name, tensor in empty.items()
    }
    # All keys that this torch's AdamW has.
    [like] = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"]
    groups = [like | {key: value for key, value in group.items() if key != "names"} | {"params": group["names"]}
              for group in contents.groups]  # fmt: skip
    # With flatten_optimizer_state_dict a weight has settings of its own, whatever groups the run has.
    flat = {
        f"optimizer.param_groups.{name}.{key}": value
        for group in groups
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {"model": empty, "optimizer": {"state": state, "param_groups": groups}, **flat}
