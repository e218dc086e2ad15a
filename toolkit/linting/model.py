"""A finding, its place, and the edits that fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from toolkit.errors import Place
from toolkit.linting.files.tree import Entry, Source

if TYPE_CHECKING:
    from toolkit.linting.context import LintContext

Severity = Literal["error", "warning", "note"]
Reader = Literal["trainer", "accelerator", "deepspeed"]
Files = dict[str, str]  # an example: file names and their text


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace ``text[start:end]`` of a file."""

    file: str
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """A safe fix: it writes what the user clearly intended."""

    title: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """A key that is written in one of the files, and its value."""

    source: Source
    key: str  # dotted
    entry: Entry

    @property
    def value(self) -> Any:
        return self.entry.node.plain()

    @property
    def place(self) -> Place:
        return self.source.place(self.entry.start)

    @property
    def described(self) -> str:
        """The value and its place, as a message about another file says it."""
        return f"{self.value} in {self.place.file}:{self.place.line}"

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.entry.key


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem at one place."""

    code: str
    severity: Severity
    place: Place
    width: int  # columns to underline
    key: str
    message: str
    fix: Fix | None = None
    line_text: str = ""
    reader: str | None = None  # the program that reads the file, where it is known


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """What a rule yields: a finding without the rule's own code and severity."""

    setting: Setting | None
    message: str
    fix: Fix | None = None
    severity: Severity | None = None  # other than the rule's own
    source: Source | None = None  # for a finding about a file as a whole
    key: str = ""  # for a finding about a key that is not written


Check = Callable[["LintContext"], Iterator[Diagnostic]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check with the data for `toolkit explain CODE`."""

    code: str
    severity: Severity
    title: str
    reason: str
    source: str
    fails: Files
    passes: Files
    check: Check
    reader: Reader | None = None  # who reads the examples
    traps: tuple[str, ...] = field(default=())
