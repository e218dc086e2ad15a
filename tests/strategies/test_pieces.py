"""Which elements each rank owns: the pieces of all ranks make up each tensor once, and read back give it again."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cases import every_case
from jobs import loader_for, resolved_from
from tiny import LLAMA, recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.base import Engine
from toolkit.strategies.engines.pieces import Piece, Saved, box, cut, overlap, span, whole
from toolkit.training.loop import Progress, train
from toolkit.training.session import open_session

SPREAD = ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"]
ODD = LLAMA | {"vocab_size": 301}
"""The ranks divide no embedding in equal rows."""


def elements(piece: Piece, shape: tuple[int, ...]) -> list[int]:
    """The places of a piece's elements in the flattened tensor, by torch's own indexing."""
    places = torch.arange(torch.Size(shape).numel())
    if piece.flat:
        return places[piece.start[0] : piece.start[0] + piece.size[0]].tolist()
    index = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
    return places.view(shape)[index].flatten().tolist()


SHAPE = (3, 4, 5)
PIECES = [
    *(span(0, 60), span(7, 23), span(59, 60), span(0, 1)),
    box((1, 0, 0), (2, 4, 5), SHAPE),
    box((0, 1, 0), (3, 2, 5), SHAPE),
    box((0, 0, 1), (3, 4, 2), SHAPE),
    box((1, 1, 1), (1, 2, 3), SHAPE),
    box((2, 3, 1), (1, 1, 4), SHAPE),
]


@every_case(("one", "other"), list(itertools.product(PIECES, PIECES)))
def test_runs_that_two_pieces_share(one: Piece, other: Piece) -> None:
    here, there = elements(one, SHAPE), elements(other, SHAPE)
    assert len(here) == one.numel
    shared = []
    for at, place, length in overlap(one, other, SHAPE):
        assert here[at : at + length] == there[place : place + length]
        shared += here[at : at + length]
    assert shared == sorted(set(here) & set(there))


def test_a_box_of_whole_rows_is_a_range() -> None:
    assert box((1, 0, 0), (2, 4, 5), SHAPE) == span(20, 60)
    assert box((2, 3, 1), (1, 1, 4), SHAPE) == span(56, 60)
    assert not box((0, 1, 0), (3, 2, 5), SHAPE).flat
    assert box((0, 0, 0), (0, 4, 5), SHAPE).numel == 0
    assert box((), (), ()) == span(0, 1) == whole(())


def test_a_piece_is_cut_into_parts() -> None:
    parts = list(cut(span(3, 13), 4))
    assert parts == [(span(3, 7), slice(0, 4)), (span(7, 11), slice(4, 8)), (span(11, 13), slice(8, 10))]


Part = tuple[Piece, torch.Tensor]


@dataclass
class Read:
    """What one rank has: by name (and ``name.moment``) its pieces, the whole tensor, and the whole after loading."""

    owned: dict[str, list[Part]]
    whole: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]
    asked: dict[str, int]
    """Elements that loading read."""
    steps: dict[str, int | None]
    losses: list[float]


def wholes(engine: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name in engine.shapes:
        found[name] = engine.full_weight(name)
        if (state := engine.full_state(name)) is not None:
            found |= {f"{name}.{key}": moment for key, moment in state.moments.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def pieces_job(resolved: Resolved) -> Read:
    """Train, read the pieces, train on, load them, and train on again."""
    session = open_session(resolved)
    engine, rank = session.engine, session.accelerator.process_index
    losses: list[float] = []

    def on(steps: int, first: int) -> None:
        progress = Progress(first, first)
        windows = loader_for(resolved, rank, first)
        train(session, windows, first + steps, progress, lambda pending: losses.append(float(pending.loss_sum)))

    on(2, 0)
    owned: dict[str, list[Part]] = {}
    steps = {}
    for name in engine.shapes:
        mine = engine.pieces(name)
        steps[name] = mine.step
        for key, values in {name: mine.weight, **{f"{name}.{key}": m for key, m in mine.moments.items()}}.items():
            owned[key] = [(piece, part.detach().cpu().clone()) for piece, part in values]
    before = wholes(engine)
    on(1, 2)
    asked = dict.fromkeys(before, 0)

    def reader(key: str) -> Any:
        def read(piece: Piece | None) -> torch.Tensor:
            tensor = before[key]
            asked[key] += tensor.numel() if piece is None else piece.numel
            if piece is None:
                return tensor.clone()
            places = torch.tensor(elements(piece, tuple(tensor.shape)), dtype=torch.long)
            return tensor.flatten()[places]

        return read

    for name in engine.shapes:
        engine.load_pieces(name, Saved(2, reader(name), lambda key, piece, name=name: reader(f"{name}.{key}")(piece)))
    loaded = wholes(engine)
    on(1, 2)
    return Read(owned, before, loaded, asked, steps, losses)


def check(reads: list[Read]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in reads[0].whole.items()}
    for name, shape in shapes.items():
        flat, times = torch.zeros(torch.Size(shape).numel()), torch.zeros(torch.Size(shape).numel(), dtype=torch.int)
        for read in reads:
            for piece, values in read.owned.get(name, []):
                places = torch.tensor(elements(piece, shape))
                flat[places], times[places] = values.flatten().float(), times[places] + 1
        assert times.eq(1).all(), f"{name}: elements are owned by {times.unique().tolist()} ranks"
        assert torch.equal(flat.view(shape), reads[0].whole[name].float()), name
    for read in reads:
        assert all(torch.equal(read.loaded[name], tensor) for name, tensor in read.whole.items())
        assert read.losses[2] == read.losses[3], "the step after loading is the one before it"
        counted = {name: {r.steps[name] for r in reads} - {None} for name in read.steps}
        assert all(steps in ({2}, {0}) for steps in counted.values()), "0: momentum alone has no count"


@every_case(("strategy", "precision"), itertools.product(SPREAD, ["fp32", "bf16"]))
def test_each_element_is_owned_once_and_comes_back(
    strategy: str, precision: str, tiny_root: Path, group: WorkerGroup
) -> None:
    recipe = recipe_dict(tiny_root, strategy={"name": strategy}, precision=precision, model={"config": ODD})
    reads = group.run(pieces_job, resolved_from(recipe), timeout=240)
    check(reads)
    total = sum(tensor.numel() for tensor in reads[0].whole.values())
    for read in reads:
        mine = sum(piece.numel for parts in read.owned.values() for piece, _ in parts)
        assert 0.4 * total < mine < 0.6 * total
        asked = sum(read.asked.values()) / total
        assert asked <= {"ddp": 1.0, "zero1": 0.7, "zero2": 0.7}.get(strategy, 0.55)  # copies are read whole


@every_case(
    ("strategy", "sections"),
    [
        ("fsdp2", {"optimizer": {"name": "adafactor", "lr": 0.01}}),
        ("fsdp2", {"optimizer": {"name": "muon"}}),
        ("ddp", {"optimizer": {"name": "adamw8bit"}}),
        ("fsdp2", {"optimizer": {"name": "adamw8bit"}}),
        ("fsdp1", {"optimizer": {"name": "adamw8bit"}}),
        ("ddp", {"optimizer": {"name": "adafactor", "lr": 0.01}}),
        ("zero1", {"optimizer": {"name": "sgd", "momentum": 0.9}}),
        ("fsdp1", {"adapter": {"r": 3}}),
        ("fsdp2", {"adapter": {"r": 3}}),
        ("zero3", {"adapter": {"r": 3}, "precision": "bf16"}),
        ("zero2", {"adapter": {"r": 3}, "precision": "bf16"}),
        ("zero3", {"strategy": {"name": "zero3", "offload": "all"}, "precision": "bf16"}),
        ("zero2", {"strategy": {"name": "zero2", "offload": "optimizer"}, "precision": "bf16"}),
        ("zero3", {"precision": "bf16-pure"}),
        ("zero1", {"precision": "bf16-pure"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_other_optimizers_adapters_and_offload(
    strategy: str, sections: dict[str, Any], tiny_root: Path, group: WorkerGroup
) -> None:
    recipe = recipe_dict(tiny_root, **({"strategy": {"name": strategy}} | sections))
    check(group.run(pieces_job, resolved_from(recipe), timeout=240))
