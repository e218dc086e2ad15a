"""ZeRO-3 checks that all ranks split modules alike: rank 0 broadcasts its numbers, the others begin with -1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def install() -> None:
    """For the rest of this process: each rank compares as rank 0 does, with the same collectives and reads."""
    from deepspeed.runtime.zero import utils

    def as_rank_0(check: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(check)
        def checked(numbers: list[int]) -> Any:
            rank = utils.dist.get_rank
            utils.dist.get_rank = lambda *args: 0
            try:
                return check(numbers)
            finally:
                utils.dist.get_rank = rank

        return checked

    for name in ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"):
        setattr(utils, name, as_rank_0(getattr(utils, name)))
