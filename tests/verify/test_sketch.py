"""Norms of tensors, and of their differences, from a few thousand sums; and tensors in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from toolkit.errors import InputError
from toolkit.verification.record.plain_form import load_plain, save_plain
from toolkit.verification.record.spill import SMALL, Spill
from toolkit.verification.scripts.sketch import BUCKETS, EXACT, NORM_SLACK, distance, norm, sketch

SHAPE = (2048, 576)


def tensors() -> dict[str, torch.Tensor]:
    """Of what trainings have: noise, few directions, one column or row, a constant, one element."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(SHAPE, generator=draw)
    column, row, lone = torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)
    column[:, 64], row[1024], lone[7, 7] = noise[:, 64], noise[1024], 1e-6
    low_rank = noise[:, :2] @ noise[:2, :]
    heavy = noise.pow(5)
    return {"noise": noise, "low rank": low_rank, "column": column, "row": row, "constant": torch.ones(SHAPE),
            "lone": lone, "heavy": heavy}  # fmt: skip


@pytest.mark.parametrize("kind", tensors())
def test_a_norm_is_told_to_a_few_percent(kind: str) -> None:
    tensor = tensors()[kind]
    told = norm(sketch(tensor)) / tensor.double().norm().item()
    assert 1 / NORM_SLACK < told < NORM_SLACK
    assert len(sketch(tensor)) == BUCKETS


def test_a_sketch_is_linear() -> None:
    one, two = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    combined = 3 * sketch(one) - 0.5 * sketch(two)
    assert distance(sketch(3 * one.double() - 0.5 * two.double()), combined) < 1e-13


def test_a_difference_of_one_element_is_seen() -> None:
    tensor = tensors()["noise"]
    changed = tensor.clone()
    changed[1000, 300] += 1e-3
    assert distance(sketch(tensor), sketch(tensor.clone())) == 0.0
    seen = distance(sketch(changed), sketch(tensor))
    right = 1e-3 / tensor.double().norm().item()
    assert seen == pytest.approx(right, rel=NORM_SLACK - 1)


def test_elements_that_changed_places_are_seen() -> None:
    """Two rows, and two halves: what a wrong shard does."""
    tensor = tensors()["noise"]
    for order in ([1, 0, *range(2, 2048)], [*range(1024, 2048), *range(1024)]):
        moved = tensor[order]
        right = (moved - tensor).double().norm().item() / tensor.double().norm().item()
        assert distance(sketch(moved), sketch(tensor)) == pytest.approx(right, rel=NORM_SLACK - 1)


def test_small_tensors_are_whole() -> None:
    tensor = torch.randn(EXACT)
    assert torch.equal(sketch(tensor), tensor.double())
    assert distance(torch.ones(3).double(), torch.zeros(3).double()) == float("inf")
    assert distance(torch.zeros(3).double(), torch.zeros(3).double()) == 0.0


@dataclass
class Kept:
    tensors: dict[str, torch.Tensor]


def test_a_spilled_tensor_is_in_its_file_once(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "tensors")
    large = torch.randn(300, 100, dtype=torch.float64).bfloat16()
    mapped, small = spill.keep(large), spill.keep(torch.ones(4))
    assert torch.equal(mapped, large)
    assert spill.place(small) is None
    assert torch.equal(spill.keep(mapped), large)
    kept = Kept({"one": mapped, "tied": mapped, "small": small, "other": spill.keep(torch.arange(9000.0))})
    save_plain(kept, tmp_path / "kept.pt", spill)
    assert spill.bytes < large.numel() * 2 + 9000 * 4 + 128
    assert (tmp_path / "kept.pt").stat().st_size < 8 * SMALL
    again = load_plain(tmp_path / "kept.pt", Kept, tmp_path / "tensors")
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in kept.tensors.items())
    again.tensors["one"].zero_()  # stays in this process
    assert torch.equal(load_plain(tmp_path / "kept.pt", Kept, tmp_path / "tensors").tensors["tied"], large)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ({"spilled": 0, "dtype": "float32", "shape": [9000, 2]}, "shorter than its trace says"),
        ({"spilled": 0, "dtype": "load", "shape": [4]}, "cannot be read"),
        ({"spilled": -64, "dtype": "float32", "shape": [4]}, "cannot be read"),
        ({"spilled": 0, "dtype": "float32", "shape": [-4]}, "cannot be read"),
        ({"spilled": 0, "dtype": "float32", "shape": "4"}, "cannot be read"),
    ],
)
def test_a_place_that_is_none_is_refused(place: dict[str, object], why: str, tmp_path: Path) -> None:
    Spill(tmp_path / "tensors").keep(torch.arange(9000.0))
    save_plain(Kept({}), tmp_path / "kept.pt")
    content = torch.load(tmp_path / "kept.pt", weights_only=True)
    torch.save(content | {"content": {"tensors": {"one": place}}}, tmp_path / "kept.pt")
    with pytest.raises(InputError, match=why):
        load_plain(tmp_path / "kept.pt", Kept, tmp_path / "tensors")
