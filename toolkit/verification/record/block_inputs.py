"""What a model's blocks are given: the dtype of every floating tensor among a block's inputs.

A model may keep a table (rotary cosines, a mask) in float32 on purpose while it computes in 16 bits. A strategy that
rounds it changes every block alike, by less than what two correct 16-bit runs differ by, so no tolerance finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from toolkit.trees import leaves

BlockInputs = dict[str, tuple[str, ...]]
"""By the block's name: dtypes in the order of its arguments, keywords after them in the order of their names."""


@contextlib.contextmanager
def watched_inputs(blocks: Sequence[tuple[str, nn.Module]]) -> Iterator[BlockInputs]:
    """Inside, note what each block is given in its first call."""
    seen: BlockInputs = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            given = leaves((args, [kwargs[key] for key in sorted(kwargs)]))
            tensors = [x for x in given if isinstance(x, torch.Tensor) and x.is_floating_point()]
            seen.setdefault(name, tuple(str(x.dtype).removeprefix("torch.") for x in tensors))

        return hook

    # After the hooks that are there: FSDP's own cast comes first.
    handles = [block.register_forward_pre_hook(note(name), with_kwargs=True) for name, block in blocks]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
