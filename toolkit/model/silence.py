"""Silences progress bars and warnings of transformers, for commands with their own screen."""

from __future__ import annotations

import logging as python_logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# On a CPU bitsandbytes 0.50.2 says, whenever it is imported (PEFT does, for every adapter), that an optional kernel is
# not there.
python_logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(python_logging.ERROR)


def silence_libraries() -> None:
    """Call it before models are loaded in the process that prints to the user."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    warnings.filterwarnings("ignore", module=r"peft\.")
    python_logging.disable(python_logging.WARNING)  # DeepSpeed warns on standard output when it is imported


@contextmanager
def peft_asks() -> Iterator[None]:
    """Context of a call of PEFT, which (0.21.2) asks a model for ``is_gradient_checkpointing``: transformers 5.23.0
    warns whoever calls that it has another name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
