"""`toolkit doctor` on the command line."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from typing import Annotated

import typer

from toolkit.doctor.model import CHECKS, Condition
from toolkit.linting.commands import write
from toolkit.terminal import coloured, paint, width

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}
_MARKS = {"ok": "ok", "note": "note", "warning": "warn", "error": "FAIL"}


def doctor_command(
    json_file: Annotated[
        str | None, typer.Option("--json", help="write the result as JSON; - for standard output")
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="prove every strategy on this installation; a minute or two")
    ] = False,
) -> None:
    """Check this machine. Exit 0: no problems. 1: a problem was found."""
    from toolkit.linting.output.machine import envelope

    started = time.time()
    found = examine()
    if json_file != "-":
        _show(found)
    if self_test:
        from toolkit.doctor import self_test as tests

        found += tests.self_test(lambda condition: None if json_file == "-" else _show([condition]))
    failed = [condition for condition in found if condition.status == "error"]
    if json_file:
        conditions = [{"subject": c.subject, "status": c.status, "found": c.found, "advice": c.advice} for c in found]
        text = json.dumps(envelope("doctor", started) | {"conditions": conditions}, indent=2)
        typer.echo(text) if json_file == "-" else write(json_file, text)
    if json_file != "-":
        typer.echo(
            f"{len(failed)} problem{'s' * (len(failed) != 1)} found"
            if failed
            else "no problems found · next: toolkit init"
        )
    raise typer.Exit(1 if failed else 0)


def examine() -> list[Condition]:
    """Run every check, in order. One that fails is reported, and the others run."""
    from toolkit.doctor import devices, machine, packages  # noqa: F401  # they register their checks

    found: list[Condition] = []
    for run in CHECKS:
        try:
            found.extend(run())
        except Exception as error:
            found.append(Condition(run.__name__, "warning", f"check failed: {error}"))
    return found


def _show(conditions: list[Condition]) -> None:
    columns, colour = min(100, width()), coloured(sys.stdout)
    for condition in conditions:
        head = f"{_MARKS[condition.status]:<5} {condition.subject:<20} {condition.found}"
        lines = textwrap.wrap(head, columns, subsequent_indent=" " * 27)
        if condition.advice and condition.status != "ok":
            lines += textwrap.wrap(
                condition.advice, columns, initial_indent=" " * 27 + "→ ", subsequent_indent=" " * 29
            )
        mark = _MARKS[condition.status]
        lines[0] = paint(mark, _COLOURS[condition.status], colour) + lines[0][len(mark) :]
        typer.echo("\n".join(lines))
