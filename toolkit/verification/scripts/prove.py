"""Record and verify in one, and the verdict on a whole command: the worst of its models'."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import RunFailed
from toolkit.results import CommandResult, Result
from toolkit.terminal import working
from toolkit.verification.scripts.command import CommandFailed, record

_WORST = ("different", "not-exercised", "equivalent")


@dataclass(frozen=True)
class Proven(CommandResult):
    """What `toolkit prove`, and `toolkit verify --trace` of a recording, give."""

    models: tuple[Any, ...]
    """A ``ModelOutcome`` of each recorded model."""

    @property
    def verdict(self) -> str:
        """``equivalent``, ``different`` or ``not-exercised``: the worst of the models'."""
        return self.document["verdict"]


def prove(
    command: Sequence[str],
    folder: str | Path | None = None,
    *,
    steps: int = 3,
    after: int = 0,
    timeout: float | None = None,
    stop: bool = False,
    on_cpu: bool = False,
    quiet: bool = False,
) -> Proven:
    """Run an unmodified training command, record its first steps, and compare them with a plain PyTorch loop.

    ``folder``: keeps the recording. The other arguments are those of ``record``. Raises InputError if there is nothing
    to record, RunFailed if the command fails.
    """
    result = Result("prove")
    with tempfile.TemporaryDirectory(prefix="toolkit-prove-") as name:
        target, copies = Path(folder) if folder is not None else Path(name) / "recording", Path(name) / "copies"
        try:
            record(command, target, steps=steps, after=after, timeout=timeout, stop=stop, on_cpu=on_cpu, quiet=quiet,
                   copies=copies)  # fmt: skip
        except CommandFailed as error:
            raise RunFailed(str(error)) from None
        with working("building the recorded model again") as say:
            return judge(target, result, copies=copies, say=say)


def judge(
    folder: Path,
    result: Result,
    model: Any = None,
    copies: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Proven:
    """Compare a recording. ``copies``: of its models, made by the same `prove`. ``say``: is told what is being
    computed. Raises InputError."""
    from toolkit.verification.scripts.verify import recorded, verify_recording

    kept = recorded(folder)
    models = verify_recording(folder, model, copies, say)
    verdict = min((one.outcome.verdict for one in models), key=_WORST.index)
    worst = next(one for one in models if one.outcome.verdict == verdict)
    document = result.finish(
        recipe_sha256=None,
        device=models[0].facts.device,
        **worst.outcome.fields()
        | {
            "verdict": verdict,
            "comparisons": sum(one.outcome.comparisons for one in models),
            "false_alarm_bound": sum(one.outcome.false_alarm_bound for one in models),
        },
        recorded=kept["recorded"],
        steps=len(models[0].facts.steps),
        models=[one.to_json() for one in models],
        not_seen=[*kept["not_seen"], *dict.fromkeys(note for one in models for note in one.outcome.notes)],
    )
    return Proven(document, 0 if verdict == "equivalent" else 1, tuple(models))
