"""Inverse questions of a plan: the longest rows, largest micro-batch or model, the fewest devices and the cheapest
device that fit, by prediction alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import InputError
from toolkit.planning.candidate import Candidate
from toolkit.planning.choice import choose
from toolkit.planning.floors import Floors
from toolkit.planning.hardware import GIB, Device
from toolkit.planning.loops import check_loop
from toolkit.planning.predict import Planner
from toolkit.planning.search import Search, largest
from toolkit.recipe.limits import limits_of
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategies

_STEP = 64
"""Lengths are rounded to multiples of it."""
_ROWS, _LAYERS, _DEVICES = 4096, 1024, 1024


@dataclass(frozen=True)
class Answer:
    """``value``: the number or name that was asked for; None if nothing fits. ``text``: the answer in a line.
    ``change``: overrides, or flags, that plan it. ``candidate``: what it takes."""

    question: str
    value: int | str | None
    text: str
    change: str | None = None
    candidate: Candidate | None = None
    cost: float | None = None
    expected: int | None = None
    """About how many would fit if the process took what is expected, not the upper end of the interval."""

    def to_json(self) -> dict[str, Any]:
        """The answer for the command's JSON; ``cost_per_step`` in the currency of the prices."""
        found = self.candidate
        return {
            "question": self.question,
            "answer": self.value,
            "expected_answer": self.expected,
            "text": self.text,
            "change": self.change,
            "devices": None if found is None else found.resolved.world_size,
            "strategy": None if found is None else found.resolved.recipe.strategy.name,
            "peak_bytes": None if found is None else found.peak,
            "usable_bytes": None if found is None else found.usable,
            "seconds_per_step": None if found is None or found.seconds is None else found.seconds.total,
            "cost_per_step": self.cost,
        }


def answer(question: str, search: Search, table: Iterable[Device], prices: dict[str, float]) -> Answer:
    """Answer one of toolkit.planning.command's QUESTIONS for the recipe of ``search``. ``prices``: of an hour of a
    device, by its name. Raises InputError where it has no answer: a model that cannot be traced, a CPU."""
    if search.asked.device == "cpu" and question in ("gpu", "gpus"):
        raise InputError(f"--fit {question}: the recipe is for a CPU (machine.device); name a device with --gpu NAME")
    if question == "gpu":
        return _gpu(search, table, prices)
    return {"length": _length, "micro": _micro, "gpus": _gpus, "model": _model}[question](search)


def cost(candidate: Candidate, price: float | None) -> float | None:
    """What a step costs on all devices at ``price`` an hour; None if the price or the time is not known."""
    if price is None or candidate.seconds is None:
        return None
    return candidate.seconds.total / 3600 * price * candidate.resolved.world_size


@dataclass(frozen=True)
class Largest:
    """The largest ``size`` that fits, 0 if none does; its candidate; and the size that about fits by the expected
    value, None where that is no other one."""

    size: int = 0
    candidate: Candidate | None = None
    expected: int | None = None


def _largest(
    search: Search,
    highest: int,
    at: Callable[[Resolved, int], Candidate],
    first: int = 1,
    *,
    same_weights: bool = True,
) -> Largest:
    """The largest size that fits, under the recipe's strategy, or under any where that is the plan's to choose: the one
    that lasts longest. ``same_weights``: whether all sizes are of the recipe's own model."""
    best = Largest()
    floors: dict[int, Floors] = {}

    def cannot(way: Resolved, size: int) -> bool:
        """Whether a size is too large as far as is known without a trace."""
        return same_weights and search.least(way, floors.get(size, Floors()).of(way)) > search.usable

    for way in _strategies(search):
        known: dict[int, Candidate] = {}

        def over(size: int, way: Resolved = way, known: dict[int, Candidate] = known) -> float:
            if size not in known:
                known[size] = at(way, size)
            return known[size].needed - known[size].usable

        beaten = best.size + 1
        if best.candidate is not None and (beaten > highest or cannot(way, beaten) or over(beaten) > 0):
            continue  # no more than what is known
        if size := largest(over, highest, max(first, beaten)):
            best = Largest(size, known[size], _by_expected(known, size, highest))
            for tried, candidate in known.items():
                floors.setdefault(tried, Floors()).see(candidate)
    if best.candidate is not None and best.candidate.resolved.recipe.strategy.name != search.asked.recipe.strategy.name:
        if cannot(search.asked, best.size):
            return best
        as_asked = at(search.asked, best.size)
        return replace(best, candidate=as_asked) if as_asked.fits else best
    return best


