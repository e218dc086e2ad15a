"""The value that one reader uses for a key, and the registry of topics: keys with their own rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.linting.context import LintContext, number
from toolkit.linting.model import Setting

READERS = ("accelerate launch", "deepspeed launcher", "Trainer")


@dataclass(frozen=True, slots=True)
class Answer:
    """The value that one reader uses, its origin, and why."""

    value: Any
    where: str
    why: str
    fails: bool = False  # the run stops there; ``value`` is then the kind of error


Answers = tuple[Answer, Answer, Answer]
Topic = Callable[[LintContext], Answers]
TOPICS: dict[str, Topic] = {}


def topic(*names: str) -> Callable[[Topic], Topic]:
    """Register a topic under every name that its key has in some layer."""

    def register(function: Topic) -> Topic:
        for name in names:
            TOPICS[name] = function
        return function

    return register


def written(setting: Setting, why: str, value: Any = None) -> Answer:
    """The value of a key in a file, or the value derived from it."""
    return Answer(setting.value if value is None else value, f"{setting.key} in {setting.place}", why)


def by_default(value: Any, whose: str, why: str = "not set") -> Answer:
    """A package's default."""
    return Answer(value, f"default of {whose}", why)


def stops(error: str, setting: Setting | None, why: str) -> Answer:
    """The run ends there with this kind of error."""
    return Answer(error, str(setting.place) if setting else "", why, fails=True)


def not_read(why: str) -> Answer:
    """This reader never looks at the key."""
    return Answer(None, "nowhere", why)


def number_of(context: LintContext, key: str) -> Setting | None:
    """A number of the accelerate config's DeepSpeed section; "auto" there counts as nothing written."""
    setting = context.acc(f"deepspeed_config.{key}") if context.distributed_type == "DEEPSPEED" else None
    return setting if setting is not None and number(setting.value) else None


def alone(context: LintContext, key: str, default: Any) -> Answer:
    """What `deepspeed.initialize` makes of a top-level number of the JSON."""
    setting = context.ds(key)
    if setting is None:
        if "deepspeed" not in context.kinds:
            return not_read("there is no DeepSpeed JSON")
        return by_default(default, "DeepSpeed")
    if setting.value == "auto":
        error = "TypeError" if "batch" in key or "accumulation" in key else "fails at the first step"
        return stops(error, setting, '"auto" stays text: nothing replaces it')
    return written(setting, "the DeepSpeed config alone decides")
