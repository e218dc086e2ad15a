"""Which way is the fastest that fits, and the smallest change that makes the recipe itself fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.planning.candidate import Candidate, gib
from toolkit.planning.hardware import GIB
from toolkit.planning.search import Search
from toolkit.recipe.schema import Recipe

EQUAL = 0.01
"""Share of the fastest time within which ways count as equally fast: the time model resolves no finer differences."""

FASTEST = "fastest that fits"
ROOMIEST = f"among equals (within {EQUAL:.0%}) the one with the most free memory".replace("%", " %")
PLAINEST = "plainest that fits, times are not known"


def choose(candidates: list[Candidate]) -> Candidate | None:
    """The fastest that fits; of all within ``EQUAL`` of the fastest the one with the most free memory, to the tenth
    of a GiB that is shown; then the plainest. Where times are not known, the plainest with the largest micro-batch.

    «Equal» is measured from the fastest alone, not from pair to pair, so that the order of candidates is irrelevant.
    """
    equal = _equally_fast(candidates)
    if not equal:
        return None
    if equal[0].seconds is None:
        return min(equal, key=lambda c: (_plainness(c), -c.resolved.micro_size, c.peak))
    return min(equal, key=lambda c: (round(c.peak / GIB, 1), _plainness(c), c.peak))


def why_chosen(candidates: list[Candidate], chosen: Candidate) -> str:
    """What `choose` went by, in words."""
    if chosen.seconds is None:
        return PLAINEST
    return FASTEST if len(_equally_fast(candidates)) == 1 else ROOMIEST


def _equally_fast(candidates: list[Candidate]) -> list[Candidate]:
    """Of those that fit and compete, all within ``EQUAL`` of the fastest; all of them where times are not known."""
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
    recipe = candidate.resolved.recipe
    return recipe.strategy.name, candidate.resolved.micro_size, recipe.loss, recipe.activation_offload


def _effort(candidate: Candidate) -> tuple[int, int]:
    """How much is offloaded and how much recomputed, from the least."""
    recipe = candidate.resolved.recipe
    offload = ("none", "optimizer", "all").index(recipe.strategy.offload)
    return offload, ("none", "selective", "full").index(recipe.activation_checkpointing)


def _plainness(candidate: Candidate) -> tuple[int, int, int]:
    """The least offload, then the least recomputation, then the strategy that communicates least."""
    return *_effort(candidate), candidate.resolved.traits.precedence


def _cost(candidate: Candidate) -> tuple[float, ...]:
    # Times that differ by less than a part in a thousand are the same: then the plainer way is preferred.
    seconds = 0.0 if candidate.seconds is None else float(f"{candidate.seconds.total:.3g}")
    return seconds, *_plainness(candidate)


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
