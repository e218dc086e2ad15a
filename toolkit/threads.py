"""How many threads torch computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with ``count`` threads within this block.

    The order of sums depends on their number, so what is to be equal to another process's result takes as many as that
    process has. On a busy machine so does time: the threads of one operator wait for each other.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
