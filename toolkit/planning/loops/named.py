"""Loops by what a command line says: a name, a version behind «@», and habits as ``key=value``, with spaces between.
Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import InputError
from toolkit.planning.loops.base import Loop, LoopPrecision, Together
from toolkit.planning.loops.known import HELD, LOOPS, VERSIONS
from toolkit.recipe.load import did_you_mean
from toolkit.recipe.resolve import Precision, Resolved

HABITS = {
    "held_outputs": "what the model returns stays until the backward is over: a variable of the loop",
    "autocast": "whether the forward runs under autocast; false: in the weights' dtypes",
    "prepare_for_kbit": "PEFT's prepare_model_for_kbit_training: on a 4-bit base norms, embeddings and head in float32",
    "float32_base": "frozen weights in float32, as from_pretrained loads them without a dtype",
    "double_quant": "whether the statistics of 4-bit weights are quantised too",
    "reentrant": "checkpointing with use_reentrant=True",
    "kernel": "the optimizer's kernel: fused or foreach",
    "tf32": "products of float32 at TF32's rate (torch.backends.cuda.matmul.allow_tf32)",
    "eval_micro": "rows of a batch of the evaluation",
    "eval_kept": "batches of the evaluation whose logits stay on the device",
}
"""Keys of ``--loop-set``: true or false, but for the kernel and the two numbers."""
_KERNELS = ("fused", "foreach")
_NUMBERS = ("eval_micro", "eval_kept")
_DIGITS = 6


def loop_named(text: str) -> Loop:
    """The loop of ``trainer``, ``trainer@4.48`` or ``bare held_outputs=false``. Raises InputError."""
    name, *habits = text.split()
    return _of_version(name) if not habits else _with_habits(text)


@functools.cache
def _with_habits(text: str) -> Loop:
    name, *habits = text.split()
    loop = with_habits(_of_version(name), habits)
    _named[id(loop)] = loop, text
    return loop


_named: dict[int, tuple[Loop, str]] = {}
"""Loops with habits, by identity, and what they were asked for as."""


def habits_of(loop: Loop) -> str | None:
    """What `loop_named` was given for ``loop``; None if it did not make it."""
    found = _named.get(id(loop))
    return None if found is None else found[1]


def _of_version(name: str) -> Loop:
    base, at, version = name.partition("@")
    if base not in LOOPS:
        raise InputError(f"--loop {name}: not one of {', '.join(LOOPS)}{did_you_mean(base, LOOPS)}")
    if not at:
        return LOOPS[base]
    known = VERSIONS.get(base, {})
    if version not in known:
        has = f"versions are known of {', '.join(VERSIONS)} alone" if not known else f"known: {', '.join(known)}"
        raise InputError(f"--loop {name}: plan does not know {base} of version {version}; {has}")
    return LOOPS[known[version]]


def with_habits(loop: Loop, habits: Sequence[str]) -> Loop:
    """``loop`` with what ``key=value`` say otherwise. Raises InputError."""
    given = dict(_habit(text) for text in habits)
    own: dict[str, Any] = {}
    if given and loop is LOOPS["toolkit"]:
        raise InputError("--loop-set: for a loop of --loop; the toolkit's own does what the recipe says")
    if "reentrant" in given:
        own["reentrant"] = given["reentrant"]
    if "kernel" in given:
        own["kernel"] = given["kernel"]
    own |= {key: given[key] for key in _NUMBERS if key in given}
    if own.get("eval_kept") and not loop.returns_logits:
        raise InputError(f"--loop-set eval_kept={own['eval_kept']}: {loop.title} computes no logits that could stay")
    own |= {key: given[key] for key in ("double_quant", "tf32") if key in given}
    if given.get("held_outputs"):
        own["acting"] = loop.acting if isinstance(loop.acting, Together) else Together(HELD, loop.acting)
    elif "held_outputs" in given:
        own["acting"] = loop.acting.second if isinstance(loop.acting, Together) else loop.acting
    dtypes = {key: given[key] for key in ("autocast", "prepare_for_kbit", "float32_base") if key in given}
    if dtypes:
        own["precision"] = Dtypes(loop.precision, **dtypes)
    return replace(loop, **own)


def _habit(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or key not in HABITS:
        raise InputError(f"--loop-set {text}: not one of {', '.join(f'{name}=…' for name in HABITS)}"
                         f"{did_you_mean(key, HABITS)}")  # fmt: skip
    if key == "kernel":
        if value not in _KERNELS:
            raise InputError(f"--loop-set {text}: {' or '.join(_KERNELS)}")
        return key, value
    if key in _NUMBERS:
        if not value.isdecimal() or len(value) > _DIGITS:
            raise InputError(f"--loop-set {text}: a number, 0 for none")
        return key, int(value)
    if value not in ("true", "false"):
        raise InputError(f"--loop-set {text}: true or false")
    return key, value == "true"


@dataclass(frozen=True)
class Dtypes:
    """``base``'s dtypes with a loop's habits; None: as ``base`` has it."""

    base: Callable[[Resolved], Precision]
    autocast: bool | None = None
    prepare_for_kbit: bool = False
    float32_base: bool = False

    def __call__(self, resolved: Resolved) -> Precision:
        own = self.base(resolved)
        adapted, packed = resolved.recipe.adapter is not None, resolved.base_storage is not None
        trained = own.trainable if own.mixed or adapted or self.autocast is not False else own.compute
        whole = self.float32_base or (self.prepare_for_kbit and packed)
        norms = own.norms if isinstance(own, LoopPrecision) else ""
        return LoopPrecision(
            own.compute,
            trained,
            "float32" if whole else own.frozen,
            own.loss_scaling,
            autocast=own.mixed if self.autocast is None else self.autocast,
            packed=own.unpacked,
            norms="" if whole else norms,
        )
