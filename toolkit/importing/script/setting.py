"""The settings of a script, as far as they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import Place
from toolkit.importing.draft import Written
from toolkit.importing.script.source import Argument, Script


@dataclass(frozen=True)
class Unread:
    """A setting that the script has, but whose value its text does not decide."""

    place: Place
    reason: str


@dataclass
class Settings:
    """``written``: by names of the Trainer's arguments, and of TRL's for model and adapter. ``loop``: of ``--loop``.
    ``habits``: its ``--loop-set``. ``unread``: settings whose values are not known. ``assumed``: in words."""

    script: Script
    loop: str = "bare"
    task: str = "causal-lm"
    written: dict[str, Written] = field(default_factory=dict)
    habits: dict[str, Written] = field(default_factory=dict)
    unread: dict[str, Unread] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    def take(self, key: str, argument: Argument) -> None:
        """Note a setting, or why it is not known."""
        place = self.script.place(argument.line)
        if argument.unread:
            self.unread[key] = Unread(place, argument.unread)
            return
        self.written[key] = Written(argument.value, place)
        for default in argument.defaults:
            self.assume(f"{key} {argument.value}: the default of {default} ({place})")

    def set(self, key: str, value: Any, line: int) -> None:
        """Note a setting that is no argument of a call."""
        self.written[key] = Written(value, self.script.place(line))

    def miss(self, key: str, line: int | None, reason: str) -> None:
        """Note a setting that is not known."""
        self.unread[key] = Unread(self.script.place(line), reason)

    def assume(self, text: str) -> None:
        if text not in self.assumed:
            self.assumed.append(text)

    def on(self, key: str) -> bool:
        """Whether a switch is on, as far as it is read."""
        return key in self.written and bool(self.written[key].value)
