"""The page of commands, from the command line itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

import typer

_HEAD = """\
# Commands

Exit status of every command: 0 success (done, equivalent, clean, fits); 1 the run failed or the check did not pass; 2
the input cannot be used, with one message that names file, line, key and what to do. A run that a signal stops saves a
checkpoint and exits with 128 plus the signal's number. `toolkit COMMAND --help` prints the same text.
"""


def pages() -> dict[str, str]:
    """Markdown by path within the site."""
    from toolkit.cli import app
    from toolkit.help import EXAMPLES

    group: Any = typer.main.get_command(app)
    parts = [_section(name, command, EXAMPLES[name]) for name, command in sorted(group.commands.items())]
    return {"reference/commands.md": "\n".join([_HEAD, *parts])}


def _section(name: str, command: Any, examples: Sequence[str]) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
    usage = " ".join(["toolkit", name, *(_argument(p) for p in arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## toolkit {name} {{: #{name} }}", "", f"```text\n{usage}\n```", "", command.help or "", ""]
    lines += ["```sh", *examples, "```", ""]
    rows = [(f"`{_name(p)}`", p.help or "", _default(p)) for p in arguments]
    rows += [(", ".join(f"`{o}`" for o in p.opts), p.help or "", _default(p)) for p in options if p.name != "help"]
    if rows:
        lines += ["| | | default |", "| --- | --- | --- |"]
        lines += [f"| {flag} | {_cell(text)} | {_cell(default)} |" for flag, text, default in rows]
    return "\n".join(lines) + "\n"


def _name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _argument(parameter: Any) -> str:
    name = _name(parameter)
    if parameter.nargs == -1 and not name.endswith("..."):
        name += "..."
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _default(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    choices = get_args(kind) if get_origin(kind) is Literal and parameter.metavar is None else ()
    allowed = f"one of {', '.join(choices)}" if choices else ""
    default = parameter.default
    if parameter.required:
        return allowed or "required"
    if default in (None, False, "", (), []) or callable(default):
        return allowed
    shown = f"`{default}`"
    return f"{shown}; {allowed}" if allowed else shown


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
