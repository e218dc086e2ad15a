"""Which way is the fastest that fits, and the smallest change that makes the recipe itself fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.plan.candidate import Candidate, gib
from toolkit.plan.hardware import GIB
from toolkit.plan.search import Search
from toolkit.recipe.schema import Recipe


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
    """The least that must change for the asked cell to fit: loss, micro-batch, checkpointing, strategy, offload,
    length, in this order; None where it fits, or nothing of these helps."""
    asked = next(c for c in candidates if c.asked)
    if asked.fits:
        return None
    fitting = [c for c in candidates if c.fits]
    changes = [(_differences(asked, c), c) for c in fitting]
    if changes:
        names, best = min(changes, key=lambda item: (len(item[0]), [_ORDER.index(n) for n in item[0]], _cost(item[1])))
        told = ", ".join(_told(name, best) for name in names)
        return f"{told} ({(best.peak - asked.peak) / GIB:+.1f} GiB: {gib(best.peak)})"
    if search.least(asked.resolved) > search.usable:
        return None
    length, rows = search.planner.length, 1
    while length > 128:
        length, rows = length // 2, rows * 2
        for told, shorter in search.shorter(length, rows):
            if shorter.fits:
                return f"{told} ({(shorter.peak - asked.peak) / GIB:+.1f} GiB: {gib(shorter.peak)})"
    return None


def other_training(asked: Candidate, search: Search) -> str | None:
    """Where no way to train what was asked fits: moments in 8 bits, an adapter in place of all weights, or one on a
    base of 4 bits, whichever of these fits first. It trains something else, so it is never among the candidates."""
    for what, flags, top in _others(search.asked.recipe):
        other = search.training(**top)
        best = None if other is None else choose(other.all())
        if best is not None:
            told = " ".join([*flags, *(_told(name, best) for name in _differences(asked, best))])
            return f"train {what}: {told} ({(best.peak - asked.peak) / GIB:+.1f} GiB: {gib(best.peak)})"
    return None


def _others(recipe: Recipe) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """What to tell of each, the flags that ask for it, and the recipe's sections."""
    adapter = recipe.adapter
    if adapter is None:
        if recipe.optimizer.name == "adamw":
            values = recipe.optimizer.model_dump(exclude_unset=True) | {"name": "adamw8bit"}
            yield "with moments in 8 bits", ["optimizer.name=adamw8bit"], {"optimizer": values}
        for method in ("lora", "qlora"):
            flags = [f"adapter.method={method}", "adapter.r=16", "adapter.alpha=32"]
            yield "an adapter in place of all weights", flags, {"adapter": {"method": method, "r": 16, "alpha": 32.0}}
    elif adapter.method == "lora":
        values = adapter.model_dump(exclude_unset=True) | {"method": "qlora"}
        yield "the adapter on a base of 4 bits", ["adapter.method=qlora"], {"adapter": values}


_ORDER = ("loss", "micro", "checkpointing", "away", "strategy", "offload")


def _differences(a: Candidate, b: Candidate) -> list[str]:
    x, y = a.resolved, b.resolved
    pairs = {
        "loss": (x.recipe.loss, y.recipe.loss),
        "micro": (x.micro_size, y.micro_size),
        "checkpointing": (x.recipe.activation_checkpointing, y.recipe.activation_checkpointing),
        "away": (x.recipe.activation_offload, y.recipe.activation_offload),
        "strategy": (x.recipe.strategy.name, y.recipe.strategy.name),
        "offload": (x.recipe.strategy.offload, y.recipe.strategy.offload),
    }
    return [name for name in _ORDER if pairs[name][0] != pairs[name][1]]


def _told(name: str, candidate: Candidate) -> str:
    resolved = candidate.resolved
    return {
        "loss": f"loss={resolved.recipe.loss}",
        "micro": f"batch.micro_size={resolved.micro_size} batch.accumulation={resolved.accumulation}",
        "checkpointing": f"activation_checkpointing={resolved.recipe.activation_checkpointing}",
        "away": f"activation_offload={str(resolved.recipe.activation_offload).lower()}",
        "strategy": f"strategy.name={resolved.recipe.strategy.name}",
        "offload": f"strategy.offload={resolved.recipe.strategy.offload}",
    }[name]
