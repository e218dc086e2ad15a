"""AdamW with its moments in 8 bits: the step, what is kept, resuming, proof, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases import every_case
from jobs import Run, resolved_from, train_job, worst
from nights import nightly_but
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.optim.adamw8bit import BLOCK, SIGNED, AdamW8bit, Moment8, table
from toolkit.planning.live import LiveBytes
from toolkit.reference.optimizers.adamw import adamw_step
from toolkit.strategies.memory.base import _UNPACKED
from toolkit.training.finding import newest
from toolkit.verification.compare.packed import distance
from toolkit.verification.matrix import what_caught
from toolkit.verification.run import verify


def recipe(root: Path, strategy: str, **sections: Any) -> dict[str, Any]:
    own = {"strategy": {"name": strategy}, "optimizer": {"name": "adamw8bit"}, "batch": {"accumulation": 3}}
    return recipe_dict(root, **(own | sections))


def ragged(size: int) -> torch.Tensor:
    """Values over many powers of ten, with a block of zeros and one whose largest is negative."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(size, generator=draw) * torch.rand(size, generator=draw) ** 6
    values[:BLOCK] = 0
    values[BLOCK + 5] = -50.0
    return values


@pytest.mark.parametrize("key", SIGNED)
def test_codes_are_the_nearest_and_packing_again_changes_nothing(key: str) -> None:
    values = ragged(40 * BLOCK + 77)
    values = values if SIGNED[key] else values**2
    moment = Moment8(values, key)
    moment.pack(values)
    unpacked = moment.unpack()
    grid = torch.tensor(table(SIGNED[key]), dtype=torch.float64)
    parts = (values.double() / moment.spread().double()).nan_to_num()
    nearest = (parts.unsqueeze(1) - grid).abs().argmin(1)
    # A positive second moment is rounded up to the smallest value, never to 0.
    nearest = nearest if SIGNED[key] else torch.where(parts > 0, nearest.clamp(min=1), nearest)
    assert torch.equal(nearest, moment.codes.long())
    again = Moment8(values, key)
    again.pack(unpacked)
    assert torch.equal(again.codes, moment.codes)
    assert torch.equal(again.scales, moment.scales)
    assert max(distance(unpacked, moment.spread(), values, SIGNED[key])) < 1e-6
    assert moment.codes.numel() + 4 * moment.scales.numel() < 1.02 * values.numel() + 4


def test_what_is_kept_wrongly_is_far_off() -> None:
    values = ragged(8 * BLOCK)
    moment = Moment8(values, "exp_avg")
    moment.pack(values)
    unpacked, scales = moment.unpack(), moment.spread()
    assert distance(values, scales, values, True)[0] == 0  # the value itself lies in its own cell
    assert distance(unpacked * 1.01, scales, values, True)[0] > 1e-4
    assert distance(unpacked, scales * 1.01, values, True)[1] > 1e-3
    assert distance(unpacked, scales.max().expand_as(scales), values, True)[1] > 0.1


def test_neighbouring_blocks_may_have_equal_scales() -> None:
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0)).clamp(-1.5, 1.5)
    moment = Moment8(values, "exp_avg")
    moment.pack(values)
    assert len(set(moment.scales.tolist())) == 1
    assert max(distance(moment.unpack(), moment.spread(), values, True)) < 1e-6
    values[300] = 3.0  # now one scale of all blocks is wrong
    assert distance(values, torch.full_like(values, 3.0), values, True)[1] > 0.1


