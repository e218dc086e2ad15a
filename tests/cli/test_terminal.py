"""The command line on a terminal: what every command has, nothing cut, colour only where it is wanted."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cases import every_case
from toolkit import __version__
from toolkit.cli import app
from toolkit.help import EXAMPLES, GROUPS, summary
from toolkit.terminal import coloured, paint, width

GROUP: Any = typer.main.get_command(app)


def printed(*arguments: str, columns: int = 80, **environment: str) -> str:
    """Standard output of a command that succeeds. CliRunner would set 80 columns, whatever COLUMNS says."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        for name, value in {"COLUMNS": str(columns), **environment}.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            app([*arguments], prog_name="toolkit")
    assert ended.value.code == 0, out.getvalue()
    return out.getvalue()


def test_version_and_short_help() -> None:
    first, second = printed("--version").splitlines()
    assert first == f"toolkit {__version__}"
    assert f"python {sys.version.split()[0]}" in second
    assert "deepspeed " in second
    assert printed("-V") == printed("--version")
    assert printed("-h") == printed("--help")
    assert printed("plan", "-h") == printed("plan", "--help")


def test_help_has_every_command_in_its_group_and_cuts_nothing() -> None:
    text = printed("--help")
    assert [name for names in GROUPS.values() for name in names] == list(EXAMPLES)
    assert sorted(EXAMPLES) == sorted(GROUP.commands)
    places = [text.index(f"{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    for title, names in GROUPS.items():
        part = text[text.index(f"{title}:\n") :].partition("\n\n")[0]
        for name in names:
            assert any(line.split()[:1] == [name] and summary(GROUP.commands[name]) in line
                       for line in part.splitlines()), name  # fmt: skip
    assert "..." not in text.partition("Start:")[2]


@every_case("name", EXAMPLES)
def test_help_of_a_command_ends_with_two_examples_that_it_takes(name: str) -> None:
    text = printed(name, "--help", columns=100)
    first, second = EXAMPLES[name]
    assert text.endswith(f"Examples:\n    {first}\n    {second}\n"), text[-200:]
    known = {option for parameter in GROUP.commands[name].params for option in parameter.opts}
    for line in EXAMPLES[name]:
        words = shlex.split(line)
        words = words[: words.index("--")] if "--" in words else words
        assert words[:2] == ["toolkit", name]
        assert {word for word in words if word.startswith("-")} <= known, line


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_help_fits_the_terminal_and_uses_it(columns: int) -> None:
    lines = [line for name in ("plan", "export") for line in printed(name, "--help", columns=columns).splitlines()]
    assert max(map(len, lines)) <= columns
    assert columns == 80 or max(map(len, lines)) > 85


def test_completion_is_offered() -> None:
    assert "--install-completion" in printed("--help")
    found = printed(_TOOLKIT_COMPLETE="complete_bash", COMP_WORDS="toolkit ex", COMP_CWORD="1")
    assert found.split() == ["export", "explain"]


class Terminal:
    def __init__(self, is_one: bool) -> None:
        self.is_one = is_one

    def isatty(self) -> bool:
        return self.is_one


def test_colour_is_for_terminals_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert coloured(Terminal(True))
    assert not coloured(Terminal(False))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured(Terminal(True))
    assert paint("text", "red") == "\x1b[31mtext\x1b[0m"
    assert paint("text", "red", False) == "text"
    assert "\x1b" not in printed("--help")


def test_headings_are_bold_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.help.coloured", lambda out: True)
    found = CliRunner().invoke(app, ["--help"], color=True)
    assert "\x1b[1mStart\x1b[0m:" in found.output


def test_the_width_is_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "97")
    assert width() == 97
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    assert width() == 120
