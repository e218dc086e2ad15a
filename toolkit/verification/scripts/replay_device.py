"""Where a recorded loop is replayed: on a device of its own kind, or on the CPU where that decides as well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.verification.scripts.facts import ScriptFacts

GeneratorStates = dict[str, torch.Tensor]
"""The state of torch's random generators by kind of device: the CPU's, and that of the device that computes."""


def generator_states(device: torch.device) -> GeneratorStates:
    """Of the CPU and of ``device``. They are on the CPU: reading them does not wait for the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device.type).get_rng_state(device)
    return states


def set_generators(states: GeneratorStates, device: torch.device) -> None:
    """Set the CPU's generator and that of ``device`` to what was recorded."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device.type).set_rng_state(states[device.type], device)


def drawn_since(states: GeneratorStates, device: torch.device) -> list[str]:
    """The kinds of device whose generator was drawn from after ``states`` were read."""
    now = generator_states(device)
    return [kind for kind, state in states.items() if not torch.equal(state, now[kind])]


def float32_products(device: torch.device) -> str:
    """How matrices of float32 are multiplied: ``ieee``, or ``tf32`` (mantissas of 10 bits) on a GPU that may."""
    if device.type != "cuda":
        return "ieee"
    backends: Any = torch.backends
    own = backends.cuda.matmul.fp32_precision
    return "tf32" if (backends.fp32_precision if own == "none" else own) == "tf32" else "ieee"


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextlib.contextmanager
def multiplying(precision: str, device: torch.device) -> Iterator[None]:
    """Multiply matrices of float32 as the recorded loop did."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def is_here(kind: str) -> bool:
    """Whether this machine has a device of a kind (``cpu``, ``cuda``, ...)."""
    if kind == "cpu":
        return True
    try:
        return bool(torch.get_device_module(kind).is_available())
    except RuntimeError:  # torch was not built for it
        return False


def replay_device(ranks: Sequence[ScriptFacts], source: str) -> tuple[torch.device, str | None]:
    """The device to replay on, and a note for the screen where it is another than the recorded one.

    A loop of another device is replayed on the CPU where rounding is all that may differ: float32 throughout, and no
    random number drawn on the device. Raises InputError with the reason elsewhere: what would be seen then could be
    the device as well as the loop.
    """
    first = ranks[0]
    if is_here(first.device):
        return torch.device(first.device), None
    reasons = []
    if any(first.device in call.drawn for rank in ranks for step in rank.steps for call in step):
        reasons.append(
            f"it drew random numbers, as dropout does, from {first.device}'s generator, and a CPU's draws others: "
            "record it with dropout 0"
        )
    half = sorted({name for rank in ranks for name in rank.computed if name in ("bfloat16", "float16")})
    if half:
        reasons.append(
            f"it computes in {' and '.join(half)}, whose rounding differs from device to device: record it in float32"
        )
    if any(rank.float32_products != "ieee" for rank in ranks):
        reasons.append('it multiplies in TF32: record it with torch.set_float32_matmul_precision("highest")')
    named = f"recorded on {first.device} ({first.device_name})"
    if reasons:
        raise InputError(
            f"--trace: {source}: {named}, which this machine does not have, and cannot be replayed on a CPU: "
            f"{'; '.join(reasons)}. Or verify it on a machine with such a device"
        )
    note = f"{named}, replayed on the CPU: in float32 without random numbers, devices differ only by rounding"
    return torch.device("cpu"), note
