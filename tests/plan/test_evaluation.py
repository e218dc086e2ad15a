"""Memory of an evaluation inside a run: of the Trainer itself and of a loop of one's own, every storage counted."""

from __future__ import annotations

from typing import Any

import pytest

from cases import every_case
from plan.cells import LLAMA, Cell
from plan.trainer import trainer_evaluation
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.loops import LOOPS, loop_named
from toolkit.planning.predict import Planner
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

WIDE = LLAMA | {"vocab_size": 8000, "num_hidden_layers": 2}
"""Its logits are the peak."""
LENGTH = 64


def planner(loop: str, precision: str = "bf16", micro: int = 1, device: str = "cpu", **sections: Any) -> Planner:
    values = Cell("llama", False, "single", "none", LENGTH, micro, 1, precision=precision).recipe() | sections
    values["model"] = {"config": WIDE}
    return Planner.of(resolve(Recipe.model_validate(values), device=device), LENGTH, loop)


@every_case(
    ("precision", "rows", "kept"), [("bf16", 8, 0), ("fp32", 8, 0), ("bf16", 4, 1), ("bf16", 4, 2), ("fp32", 4, 5)]
)
@pytest.mark.usefixtures("launches")
def test_an_evaluation_of_the_trainer_takes_what_it_takes(precision: str, rows: int, kept: int) -> None:
    made = planner(f"trainer eval_micro={rows} eval_kept={kept}", precision)
    memory = made.memory(made.resolved)
    with WorkerGroup(1) as lone:
        [real] = lone.run(trainer_evaluation, WIDE, LENGTH, precision == "bf16", rows, kept)
    assert memory.phases["evaluate"] == pytest.approx(real, rel=0.005)
    assert memory.peak_phase == "evaluate", "a step of one row takes less"


@every_case(("precision", "rows"), [("bf16", 8), ("fp32", 8), ("bf16", 16)])
@pytest.mark.usefixtures("launches")
def test_an_evaluation_of_the_sfttrainer_takes_what_it_takes(precision: str, rows: int) -> None:
    """Without Triton a tile's mask of words before the target stays beside its exponentials: a thirteenth of the peak's
    tile, which was missing."""
    made = planner(f"trl eval_micro={rows}", precision)
    with WorkerGroup(1) as lone:
        [real] = lone.run(trainer_evaluation, WIDE, LENGTH, precision == "bf16", rows, 0, True)
    assert made.memory(made.resolved).phases["evaluate"] == pytest.approx(real, rel=0.005)


@every_case(
    ("loop", "held", "kept"), [("bare", True, 0), ("bare held_outputs=false", False, 0), ("bare eval_kept=4", True, 4)]
)
def test_an_evaluation_of_a_loop_of_ones_own_takes_what_it_takes(loop: str, held: bool, kept: int) -> None:
    """Batches of eight rows after two steps of one; logits of ``kept`` batches are in a list, or none are."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.planning.live import LiveBytes

    made = planner(f"{loop} eval_micro=8", "bf16-pure")
    sizes = dict(WIDE)
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with LiveBytes() as tracker:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            batch = torch.ones(1, LENGTH, dtype=torch.int64)
            outputs = model(input_ids=batch, labels=batch, use_cache=False)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if not held:
            del outputs
        tracker.reset_peak()
        model.eval()
        logits = []
        with torch.no_grad():
            for _ in range(kept or 3):
                batch = torch.ones(8, LENGTH, dtype=torch.int64)
                outputs = model(input_ids=batch, labels=batch, use_cache=False)
                if kept:
                    logits.append(outputs.logits)
                if not held:
                    del outputs
        peak = tracker.reset_peak()
    assert made.memory(made.resolved).phases["evaluate"] == pytest.approx(peak, rel=0.01)


def test_an_evaluation_of_as_many_rows_as_a_micro_batch_takes_less_than_a_step() -> None:
    """So that it need not be traced where nothing of it stays."""
    for loop, precision, sections in (
        ("trainer", "bf16", {}),
        ("trl", "bf16", {}),
        ("bare", "bf16-pure", {}),
        ("trainer", "bf16", {"adapter": {"method": "qlora", "r": 4, "alpha": 8.0, "target_modules": "all-linear"}}),
    ):
        made = planner(f"{loop} eval_micro=2", precision, 2, "cuda", **sections)
        phases = made.memory(made.resolved).phases
        step = max(phases[name] for name in ("forward", "loss", "backward", "reduce", "step"))
        assert 0 < phases["evaluate"] <= step, loop
        plain = planner(loop, precision, 2, "cuda", **sections)
        assert "evaluate" not in plain.memory(plain.resolved).phases


def test_the_logits_of_all_ranks_are_gathered_and_put_together() -> None:
    ddp = {"strategy": {"name": "ddp"}, "machine": {"device": "cpu", "processes": 2}}
    batch = 4 * 4 * LENGTH * WIDE["vocab_size"]  # of one rank, in float32
    lone, two = (planner("trainer eval_micro=4 eval_kept=3", "fp32", **more) for more in ({}, ddp))
    shares = [made.memory(made.resolved) for made in (lone, two)]
    assert shares[0].breakdown["loss"] == 6 * batch, "three before, three put together"
    assert shares[1].breakdown["loss"] == 2 * 6 * batch


@every_case(
    ("loop", "message"),
    [
        ("trainer eval_micro=many", "--loop-set eval_micro=many: a number, 0 for none"),
        ("trainer eval_kept=-1", "--loop-set eval_kept=-1: a number, 0 for none"),
        ("trl eval_kept=2", "--loop-set eval_kept=2: TRL's SFTTrainer computes no logits that could stay"),
    ],
)
def test_what_no_evaluation_can_be_is_an_error(loop: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        loop_named(loop)
    assert loop_named("trainer eval_micro=0") is not LOOPS["trainer"]


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
def test_an_evaluation_of_the_sft_trainer_takes_what_it_takes() -> None:
    pytest.importorskip("trl")
    made = planner("trl eval_micro=8", "bf16")
    with WorkerGroup(1) as lone:
        [real] = lone.run(trainer_evaluation, WIDE, LENGTH, True, 8, 0, True)
    assert made.memory(made.resolved).phases["evaluate"] == pytest.approx(real, rel=0.05)
