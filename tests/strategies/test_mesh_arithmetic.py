"""The arithmetic of `strategy.mesh`: parts of matrices as pieces of whole ones, the schedule of stages, the state."""

from __future__ import annotations

import pytest
import torch

from toolkit.model.sources import Made
from toolkit.model.tensor import Division, PartOf
from toolkit.recipe.mesh import Mesh, one_forward_one_backward, stage_blocks
from toolkit.recipe.schema import MeshAxes
from toolkit.strategies.engines.pieces import Shape, span, within
from toolkit.verification.compare.pipeline import idle_slots


@pytest.mark.parametrize(
    ("shape", "dim", "start", "stop", "runs"),
    [
        ((6, 4), 1, 0, 24, 1),
        ((6, 4), 1, 3, 21, 1),
        ((6, 4), 1, 5, 7, 1),
        ((3, 8), 0, 2, 23, 1),
        ((8,), 0, 1, 7, 1),
        ((6, 4), 1, 8, 8, 1),
        ((6, 4), 1, 0, 24, 2),
        ((6, 4), 1, 8, 16, 4),
        ((6, 6), 1, 1, 34, 2),
        ((6, 6), 1, 8, 10, 3),
        ((6, 4), 1, 5, 7, 2),
    ],
)
def test_a_piece_of_a_part_is_found_in_the_whole(shape: Shape, dim: int, start: int, stop: int, runs: int) -> None:
    """Each element once, in its place, whichever part it is."""
    count = 3
    whole = torch.arange(count * torch.Size(shape).numel())
    whole = whole.view(*(size * count if at == dim else size for at, size in enumerate(shape)))
    for index in range(count):
        part = Division(dim, index, count, runs).part(whole).reshape(-1)
        seen = torch.full((stop - start,), -1)
        for piece, places in within(span(start, stop), shape, dim, index, count, runs):
            assert (seen[places] == -1).all()
            if piece.flat:
                values = whole.reshape(-1)[piece.start[0] : piece.start[0] + piece.numel]
            else:
                values = whole[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))]
            seen[places] = values.reshape(-1)
        assert torch.equal(seen, part[start:stop])


@pytest.mark.parametrize(("dim", "runs"), [(0, 1), (1, 1), (1, 2), (1, 4), (0, 2)])
def test_a_part_is_read_as_it_is_cut(dim: int, runs: int) -> None:
    whole = torch.randn(7 if dim else 8, 8)
    division = Division(dim, 1, 2, runs)
    assert torch.equal(division.join([division.part(whole, index) for index in range(2)]), whole)
    made = Made(lambda: whole)
    cast = _Read(whole)
    right = division.part(whole).reshape(-1)
    for source in (made, cast):
        part = PartOf(source, tuple(whole.shape), division)
        assert torch.equal(part.whole().reshape(-1), right)
        for start, stop in ((0, right.numel()), (3, 17), (4, 8), (27, 28)):
            into = torch.empty(stop - start)
            part.fill(into, start)
            assert torch.equal(into, right[start:stop]), (source, start, stop)


class _Read:
    """A source that is read by ranges."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def fill(self, into: torch.Tensor, start: int) -> None:
        into.copy_(self.values.reshape(-1)[start : start + into.numel()])

    def whole(self) -> torch.Tensor:
        return self.values


@pytest.mark.parametrize(("stages", "micros"), [(2, 1), (2, 3), (4, 2), (4, 4), (4, 9), (3, 7)])
def test_a_schedule_keeps_few_micro_batches_and_waits_as_little_as_can_be(stages: int, micros: int) -> None:
    """Backwards come in order; a stage holds the activations of as many micro-batches as stages follow, and one more;
    the idle slots are those of a pipeline that fills and empties once."""
    actions = [one_forward_one_backward(stage, stages, micros) for stage in range(stages)]
    for stage, own in enumerate(actions):
        for what in ("forward", "backward"):
            assert [micro for kind, micro in own if kind == what] == list(range(micros))
        held = most = 0
        for what, _ in own:
            held += 1 if what == "forward" else -1
            most = max(most, held)
        assert most == min(micros, stages - stage)
    assert idle_slots(actions) == 2 * (stages - 1)


def test_stages_that_wait_for_each_other_are_seen() -> None:
    first, last = (one_forward_one_backward(stage, 2, 2) for stage in range(2))
    assert idle_slots([first[::-1], last]) is None


def test_blocks_are_divided_evenly_and_the_last_stage_has_no_more() -> None:
    assert stage_blocks(4, 2) == [range(2), range(2, 4)]
    assert stage_blocks(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert stage_blocks(3, 3) == [range(1), range(1, 2), range(2, 3)]


def test_the_parts_of_the_state() -> None:
    """Ranks that divide rows divide the state too, where the strategy shards it."""
    assert Mesh.of(MeshAxes(shard=2, context=2), shards=True) == Mesh(1, 4, 2)
    assert Mesh.of(MeshAxes(replicate=2, context=4), shards=True) == Mesh(2, 4, 4)
    assert Mesh.of(MeshAxes(replicate=2, context=2), shards=False) == Mesh(4, 1, 2)
