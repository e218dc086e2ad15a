"""Chooses the fastest candidate that fits, and the smallest change that makes the recipe itself fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.base_formats import base_formats
from toolkit.planning.candidate import Candidate, gib
from toolkit.planning.hardware import GIB
from toolkit.planning.search import Search
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import host_settings, whole_keys

EQUAL = 0.01
"""Candidates within this fraction of the fastest time are equally fast: the time model is not more precise."""

FASTEST = "fastest that fits"
ROOMIEST = f"most free memory of those within {EQUAL:.0%} of the fastest".replace("%", " %")
SIMPLEST = "simplest that fits (times are unknown)"


def choose(candidates: list[Candidate]) -> Candidate | None:
    """The fastest candidate that fits. Of all within ``EQUAL`` of the fastest, the one with the most free memory (to a
    tenth of a GiB, as shown), then the simplest. Without times, the simplest with the largest micro-batch.

    «Equal» is relative to the fastest only, not between pairs, so the order of candidates does not matter.
    """
    equal = _equally_fast(candidates)
    if not equal:
        return None
    if equal[0].seconds is None:
        return min(equal, key=lambda c: (_complexity(c), -c.resolved.micro_size, c.needed))
    return min(equal, key=lambda c: (round(c.needed / GIB, 1), _complexity(c), c.needed))


def why_chosen(candidates: list[Candidate], chosen: Candidate) -> str:
    """The reason for the result of `choose`, in words."""
    if chosen.seconds is None:
        return SIMPLEST
    return FASTEST if len(_equally_fast(candidates)) == 1 else ROOMIEST


def _equally_fast(candidates: list[Candidate]) -> list[Candidate]:
    """Of the competing candidates that fit, all within ``EQUAL`` of the fastest; all of them if times are not known."""
    fitting = [c for c in candidates if c.fits]
    # What recomputes or offloads more than it takes to fit does not compete, as `Search.all` leaves it out: `--all`
    # shows more ways and chooses the same.
    least: dict[tuple[object, ...], tuple[int, int]] = {}
    for c in fitting:
        least[_way(c)] = min(_effort(c), least.get(_way(c), _effort(c)))
    competing = [c for c in fitting if c.asked or _effort(c) == least[_way(c)]]
    times = [c.seconds.total for c in competing if c.seconds is not None]
    if not times:
        return competing
    return [c for c in competing if c.seconds is not None and c.seconds.total <= min(times) * (1 + EQUAL)]


def _way(candidate: Candidate) -> tuple[object, ...]:
    recipe, strategy = candidate.resolved.recipe, candidate.resolved.recipe.strategy
    kept = strategy.sync, strategy.reshard_after_forward, candidate.resolved.whole_blocks
    return strategy.name, kept, candidate.resolved.micro_size, recipe.loss, (*host_settings(recipe).values(),)


def _effort(candidate: Candidate) -> tuple[int, int]:
    """The amount of offload and of recomputation."""
    recipe = candidate.resolved.recipe
    offload = ("none", "optimizer", "all").index(recipe.strategy.offload)
    return offload, ("none", "selective", "full").index(recipe.activation_checkpointing)


def _complexity(candidate: Candidate) -> tuple[int, int, int]:
    """The least offload, then the least recomputation, then the strategy that communicates least."""
    return *_effort(candidate), candidate.resolved.traits.precedence


def _cost(candidate: Candidate) -> tuple[float, ...]:
    # Times that differ by less than 0.1 % are equal: then the simpler candidate is preferred.
    seconds = 0.0 if candidate.seconds is None else float(f"{candidate.seconds.total:.3g}")
    return seconds, *_complexity(candidate)


def smallest_change(candidates: list[Candidate], search: Search) -> str | None:
    """The smallest change that makes the recipe fit: loss, micro-batch, checkpointing, strategy, offload, length, in
    this order. None if it fits, or if none of these is sufficient."""
    asked = next(c for c in candidates if c.asked)
    if asked.fits:
        return None
    fitting = [c for c in candidates if c.fits]
    changes = [(_differences(asked, c), c) for c in fitting]
    if changes:
        names, best = min(changes, key=lambda item: (len(item[0]), [_ORDER.index(n) for n in item[0]], _cost(item[1])))
        described = ", ".join(_describe(name, best) for name in names)
        return f"{described} ({(best.needed - asked.needed) / GIB:+.1f} GiB: {gib(best.needed)})"
    if search.least(asked.resolved) > search.usable:
        return None
    length, rows = search.planner.length, 1
    while length > 128:
        length, rows = length // 2, rows * 2
        for described, shorter in search.shorter(length, rows):
            if shorter.fits:
                return f"{described} ({(shorter.needed - asked.needed) / GIB:+.1f} GiB: {gib(shorter.needed)})"
    return None


def other_training(asked: Candidate, search: Search) -> str | None:
    """If nothing fits: 8-bit moments, an adapter instead of all weights, or an adapter on a 4-bit base, whichever fits
    first. These train something else, so they are not among the candidates."""
    for what, flags, top in _others(search.asked):
        other = search.training(**top)
        best = None if other is None else choose(other.all())
        if best is not None:
            described = " ".join([*flags, *(_describe(name, best) for name in _differences(asked, best))])
            return f"train {what}: {described} ({(best.needed - asked.needed) / GIB:+.1f} GiB: {gib(best.needed)})"
    return None


def _others(asked: Resolved) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """What to print of each, the flags that ask for it, and the recipe's sections."""
    recipe, adapter = asked.recipe, asked.recipe.adapter
    if adapter is None:
        if recipe.optimizer.name == "adamw":
            values = recipe.optimizer.model_dump(exclude_unset=True) | {"name": "adamw8bit"}
            yield "with 8-bit moments", ["optimizer.name=adamw8bit"], {"optimizer": values}
        for method in ("lora", *(base.method for base in base_formats())):
            flags = [f"adapter.method={method}", "adapter.r=16", "adapter.alpha=32"]
            yield "an adapter instead of all weights", flags, {"adapter": {"method": method, "r": 16, "alpha": 32.0}}
    elif adapter.method == "lora" and asked.base is None:
        for base in base_formats():
            values = adapter.model_dump(exclude_unset=True) | {"method": base.method}
            yield "the adapter on a 4-bit base", [f"adapter.method={base.method}"], {"adapter": values}


