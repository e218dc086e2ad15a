"""Inverse questions of a plan: the longest rows, largest micro-batch or model, the fewest devices and the cheapest
device that fit, by prediction alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InputError
from toolkit.planning.candidate import Candidate
from toolkit.planning.choice import choose
from toolkit.planning.hardware import GIB, Device
from toolkit.planning.layers import with_layers
from toolkit.planning.loops import check_loop
from toolkit.planning.predict import Planner
from toolkit.planning.search import Search
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

    def to_json(self) -> dict[str, Any]:
        """The answer for the command's JSON; ``cost_per_step`` in the currency of the prices."""
        found = self.candidate
        return {
            "question": self.question,
            "answer": self.value,
            "text": self.text,
            "change": self.change,
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


def largest(fits: Callable[[int], bool], highest: int) -> int:
    """The largest number from 1 to ``highest`` of those that fit, all smaller ones too; 0 if 1 does not."""
    low, high = 0, 1
    while high < highest and fits(high):
        low, high = high, min(2 * high, highest)
    if high == highest and fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _found(search: Search, highest: int, at: Callable[[int], Candidate]) -> tuple[int, Candidate | None]:
    known: dict[int, Candidate] = {}

    def fits(size: int) -> bool:
        known[size] = at(size)
        return known[size].fits

    best = largest(fits, highest)
    return best, known.get(best)


def _length(search: Search) -> Answer:
    made_for = limits_of(search.asked.recipe, search.asked.facts).rows
    limit = 1 << 20 if made_for is None else made_for.tokens

    def at(steps: int) -> Candidate:
        planner = search.planner.of_length(min(steps * _STEP, limit))
        return search.candidate(search.asked, planner=planner)

    steps, found = _found(search, -(-limit // _STEP), at)
    if found is None:
        return Answer("length", None, f"rows of {_STEP} tokens do not fit")
    length = min(steps * _STEP, limit)
    more = ", the model's own limit" if length == limit else ""
    return Answer("length", length, f"rows of up to {length:,} tokens fit{more}", f"data.max_length={length}", found)


def _micro(search: Search) -> Answer:
    def at(micro: int) -> Candidate:
        batch = {"micro_size": micro, "accumulation": search.asked.accumulation}
        return search.candidate(_variant(search, batch=batch))

    micro, found = _found(search, _ROWS, at)
    if found is None:
        return Answer("micro", None, "a micro-batch of one row does not fit")
    return Answer("micro", micro, f"micro-batches of up to {micro} rows fit", f"batch.micro_size={micro}", found)


def _gpus(search: Search) -> Answer:
    asked = search.asked.recipe.strategy.name
    count = 1
    while count <= _DEVICES:
        fitting = [c for c in on_devices(search, count) if c.fits]
        own = [c for c in fitting if c.resolved.recipe.strategy.name == asked]
        if best := choose(own or fitting):
            machine, name = best.resolved.recipe.machine, best.resolved.recipe.strategy.name
            change = f"--gpus {machine.processes} --nodes {machine.nodes} strategy.name={name}"
            change += "".join(f" {override}" for override in _axes(search.asked, best.resolved))
            return Answer("gpus", count, f"{count} × {search.device.name} under {name}", change, best)
        count *= 2
    return Answer("gpus", None, f"{_DEVICES} × {search.device.name} are too few under every strategy")


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
    batch = {"micro_size": search.asked.micro_size, "accumulation": search.asked.accumulation}
    own = search.asked.recipe.model_dump(exclude_unset=True)
    machine = own.get("machine", {}) | {"processes": per_node, "nodes": count // per_node}
    for name, strategy in strategies().items():
        if strategy.traits.distributed != (count > 1):
            continue
        ways: list[dict[str, Any]] = [{"name": name}]
        if asked.context * asked.tensor > 1 and count % (asked.context * asked.tensor) == 0:
            ways.append({"name": name, "mesh": asked.divided_alike(count, bool(strategy.traits.shards))})
        if asked.expert > 1 and count % asked.expert == 0:  # refused where the strategy cannot
            rest = count // asked.expert
            wholes = ("shard", "replicate") if strategy.traits.shards else ("replicate",)
            ways += [{"name": name, "mesh": {"expert": asked.expert, whole: rest}} for whole in wholes]
        for way in ways:
            with contextlib.suppress(InputError):  # an adapter that a strategy cannot shard, say
                yield search.candidate(_variant(search, strategy=way, machine=machine, batch=batch))


def _gpu(search: Search, table: Iterable[Device], prices: dict[str, float]) -> Answer:
    fitting = []
    for device in table:
        one = search.on(device)
        candidate = one.candidate(search.asked)
        if candidate.fits:
            fitting.append((device, candidate, cost(candidate, prices.get(device.name))))
    if not fitting:
        return Answer("gpu", None, "no device of the table is large enough")
    priced = [one for one in fitting if one[2] is not None]
    if priced:
        device, candidate, paid = min(priced, key=lambda one: one[2] or 0.0)
        why = f"cheapest of {len(priced)} that fit and have a price, {paid:.4g} a step"
    else:
        device, candidate, paid = min(fitting, key=lambda one: (one[0].memory, one[0].bf16))
        why = f"smallest of {len(fitting)} that fit"
    return Answer("gpu", device.name, f"{device.name}, the {why}", f"--gpu {device.name}", candidate, paid)


def _model(search: Search) -> Answer:
    config = search.asked.facts.config
    if config is None or "num_hidden_layers" not in config:
        raise InputError("--fit model: the model's config has no num_hidden_layers to change")
    kept = {key: value for key, value in config.items() if key != "_name_or_path"}
    counted: dict[int, int] = {}

    def at(layers: int) -> Candidate:
        model = search.asked.recipe.model.model_dump(exclude_unset=True, exclude={"path"})
        varied = _variant(search, model=model | {"config": with_layers(kept, layers)})
        planner = Planner.of(varied, search.planner.length, search.planner.loop, search.planner.images)
        counted[layers] = planner.holdings.elements(whole=True)
        return search.candidate(varied, planner=planner)

    layers, found = _found(search, _LAYERS, at)
    if found is None:
        return Answer("model", None, "one layer of this width does not fit")
    text = f"{layers} layers of this width fit, {counted[layers] / 1e9:.2f} billion weights"
    varied = with_layers(kept, layers)
    change = " ".join(_override(key, value) for key, value in varied.items() if value != kept[key])
    return Answer("model", layers, text, change or f"model.config.num_hidden_layers={layers}", found)


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
