"""Which layer wins a setting: under `accelerate launch`, under the `deepspeed` launcher, under the Trainer.

Each topic is one function from the files to three answers (`layer_numbers`, `layer_fsdp`); the tests run the
real packages and compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.lint import keys
from toolkit.lint.model import Setting
from toolkit.lint.world import World, number

READERS = ("accelerate launch", "deepspeed launcher", "Trainer")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one reader really uses, where it has it from, and why."""

    value: Any
    where: str
    why: str
    fails: bool = False  # the run stops there; ``value`` is then the kind of error


Answers = tuple[Answer, Answer, Answer]
Topic = Callable[[World], Answers]
_TOPICS: dict[str, Topic] = {}


def topic(*names: str) -> Callable[[Topic], Topic]:
    """Register a topic under every name that its key has in some layer."""

    def register(function: Topic) -> Topic:
        for name in names:
            _TOPICS[name] = function
        return function

    return register


def load_topics() -> None:
    """Import the modules that register topics (they import this one)."""
    from toolkit.lint import layer_fsdp, layer_numbers  # noqa: F401


def names() -> list[str]:
    """Every key that has an answer of its own."""
    load_topics()
    return sorted(_TOPICS)


def answers(world: World, key: str) -> Answers | None:
    """The three answers for a key, by its full or its last name; None where no layer knows it."""
    load_topics()
    function = _TOPICS.get(key) or _TOPICS.get(key.rpartition(".")[2])
    return function(world) if function else _general(world, key)


def written(setting: Setting, why: str, value: Any = None) -> Answer:
    """The value of a key that stands in a file, or what is made of it."""
    return Answer(setting.value if value is None else value, f"{setting.key} in {setting.place}", why)


def by_default(value: Any, whose: str, why: str = "nothing is written") -> Answer:
    """A package's default."""
    return Answer(value, f"default of {whose}", why)


def stops(error: str, setting: Setting | None, why: str) -> Answer:
    """The run ends there with this kind of error."""
    return Answer(error, str(setting.place) if setting else "", why, fails=True)


def not_read(why: str) -> Answer:
    """This reader never looks at the key."""
    return Answer(None, "nowhere", why)


def number_of(world: World, key: str) -> Setting | None:
    """A number of the accelerate config's DeepSpeed section; "auto" there counts as nothing written."""
    setting = world.acc(f"deepspeed_config.{key}") if world.distributed_type == "DEEPSPEED" else None
    return setting if setting is not None and number(setting.value) else None


def alone(world: World, key: str, default: Any) -> Answer:
    """What `deepspeed.initialize` makes of a top-level number of the JSON."""
    setting = world.ds(key)
    if setting is None:
        if "deepspeed" not in world.kinds:
            return not_read("there is no DeepSpeed JSON")
        return by_default(default, "DeepSpeed")
    if setting.value == "auto":
        error = "TypeError" if "batch" in key or "accumulation" in key else "fails at the first step"
        return stops(error, setting, '"auto" stays text: nobody fills it in')
    return written(setting, "the DeepSpeed config alone decides")


def _general(world: World, key: str) -> Answers | None:
    """A key that one layer has: that layer's value wherever the layer is read."""
    yaml = world.acc(key) or next((world.acc(f"{s}.{key}") for s in _SECTIONS if world.acc(f"{s}.{key}")), None)
    json, arg = world.ds(key) or world.ds(f"zero_optimization.{key}"), world.arg(key)
    known = _knownby_default(key)
    if yaml is None and json is None and arg is None and known is None:
        return None
    bare = written(yaml, "only the accelerate layer has it") if yaml else None
    if bare is not None and yaml is not None and _dropped(yaml):
        bare = not_read("accelerate launch accepts the key and never uses it")
    stored = written(json, "only the DeepSpeed JSON has it") if json else None
    default = known or not_read("no layer writes it")
    return (
        bare or stored or default,
        stored
        or (
            default if known and "DeepSpeed" in known.where else not_read("the deepspeed launcher reads the JSON alone")
        ),
        (written(arg, "the Trainer's own argument") if arg else None) or bare or stored or default,
    )


_SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config", "fp8_config", "dynamo_config")


def _dropped(setting: Setting) -> bool:
    section, _, name = setting.key.rpartition(".")
    if setting.source.kind != "accelerate":
        return False
    raw = keys.package("accelerate")["sections"].get(section, {}).get(name, {})
    return raw.get("read") is False


def _knownby_default(key: str) -> Answer | None:
    tables = (
        ("transformers", "", "TrainingArguments"),
        ("deepspeed", "", "DeepSpeed"),
        ("deepspeed", "zero_optimization", "DeepSpeed"),
        ("accelerate", "", "accelerate"),
        ("accelerate", "deepspeed_config", "accelerate"),
        ("accelerate", "fsdp_config", "accelerate"),
    )
    last = key.rpartition(".")[2]
    for package, section, whose in tables:
        known = keys.section(package, section)
        if last in known:
            return by_default(known[last].default, whose)
    return None
