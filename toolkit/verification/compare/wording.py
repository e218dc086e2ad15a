"""The words of comparisons: the only place where what was measured becomes a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.rooms import all_options

KINDS: dict[str, tuple[str, str]] = {
    # data
    "conversation-ids": ("conversation {row}", "its token ids are not the tokenizer's"),
    "conversation-header": ("conversation {row}", "{count} supervised stretches begin before the assistant's turn"),
    "conversation-unended": ("conversation {row}", "{count} supervised stretches lack what ends the turn"),
    "conversation-shown": ("conversation {row}", "{count} supervised stretches hold what somebody else wrote"),
    "conversation-elsewhere": (
        "conversation {row}",
        "{count} supervised stretches are not what the assistant would have generated there",
    ),
    "conversation-beyond": ("conversation {row}", "{count} supervised stretches go beyond the assistant's turn"),
    "conversation-missing": ("conversation {row}", "{count} assistant turns are not supervised"),
    "conversation-repeated": ("conversation {row}", "{count} assistant turns are supervised twice"),
    "mixture-share": ("source {source}", "{seen} samples in an epoch, {least} to {most} expected"),
    "mixture-draws": ("draws of source {source}", "one sample occurs {spread} times more often than another"),
    # ledger
    "samples": (
        "samples",
        "{missing} samples missing, {unexpected} not expected, {repeated} of them repeated, "
        "{relabelled} with other labels",
    ),
    "sample-places": ("samples", "samples of {ranks} ranks are in other micro-batches or ranks"),
    "supervised-tokens": ("supervised tokens", "{seen} supervised tokens, {expected} expected"),
    "part-of-rows": ("rows", "{count} micro-batches are computed in other parts of their rows"),
    "samples-of-shared-part": (
        "samples of ranks that share a part",
        "ranks {ranks} have other samples than the ranks they share a part with",
    ),
    "samples-once": ("samples", "{repeated} samples occur twice in one step"),
    # forward
    "initial-weight": ("{name} at the start", "the first weights"),
    "loss": ("loss", "loss {seen:.7g}, {expected:.7g} expected"),
    "output": ("output {name}", "the model's answer in a recorded call"),
    "micro-batch-weight": (
        "weight of the micro-batch",
        "its {tokens} of {all} supervised tokens weigh {seen:.4g} times what they do in the mean over all",
    ),
    "loss-weight": ("loss", "{seen:.5g} times the mean over supervised tokens"),
    "evaluation-weight": ("{name} in an evaluation", "the average of the optimizer's steps"),
    "evaluation-loss": ("loss of an evaluation", "loss {seen:.7g}, {expected:.7g} expected"),
    "loss-samples-apart": ("loss of samples apart", "the plain loop's own: packed samples, against each alone"),
    # gradient
    "gradient": ("{name}", ""),
    "gradient-missing": ("{name}", "no gradient"),
    "gradient-unexpected": ("{name}", "a gradient where none is expected"),
    "gradient-reordered": ("{name}, in another order", "the plain loop's own: in the candidate's order of sums"),
    "gradient-samples-apart": ("{name}, samples apart", ""),
    # clip
    "gradient-norm": ("gradient norm", "norm {seen:.7g}, {expected:.7g} expected"),
    "coefficient": (
        "clipping coefficient",
        "gradients were multiplied by {seen:.7g}, {expected:.7g} expected",
    ),
    "tensor-coefficient": ("{name}", "gradients were multiplied by {seen:.7g}, {expected:.7g} expected"),
    # update
    "update": ("{name}", ""),
    "update-of-skipped-step": ("{name}", "a skipped step changed it"),
    # optimizer-state
    "state-missing": ("{name}", "no optimizer state"),
    "step-count": ("{name} step count", "{seen}, {expected} expected"),
    "moment": ("{name} {moment}", ""),
    "packed-moment": ("{name} {moment}", ""),
    "moment-scales": ("{name} {moment} scales", ""),
    "state-of-skipped-step": ("{name}", "a skipped step changed its state"),
    # schedule
    "step-skipped": ("skipped step", "skipped"),
    "step-not-skipped": ("skipped step", "not skipped"),
    "learning-rate": ("learning rate", "learning rate {seen}, {expected:.6g} expected"),
    "group-learning-rate": (
        "learning rate of group {group}",
        "learning rate {seen} of the parameters of optimizer.groups[{group}], {expected:.6g} expected",
    ),
    # cross-rank
    "frozen-weight": ("{name}", "a frozen weight changed on ranks {ranks}"),
    "steps-taken": ("steps taken", "a rank stopped early"),
    "rank-gradient": ("{name} gradient", "differs between ranks"),
    "rank-weight": ("{name}", "weights differ between ranks"),
    "optimizer-weight": ("{name}", "the weights that compute are not those that the optimizer updates"),
    "rank-value": ("{name}", "by rank: {values}"),
    # round-trip
    "resume": ("resume", "the run did not resume"),
    "weight": ("{name}", ""),
    "state-not-restored": ("{name} state", "no optimizer state was restored"),
    "schedule": ("schedule", "learning rate {seen}, {expected} uninterrupted"),
    "loss-scale": ("loss scale", "{seen}, {expected} uninterrupted"),
    "gradient-after-resume": ("{name} gradient", ""),
    "logits": ("{name} logits", "the {name} model answers differently"),
    "exported-average": ("exported {name}", "the average of the optimizer's steps"),
    "frozen-weights": ("frozen weights", "differ after resuming"),
    # two checkpoints
    "optimizer-steps": ("optimizer steps", "{a} in A, {b} in B"),
    "tensor-alone": ("{name}", "in {where} alone"),
    "tensor-shape": ("{name}", "shape {a} in A, {b} in B"),
    "stored-weight": ("{name}", ""),
    "stored-weight-moved": ("{name}", "{share:.1e} of the farthest that AdamW can have moved it"),
    "moment-alone": ("{name} {moment}", "in {where} alone"),
    "moment-precision": ("precision of the moments", "{a} in A, {b} in B"),
    "stored-learning-rate": ("learning rate", "{a} in A, {b} in B"),
}
"""By kind: what was compared, and what was observed; options have words for their own."""


def label(kind: str, name: str, phase: str, facts: Mapping[str, Any]) -> str:
    """What was compared, for example ``resumed lm_head.weight exp_avg``."""
    return f"{phase} {_words(kind)[0].format(name=name, **facts)}".strip()


def sentence(kind: str, name: str, facts: Mapping[str, Any]) -> str:
    """What was observed."""
    return _words(kind)[1].format(name=name, **facts)


def _words(kind: str) -> tuple[str, str]:
    if kind in KINDS:
        return KINDS[kind]
    return next(kinds[kind] for option in all_options().values() if kind in (kinds := option.kinds()))
