"""Causes of a wrong clip, update, optimizer state or learning rate."""

from __future__ import annotations

import re

import torch

from toolkit.reference.schedule import plain_learning_rate
from toolkit.verification.case import Case
from toolkit.verification.diagnosis import Diagnosis
from toolkit.verification.measure import Measure, Stage
from toolkit.verification.passes import Pass


def clip_cause(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """From the coefficients that were applied beside those that were right."""
    resolved = case.resolved()
    whole = [m for m in stage.measures if m.tensor == "clipping coefficient"]
    pairs = [(m, *_two(m.said)) for m in whole]
    wrong = [(m, seen, right) for m, seen, right in pairs if not m.ok]
    norms_wrong = [m for m in stage.measures if m.tensor == "gradient norm" and not m.ok]
    if norms_wrong and wrong:
        return Diagnosis(
            "each rank clips by the norm of its own shard",
            f"{norms_wrong[0].said}; {wrong[0][0].said}",
            "torch.nn.utils.clip_grad_norm_ over FSDP1's flat parameters",
        )
    if not wrong:
        return None
    told = wrong[0][0].said
    if resolved.max_grad_norm <= 0:
        taken = found.ranks[0].run.steps[wrong[0][0].step]
        return Diagnosis(f"no clipping is asked for, yet the engine clips at {wrong[0][1] * taken.norm:.3g}", told,
                         "DeepSpeed#8068: its default is 1.0")  # fmt: skip
    if all(abs(seen - 1) < 1e-3 for _, seen, _ in wrong):
        return Diagnosis("the asked max_grad_norm never reaches the engine", told, "axolotl#1381, accelerate#3807")
    if all(abs(seen - right * right) < 1e-3 * right for _, seen, right in wrong):
        return Diagnosis("gradients are clipped twice: by the loop and by the engine", told)
    return None


def update_cause(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """From what the weights did in place of the right update."""
    run = found.ranks[0].run
    step = measure.step
    before = run.weights if step == 0 else run.steps[step - 1].weights
    after = run.steps[step].weights
    wrong = [m.tensor for m in stage.measures if not m.ok and m.step == step]
    resolved = case.resolved()
    settings = resolved.recipe.optimizer
    if all(torch.equal(before[name], after[name]) for name in wrong):
        return Diagnosis(
            f"{len(wrong)} weights do not change: the optimizer holds other parameters",
            f"{wrong[0]} is bit-equal before and after the step",
            "accelerate#2665, pytorch#149205",
        )
    if resolved.precision.trainable == "float32" and all(_is_bf16(after[name]) for name in wrong):
        return Diagnosis(
            "weights are updated in bf16, without float32 masters",
            f"all {len(wrong)} wrong weights are bf16 numbers",
            "accelerate#2624, accelerate#3979",
        )
    lr = run.steps[step].lr[0] if run.steps[step].lr else 0.0
    if settings.weight_decay and lr and found.reference:
        decayed = found.reference.decayed
        spared = [name for name in wrong if name not in decayed]
        if len(spared) == len(wrong):
            return Diagnosis("weight decay on weights that the groups spare", f"{len(wrong)} of them, first {wrong[0]}")
        if not spared:
            return Diagnosis("weight decay is lost", f"{len(wrong)} weights that should decay, first {wrong[0]}",
                             "peft#3503")  # fmt: skip
    return None


def state_cause(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """From the moments' values."""
    states = found.ranks[0].run.steps[measure.step].states
    moments = [m for state in states.values() if state is not None for m in state.moments.values()]
    if moments and case.resolved().precision.trainable == "float32" and all(_is_bf16(m) for m in moments):
        return Diagnosis("Adam's moments are kept in bf16", f"all {len(moments)} moments are bf16 numbers",
                         "AReaL#1292")  # fmt: skip
    return None


def schedule_cause(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """From the update whose learning rate it would have been."""
    resolved = case.resolved()
    updates = 0
    for taken in found.ranks[0].run.steps:
        right = plain_learning_rate(resolved, updates, case.steps)
        for lr in taken.lr:
            if abs(lr - right) <= 1e-9 * resolved.recipe.optimizer.lr:
                continue
            skips = taken.step - updates
            if skips and abs(lr - plain_learning_rate(resolved, taken.step, case.steps)) < 1e-9:
                return Diagnosis(
                    "the scheduler advances on steps that overflow skipped",
                    f"step {taken.step + 1} has the learning rate of one update later",
                    "accelerate#4242",
                )
            times = updates * resolved.world_size
            if updates and abs(lr - plain_learning_rate(resolved, times, case.steps)) < 1e-9:
                return Diagnosis(
                    f"the scheduler advances {resolved.world_size} times a step, once per process",
                    f"update {updates} has the learning rate of update {times}",
                    "accelerate#1398, accelerate#2142",
                )
        updates += not taken.skipped
    return None


def _is_bf16(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, tensor.bfloat16().to(tensor.dtype))


def _two(said: str) -> tuple[float, float]:
    numbers = [float(part) for part in re.findall(r"(?<![\w.])\d[\d.]*(?:e[-+]?\d+)?", said)]
    return (numbers[0], numbers[1]) if len(numbers) >= 2 else (float("nan"), float("nan"))
