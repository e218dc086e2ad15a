"""Every way to train a recipe that keeps its result: which fit, which is fastest, and the smallest change that
makes the recipe itself fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InputError
from toolkit.plan.hardware import GIB, Device
from toolkit.plan.memory import Memory
from toolkit.plan.predict import Planner
from toolkit.plan.time import Rates, Seconds, step_seconds
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategies, strategy_of

CONTEXT = int(0.5 * GIB)
"""CUDA context, NCCL and loaded kernels: assumed, since no GPU has been measured (see docs/planning.md)."""
WORKSPACE = 32 * 2**20
"""cuBLAS workspace of one stream on Hopper, 8 MiB before (PyTorch docs, CUDA semantics, «cuBLAS workspaces»)."""


@dataclass
class Candidate:
    """One way to train, with its memory and time. ``error``: why it cannot be, in place of both."""

    resolved: Resolved
    memory: Memory
    reserve: int
    host: int
    seconds: Seconds | None
    capacity: int
    usable: int
    asked: bool = False
    host_loading: int = 0
    """Bytes of a node's host while all its processes load the model; ``host``: while they train."""

    @property
    def peak(self) -> int:
        return self.memory.peak + self.reserve

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    @property
    def breakdown(self) -> dict[str, int]:
        return {**self.memory.breakdown, "reserve": self.reserve}

    @property
    def label(self) -> str:
        recipe = self.resolved.recipe
        parts: list[str] = [recipe.strategy.name]
        if recipe.strategy.offload != "none":
            parts.append(f"offload {recipe.strategy.offload}")
        if recipe.activation_checkpointing != "none":
            parts.append(f"{recipe.activation_checkpointing} ckpt")
        return " ".join([*parts, f"micro {self.resolved.micro_size}"])

    @property
    def reason(self) -> str:
        """Why it is not chosen, in numbers; empty where it fits."""
        if self.fits:
            return ""
        term, size = max(self.breakdown.items(), key=lambda item: item[1])
        when = " while it is loaded" if self.memory.peak_phase == "load" else ""
        return (
            f"{_gib(self.peak)} of {_gib(self.capacity)} GiB{when}, {_gib(self.peak - self.usable)} over, "
            f"of which {term} {_gib(size)}"
            + (f", loss {_gib(self.breakdown['loss'])}" if term != "loss" and self.breakdown["loss"] else "")
        )

    @property
    def unmeasured(self) -> list[str]:
        """What of this way no prediction has been held against real training for, on any device."""
        recipe = self.resolved.recipe
        found = [f"offload {recipe.strategy.offload}"] if recipe.strategy.offload != "none" else []
        name = recipe.strategy.name
        found += ["fp16"] if self.resolved.precision.compute == "float16" and name not in ("single", "fsdp2") else []
        found += [recipe.model.task] if recipe.model.task != "causal-lm" and name != "single" else []
        return found

    def as_json(self) -> dict[str, Any]:
        """The contract's fields, and more."""
        recipe = self.resolved.recipe
        return {
            "strategy": recipe.strategy.name,
            "offload": recipe.strategy.offload,
            "activation_checkpointing": recipe.activation_checkpointing,
            "micro_size": self.resolved.micro_size,
            "accumulation": self.resolved.accumulation,
            "fits": self.fits,
            "peak_bytes": self.peak,
            "host_bytes": self.host,
            "host_load_bytes": self.host_loading,
            "breakdown": self.breakdown,
            "phases": {name: size + self.reserve for name, size in self.memory.phases.items()},
            "peak_phase": self.memory.peak_phase,
            "seconds_per_step": None if self.seconds is None else self.seconds.total,
            "seconds": None if self.seconds is None else dataclasses.asdict(self.seconds),
            "reason": self.reason,
            "unmeasured": self.unmeasured,
            "asked": self.asked,
        }


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


