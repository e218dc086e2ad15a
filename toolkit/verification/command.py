"""`toolkit verify` behind the command line: runs, prints, writes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.model.silence import silence_libraries
from toolkit.recipe.preflight import known_notes
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.report.names import page_name
from toolkit.report.verify_page import verify_page
from toolkit.results import CommandResult, Result, versions, write_json
from toolkit.terminal import Say, coloured, fitted, paint, width, working
from toolkit.verification import screen
from toolkit.verification.baseline import badge, compare, read_baseline
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.outcome import Outcome
from toolkit.verification.run import TIME_LIMIT, resolve_recipe, verify

if TYPE_CHECKING:
    from toolkit.verification.commands import VerifyRequest


def run_command(recipe: str, asked: VerifyRequest) -> int:
    """Verify and print; returns the exit status. Raises InputError, RunFailed."""
    overrides, fault, baseline, json_target = asked.overrides, asked.fault, asked.baseline, asked.json_target
    kept = read_baseline(baseline) if baseline else None
    shown = writable(asked.badge, "--badge") if asked.badge else None
    resolved = resolve_recipe(recipe, overrides)
    say = _say if json_target != "-" else _silent
    say(screen.headline(resolved))
    for note in known_notes(resolved):
        say(f"note: {note}")
    name = page_name(recipe, resolved.recipe.strategy.name, overrides)
    page = writable(asked.output) if asked.output else Path("runs/verify") / f"{name}.html"
    log = page.with_suffix(".log").absolute()
    with working("starting the processes") as doing:
        verdict = verify_recipe(
            resolved, fault=fault, full_size=asked.full_size, time_limit=asked.time_limit, log=log, doing=doing
        )
    outcome, answer = verdict.outcome, verdict.to_json()
    say("\n".join(_report(outcome, answer["seconds"], " ".join([recipe, *overrides]))))
    held = compare(kept, answer, baseline) if kept and baseline else None
    if held:
        answer = answer | {"baseline": held.to_json()}
        say("\n".join(held.lines()))
    if json_target:
        write_json(answer, json_target)
    if shown:
        shown.write_text(json.dumps(badge(answer)) + "\n", encoding="utf-8")
    page.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["toolkit", "verify", recipe, *overrides, *(["--fault", fault] if fault else [])])
    shown_as = f"{command} · {answer['started']}"
    page.write_text(verify_page(outcome, name, answer["seconds"], versions(), shown_as), encoding="utf-8")
    say(f"report: {page}")
    return outcome.exit_code or int(held is not None and not held.ok)


@dataclass(frozen=True)
class Verdict(CommandResult):
    """What `toolkit verify` gives."""

    outcome: Outcome
    """Passes, stages and measures as objects."""

    @property
    def verdict(self) -> str:
        """``equivalent``, ``different``, ``not-exercised`` or ``failed-to-start``."""
        return self.outcome.verdict

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The likely cause of a difference."""
        return self.outcome.diagnosis


def verify_recipe(
    recipe: str | Path | Recipe | Resolved,
    overrides: Sequence[str] = (),
    *,
    fault: str | None = None,
    full_size: bool = False,
    time_limit: float = TIME_LIMIT,
    log: Path | None = None,
    doing: Say | None = None,
) -> Verdict:
    """``toolkit.verify``, which says what the arguments are. ``doing`` is told each stage as it ends."""
    result = Result("verify")
    resolved = recipe if isinstance(recipe, Resolved) else resolve_recipe(recipe, overrides)
    silence_libraries()
    outcome = verify(
        resolved, fault=fault, full_size=full_size, time_limit=time_limit, stop_early=True, log=log, doing=doing
    )
    return Verdict(to_json(result, outcome, fault), outcome.exit_code, outcome)


def to_json(result: Result, outcome: Outcome, fault: str | None) -> dict[str, Any]:
    """The contract's result."""
    resolved = outcome.resolved
    fields = outcome.fields() | ({"fault": fault} if fault else {})
    return result.finish(recipe_sha256=resolved.sha256, device=resolved.device, **fields)


def writable(output: str, option: str = "--output") -> Path:
    """``output``, with its folder made; raises InputError now rather than after all has run."""
    target = Path(output)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new = not target.exists()
        target.open("a", encoding="utf-8").close()
        if new:
            target.unlink()
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{option}: {output}: {target.parent} is not a folder") from None
    except OSError as error:
        raise InputError(f"{option}: {output}: {error.strerror}") from None
    return target


def run_matrix(recipe: str, asked: VerifyRequest) -> int:
    """Every fault (or the one that is asked for) under every strategy; returns the exit status. The table is written as
    Markdown where there is an output; without it the screen has all."""
    from toolkit.verification.matrix import kill_matrix, write_matrix

    result = Result("verify")
    resolved = resolve_recipe(recipe, asked.overrides)
    target = writable(asked.output) if asked.output else None
    say = _say if asked.json_target != "-" else _silent
    silence_libraries()
    cells = kill_matrix(resolved, [asked.fault] if asked.fault else None, asked.time_limit, say)
    killed = sum(cell.killed for cell in cells)
    named = sum(cell.killed and cell.named for cell in cells)
    say(f"\n{killed} of {len(cells)} killed, {named} with the right diagnosis")
    if target:
        write_matrix(cells, target)
        say(f"wrote {target}")
    answer = result.finish(
        recipe_sha256=resolved.sha256,
        device=resolved.device,
        killed=killed,
        cells=[cell.to_json() for cell in cells],
    )
    if asked.json_target:
        write_json(answer, asked.json_target)
    return 0 if killed == len(cells) else 1


def run_trace(folder: str, json_target: str | None) -> int:
    """Judge a recorded loop; returns the exit status. Raises InputError."""
    from toolkit.verification.scripts import screen as script_screen
    from toolkit.verification.scripts.prove import judge

    found = judge(Path(folder), Result("verify"))
    if json_target != "-":
        _say("\n".join(script_screen.proven(found, folder)))
    if json_target:
        write_json(found.to_json(), json_target)
    return found.exit_code


def _report(outcome: Outcome, seconds: float, command: str) -> list[str]:
    whole = [one for one in outcome.passes if one.stages]
    return [
        screen.twin_line(outcome),
        "",
        *screen.engaged_lines(outcome),
        *(screen.table(whole) if whole else []),
        *screen.ending(outcome, seconds, command),
    ]


_TONES = {
    "equivalent": "green",
    "different": "red",
    "not-exercised": "red",
    "failed-to-start": "red",
    "NOT SEEN": "red",
}


def _say(text: str) -> None:
    columns, colour = min(100, width()), coloured(sys.stdout)
    for line in text.splitlines():
        first, *more = fitted(line, columns)
        word = next((word for word in _TONES if first.startswith(word)), "")
        print(paint(word, _TONES[word], colour) + first[len(word) :] if word else first, *more, sep="\n")
    sys.stdout.flush()


def _silent(text: str) -> None:
    """Standard output is the result's."""
