"""Which calls of a script make a trainer, and its arguments."""

from __future__ import annotations

import ast

from toolkit.importing.script.source import Call, Script

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")


def trainer_classes(script: Script) -> dict[str, str]:
    """The script's own subclasses of a trainer, with what each is a subclass of."""
    return {
        node.name: base
        for node in script.names.scopes
        if isinstance(node, ast.ClassDef)
        for base in (getattr(item, "attr", getattr(item, "id", "")) for item in node.bases)
        if base in TRAINERS
    }


def trainer_call(script: Script) -> Call | None:
    """The call that makes the trainer; None where there is none."""
    made = script.called(*TRAINERS, *trainer_classes(script))
    return made[0] if made else None