class Search:
    """Candidates of one recipe on one device."""

    def __init__(self, asked: Resolved, device: Device, headroom: float, rates: Rates) -> None:
        self.asked = asked
        self.device = device
        self.rates = rates
        self.usable = int(device.bytes * (1 - headroom))
        self.planner = Planner.of(asked, asked.recipe.data.max_length)

    def candidate(self, resolved: Resolved, asked: bool = False, planner: Planner | None = None) -> Candidate:
        """Predict one. Raises InputError where the model cannot be traced."""
        planner = planner or self.planner
        memory = planner.memory(resolved)
        ledger = strategy_of(resolved).ledger_class()(planner.skeleton.holdings, resolved)
        segments = planner.segments_of(resolved)
        reserve = _reserve(resolved)
        seconds = step_seconds(resolved, planner.skeleton.holdings, segments, self.device, self.rates)
        host = sum(ledger.host.values()) * resolved.recipe.machine.processes
        own, shared = ledger.host_loading()
        loading = own * resolved.recipe.machine.processes + shared
        return Candidate(resolved, memory, reserve, host, seconds, self.device.bytes, self.usable, asked, loading)

    def all(self, every: bool = False) -> list[Candidate]:
        """The recipe's own first, then every other strategy, offload, checkpointing and micro-batch size.

        Unless ``every``, ways that cannot win are left out: more recomputation or offload than it takes to fit,
        micro-batches larger than one that does not, and where weights and optimizer alone are too much all but the
        smallest, which tells by how much.
        """
        found = [self.candidate(self.asked, asked=True)]
        seen = {_key(self.asked)}
        enough: set[Any] = set()
        too_large: dict[Any, int] = {}
        smallest = min(self._sizes(), default=1)
        for variant in self._variants():
            name, offload, kind, micro, _ = key = _key(variant)
            cannot_win = (name, micro) in enough or micro > too_large.get((name, offload, kind), micro)
            if key in seen or (cannot_win and not every):
                continue
            if not every and not (kind == "full" and micro == smallest) and self.least(variant) > self.usable:
                continue
            seen.add(key)
            found.append(self.candidate(variant))
            if found[-1].fits:
                enough.add((name, micro))
            else:
                too_large[name, offload, kind] = micro
        return found

    def least(self, resolved: Resolved) -> int:
        """Bytes that stay for the whole step: no micro-batch, length or recomputation takes less. Traces nothing."""
        ledger = strategy_of(resolved).ledger_class()(self.planner.skeleton.holdings, resolved)
        least = sum(ledger.resident.values())
        return max(least, ledger.loading() if ledger.overlap else 0) + _reserve(resolved)

    def _sizes(self) -> list[int]:
        per_rank = self.asked.global_size // self.asked.world_size
        return [size for size in (1, 2, 4, 8, 16, 32) if per_rank % size == 0]

    def _variants(self) -> Iterator[Resolved]:
        sizes = self._sizes()
        for name, strategy in strategies().items():
            if (name == "single") != (self.asked.world_size == 1):
                continue
            for offload in strategy.offloads:
                for kind in ("none", "selective", "full"):
                    for micro in sizes:
                        variant = self.variant(
                            {"name": name, "offload": offload}, {"activation_checkpointing": kind}, micro
                        )
                        if variant is not None:
                            yield variant

    def variant(self, strategy: dict[str, Any], top: dict[str, Any], micro: int) -> Resolved | None:
        """The asked recipe with other values and the same global batch; None where it contradicts itself."""
        recipe = self.asked.recipe
        values = recipe.model_dump(exclude_unset=True)
        values["strategy"] = values.get("strategy", {}) | strategy
        values["batch"] = {"micro_size": micro, "global_size": self.asked.global_size}
        try:
            return resolve(Recipe.model_validate(values | top), self.asked.source, device=self.asked.device)
        except InputError:
            return None


def _reserve(resolved: Resolved) -> int:
    return CONTEXT + WORKSPACE if resolved.device == "cuda" else 0


def choose(candidates: list[Candidate]) -> Candidate | None:
    """The fastest that fits; where times are the same or not known, the one with the least offload, the least
    recomputation, the least communication and the largest micro-batch."""
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        return None
    return min(fitting, key=lambda c: (_cost(c), -c.resolved.micro_size, c.peak))


def _cost(candidate: Candidate) -> tuple[float, ...]:
    recipe = candidate.resolved.recipe
    order = ("single", "ddp", "zero1", "zero2", "fsdp2", "fsdp1", "zero3")
    kinds = ("none", "selective", "full")
    offloads = ("none", "optimizer", "all")
    # Times that differ by less than a part in a thousand are the same: then the plainer way is chosen.
    seconds = 0.0 if candidate.seconds is None else float(f"{candidate.seconds.total:.3g}")
    return (
        seconds,
        offloads.index(recipe.strategy.offload),
        kinds.index(recipe.activation_checkpointing),
        order.index(recipe.strategy.name),
    )


def smallest_change(candidates: list[Candidate], search: Search) -> str | None:
    """The least that must change for the asked cell to fit: micro-batch, checkpointing, strategy, offload, length,
    in this order; None where it fits, or nothing of these helps."""
    asked = next(c for c in candidates if c.asked)
    if asked.fits:
        return None
    fitting = [c for c in candidates if c.fits]
    changes = [(_differences(asked, c), c) for c in fitting]
    if changes:
        names, best = min(changes, key=lambda item: (len(item[0]), [_ORDER.index(n) for n in item[0]], _cost(item[1])))
        told = ", ".join(_told(name, best) for name in names)
        return f"{told} ({(best.peak - asked.peak) / GIB:+.1f} GiB: {_gib(best.peak)})"
    if search.least(asked.resolved) > search.usable:
        return None
    length = search.planner.length
    while length > 128:
        length //= 2
        shorter = search.candidate(asked.resolved, planner=Planner(asked.resolved, length, search.planner.skeleton))
        if shorter.fits:
            return f"data.max_length={length} ({(shorter.peak - asked.peak) / GIB:+.1f} GiB: {_gib(shorter.peak)})"
    return None


_ORDER = ("micro", "checkpointing", "strategy", "offload")


def _differences(a: Candidate, b: Candidate) -> list[str]:
    x, y = a.resolved, b.resolved
    pairs = {
        "micro": (x.micro_size, y.micro_size),
        "checkpointing": (x.recipe.activation_checkpointing, y.recipe.activation_checkpointing),
        "strategy": (x.recipe.strategy.name, y.recipe.strategy.name),
        "offload": (x.recipe.strategy.offload, y.recipe.strategy.offload),
    }
    return [name for name in _ORDER if pairs[name][0] != pairs[name][1]]


def _told(name: str, candidate: Candidate) -> str:
    resolved = candidate.resolved
    return {
        "micro": f"batch.micro_size={resolved.micro_size} batch.accumulation={resolved.accumulation}",
        "checkpointing": f"activation_checkpointing={resolved.recipe.activation_checkpointing}",
        "strategy": f"strategy.name={resolved.recipe.strategy.name}",
        "offload": f"strategy.offload={resolved.recipe.strategy.offload}",
    }[name]


def _key(resolved: Resolved) -> tuple[Any, ...]:
    recipe = resolved.recipe
    return (
        recipe.strategy.name,
        recipe.strategy.offload,
        recipe.activation_checkpointing,
        resolved.micro_size,
        resolved.accumulation,
    )
