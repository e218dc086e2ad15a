"""A readable file that belongs to none of the tools: an error when it is named, skipped when a hook passes it."""

from __future__ import annotations

from toolkit.errors import InputError


class UnrelatedFile(InputError):
    """No key and no command of accelerate, DeepSpeed, the training arguments or PEFT is in the file."""
