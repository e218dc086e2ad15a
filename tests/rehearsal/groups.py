"""Process groups of one rank: torch's fake group, under the names and for the devices that the program asked for.

Every other rank is taken for one like this: a sum over ranks of known values is the value times their number, a
gather has the same from each. Groups are not connected, so nothing is sent and nothing waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from rehearsal.known import Known, tensors_in

made: list[tuple[int, str]] = []
"""Size and declared backend of every group, in order."""
_op = dist.ReduceOp.SUM


def install() -> None:
    """For the rest of this process."""
    connect, helper = distributed_c10d.init_process_group, distributed_c10d._new_process_group_helper

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        asked = backend or kwargs.pop("backend", None)
        connect(_declared(asked), rank=rank, world_size=world, store=FakeStore())
        made[-1] = (world, asked or "")

    def new_group_helper(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        made.append((size, str(backend)))
        return helper(size, rank, ranks, _declared(str(backend)), *args, **kwargs)

    for module in (dist, distributed_c10d, device_mesh):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
    distributed_c10d._new_process_group_helper = new_group_helper
    dist.is_nccl_available = distributed_c10d.is_nccl_available = lambda: True
    if not hasattr(distributed_c10d, "ProcessGroupNCCL"):  # torch asks whether a group is one
        distributed_c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})
    _remember_the_operation()
    _objects_as_here()


def _declared(backend: str | None) -> str:
    """The fake group in the place of each backend, for the devices that it serves: NCCL has no CPU tensors."""
    if backend is None or backend in ("undefined", "None", ""):
        return "cpu:fake,cuda:fake"
    if ":" in backend:
        return ",".join(f"{part.split(':')[0]}:fake" for part in backend.split(","))
    return {"nccl": "cuda:fake", "gloo": "cpu:fake,cuda:fake"}[backend]


def devices_of(args: Any) -> set[str] | None:
    """The device types of the group that a collective goes over; None where it names no group."""
    for value in args:
        group = None
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
        elif isinstance(value, str) and value in distributed_c10d._world.pg_names.values():
            group = distributed_c10d._resolve_process_group(value)
        if group is not None:
            return {device.type for device in group._device_types}
    return None


def size_of(args: Any) -> int:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
    return dist.get_world_size()


def follow(known: Known, name: str, args: Any) -> None:
    """What a collective does to values, every rank being as this one."""
    tensors = tensors_in((args[0],))
    if name == "c10d::allreduce_":
        for tensor in tensors:
            values = known.of(tensor)
            if values is None:
                known.lose(tensor)
            elif _op == dist.ReduceOp.SUM:
                values.mul_(size_of(args))
    elif name in ("c10d::broadcast_", "c10d::barrier"):
        return
    else:
        inputs = tensors_in((args[1],))
        value = known.of(inputs[0]) if len(inputs) == 1 else None
        for tensor in tensors:
            known.lose(tensor)
            if name == "c10d::allgather_" and value is not None and tensor.shape == value.shape:
                known.set(tensor, value.clone())


def _remember_the_operation() -> None:
    """Dispatch has the operation of a reduction as an object that cannot be read."""
    reduce = distributed_c10d.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        global _op
        _op = op
        return reduce(tensor, op, *args, **kwargs)

    dist.all_reduce = distributed_c10d.all_reduce = all_reduce


def _objects_as_here() -> None:
    """Objects travel pickled, in tensors whose bytes a fake tensor does not have: each rank has this one's. What is
    kept is the collective itself, on the device that torch chooses for it."""

    def travel(group: Any) -> int:
        device = distributed_c10d._get_object_coll_device(group)
        index = f":{torch.cuda.current_device()}" if device == "cuda" else ""
        dist.broadcast(torch.empty(1, dtype=torch.uint8, device=f"{device}{index}"), group=group, group_src=0)
        return dist.get_world_size(group)

    def broadcast(objects: list[Any], src: int | None = None, group: Any = None, **kwargs: Any) -> None:
        travel(group)

    def all_gather(objects: list[Any], one: Any, group: Any = None) -> None:
        objects[:] = [one] * travel(group)

    def gather(one: Any, objects: list[Any] | None = None, dst: int | None = None, group: Any = None, **_: Any) -> None:
        size = travel(group)
        if objects is not None:
            objects[:] = [one] * size

    replaced: dict[str, Callable[..., Any]] = {
        "broadcast_object_list": broadcast, "all_gather_object": all_gather, "gather_object": gather,
    }  # fmt: skip
    for name, function in replaced.items():
        setattr(dist, name, function)
        setattr(distributed_c10d, name, function)
