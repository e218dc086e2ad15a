"""From a difference to its likely cause: by stage, by ratio, by pattern. Knows nothing of what was injected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from toolkit.reference.extras import Extras
from toolkit.rooms import Option, active_options, all_options, shadows
from toolkit.strategies.engines.claims import Claim
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED
from toolkit.verification.cases.case import FULL_WINDOWS, Case
from toolkit.verification.compare.ledger import rows_of
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.diagnose.experts import misplaced
from toolkit.verification.diagnose.gradient import gradient_cause
from toolkit.verification.diagnose.known import known
from toolkit.verification.diagnose.layers import other_masks
from toolkit.verification.diagnose.mesh import other_rows, stale_copies, wrong_parts
from toolkit.verification.diagnose.stages import masks_of_stages
from toolkit.verification.diagnose.step import clip_cause, rank_cause, schedule_cause, state_cause, update_cause
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
        return _unproven(found.unproven)
    # What differs follows from these.
    of_options = {name for option in all_options().values() for name in _claims_of(option)}
    if causes := [c for c in found.unproven if c.id in _CAUSES_OF_DIFFERENCES | of_options]:
        return _unproven(causes)
    stage, measure = difference
    cause = _FINDERS.get(stage.name, _none)(found, case, stage, measure)
    if cause is not None and cause.id == "sums-rounded-to-16-bits":
        # Weights that are kept in 16 bits have such gradients.
        cause = _unproven([claim for claim in found.unproven if claim.id == "dtype"]) or cause
    return cause or _unproven(found.unproven)


def _none(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    return None


def _unproven(claims: Sequence[Claim]) -> Diagnosis | None:
    diagnoses = _CLAIMS | {name: option.missing for option in all_options().values() for name in _claims_of(option)}
    for claim in claims:
        if claim.id in diagnoses:
            seen = claim.seen[:160]
            facts = {"claim": claim.claim, "seen": seen, "expected": claim.expected}
            return Diagnosis(
                diagnoses[claim.id], facts | {"evidence": f"{claim.claim}: {seen}; expected {claim.expected}"}
            )
    return None


def _claims_of(option: Option) -> tuple[str, ...]:
    return *(option.claim or ())[:1], *option.compared_claims


_CLAIMS = {
    "block-inputs": "block-inputs-cast",
    "strategy": "strategy-not-active",
    "model-wrapped": "strategy-not-active",
    "engine": "strategy-not-active",
    "zero-stage": "strategy-not-active",
    "weights-split": "strategy-not-active",
    "share-of-weights": "strategy-not-active",
    "share-of-state": "strategy-not-active",
    "collectives": "collectives-missing",
    "sync": "sync-not-as-set",
    "mesh": "mesh-not-active",
    "mesh-copies": "mesh-copies-differ",
    "mesh-collectives": "mesh-not-active",
    "layers-divided": "mesh-not-active",
    "layers-alike": "mesh-copies-differ",
    "experts-divided": "mesh-not-active",
    "stages": "mesh-not-active",
    "stage-weights": "mesh-not-active",
    "stage-exchanges": "mesh-not-active",
    "bubble": "mesh-not-active",
    "stage-shared": "mesh-copies-differ",
    "schedule": "micro-batches-dropped",
    "processes": "processes-not-connected",
    "recomputation": "checkpointing-not-applied",
    "trainable": "other-parameters-train",
    "frozen": "frozen-weight-changes",
    "tied": "tied-weights-separate",
    "dtype": "wrong-dtype",
}
"""The diagnosis by the claim without evidence."""
_CAUSES_OF_DIFFERENCES = {"block-inputs", "schedule"}


_SAMPLES = {
    "conversation-header": "header-learned",
    "conversation-unended": "end-of-turn-not-learned",
    "conversation-shown": "results-learned",
    "conversation-elsewhere": "rewritten-turns-learned",
    "conversation-missing": "turns-not-learned",
    "conversation-repeated": "turns-not-learned",
    "mixture-share": "share-wrong",
    "mixture-draws": "replaced-draws",
}
"""The diagnosis by what is wrong with samples; earlier ones explain later ones."""


def _data(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    for kind, cause in _SAMPLES.items():
        for wrong in stage.wrong:
            if wrong.kind == kind:
                return Diagnosis(cause, {"measure": f"{wrong.tensor}: {wrong.sentence}"})
    return None


def _ledger(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    wrong = {m.kind: m for m in stage.wrong if m.step == measure.step}
    if places := wrong.get("sample-places"):
        return Diagnosis("samples-reordered", {"measure": places.sentence})
    if (odd := other_rows(found, measure.step)) is not None:
        return odd
    samples = wrong.get("samples")
    details = {"measure": (samples or measure).sentence}
    ids = [_ids(rank, measure.step) for rank in found.parts]
    if len(ids) > 1 and all(other == ids[0] for other in ids[1:]):
        return Diagnosis("same-samples-on-every-rank", details)
    counts = samples.facts if samples else {"missing": 0, "unexpected": 0, "repeated": 0, "relabelled": 0}
    if counts["relabelled"] and (at := _labelled_image(found, measure.step)) is not None:
        rank, count = at
        return Diagnosis("image-tokens-supervised", {"step": measure.step + 1, "rank": rank, "count": count})
    if counts["relabelled"] or (samples is None and "supervised-tokens" in wrong):
        return Diagnosis("wrong-labels", details)
    if counts["repeated"] and counts["repeated"] == counts["unexpected"] and not counts["missing"]:
        return Diagnosis("samples-repeated", details)
    lengths = {len(rank.run.steps) for rank in found.ranks}
    micros = sum(len(rank.run.steps[measure.step].micros) for rank in found.parts) if len(lengths) == 1 else None
    right = len(found.reference.windows[measure.step]) if found.reference else None
    if measure.step == FULL_WINDOWS and micros != right:
        return Diagnosis("remainder-dropped", details)
    return None


def _labelled_image(found: Pass, step: int) -> tuple[int, int] | None:
    """The first rank that has labels at places of an image, and how many; None if no rank has."""
    reference = found.reference
    media = task_of(reference.resolved.recipe.model.task).media if reference else None
    if reference is None or media is None or media.in_text is None:
        return None
    framed = torch.tensor(sorted(set(media.in_text(reference.loop.config.to_dict(), 1))))
    for rank in found.ranks:
        tensors = [micro.tensors for micro in rank.run.steps[step].micros]
        count = sum(int((torch.isin(one["input_ids"], framed) & (one["labels"] != IGNORED)).sum()) for one in tensors)
        if count:
            return rank.rank, count
    return None


def _ids(rank: object, step: int) -> list:
    return [[ids for ids, _ in rows_of(micro.tensors)] for micro in rank.run.steps[step].micros]  # type: ignore[attr-defined]


def _forward(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    wrong = stage.wrong
    starts = [m.name for m in wrong if m.kind == "initial-weight"]
    if starts:
        adapter = case.recipe["adapter"] is not None and not any("modules_to_save" in name for name in starts)
        facts = {"count": len(starts), "first": starts[0]}
        return Diagnosis("adapter-initialisation" if adapter else "initial-weights-differ", facts)
    if not math.isfinite(measure.error) and measure.kind == "loss" and found.replayed:
        finite = all(math.isfinite(loss) for loss in found.replayed.losses[measure.step])
        return Diagnosis("loss-not-finite" if finite else "recipe-diverges", {"measure": measure.sentence})
    cause = stale_copies(found, measure) or wrong_parts(found, measure) or masks_of_stages(found, measure)
    cause = cause or misplaced(found, measure)
    if cause is not None:
        return cause
    kinds = {m.kind for m in wrong}
    if kinds <= {"evaluation-weight", "evaluation-loss"}:
        names = [m.name for m in wrong if m.kind == "evaluation-weight"]
        if names:
            return Diagnosis("evaluation-not-at-average", {"count": len(names), "first": names[0]})
        return Diagnosis("evaluation-copy-stale", {"measure": measure.sentence})
    if (cause := _of_options(found, case, stage, measure)) is not None:
        return cause
    if any(m.kind == "loss-samples-apart" for m in wrong):
        return Diagnosis("model-mixes-packed-samples")
    if case.resolved().base_storage is not None and not case.recipe["data"]["packing"]:
        return Diagnosis("base-unpacked-wrong")
    if (cause := _other_extras(found, stage, measure)) is not None:
        return cause
    ranks = {m.rank for m in wrong}
    if case.recipe["data"]["packing"] and _leaks(found, measure):
        return Diagnosis("packed-samples-attend", {"step": measure.step + 1})
    if (rank := _without_prompt(found, measure)) is not None:
        return Diagnosis("prompt-missing", {"step": measure.step + 1, "rank": rank})
    reference = found.reference
    if reference and ranks and 0 not in ranks and reference.dropout_matters(0, found.ranks[0].run.weights):
        return Diagnosis("dropout-mask-shared")
    return other_masks(found)


def _of_options(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """What options say of a comparison of theirs."""
    active = (option for option, _ in active_options(case.resolved().recipe) if measure.kind in option.kinds())
    return next((cause for option in active if (cause := option.diagnose(stage, measure)) is not None), None)


def _leaks(found: Pass, measure: Measure) -> bool:
    """Whether the plain loop without blocks in its mask finds the wrong losses of a step."""
    reference, step = found.reference, measure.step
    if reference is None:
        return False
    weights = found.ranks[0].run.weights_before(step)
    leaking = reference.losses_without_blocks(step, weights)
    for (rank, micro), loss in zip(reference.windows[step], leaking, strict=True):
        taken = found.parts[rank].run.steps[step].micros
        if micro.micro >= len(taken) or abs(taken[micro.micro].loss - loss) > LEAK_FITS * abs(loss):
            return False
    return True


def _other_extras(found: Pass, stage: Stage, measure: Measure) -> Diagnosis | None:
    """A mistake in label smoothing, z-loss or an option that explains the wrong losses of a step."""
    reference, step = found.reference, measure.step
    of_losses = any(m.kind == "loss" and m.step == step for m in stage.wrong)
    if reference is None or found.replayed is None or not of_losses:
        return None
    own = reference.loop.extras
    weights = found.ranks[0].run.weights_before(step)
    for cause, facts, extras in _mistakes(own):
        wrong = reference.losses_with(step, weights, extras)
        rows = zip(reference.windows[step], found.replayed.losses[step], wrong, strict=True)
        seen = [
            (found.parts[rank].run.steps[step].micros[micro.micro].loss, right, other)
            for (rank, micro), right, other in rows
            if micro.supervised and micro.micro < len(found.parts[rank].run.steps[step].micros)
        ]
        most = max((abs(loss - right) for loss, right, _ in seen), default=0.0)
        if all(abs(loss - other) <= EXTRAS_FIT * most for loss, _, other in seen):
            asked = {"ranks": len(found.parts)} if "{ranks}" in known()[cause].evidence else {}
            return Diagnosis(cause, facts | {"step": step + 1} | asked)
    return None


EXTRAS_FIT = 0.05
"""A mistake explains a step if it leaves at most this share of its largest difference, in every micro-batch: where a
rank has no samples, the others may differ by roundings alone."""


def _mistakes(own: Extras) -> list[tuple[str, dict[str, object], Extras]]:
    found: list[tuple[str, dict[str, object], Extras]] = []
    if own.smoothing:
        found.append(("loss-term-missing", {"term": "label_smoothing"}, replace(own, smoothing=0.0)))
    if own.z_loss:
        found.append(("loss-term-missing", {"term": "z_loss"}, replace(own, z_loss=0.0)))
        found.append(("z-loss-of-every-token", {}, replace(own, z_everywhere=True)))
    if own.smoothing and own.z_loss:
        both = replace(own, smoothing=0.0, z_loss=0.0)
        found.append(("loss-term-missing", {"term": "label_smoothing and z_loss"}, both))
    for at, option in enumerate(own.options):
        for cause, facts, wrong in option.mistakes():
            found.append((cause, facts, replace(own, options=(*own.options[:at], wrong, *own.options[at + 1 :]))))
    return found


def _without_prompt(found: Pass, measure: Measure) -> int | None:
    """The first rank whose losses of a step are those of the model without its virtual tokens; None if there is
    none."""
    reference, step = found.reference, measure.step
    if reference is None:
        return None
    weights = found.ranks[0].run.weights_before(step)
    losses = reference.losses_without_prompt(step, weights)
    for rank, part in enumerate(found.parts):
        taken = part.run.steps[step].micros
        own = [loss for (at, _), loss in zip(reference.windows[step], losses, strict=False) if at == rank]
        pairs = list(zip(taken, own, strict=False))
        if pairs and all(abs(micro.loss - loss) <= LEAK_FITS * abs(loss) for micro, loss in pairs):
            return rank
    return None


def _across(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    return rank_cause(stage, measure)


def _round_trip(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    wrong = stage.wrong
    facts = {"differing": f"{len(wrong)} comparisons differ, first {wrong[0].tensor}"}
    kinds = {m.kind for m in wrong}
    if kinds & {"samples", "sample-places"}:
        return Diagnosis("resumed-samples", facts)
    if "step-count" in kinds:
        return Diagnosis("step-count-not-restored", facts)
    if "frozen-weights" in kinds:
        return Diagnosis("frozen-weights-not-restored", facts)
    if kinds <= shadows().keys():
        return Diagnosis(shadows()[wrong[0].kind].lost, facts)
    if kinds == {"exported-average"}:
        return Diagnosis("export-not-average", {"count": len(wrong), "first": wrong[0].name})
    if wrong[0].kind == "logits":
        return Diagnosis("export-differs", facts | {"what": wrong[0].name})
    resumed = found.ranks[0].resumed
    weights = [m.name for m in wrong if m.kind == "weight" and m.phase == "reloaded"]
    tensors = [resumed.weights[name] for name in weights if name in resumed.weights] if resumed else []
    if tensors:
        if all(not tensor.any() for tensor in tensors):
            return Diagnosis("saved-tensors-empty", facts)
        if all(tensor.equal(tensor.bfloat16().to(tensor.dtype)) for tensor in tensors):
            return Diagnosis("saved-16-bit-copy", facts)
        return Diagnosis("saved-other-weights", facts)
    return None


_FINDERS: dict[str, Finder] = {
    "data": _data,
    "ledger": _ledger,
    "products": _of_options,
    "forward": _forward,
    "gradient": gradient_cause,
    "clip": clip_cause,
    "update": update_cause,
    "optimizer-state": state_cause,
    "schedule": schedule_cause,
    "cross-rank": _across,
    "round-trip": _round_trip,
}
