"""What is replaced inside other packages steps aside where its cause is gone, and `doctor` says so."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from toolkit.doctor import devices
from toolkit.upstream import torch as upstream


class _Newer:
    """A process group as torch 2.14.1 has it: made with other arguments, without options."""

    def __init__(
        self, store: object, rank: int, size: int, timeout: object = 0, enable_reconfigure: bool = False
    ) -> None:
        """(store, rank, size, timeout, enable_reconfigure)"""


@pytest.mark.parametrize("kind", [_Newer, None])
def test_a_torch_without_the_race_keeps_its_groups(kind: type | None) -> None:
    absent = upstream._two_threads_of_gloo
    absent.cache_clear()
    try:
        with (
            mock.patch.object(dist, "ProcessGroupGloo", kind, create=True),
            mock.patch.object(dist, "is_gloo_available", return_value=kind is not None),
        ):
            made = kind and kind.__init__
            upstream.use_one_gloo_thread()
            assert (kind and kind.__init__) is made
            [told] = [one for one in devices.replacements() if "ProcessGroupGloo" in one.found]
            assert told.status == "note"
            assert absent() in told.found
    finally:
        absent.cache_clear()


def test_what_is_needed_here_is_not_told() -> None:
    needed = [one for one in upstream.REPLACEMENTS if not one.absent()]
    assert {one.what for one in needed}.isdisjoint(
        word for condition in devices.replacements() for word in condition.found.split()
    )
