"""The verdict on a loop that `toolkit.Recorder` recorded, from Python: for models that only Python can build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.verification.outcome import Outcome
from toolkit.verification.scripts.verify import verify_recording


def verify_trace(folder: Path, model: Any = None) -> Outcome:
    """Compare every recorded step, on a device of the kind that the loop ran on where this machine has one.

    ``model``: one of the recorded class, where that is not one of transformers' own; its values are replaced. Nothing
    in ``folder`` is unpickled: a trace of any origin can be given. Raises InputError where ``folder`` holds no trace
    that this version can read, or where the loop cannot be replayed on this machine.
    """
    return verify_recording(folder, model)[0].outcome