def test_steps_are_adamws_from_what_is_kept() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(30, 41))
    optimizer = AdamW8bit([{"params": [weight], "weight_decay": 0.1}], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    moments: dict[str, torch.Tensor] = {}
    for step in range(1, 6):
        weight.grad = torch.randn_like(weight)
        before = weight.detach().clone()
        right = adamw_step(before, weight.grad, moments.get("exp_avg"), moments.get("exp_avg_sq"), step=step, lr=1e-3,
                           betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)  # fmt: skip
        optimizer.step()
        moved, expected = weight.detach().double() - before, right.weight - before
        assert (moved - expected).norm() / expected.norm() < 1e-4  # a float32 weight's last digit against its change
        moments = {key: optimizer.state[weight][key].unpack().view(30, 41) for key in SIGNED}


def test_a_step_takes_no_more_than_the_plan_says() -> None:
    weight = torch.nn.Parameter(torch.randn(512, 512))
    optimizer = AdamW8bit([weight], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = [
        tensor for key in SIGNED for tensor in (optimizer.state[weight][key].codes, optimizer.state[weight][key].scales)
    ]
    with LiveBytes() as live:
        live.born_before([weight, weight.grad, *kept])
        optimizer.step()
    assert live.peak == pytest.approx(_UNPACKED * weight.numel(), rel=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_it_is_proven(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(resolved_from(recipe(tiny_root, strategy, precision="bf16")), group=group, time_limit=300)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    seen = {claim.claim: claim.seen for claim in outcome.passes[-1].claims}
    assert seen["dtype of optimizer state"] == "uint8"
    limit = {stage.name: stage.detection_limit for stage in outcome.passes[0].stages}["optimizer-state"]
    assert limit is not None
    assert limit < 1e-4


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        pytest.param("moments-unpacked", "engagement", marks=pytest.mark.nightly),
        ("moments-truncated", "optimizer-state"),
    ],
)
def test_moments_that_are_kept_otherwise_are_found(fault: str, stage: str, tiny_root: Path, group: WorkerGroup) -> None:
    resolved = resolved_from(recipe(tiny_root, "ddp"))
    outcome = verify(resolved, group=group, fault=fault, time_limit=300, stop_early=True)
    assert outcome.exit_code == 1
    assert what_caught(outcome)[0] == stage, what_caught(outcome)


@pytest.mark.parametrize(("saved", "resumed"), nightly_but([("fsdp2", "fsdp2"), ("fsdp2", "ddp")], ("fsdp2", "ddp")))
def test_resumed_equals_uninterrupted(
    saved: str, resumed: str, tiny_root: Path, group: WorkerGroup, tmp_path: Path
) -> None:
    first, second = (resolved_from(recipe(tiny_root, name, run={"max_steps": 6})) for name in (saved, resumed))
    whole: Run = group.run(train_job, first, 6, None, None, 6)[0]
    group.run(train_job, first, 3, str(tmp_path), None, 6)
    run: Run = group.run(train_job, second, 3, None, str(newest(tmp_path)), 6)[0]
    if saved == resumed:
        assert run.losses == whole.losses[3:]
        assert all(torch.equal(run.weights[name], weight) for name, weight in whole.weights.items())
        assert all(torch.equal(run.moments[name], moment) for name, moment in whole.moments.items())
    else:
        # Blocks begin elsewhere: moments are rounded once more.
        assert run.losses == pytest.approx(whole.losses[3:], rel=1e-3)
        assert worst(run.weights, whole.weights)[0] < 1e-3


@every_case(
    ("strategy", "optimizer", "expected"),
    [
        *[(name, {}, "use fsdp2") for name in ("zero1", "zero2", "zero3")],
        ("ddp", {"kernel": "foreach"}, "remove optimizer.kernel"),
    ],
)
def test_where_it_cannot_be_it_is_refused(
    strategy: str, optimizer: dict[str, Any], expected: str, tiny_root: Path
) -> None:
    with pytest.raises(InputError, match=expected):
        resolved_from(recipe(tiny_root, strategy, optimizer={"name": "adamw8bit", **optimizer}))


def test_the_plan_counts_two_bytes_a_weight(tiny_root: Path) -> None:
    from toolkit.planning.predict import Planner
    from toolkit.strategies import strategy_of

    found = []
    for name in ("adamw", "adamw8bit"):
        resolved = resolved_from(recipe(tiny_root, "fsdp2", optimizer={"name": name}))
        held = strategy_of(resolved).memory_model()(Planner.of(resolved, 64).skeleton.holdings, resolved)
        found.append(held.resident["optimizer"] / (held.trains / 2))
    assert found == pytest.approx([8.0, 2 + 8 / 256], rel=1e-3)
