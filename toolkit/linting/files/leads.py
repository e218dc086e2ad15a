"""The training arguments that another tool's file leads to: what its settings become when it starts the Trainer.

Only settings that the tool hands on as they are. Sources: LLaMA-Factory `hparams/training_args.py` (a subclass of
TrainingArguments), Axolotl `core/builders/base.py` and `causal.py`, ms-swift `arguments` (of Seq2SeqTrainingArguments).
"""

from __future__ import annotations

from toolkit.linting.files.tree import Entry, Node, Source

_SHARED = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "auto_find_batch_size", "bf16", "deepspeed", "fp16",
    "gradient_accumulation_steps", "learning_rate", "load_best_model_at_end", "max_grad_norm", "max_steps",
    "per_device_train_batch_size", "save_only_model", "weight_decay",
)  # fmt: skip
_SAME = {key: key for key in _SHARED}
_ARGUMENTS: dict[str, dict[str, str]] = {
    "llamafactory": _SAME,
    "swift": _SAME,
    "axolotl": {
        **{key: key for key in _SHARED if key != "per_device_train_batch_size"},
        "micro_batch_size": "per_device_train_batch_size",
    },
}
# Tools whose defaults are those of TrainingArguments: what is not written is known, too.
SAME_DEFAULTS = ("trainer", "llamafactory")


def _number(node: Node) -> Node:
    """`1e-4`, which these tools read as a number, and PyYAML as text."""
    try:
        return Node(node.start, node.end, float(node.value)) if isinstance(node.value, str) else node
    except ValueError:
        return node


def arguments_of(source: Source) -> Source | None:
    """A tool's file as training arguments, each at its place in the file; None if the tool starts no Trainer.

    They are not certain: findings about them are warnings, and nothing is fixed.
    """
    table = _ARGUMENTS.get(source.tool)
    if table is None:
        return None
    root, unknown = Node(source.root.start, source.root.end, entries={}), dict(source.unknown)
    assert root.entries is not None
    for key, name in table.items():
        entry = source.entry(key)
        if entry is None:
            continue
        if key in ("bf16", "fp16") and not isinstance(entry.node.value, bool):
            unknown[name] = entry  # "auto" and "full": the tool decides at startup
        else:
            root.entries[name] = Entry(name, entry.start, entry.end, _number(entry.node), entry.merged)
    made = Source(source.path, "args", source.text, root, source.syntax, tool=source.tool, certain=False)
    made.unknown, made.open, made.names, made.command = unknown, source.open, source.names, source.command
    return made
