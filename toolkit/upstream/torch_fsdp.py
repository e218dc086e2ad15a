"""The private names of torch's FSDP that the toolkit uses. Import it where FSDP is, not before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.upstream.replacement import Replacement, missing, named, unwritten

_FSDP = "torch.distributed.fsdp"

# ---------------------------------------------------------------------- FSDP1


def no_flat_parameters() -> str:
    """Why FSDP1's flat parameters cannot be read, "" if they can. torch gives none of them publicly but whole, on every
    rank (``summon_full_params``, state dicts); FSDP2, which replaces FSDP1, has parameters to be read."""
    return (
        missing(
            f"{_FSDP}._flat_param:FlatParamHandle.flatten_tensors",
            f"{_FSDP}._flat_param:FlatParamHandle.shard",
            f"{_FSDP}._flat_param:FlatParamHandle._reset_flat_param_grad_info_if_needed",
            f"{_FSDP}._runtime_utils:_reshard",
            f"{_FSDP}._common_utils:_is_fsdp_flattened",
            f"{_FSDP}.wrap:_wrap",
        )
        or unwritten(
            "torch", "distributed/fsdp/_flat_param.py", "_shard_param_infos", "_unpadded_unsharded_size", "_params"
        )
        or unwritten("torch", "distributed/fsdp/_common_utils.py", "_ignored_params", "_handle")
    )


def handle_of(unit: Any) -> Any:
    """What a unit of FSDP1 shards its flat parameter with; None where it has none."""
    return unit._handle


def whole_size(handle: Any) -> int:
    """Elements of a flat parameter on all ranks together, without padding."""
    return int(handle.flat_param._unpadded_unsharded_size.numel())


def slices_of(handle: Any) -> Iterator[tuple[nn.Parameter, int, int]]:
    """Each parameter of a unit, and which elements of it, flattened, this rank holds (torch 2.13.0)."""
    flat = handle.flat_param
    for parameter, info in zip(flat._params, flat._shard_param_infos, strict=True):
        ends = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
        yield parameter, *ends


def copies_of(unit: Any) -> int:
    """Ranks that hold the same part of a unit."""
    others = getattr(unit, "_inter_node_pg", None)
    return 1 if others is None else int(others.size())


def drop_flat_gradient(handle: Any) -> None:
    """A flat gradient stays in memory until the next forward (torch 2.13.0), through an evaluation and a save."""
    handle._reset_flat_param_grad_info_if_needed()


def shard_again(unit: Any) -> None:
    """A forward without a backward leaves the root's unit gathered (torch 2.13.0, _post_forward_reshard)."""
    handle = handle_of(unit)
    begun = handle is not None and hasattr(handle.flat_param, "_full_param_padded")  # by the first forward
    if begun and handle.uses_sharded_strategy and not handle.needs_unshard():
        named(f"{_FSDP}._runtime_utils:_reshard")(unit, handle, True)


@contextlib.contextmanager
def flattened_by(flatten: Callable[..., Any], shard: Callable[..., Any]) -> Iterator[None]:
    """Context in which ``flatten(own, handle, tensors, aligned_numel)`` and ``shard(own, handle)`` put a unit's flat
    parameter together and divide it. ``own``: torch's functions."""
    kind = named(f"{_FSDP}._flat_param:FlatParamHandle")
    own_flatten, own_shard = kind.flatten_tensors, kind.shard

    def flattened(self: Any, tensors: list[torch.Tensor], aligned_numel: int) -> torch.Tensor:
        return flatten(own_flatten, self, tensors, aligned_numel)

    def sharded(self: Any) -> None:
        shard(own_shard, self)

    with mock.patch.object(kind, "flatten_tensors", flattened), mock.patch.object(kind, "shard", sharded):
        yield


@contextlib.contextmanager
def units_by(wrap: Callable[..., nn.Module]) -> Iterator[None]:
    """Context in which ``wrap(own, module, wrapper_cls, **options)`` makes the units of an ``auto_wrap_policy``, which
    makes one unit of a module. ``own``: torch's function."""
    from torch.distributed.fsdp import wrap as place

    own = place._wrap
    with mock.patch.object(place, "_wrap", lambda *args, **options: wrap(own, *args, **options)):
        yield


def is_flattened(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a flat one, or in one."""
    return bool(named(f"{_FSDP}._common_utils:_is_fsdp_flattened")(parameter))


def ignore_no_more(unit: Any, parameters: set[nn.Parameter]) -> None:
    """Have units around this one take parameters that it ignores (_init_utils.py, ``_get_ignored_params``)."""
    unit._ignored_params -= parameters


# ---------------------------------------------------------------------- FSDP2


def precision_of(model: nn.Module) -> Any:
    """The ``MixedPrecisionPolicy`` that a model was sharded with; None if it was not, or torch does not say."""
    state = getattr(model, "_get_fsdp_state", None)
    return None if state is None else getattr(state(), "_mp_policy", None)


_PLACES = f"{_FSDP}._fully_shard._fsdp_common"


def no_placement() -> str:
    return missing(*(f"{_PLACES}:{one}" for one in ("ShardPlacementResult", "FSDPMeshInfo", "HSDPMeshInfo")))


def placed_on(mesh: Any) -> Callable[[], Any]:
    """What ``shard_placement_fn`` returns for a parameter that is sharded over a mesh of its own: of one axis, or of
    copies and shards. A ``fully_shard`` for each module of experts has a mesh too, and a collective more in each block.
    Raises InputError where torch (2.11) takes a dimension there alone."""
    if why := no_placement():
        raise InputError(f"torch {torch.__version__}: strategy.mesh.expert under fsdp2 needs a newer torch ({why})")
    info = (
        named(f"{_PLACES}:HSDPMeshInfo")(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        if mesh.ndim > 1
        else named(f"{_PLACES}:FSDPMeshInfo")(mesh, shard_mesh_dim=0)
    )
    return lambda: named(f"{_PLACES}:ShardPlacementResult")(None, info)


REPLACEMENTS = (
    Replacement(
        "torch", "FSDP1's flat parameters", "each rank reads, writes and saves its slices", "2.11 to 2.14",
        no_flat_parameters, "whole parameters alone, on every rank", "strategy fsdp1 is refused: use fsdp2",
    ),
    Replacement(
        "torch", "ShardPlacementResult", "experts are sharded over ranks of their own", "2.13 and 2.14", no_placement,
        "a fully_shard for each module of experts: a collective more in each block",
        "strategy.mesh.expert is refused under fsdp2",
    ),
)  # fmt: skip
