"""The order of samples: each once an epoch, windows that no rank count changes."""

from __future__ import annotations

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.order import deal, epoch_order, window_count, windows

sizes = st.integers(1, 7)


@given(n=st.integers(0, 200), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 50), shuffle=st.booleans())
def test_an_epoch_is_every_sample_once(n: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = epoch_order(n, seed, epoch, shuffle)
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == epoch_order(n, seed, epoch, shuffle).tolist()


def test_the_order_is_this_one_for_ever() -> None:
    # A resumed run must go on in the order it began in, under another numpy too.
    assert epoch_order(8, 0, 0, True).tolist() == [3, 7, 4, 0, 2, 6, 5, 1]
    assert epoch_order(4, 7, 3, False).tolist() == [0, 1, 2, 3]


def test_seed_and_epoch_each_change_the_order() -> None:
    base = epoch_order(50, 1, 0, True).tolist()
    assert base != list(range(50))
    assert base != epoch_order(50, 1, 1, True).tolist()
    assert base != epoch_order(50, 2, 0, True).tolist()
    assert epoch_order(50, 0, 1, True).tolist() != epoch_order(50, 1, 0, True).tolist()


@settings(max_examples=200)
@given(n=st.integers(0, 120), micro=sizes, accumulation=sizes, world=sizes)
def test_every_sample_reaches_exactly_one_rank(n: int, micro: int, accumulation: int, world: int) -> None:
    size = micro * accumulation * world
    pieces = list(windows(epoch_order(n, 3, 1, True), size))
    assert len(pieces) == window_count(n, size)
    assert all(len(piece) == size for piece in pieces[:-1])
    seen: list[int] = []
    for piece in pieces:
        dealt = deal(piece, micro, world)
        assert len(dealt) == -(-len(piece) // (micro * world))
        assert len(dealt) <= accumulation
        assert all(len(ranks) == world for ranks in dealt)
        assert all(len(ids) <= micro for ranks in dealt for ids in ranks)
        assert [i for ranks in dealt for ids in ranks for i in ids] == piece
        seen += piece
    assert sorted(seen) == list(range(n))


@given(n=st.integers(1, 100), seed=st.integers(0, 100))
def test_ranks_do_not_change_what_shares_a_window(n: int, seed: int) -> None:
    alone, four = (
        [
            sorted(chain.from_iterable(chain.from_iterable(deal(piece, micro, world))))
            for piece in windows(epoch_order(n, seed, 0, True), 12)
        ]
        for micro, world in ((12, 1), (1, 4))
    )
    assert alone == four


def test_a_short_window_leaves_ranks_short_or_empty_in_its_last_micro_batch() -> None:
    assert deal(range(7), micro_size=2, data_size=2) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert deal(range(5), micro_size=2, data_size=2) == [[[0, 1], [2, 3]], [[4], []]]
    assert deal([], micro_size=2, data_size=2) == []
