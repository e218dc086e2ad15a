"""`python -m toolkit.linting.hook FILE...`: the linter as a pre-commit hook.

pre-commit passes the files of one commit, in any combination. A finding must not depend on which other files that
commit touches, so each file is checked by itself, together with the files that it names. Files that belong to none of
the tools are skipped: most shell scripts launch nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolkit.errors import InputError, ToolkitError
from toolkit.linting.commands import Reader, echo, split_codes, stop


def check_files(files: list[str], reader: Any, select: tuple[str, ...], ignore: tuple[str, ...]) -> tuple[str, bool]:
    """The findings as text, and whether any is more than a note.

    Raises InputError, with every problem at once, where a file that belongs to one of the tools cannot be read.
    """
    from toolkit.linting.engine import Report, check
    from toolkit.linting.files.load import UnrelatedFile, load, read_sources
    from toolkit.linting.output.text import show

    merged = Report([], [])
    problems: list[str] = []
    for file in files:
        try:
            read_sources(file)  # `load` reports what is wrong with all of its files in one error of one type
            report = check(load([file]), reader=reader, select=select, ignore=ignore)
        except UnrelatedFile:
            continue
        except InputError as error:
            problems.extend(error.problems)
            continue
        problems.extend(report.unread)
        merged.findings.extend(found for found in report.findings if found not in merged.findings)
        merged.sources.extend(report.sources)
    if problems:
        raise InputError(*dict.fromkeys(problems))
    return show(merged, quiet=True), merged.failed


def hook(
    files: Annotated[list[str] | None, typer.Argument(help="the files of a commit", show_default=False)] = None,
    reader: Annotated[Reader | None, typer.Option(help="the program that reads the files; default: detected")] = None,
    select: Annotated[list[str] | None, typer.Option(help="only these codes or code prefixes")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="skip these codes or code prefixes")] = None,
) -> None:
    """Check each file separately. Exit 0: clean (notes allowed). 1: findings. 2: a file cannot be used."""
    try:
        text, failed = check_files(files or [], reader, split_codes(select), split_codes(ignore))
    except ToolkitError as error:
        stop(error)
    echo(text)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(hook)
