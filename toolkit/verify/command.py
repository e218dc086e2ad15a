"""`toolkit verify` behind the command line: runs, prints, writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.model.quiet import hush
from toolkit.report.verify_page import verify_page
from toolkit.results import Result, versions, write_json
from toolkit.verify import screen
from toolkit.verify.outcome import Outcome
from toolkit.verify.run import resolve_recipe, verify


def run_command(
    recipe_file: str,
    overrides: Sequence[str],
    fault: str | None,
    full_size: bool,
    json_target: str | None,
    time_limit: float,
) -> int:
    """Verify and tell; returns the exit status. Raises InputError, NotSo."""
    result = Result("verify")
    resolved = resolve_recipe(recipe_file, overrides)
    say = _say if json_target != "-" else _silent
    say(screen.headline(resolved))
    hush()
    page = Path("runs/verify") / f"{Path(recipe_file).stem}.html"
    outcome = verify(
        resolved,
        fault=fault,
        full_size=full_size,
        time_limit=time_limit,
        stop_early=True,
        log=page.with_suffix(".log").absolute(),
    )
    answer = to_json(result, outcome, fault)
    say("\n".join(_report(outcome, answer["seconds"], " ".join([recipe_file, *overrides]))))
    if json_target:
        write_json(answer, json_target)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(verify_page(outcome, Path(recipe_file).stem, answer["seconds"], versions()), encoding="utf-8")
    say(f"report: {page}")
    return outcome.exit_code


def to_json(result: Result, outcome: Outcome, fault: str | None) -> dict[str, Any]:
    """The contract's result."""
    resolved = outcome.resolved
    fields = outcome.fields() | ({"fault": fault} if fault else {})
    return result.finish(recipe_sha256=resolved.sha256, device=resolved.device, **fields)


def run_matrix(
    recipe_file: str, overrides: Sequence[str], only: str | None, json_target: str | None, time_limit: float
) -> int:
    """Every fault under every strategy; returns the exit status."""
    from toolkit.verify.matrix import kill_matrix, write_matrix

    result = Result("verify")
    resolved = resolve_recipe(recipe_file, overrides)
    say = _say if json_target != "-" else _silent
    cells = kill_matrix(resolved, [only] if only else None, time_limit, say)
    killed = sum(cell.killed for cell in cells)
    say(f"\n{killed} of {len(cells)} killed")
    if only is None:
        target = Path("docs/kill-matrix.md")
        write_matrix(cells, target)
        say(f"wrote {target}")
    answer = result.finish(
        recipe_sha256=resolved.sha256,
        device=resolved.device,
        killed=killed,
        cells=[cell.to_json() for cell in cells],
    )
    if json_target:
        write_json(answer, json_target)
    return 0 if killed == len(cells) else 1


def run_trace(folder: str, json_target: str | None) -> int:
    """Judge a recorded loop; returns the exit status. Raises InputError."""
    from toolkit.verify.recorded import verify_trace

    result = Result("verify")
    outcome = verify_trace(Path(folder))
    answer = to_json(result, outcome, None)
    if json_target != "-":
        steps = len(outcome.passes[0].ranks[0].run.steps)
        _say(f"verify  {folder} · {outcome.resolved.world_size} processes · {steps} recorded steps")
        told = [*screen.table(outcome.passes), *screen.ending(outcome, answer["seconds"], f"--trace {folder}")]
        _say("\n".join(line for line in told if not line.startswith("next: toolkit train")))
    if json_target:
        write_json(answer, json_target)
    return outcome.exit_code


def _report(outcome: Outcome, seconds: float, command: str) -> list[str]:
    whole = [one for one in outcome.passes if one.stages]
    return [
        screen.twin_line(outcome),
        "",
        *screen.engaged_lines(outcome),
        *(screen.table(whole) if whole else []),
        *screen.ending(outcome, seconds, command),
    ]


def _say(text: str) -> None:
    print(text)
    sys.stdout.flush()


def _silent(text: str) -> None:
    """Standard output is the result's."""
