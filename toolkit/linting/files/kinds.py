"""The kind of a file, derived from its keys."""

from __future__ import annotations

from toolkit.linting import keys
from toolkit.linting.files.tree import Node

# Keys that only one kind of file has: one of them decides.
_MARKS = {
    "accelerate": {
        "distributed_type",
        "compute_environment",
        "deepspeed_config",
        "num_machines",
        "num_processes",
    },
    "deepspeed": {"zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"},
    "args": {
        "per_device_train_batch_size",
        "output_dir",
        "num_train_epochs",
        "max_steps",
        "model_name_or_path",
    },
    "peft": {"peft_type", "lora_alpha", "base_model_name_or_path"},
}
# Names that two kinds share and that differ in the shape of the value.
_SECTIONS_OF_DEEPSPEED = {"fp16", "bf16", "optimizer", "scheduler", "zero_optimization"}


def recognise(root: Node) -> str | None:
    """``accelerate``, ``deepspeed``, ``args`` or ``peft``; None if no key is known."""
    scores = {kind: _score(kind, root) for kind in _MARKS}
    best = max(scores, key=lambda kind: scores[kind])
    return best if scores[best] > 0 else None


def _score(kind: str, root: Node) -> int:
    package = "transformers" if kind == "args" else kind
    known = keys.section(package, "")
    score = 0
    for key, entry in (root.entries or {}).items():
        mapping = entry.node.entries is not None
        if key in _SECTIONS_OF_DEEPSPEED and key != "optimizer" and mapping != (kind == "deepspeed"):
            continue
        if key in _MARKS[kind]:
            score += 10
        elif key in known or (kind == "args" and key in keys.section("transformers", "seq2seq")):
            score += 2
        elif kind == "accelerate" and key in ("fsdp_config", "parallelism_config") and mapping:
            score += 1
    return score
