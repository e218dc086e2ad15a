"""Which layer sets a key: under `accelerate launch`, under the `deepspeed` launcher, under the Trainer.

Each topic is one function from the files to three answers (`layer_numbers`, `layer_fsdp`); the tests run the real
packages and compare.
"""

from __future__ import annotations

from toolkit.linting import keys, layer_fsdp, layer_numbers  # noqa: F401  # the last two register topics
from toolkit.linting.context import LintContext
from toolkit.linting.layer_answers import READERS, TOPICS, Answer, Answers, by_default, not_read, written
from toolkit.linting.model import Setting

__all__ = ["READERS", "Answer", "Answers", "answers", "names"]


def names() -> list[str]:
    """Every key that has an answer of its own."""
    return sorted(TOPICS)


def answers(context: LintContext, key: str) -> Answers | None:
    """The three answers for a key, by its full or its last name; None if no layer knows it."""
    function = TOPICS.get(key) or TOPICS.get(key.rpartition(".")[2])
    return function(context) if function else _general(context, key)


def _general(context: LintContext, key: str) -> Answers | None:
    """A key that one layer has: that layer's value wherever the layer is read."""
    yaml = context.acc(key) or next((context.acc(f"{s}.{key}") for s in _SECTIONS if context.acc(f"{s}.{key}")), None)
    json, arg = context.ds(key) or context.ds(f"zero_optimization.{key}"), context.arg(key)
    known = _knownby_default(key)
    if yaml is None and json is None and arg is None and known is None:
        return None
    bare = written(yaml, "only the accelerate layer has it") if yaml else None
    if bare is not None and yaml is not None and _dropped(yaml):
        bare = not_read("accelerate launch accepts the key but never uses it")
    stored = written(json, "only the DeepSpeed JSON has it") if json else None
    default = known or not_read("no layer sets it")
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
