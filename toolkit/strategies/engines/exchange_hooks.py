"""FSDP1, FSDP2 and DeepSpeed gather and reduce by `exchange` where they train without a GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.strategies.engines.exchange import SUMS, all_gather, exchanges, reduce_scatter, reduce_to_owners


def exchange_in_fsdp2(model: nn.Module) -> None:
    """By torch's interface for it. Its setters (``set_custom_all_gather``) refuse modules with several groups, as
    those with experts are, since some of torch's own communicators belong to one group; these belong to none."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class Gather(DefaultAllGather):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            return all_gather(output_tensor, input_tensor, group, async_op)

    class Reduce(DefaultReduceScatter):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
            if op not in SUMS:
                return super().__call__(output_tensor, input_tensor, group, op, async_op)
            return reduce_scatter(output_tensor, input_tensor, group, op, async_op)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for unit in module._get_fsdp_state()._fsdp_param_groups:
                if exchanges(unit._all_gather_process_group):
                    unit._all_gather_comm, unit._reduce_scatter_comm = Gather(), Reduce()


def exchange_in_fsdp1(model: nn.Module) -> None:
    """Its gathers; on a CPU torch 2.13.0 gives gloo a list of parts (_flat_param.py, ``_all_gather_flat_param``)."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in model.modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None and exchanges(handle.process_group):
            handle._all_gather_flat_param = functools.partial(_gather_flat, handle)


def _gather_flat(handle: Any, padded: torch.Tensor) -> torch.Tensor:
    all_gather(padded, handle.flat_param.data, handle.process_group)
    return padded


_EXCHANGES = "_toolkit_exchanges"


def exchange_in_deepspeed() -> None:
    """In every call that DeepSpeed's backend makes from now on in this process (comm/torch.py, ``TorchBackend``)."""
    from deepspeed.comm import comm

    backend: Any = comm.cdb
    if hasattr(backend, _EXCHANGES):
        return
    gather, reduce = backend.all_gather_function, backend.reduce_scatter_function
    reduce_all = backend.all_reduce

    def gathered(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if output_tensor.is_cpu and exchanges(group):
            return all_gather(output_tensor, input_tensor, group, async_op)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)

    def reduced(
        output_tensor: Any, input_tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if output_tensor.is_cpu and exchanges(group) and op in SUMS:
            return reduce_scatter(output_tensor, input_tensor, group, op, async_op)
        return reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    def all_reduced(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if _PIECES:
            return reduce_to_owners(tensor, _PIECES, group)
        return reduce_all(tensor, op=op, group=group, async_op=async_op)

    backend.all_gather_function, backend.reduce_scatter_function = gathered, reduced
    backend.all_reduce = all_reduced
    setattr(backend, _EXCHANGES, True)


_PIECES: list[tuple[int, int]] = []
"""Owners and sizes of the pieces of the tensor that DeepSpeed all-reduces now, if every rank keeps its own alone."""


@contextlib.contextmanager
def _of_owners(pieces: list[tuple[int, int]]) -> Iterator[None]:
    _PIECES[:] = pieces
    try:
        yield
    finally:
        _PIECES.clear()


def exchange_in_buckets(optimizer: Any) -> None:
    """Stages 1 and 2 all-reduce a bucket of gradients and keep of it what is theirs (stage_1_and_2.py,
    ``allreduce_and_copy_with_multiple_ranks``): here each piece is added up where it is kept. After
    ``exchange_in_deepspeed``."""
    keep = getattr(optimizer, "allreduce_and_copy_with_multiple_ranks", None)
    if keep is None:  # BF16_Optimizer, which has whole gradients
        return

    def kept(small_bucket: Any, *args: Any, bucket_ranks: Any = None, process_group: Any = None, **kwargs: Any) -> Any:
        owned = zip(map(_owner, bucket_ranks), small_bucket, strict=True)
        pieces = [(owner, piece.numel()) for owner, piece in owned if owner is not None]
        direct = len(pieces) == len(small_bucket) and exchanges(process_group or optimizer.dp_process_group)
        with _of_owners(pieces if direct else []):
            return keep(small_bucket, *args, bucket_ranks=bucket_ranks, process_group=process_group, **kwargs)

    optimizer.allreduce_and_copy_with_multiple_ranks = kept


def _owner(ranks: Any) -> int | None:
    """The rank that keeps a piece; None where several do (DeepSpeed's Muon)."""
    if isinstance(ranks, int):
        return ranks
    return next(iter(ranks)) if len(ranks) == 1 else None
