"""transformers' progress bars and warnings, kept off the screen of commands that say what they do themselves."""

from __future__ import annotations

import logging as python_logging
import warnings


def silence_libraries() -> None:
    """Call before models are loaded in the process that prints to the user."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    python_logging.disable(python_logging.WARNING)  # DeepSpeed warns on standard output when it is imported