def _by_expected(known: dict[int, Candidate], size: int, highest: int) -> int | None:
    """The size whose expected bytes are those that are usable, on the line through ``size`` and the known one farthest
    from it, the larger ones first; at most ``highest``."""
    others = [other for other in known if other > size] or [other for other in known if other < size]
    if not others:
        return None
    far = max(others, key=lambda other: abs(other - size))
    slope = (known[far].expected - known[size].expected) / (far - size)
    room = known[size].usable - known[size].expected
    more = math.floor(room / slope) if slope > 0 else 0
    return min(size + more, highest) if more > 0 else None


def _strategies(search: Search) -> list[Resolved]:
    """The recipe, and under every other strategy where nobody asked for one: without offload, that which shards most
    first, since it is the most likely to take the largest."""
    if search.start is None or not search.start.any_strategy or search.asked.world_size == 1:
        return [search.asked]
    ways = [way for name in strategies() if (way := search.variant({"name": name}, {}, search.asked.micro_size))]
    own = search.asked.recipe.strategy.name
    return sorted(ways, key=lambda way: (-len(way.traits.shards), way.recipe.strategy.name != own))


def _under(search: Search, found: Candidate) -> tuple[str, str]:
    """How the answer's candidate is trained, in words and as an override, where that is not as the recipe says."""
    name = found.resolved.recipe.strategy.name
    peak = f", {found.needed / GIB:.1f} of {found.usable / GIB:.1f} GiB"
    other = name != search.asked.recipe.strategy.name
    return (f" under {name}{peak}", f" strategy.name={name}") if other else (peak, "")


def _also(expected: int | None) -> str:
    """What fits by the middle of the interval, beside an answer, which fits by its upper end."""
    return "" if expected is None else f" by the upper end of the interval, about {expected:,} by its expected value"


