"""From a difference to its likely cause: by stage, by ratio, by pattern. Knows nothing of what was injected."""

from __future__ import annotations

import math
from collections.abc import Callable

from toolkit.verification.case import Case
from toolkit.verification.causes_gradient import gradient_cause
from toolkit.verification.causes_step import clip_cause, schedule_cause, state_cause, update_cause
from toolkit.verification.diagnosis import Diagnosis
from toolkit.verification.measure import Measure, Stage
from toolkit.verification.passes import Pass

LEAK_FITS = 1e-3
"""How near the losses have to be: what samples see of each other changes them by more, 16-bit rounding by less."""

Finder = Callable[[Pass, Case, Stage, Measure], Diagnosis | None]


def diagnose(found: Pass, case: Case) -> Diagnosis | None:
    """The likely cause of what a pass found, or None where nothing known fits."""
    if found.failure:
        return None
    difference = found.different
    if difference is None or (found.unproven and difference[0].name == "round-trip"):
        return _unproven(found)
    if any("float8" in c.claim or c.claim == _INPUTS for c in found.unproven):  # what differs follows from it
        return _unproven(found)
    stage, measure = difference
    return _FINDERS.get(stage.name, _none)(found, case, stage, measure) or _unproven(found)


def _none(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    return None


def _unproven(found: Pass) -> Diagnosis | None:
    for claim in found.unproven:
        for words, cause, reference in _CLAIMS:
            # A run that is refused before its first step tells in one line what was missing.
            if words in claim.claim or (words.startswith("base ") and words in claim.seen):
                return Diagnosis(cause, f"{claim.claim}: {claim.seen[:160]}; expected {claim.expected}", reference)
    return None


_INPUTS = "dtypes that blocks are given"
_CLAIMS = (
    (_INPUTS, "what blocks are given is cast to the compute dtype",
     "torch 2.13.0, FSDP: cast_forward_inputs, True by default in FSDP2"),
    ("base weights in NF4", "the base is not in 4 bits", ""),
    ("bits of such a weight", "the base is not in 4 bits", ""),
    ("float8", "products of the recipe's layers are not all in float8", ""),
    ("engaged", "the strategy does not engage", "accelerate 1.15.0 on a machine without a GPU runs DDP in its place"),
    ("collectives", "the strategy does not engage: what it has to call is never called",
     "accelerate 1.15.0 on a machine without a GPU runs DDP, or unconnected processes, in its place"),
    ("processes connected", "the processes are not connected", "accelerate 1.15.0 on a machine without a GPU"),
    ("recomputed", "activation checkpointing is asked for and not applied", ""),
    ("tensors that train", "other parameters train than the recipe says", ""),
    ("frozen tensors", "a frozen weight changes", ""),
    ("tied", "weights that share one parameter were split", "verl#7834, lingua#75"),
    ("dtype", "tensors are kept in another dtype than the recipe's precision says", "peft#1706, DeepSpeed#1800"),
)  # fmt: skip


def _ledger(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    said = next((m.said for m in stage.measures if not m.ok and m.tensor == "samples"), measure.said)
    if measure.tensor == "supervised tokens":
        said = measure.said
    if "0 samples missing" in said and "seen twice" in said and not said.endswith("0 of them seen twice"):
        return Diagnosis("the last batch is filled up with samples seen before", said, "accelerate#2316")
    if said.startswith("samples dealt otherwise"):
        return Diagnosis("samples are dealt to other ranks or micro-batches than the seed says", said)
    lengths = {len(rank.run.steps) for rank in found.ranks}
    micros = [sum(len(rank.run.steps[measure.step].micros) for rank in found.ranks)] if len(lengths) == 1 else []
    right = len(found.reference.windows[measure.step]) if found.reference else 0
    if micros and micros[0] != right and measure.step == 3:
        return Diagnosis("the remainder of the epoch is not trained on", said)
    ids = [_ids(rank, measure.step) for rank in found.ranks]
    if len(ids) > 1 and all(other == ids[0] for other in ids[1:]):
        return Diagnosis("every rank reads the same samples", said)
    if "expected" in said and ("samples" not in said or "seen twice" in said):
        return Diagnosis("padding or prompt tokens are supervised, or supervised ones are masked", said)
    return None


def _ids(rank: object, step: int) -> list:
    return [micro.tensors["input_ids"].tolist() for micro in rank.run.steps[step].micros]  # type: ignore[attr-defined]


def _forward(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    wrong = [m for m in stage.measures if not m.ok]
    starts = [m.tensor.removesuffix(" at the start") for m in wrong if m.tensor.endswith(" at the start")]
    if starts and all("lora_" in name for name in starts):
        return Diagnosis(
            "the adapter does not start from its own initialisation",
            f"{len(starts)} adapter tensors differ before the first step, first {starts[0]}",
            "peft#1887",
        )
    if starts:
        return Diagnosis("ranks start from different weights", f"{len(starts)} tensors differ before the first step")
    if not math.isfinite(measure.error) and measure.tensor == "loss" and found.replayed:
        if all(math.isfinite(loss) for loss in found.replayed.losses[measure.step]):
            return Diagnosis("the loss is not finite where a plain loop's is", measure.said)
        return Diagnosis("the recipe diverges: a plain loop's loss is not finite either", measure.said,
                         remedy="lower optimizer.lr, or set optimizer.max_grad_norm")  # fmt: skip
    if any(m.tensor == "loss of samples apart" for m in wrong):
        return Diagnosis("packed samples see each other in this model", "the plain loop finds another loss for samples "
                         "that share a row than for each alone", "", "data.packing: false")  # fmt: skip
    if case.recipe["adapter"] and case.recipe["adapter"]["method"] == "qlora" and not case.recipe["data"]["packing"]:
        return Diagnosis("the base is not what its 4 bits stand for", "the plain loop computes the same micro-batches "
                         "from the dequantised weights and finds another loss")  # fmt: skip
    ranks = {m.rank for m in wrong}
    if case.recipe["data"]["packing"] and (told := _leaks(found, measure)):
        return Diagnosis("packed samples attend to each other", told)
    reference = found.reference
    if reference and ranks and 0 not in ranks and reference.dropout_matters(0, found.ranks[0].run.weights):
        return Diagnosis(
            "ranks share one dropout mask",
            "losses of the first rank agree, those of the others do not, and dropout is on",
            "transformers#31412",
        )
    return None


def _products(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    of_step = [m for m in stage.measures if m.step == measure.step]
    wrong = [m for m in of_step if not m.ok]
    kinds = sorted({m.tensor.rpartition(": ")[2] for m in wrong})
    told = f"step {measure.step + 1}: {len(wrong)} of {len(of_step)} products ({', '.join(kinds)})"
    return Diagnosis("a float8 product is not that of its operands: scale, format or layout", told)


def _leaks(found: Pass, measure: Measure) -> str:
    """What the wrong losses of a step are, where the plain loop without blocks in its mask finds the same."""
    reference, step = found.reference, measure.step
    if reference is None:
        return ""
    run = found.ranks[0].run
    weights = run.weights if step == 0 else run.steps[step - 1].weights
    leaking = reference.losses_without_blocks(step, weights)
    for (rank, micro), loss in zip(reference.windows[step], leaking, strict=True):
        taken = found.parts[rank].run.steps[step].micros
        if micro.micro >= len(taken) or abs(taken[micro.micro].loss - loss) > LEAK_FITS * abs(loss):
            return ""
    return f"step {step + 1}: the losses are those of rows in which every sample sees those before it"


def _across(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    skips = [m for m in stage.measures if not m.ok and m.tensor == "skipped"]
    if skips and skips[0].step <= measure.step:
        told = f"step {skips[0].step + 1} skipped, {skips[0].said}"
        return Diagnosis("ranks disagree on skipping a step", told, "DeepSpeed#7580")
    if "gradient" in measure.tensor:
        return Diagnosis("a gradient is not reduced over the ranks", f"{measure.tensor} differs between ranks",
                         "DeepSpeed#4321, DeepSpeed#7985")  # fmt: skip
    return Diagnosis("ranks have drifted apart", f"{measure.tensor}: {measure.said}")


def _round_trip(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    wrong = [m.tensor for m in stage.measures if not m.ok]
    first = f"{len(wrong)} comparisons differ, first {wrong[0]}"
    if any("samples" in name for name in wrong):
        return Diagnosis("a resumed run consumes other samples", first)
    if any(name.endswith("step count") for name in wrong):
        return Diagnosis("the optimizer's step count does not come back", first, "DeepSpeed#4396")
    if "frozen weights" in wrong:
        return Diagnosis("frozen weights do not come back", first, "DeepSpeed#3090")
    if wrong[0] in ("merged logits", "exported logits"):
        return Diagnosis(
            f"the {wrong[0].split()[0]} model is not the one that was trained", first, "peft#2025, peft#2803"
        )
    resumed = found.ranks[0].resumed
    reloaded = [name.removeprefix("reloaded ") for name in wrong if name.startswith("reloaded ")]
    weights = [name for name in reloaded if resumed and name in resumed.weights]
    if resumed and weights:
        tensors = [resumed.weights[name] for name in weights]
        if all(not tensor.any() for tensor in tensors):
            return Diagnosis("saved tensors are empty", first, "trl#4416, peft#2450, peft#2892")
        if all(tensor.equal(tensor.bfloat16().to(tensor.dtype)) for tensor in tensors):
            return Diagnosis("the bf16 copy of float32 masters was saved", first)
        return Diagnosis("saved weights are not those of the run", first)
    return None


_FINDERS: dict[str, Finder] = {
    "ledger": _ledger,
    "products": _products,
    "forward": _forward,
    "gradient": gradient_cause,
    "clip": clip_cause,
    "update": update_cause,
    "optimizer-state": state_cause,
    "schedule": schedule_cause,
    "cross-rank": _across,
    "round-trip": _round_trip,
}