_ORDER = ("loss", "micro", "checkpointing", "away", "strategy", "mesh", "sync", "kept", "whole", "offload")


def _differences(a: Candidate, b: Candidate) -> list[str]:
    x, y = a.resolved, b.resolved
    pairs = {
        "loss": (x.recipe.loss, y.recipe.loss),
        "micro": (x.micro_size, y.micro_size),
        "checkpointing": (x.recipe.activation_checkpointing, y.recipe.activation_checkpointing),
        "away": (host_settings(x.recipe), host_settings(y.recipe)),
        "strategy": (x.recipe.strategy.name, y.recipe.strategy.name),
        "mesh": (x.recipe.strategy.mesh, y.recipe.strategy.mesh),
        "sync": (x.recipe.strategy.sync, y.recipe.strategy.sync),
        "kept": (x.recipe.strategy.reshard_after_forward, y.recipe.strategy.reshard_after_forward),
        "whole": (x.whole_blocks, y.whole_blocks),
        "offload": (x.recipe.strategy.offload, y.recipe.strategy.offload),
    }
    return [name for name in _ORDER if pairs[name][0] != pairs[name][1]]


def _describe(name: str, candidate: Candidate) -> str:
    resolved = candidate.resolved
    return {
        "loss": f"loss={resolved.recipe.loss}",
        "micro": f"batch.micro_size={resolved.micro_size} batch.accumulation={resolved.accumulation}",
        "checkpointing": f"activation_checkpointing={resolved.recipe.activation_checkpointing}",
        "away": " ".join(f"{key}={str(value).lower()}" for key, value in host_settings(resolved.recipe).items()),
        "strategy": f"strategy.name={resolved.recipe.strategy.name}",
        "mesh": "strategy.mesh=null",  # a recipe's own is kept or dropped, never made up
        "sync": f"strategy.sync={resolved.recipe.strategy.sync or 'null'}",
        "kept": f"strategy.reshard_after_forward={str(resolved.recipe.strategy.reshard_after_forward).lower()}",
        "whole": " ".join(f"strategy.{key}={resolved.whole_blocks or 'null'}" for key in whole_keys()),
        "offload": f"strategy.offload={resolved.recipe.strategy.offload}",
    }[name]