def _length(search: Search) -> Answer:
    made_for = limits_of(search.asked.recipe, search.asked.facts).rows
    limit = 1 << 20 if made_for is None else made_for.tokens

    planners = {search.planner.length: search.planner}

    def at(way: Resolved, steps: int) -> Candidate:
        tokens = min(steps * _STEP, limit)
        if tokens not in planners:
            planners[tokens] = search.planner.of_length(tokens)
        return search.candidate(way, planner=planners[tokens])

    best = _largest(search, -(-limit // _STEP), at, search.planner.length // _STEP)
    if best.candidate is None:
        return Answer("length", None, f"rows of {_STEP} tokens do not fit")
    length = min(best.size * _STEP, limit)
    how, change = _under(search, best.candidate)
    expected = None if best.expected is None or length == limit else min(best.expected * _STEP, limit)
    more = ", the model's own limit" if length == limit else _also(expected)
    text = f"rows of up to {length:,} tokens fit{how}{more}"
    return Answer("length", length, text, f"data.max_length={length}{change}", best.candidate, expected=expected)


def _micro(search: Search) -> Answer:
    def at(way: Resolved, micro: int) -> Candidate:
        batch = {"micro_size": micro, "accumulation": search.asked.accumulation}
        strategy = way.recipe.strategy.model_dump(exclude_unset=True)
        return search.candidate(_variant(search, batch=batch, strategy=strategy))

    best = _largest(search, _ROWS, at)
    if best.candidate is None:
        return Answer("micro", None, "a micro-batch of one row does not fit")
    how, change = _under(search, best.candidate)
    text = f"micro-batches of up to {best.size} rows fit{how}{_also(best.expected)}"
    return Answer("micro", best.size, text, f"batch.micro_size={best.size}{change}", best.candidate,
                  expected=best.expected)  # fmt: skip


def _gpus(search: Search) -> Answer:
    asked = search.asked.recipe.strategy.name
    free = search.start is not None and search.start.any_strategy
    count = 1
    while count <= _DEVICES:
        fitting = [c for c in on_devices(search, count) if c.fits]
        own = [] if free else [c for c in fitting if c.resolved.recipe.strategy.name == asked]
        if best := choose(own or fitting):
            change = _devices_flags(search, best)
            text = f"{count} × {search.device.name} under {best.resolved.recipe.strategy.name}, {_share(best)}"
            return Answer("gpus", count, text, change, best)
        count *= 2
    return Answer("gpus", None, f"{_DEVICES} × {search.device.name} are too few under every strategy")


def _share(found: Candidate) -> str:
    return f"{found.needed / GIB:.1f} of {found.usable / GIB:.1f} GiB each"


def _devices_flags(search: Search, found: Candidate) -> str:
    """What plans ``found``, on its number of devices."""
    machine, name = found.resolved.recipe.machine, found.resolved.recipe.strategy.name
    change = f"--gpus {machine.processes} --nodes {machine.nodes} strategy.name={name}"
    return change + "".join(f" {override}" for override in _axes(search.asked, found.resolved))


def _axes(asked: Resolved, found: Resolved) -> list[str]:
    """Overrides that make the mesh of ``asked`` the mesh of ``found``."""
    own, mesh = asked.recipe.strategy.mesh, found.recipe.strategy.mesh
    if mesh is None:
        return [] if own is None else ["strategy.mesh=null"]
    given = mesh.model_dump(exclude_defaults=True)
    kept = set() if own is None else own.model_fields_set
    return [f"strategy.mesh.{axis}={size}" for axis, size in mesh if axis in given or axis in kept]


def on_devices(search: Search, count: int) -> Iterable[Candidate]:
    """The recipe under every strategy on ``count`` devices, at most 8 a node, with its micro-batch and accumulation:
    rows, layers and experts divided as it says, where as many devices are there, and undivided."""
    per_node, asked = min(count, 8), search.asked.mesh
    micro = search.asked.micro_size
    batch = {"micro_size": micro, "accumulation": search.asked.accumulation}
    if search.start is not None and search.start.any_count and search.asked.global_size % (count * micro) == 0:
        batch = {"micro_size": micro, "global_size": search.asked.global_size}
    own = search.asked.recipe.model_dump(exclude_unset=True)
    machine = own.get("machine", {}) | {"processes": per_node, "nodes": count // per_node}
    for name, strategy in strategies().items():
        if strategy.traits.distributed != (count > 1):
            continue
        ways: list[dict[str, Any]] = [{"name": name}]
        if asked.context * asked.tensor > 1 and count % (asked.context * asked.tensor) == 0:
            ways.append({"name": name, "mesh": asked.divided_alike(count, strategy.traits)})
        if asked.expert > 1 and count % asked.expert == 0:  # refused where the strategy cannot
            rest = count // asked.expert
            ways += [{"name": name, "mesh": {"expert": asked.expert, whole: rest}} for whole in ("shard", "replicate")]
        for way in ways:
            with contextlib.suppress(InputError):  # an adapter that a strategy cannot shard, say
                yield search.candidate(_variant(search, strategy=way, machine=machine, batch=batch))


_COUNTS = (1, 2, 4, 8)
"""Devices of a node, of which a model without a recipe may take any number."""
_AS_CHEAP = 0.02
"""Costs within this fraction are equal, and the fewest devices are the answer."""


def _gpu(search: Search, table: Iterable[Device], prices: dict[str, float]) -> Answer:
    """The cheapest for a token, where prices are known, else the fewest and of those the smallest."""
    several = search.start is not None and search.start.any_count
    if several:
        ways = [way for count in _COUNTS for way in on_devices(search, count)]
    else:
        ways = [search.candidate(search.asked)]
    fitting: list[tuple[Device, Candidate]] = []
    for device in (one for one in table if not one.lacks(search.asked.precision.compute)):
        there = search.on(device)
        moved = [one for way in ways if (one := there.moved(way)).fits]
        for count in sorted({one.resolved.world_size for one in moved}):
            best = choose([one for one in moved if one.resolved.world_size == count])
            fitting += [] if best is None else [(device, best)]
    if not fitting:
        return Answer("gpu", None, "no device of the table is large enough")
    paid = [(device, one, cost(one, prices.get(device.name))) for device, one in fitting]
    priced = [(device, one, step / one.resolved.global_size) for device, one, step in paid if step is not None]
    if priced:
        cheapest = min(row for _, _, row in priced)
        as_cheap = [item for item in priced if item[2] <= cheapest * (1 + _AS_CHEAP)]
        device, best, row = min(as_cheap, key=lambda item: (item[1].resolved.world_size, item[2]))
        step = row * best.resolved.global_size
        token = row / search.planner.length * 1e6
        paid_for = f"{step:.4g} a step, {token:.4g} a million tokens"
        why = f"the cheapest of {len(priced)} ways that fit and have a price, {paid_for}"
        return _of_device(search, device, best, why, several, step)
    device, best = min(fitting, key=lambda item: (item[1].resolved.world_size, item[0].memory, item[0].bf16))
    why = f"the smallest of {len({each.name for each, _ in fitting})} that fit"
    others = []
    for count in (count for count in _COUNTS if count > best.resolved.world_size):
        enough = [item for item in fitting if item[1].resolved.world_size == count]
        if enough and (least := min(enough, key=lambda item: (item[0].memory, item[0].bf16)))[0].memory < device.memory:
            others.append(f"{count} × {least[0].name} under {least[1].resolved.recipe.strategy.name}")
            device_limit = least[0].memory
            fitting = [item for item in fitting if item[0].memory < device_limit]
    more = f"; several smaller ones: {', '.join(others)}" if others else ""
    return _of_device(search, device, best, why + more, several, None)


def _of_device(search: Search, device: Device, found: Candidate, why: str, several: bool, step: float | None) -> Answer:
    count, name = found.resolved.world_size, found.resolved.recipe.strategy.name
    how = f"{count} × {device.name} under {name}" if count > 1 else device.name
    flags = f"--gpu {device.name}" + (f" {_devices_flags(search, found)}" if several and count > 1 else "")
    return Answer("gpu", device.name, f"{how}, {_share(found)}: {why}", flags, found, step)


def _model(search: Search) -> Answer:
    config = search.asked.facts.config
    if config is None or "num_hidden_layers" not in config:
        raise InputError("--fit model: the model's config has no num_hidden_layers to change")
    kept = {key: value for key, value in config.items() if key != "_name_or_path"}
    counted: dict[int, int] = {}

    def at(way: Resolved, layers: int) -> Candidate:
        model = search.asked.recipe.model.model_dump(exclude_unset=True, exclude={"path"})
        strategy = way.recipe.strategy.model_dump(exclude_unset=True)
        varied = _variant(search, model=model | {"config": with_layers(kept, layers)}, strategy=strategy)
        planner = Planner.of(varied, search.planner.length, search.planner.loop, search.planner.images)
        counted[layers] = planner.holdings.elements(whole=True)
        return search.candidate(varied, planner=planner)

    best = _largest(search, _LAYERS, at, config["num_hidden_layers"], same_weights=False)
    layers, found = best.size, best.candidate
    if found is None:
        return Answer("model", None, "one layer of this width does not fit")
    how, strategy = _under(search, found)
    text = f"{layers} layers of this width fit, {counted[layers] / 1e9:.2f} billion weights{how}{_also(best.expected)}"
    varied = with_layers(kept, layers)
    change = " ".join(_override(key, value) for key, value in varied.items() if value != kept[key])
    change = (change or f"model.config.num_hidden_layers={layers}") + strategy
    return Answer("model", layers, text, change, found, expected=best.expected)


def _override(key: str, value: Any) -> str:
    shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
    return f"model.config.{key}={shown}"


def _variant(search: Search, **top: Any) -> Resolved:
    values = search.asked.recipe.model_dump(exclude_unset=True) | top
    varied = resolve(Recipe.model_validate(values), search.asked.source, device=search.asked.device)
    check_loop(search.loop, varied)
    return varied


@dataclass(frozen=True)
class Explanation:
    """Where the bytes of the recipe's own candidate are at its peak, and what more tokens or rows would add."""

    candidate: Candidate
    by_token: float
    """Bytes for each more token of a row."""
    by_row: float
    """Bytes for each more row of a micro-batch."""
    longer: Candidate
    """With rows twice as long."""

    def lines(self) -> list[str]:
        """The explanation as it is printed."""
        one, recipe = self.candidate, self.candidate.resolved.recipe
        terms = sorted(one.breakdown.items(), key=lambda item: -item[1])
        lines = [f"the peak is {one.peak / GIB:.1f} GiB, in the phase «{one.memory.peak_phase}»:"]
        lines += [f"  {name:14s}{size / GIB:8.2f} GiB  {size / one.peak:4.0%}" for name, size in terms if size]
        lines.append(f"1,024 more tokens a row: {1024 * self.by_token / GIB:+.2f} GiB")
        lines.append(f"one more row a micro-batch: {self.by_row / GIB:+.2f} GiB")
        if one.seconds is not None and self.longer.seconds is not None:
            now, then = one.seconds.total, self.longer.seconds.total
            lines.append(f"rows twice as long: {then:.2f} s a step, {then / now / 2:.2f} times the time of a token")
        if not one.fits:
            lines.append(f"why it does not fit: {one.reason}")
            if recipe.activation_checkpointing != "full" and terms[0][0] == "activations":
                lines.append("activations are most of it: activation_checkpointing=full keeps blocks' inputs alone")
        return lines

    def to_json(self) -> dict[str, Any]:
        """The explanation for the command's JSON."""
        one = self.candidate
        return {
            "peak_bytes": one.peak,
            "peak_phase": one.memory.peak_phase,
            "breakdown": one.breakdown,
            "bytes_per_token": round(self.by_token),
            "bytes_per_row": round(self.by_row),
            "seconds_twice_as_long": None if self.longer.seconds is None else self.longer.seconds.total,
            "reason": one.reason,
        }


def explain(search: Search) -> Explanation:
    """Raises InputError where the model cannot be traced."""
    own = search.candidate(search.asked, asked=True)
    length = search.planner.length
    longer = search.candidate(search.asked, planner=search.planner.of_length(2 * length))
    by_token = (longer.peak - own.peak) / length
    micro = search.asked.micro_size
    batch = {"micro_size": 2 * micro, "accumulation": search.asked.accumulation}
    by_row = (search.candidate(_variant(search, batch=batch)).peak - own.peak) / micro
    return Explanation(own, by_token, by_row, longer)


_BY_LAYER = ("no_rope_layers", "layer_rope_theta", "num_key_value_heads_per_layer", "num_attention_heads_per_layer")
"""Lists of numbers with one entry a layer (transformers 5.23). Lists of names (``layer_types``, ``mlp_layer_types``,
``layers_block_type``) have one where they are as long as the model."""
_NUMBERS = ("moe_layers", "mlp_only_layers", "full_attn_idxs", "attn_layer_indices", "cross_attention_layers")
"""Lists of layers' numbers."""


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """``config`` with ``num_hidden_layers`` of ``layers`` and the same pattern of layers, cut off or repeated."""
    before = int(config["num_hidden_layers"])
    changed = dict(config) | {"num_hidden_layers": layers}
    for key, value in config.items():
        if not isinstance(value, list) or not value:
            continue
        if key in _NUMBERS:
            inside = repeated([at in value for at in range(before)], layers)
            changed[key] = [at for at, found in enumerate(inside) if found]
        elif len(value) == before and (key in _BY_LAYER or all(isinstance(one, str) for one in value)):
            changed[key] = repeated(value, layers)
    return changed


def repeated(kinds: Sequence[Any], count: int) -> list[Any]:
    """``count`` entries that continue ``kinds``: by the shortest pattern that they repeat, behind a first part of at
    most half of them which does not (a dense layer in front of experts); otherwise all of them again."""
    first, period = _pattern(kinds)
    return [kinds[at if at < first else first + (at - first) % period] for at in range(count)]


def _pattern(kinds: Sequence[Any]) -> tuple[int, int]:
    total = len(kinds)
    for size in range(1, total):
        for period in range(size, 0, -1):
            first = size - period
            if 2 * first > total or first + 2 * period > total:
                continue
            if all(kinds[at] == kinds[at - period] for at in range(first + period, total)):
                return first, period
    return 0, total
