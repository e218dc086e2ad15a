"""All candidates that give the same result as the recipe, on one device."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from toolkit.errors import InputError
from toolkit.planning.allocator import Parts, fixed, process_interval, workspaces
from toolkit.planning.candidate import WHOLE, Candidate
from toolkit.planning.floors import Floors
from toolkit.planning.hardware import Device
from toolkit.planning.images import Images
from toolkit.planning.loops import check_loop, loop_named
from toolkit.planning.memory import Memory
from toolkit.planning.predict import Planner
from toolkit.planning.stages import Stage
from toolkit.planning.starting import Start
from toolkit.planning.storage import Storage
from toolkit.planning.time import Rates, Seconds, exchanged, staged_seconds, step_seconds
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.recipe.strategy_names import own_keys
from toolkit.recipe.traits import Traits
from toolkit.rooms import check_whole, host_options, host_settings, whole_keys
from toolkit.strategies import resolve, strategies, strategy_of
from toolkit.strategies.layouts.expert.spec import FAMILIES, expert_count
from toolkit.strategies.memory.base import Holdings

_KEPT = {"sync": "last", "reshard_after_forward": False}
"""Weights are gathered, and gradients summed over the ranks, once per step: the least traffic that sharding allows."""


class Search:
    """Candidates of one recipe on one device."""

    def __init__(
        self,
        asked: Resolved,
        device: Device,
        headroom: float | None,
        rates: Rates,
        loop: str = "toolkit",
        images: Images | None = None,
        start: Start | None = None,
    ) -> None:
        """``headroom``: the part of the memory that is kept free; None: 5 % of a host's, nothing of a GPU's, since what
        nvidia-smi will show decides there. ``start``: where ``asked`` is from, which of its values nobody asked for,
        and notes for the screen."""
        self.start = start
        self.asked = asked
        self._tf32 = loop_named(loop).tf32
        self.device = device.in_tf32() if self._tf32 else device
        self.rates = rates
        self.headroom = headroom = (0.05 if asked.device == "cpu" else 0.0) if headroom is None else headroom
        self.usable = int(device.bytes * (1 - headroom))
        self.loop = loop
        self.planner = Planner.of(asked, asked.recipe.data.max_length, loop, images)

    def notes(self) -> list[str]:
        """What the plan is of, in words, where the recipe does not say it."""
        return [*(() if self.start is None else self.start.notes), *self.planner.notes()]

    def on(self, device: Device) -> Search:
        """The same search on another device, with the traces of this one."""
        other = copy.copy(self)
        other.device, other.usable = device.in_tf32() if self._tf32 else device, int(device.bytes * (1 - self.headroom))
        other.rates = Rates.on(device, self.rates.between_nodes)
        return other

    def candidate(self, resolved: Resolved, asked: bool = False, planner: Planner | None = None) -> Candidate:
        """Predict one. Raises InputError if the model cannot be traced."""
        planner = (planner or self.planner).for_layers_of(resolved)
        if (reason := _why_not_adapted(resolved, planner.holdings)) is not None:
            raise InputError(f"{resolved.source}: strategy.name: {reason}")
        check_whole(resolved, len(planner.holdings.order))
        segments, stages = planner.segments_of(resolved), planner.by_stage(resolved)
        away, holdings = planner.away(resolved), planner.holdings
        if stages:
            largest, memory = max(stages, key=lambda stage: stage[1].peak)
            holdings = largest.holdings
        else:
            memory = planner.memory(resolved)
        seconds = self._seconds(resolved, planner, [stage for stage, _ in stages])
        held = strategy_of(resolved).memory_model()(holdings, resolved)
        reserve = self._reserve(resolved)
        storage = Storage.of(held)
        if stages:
            whole = strategy_of(resolved).memory_model()(planner.holdings, resolved)
            storage = Storage.of_stages(whole, [stage.held(resolved) for stage, _ in stages])
        host = (sum(held.host.values()) + away) * resolved.recipe.machine.processes
        own, shared = held.host_loading()
        loading = own * resolved.recipe.machine.processes + shared
        sent = strategy_of(resolved).traffic(resolved, holdings).by_axis(resolved.accumulation)
        for one in exchanged(segments, list(holdings.order), resolved.mesh):
            if one.size:
                sent |= {one.axis: resolved.accumulation * one.size}
        if stages:
            sent["pipeline"] = max(stage.sent(resolved.accumulation) for stage, _ in stages)
        parts = self._parts(resolved, memory)
        interval = None if parts is None else process_interval(parts, self.device.bytes)
        return Candidate(
            resolved, memory, reserve, host, seconds, self.device.bytes, self.usable, asked, loading,
            storage,
            sent, interval, self.loop, parts, [(stage.blocks, memory.peak + reserve) for stage, memory in stages],
        )  # fmt: skip

    def _reserve(self, resolved: Resolved) -> int:
        return fixed(self.device.name, resolved.world_size) if resolved.device == "cuda" else 0

    def _parts(self, resolved: Resolved, memory: Memory) -> Parts | None:
        if resolved.device != "cuda":
            return None
        sharded, loop = "weights" in resolved.traits.shards, self.planner.loop
        return Parts.of(memory, self.device.name, resolved.world_size, sharded, loop.holds_outputs)

    def _seconds(self, resolved: Resolved, planner: Planner, stages: list[Stage]) -> Seconds | None:
        segments = planner.segments_of(resolved)
        if stages:
            return staged_seconds(resolved, stages, segments, self.device, self.rates)
        away = planner.away(resolved)
        return step_seconds(resolved, planner.holdings, segments, self.device, self.rates, away)

    def moved(self, candidate: Candidate) -> Candidate:
        """``candidate``, of this planner's rows, on this search's device, without a time where it does not fit."""
        parts = self._parts(candidate.resolved, candidate.memory)
        interval = None if parts is None else process_interval(parts, self.device.bytes)
        reserve = self._reserve(candidate.resolved)
        there = replace(candidate, capacity=self.device.bytes, usable=self.usable, interval=interval, seconds=None,
                        parts=parts, reserve=reserve)  # fmt: skip
        if not there.fits:
            return there
        planner = self.planner.for_layers_of(candidate.resolved)
        stages = [stage for stage, _ in planner.by_stage(candidate.resolved)]
        return replace(there, seconds=self._seconds(candidate.resolved, planner, stages))

    def all(self, every: bool = False) -> list[Candidate]:
        """The recipe's own candidate, then every other strategy, offload, checkpointing and micro-batch size.

        Unless ``every``, candidates that cannot win are left out: more recomputation or offload than needed to fit,
        micro-batches larger than one that does not fit, and, if weights and optimizer alone are too large, all but the
        smallest, which shows by how much.
        """
        found = [self.candidate(self.asked, asked=True)]
        seen = {_key(self.asked)}
        enough: set[Any] = set()
        too_large: dict[Any, int] = {}
        floors = Floors()
        floors.see(found[0])
        smallest = min(self._sizes(), default=1)
        for variant in self._variants():
            name, offload, kind, micro, *_ = key = _key(variant)
            way = variant.recipe.strategy
            kept = way.sync, way.reshard_after_forward, variant.whole_blocks, variant.mesh.expert
            cannot_win = (name, micro, kept) in enough or micro > too_large.get((name, offload, kind, kept), micro)
            if key in seen or (cannot_win and not every):
                continue
            least_of_its_kind = kind == "full" and micro == smallest
            if not every and not least_of_its_kind and self.least(variant, floors.of(variant)) > self.usable:
                continue
            seen.add(key)
            found.append(self.candidate(variant))
            floors.see(found[-1])
            if found[-1].fits:
                enough.add((name, micro, kept))
            else:
                too_large[name, offload, kind, kept] = micro
        if self.loop != "toolkit":
            return found  # other loops have neither
        if not found[0].fits:
            found += self._fused(found)
        if not any(c.fits for c in found):
            found += self._away(found)
        return found + self._whole(found)

    def _whole(self, found: list[Candidate]) -> list[Candidate]:
        """The fastest that fits of each strategy that shards frozen weights, with those of as many blocks whole as fit,
        where such a prediction has been measured. Nothing where a strategy fits that has all weights whole."""
        if any(c.fits and "weights" not in c.resolved.traits.shards for c in found):
            return []
        fastest: dict[str, Candidate] = {}
        for c in found:
            recipe = c.resolved.recipe
            able = c.fits and c.seconds is not None and recipe.strategy.offload != "all"
            if able and WHOLE in (c.resolved.traits.validated or ()) and not c.resolved.whole_blocks:
                name = recipe.strategy.name
                fastest[name] = min(c, fastest.get(name, c), key=_total)
        return [more for c in fastest.values() for key in whole_keys()
                if (more := self._most_whole(c, key)) is not None]  # fmt: skip

    def _most_whole(self, candidate: Candidate, key: str) -> Candidate | None:
        """This candidate with the frozen weights of the most blocks whole that fit; None if not those of one.
        ``key``: of the section `strategy`, which says how many."""
        recipe = candidate.resolved.recipe
        top = {
            "activation_checkpointing": recipe.activation_checkpointing,
            "loss": recipe.loss,
            **host_settings(recipe),
        }
        tried: dict[int, Candidate] = {}

        def over(blocks: int) -> float:
            way = recipe.strategy.model_dump(exclude_unset=True) | {key: blocks}
            variant = self.variant(way, top, candidate.resolved.micro_size)
            if variant is None:  # nothing is frozen, or the mesh divides the blocks
                return math.inf
            tried[blocks] = self.candidate(variant)
            return tried[blocks].needed - tried[blocks].usable

        every = len(self.planner.holdings.order)
        if over(every) <= 0:
            return tried[every]
        return tried.get(largest(over, every - 1, every // 2)) if tried else None

    def _fused(self, found: list[Candidate]) -> list[Candidate]:
        """The asked way, and where nothing fits every other, without its logits: where it may then fit."""
        tried = [found[0]] if any(c.fits for c in found) else found
        more = []
        for c in tried:
            recipe = c.resolved.recipe
            if recipe.loss == "fused" or c.peak - c.breakdown["loss"] > self.usable:
                continue
            top = {"activation_checkpointing": recipe.activation_checkpointing, "loss": "fused"}
            variant = self.variant(recipe.strategy.model_dump(exclude_unset=True), top, c.resolved.micro_size)
            with contextlib.suppress(InputError):  # an adapter on the head, say
                if variant is not None:
                    more.append(self.candidate(variant))
        return more

    def _away(self, found: list[Candidate]) -> list[Candidate]:
        """Those that keep blocks' inputs alone, with these in host memory: where they may then fit."""
        more = []
        for c in found:
            recipe = c.resolved.recipe
            if (
                recipe.activation_checkpointing != "full"
                or c.peak - self.planner.for_layers_of(c.resolved).held(c.resolved) > self.usable
            ):
                continue
            for option in host_options():
                top = {"activation_checkpointing": "full", "loss": recipe.loss, option.key: option.host_value}
                variant = self.variant(recipe.strategy.model_dump(exclude_unset=True), top, c.resolved.micro_size)
                if variant is not None:
                    more.append(self.candidate(variant))
        return more

    def least(self, resolved: Resolved, live: int = 0) -> int:
        """Bytes that ``resolved`` needs at least: of what stays for the whole step, and of ``live`` bytes of
        activations and loss. Traces nothing."""
        least = 0
        sharded = "weights" in resolved.traits.shards
        for holdings in self.planner.for_layers_of(resolved).holdings_of(resolved):
            held = strategy_of(resolved).memory_model()(holdings, resolved)
            stays = sum(held.resident.values()) + live
            least = max(least, stays, held.loading() if held.overlap else 0)
        if resolved.device != "cuda":
            return least + self._reserve(resolved)
        tensors = least + workspaces(self.device.name)
        beyond = fixed(self.device.name, resolved.world_size) - workspaces(self.device.name)
        return max(int(tensors), int(Parts(tensors, live, 0.0, 0.0, beyond, sharded).most()))

    def shorter(self, length: int, rows: int) -> Iterator[tuple[str, Candidate]]:
        """The asked way with shorter rows; packed, first with so many more of them that a step has as many tokens."""
        recipe, asked = self.asked.recipe, self.asked
        planner = self.planner.of_length(length)
        setting = f"data.max_length={length}"
        if recipe.data.packing:
            micro = asked.micro_size * rows
            batch = {"micro_size": micro, "accumulation": asked.accumulation}
            values = recipe.model_dump(exclude_unset=True) | {"batch": batch}
            more = resolve(Recipe.model_validate(values), asked.source, device=asked.device)
            yield f"{setting} batch.micro_size={micro}", self.candidate(more, planner=planner)
        yield setting, self.candidate(asked, planner=planner)

    def training(self, **top: Any) -> Search | None:
        """The recipe with another adapter or optimizer; None if that is not possible."""
        values = self.asked.recipe.model_dump(exclude_unset=True) | top
        try:
            asked = resolve(Recipe.model_validate(values), self.asked.source, device=self.asked.device)
            check_loop(self.loop, asked)
            return Search(asked, self.device, self.headroom, self.rates, self.loop, self.planner.images)
        except InputError:
            return None

    def _sizes(self) -> list[int]:
        per_rank = self.asked.global_size // self.asked.data_size
        return [size for size in (1, 2, 4, 8, 16, 32) if per_rank % size == 0]

    def _variants(self) -> Iterator[Resolved]:
        sizes = self._sizes()
        for name, strategy in strategies().items():
            if strategy.traits.distributed != (self.asked.world_size > 1):
                continue
            if _adapts_experts(self.planner.holdings) and strategy.traits.why_no_expert_adapters:
                continue
            ways: list[dict[str, Any]] = [{"name": name, "offload": offload} for offload in strategy.offloads]
            if name == self.asked.recipe.strategy.name:
                if self.asked.mesh.hybrid:
                    # All ranks divide the state: the least memory.
                    mesh = self.asked.mesh.divided_alike(self.asked.world_size, strategy.traits)
                    ways += [way | {"mesh": mesh} for way in ways]
                asked = self.asked.recipe.strategy
                if not asked.reshard_after_forward:
                    ways += [way | {"sync": None, "reshard_after_forward": True} for way in ways]
                elif asked.sync is not None:
                    ways += [way | {"sync": None} for way in ways]
                if self.asked.whole_blocks:
                    ways += [way | dict.fromkeys(whole_keys()) for way in ways]
            if strategy.traits.other_sync and "weights" in strategy.traits.shards:
                ways += [way | _KEPT for way in ways if way["offload"] == "none"]
            if (size := self._expert_ranks(name, strategy.traits)) > 1:
                ways += self._possible({"name": name, "mesh": self._expert_mesh(size), "sync": None})
            for way in ways:
                for kind in ("none", "selective", "full"):
                    for micro in sizes:
                        variant = self.variant(way, {"activation_checkpointing": kind}, micro)
                        if variant is not None:
                            yield variant

    def _expert_ranks(self, name: str, traits: Traits) -> int:
        """Into how many parts to divide the experts of a mixture under another strategy: as many as the recipe's mesh
        has; without a mesh the most that a node's processes allow, up to 8. 1 where the strategy cannot, or the model
        has none that can be divided."""
        recipe = self.asked.recipe
        if "expert" not in traits.layouts or self.asked.facts.model_type not in FAMILIES:
            return 1
        if recipe.strategy.mesh is not None:
            return 1 if name == recipe.strategy.name else self.asked.mesh.expert
        count = self._experts()
        return max(size for size in (1, 2, 4, 8) if recipe.machine.processes % size == count % size == 0)

    def _experts(self) -> int:
        return expert_count(self.asked.facts) or 1

    def _expert_mesh(self, size: int) -> dict[str, int]:
        """``size`` ranks that divide experts, each rank's sharded over as many as can divide them, and copies."""
        rest = self.asked.world_size // size
        shard = math.gcd(self._experts() // size, rest)
        return {"expert": size, "shard": shard, "replicate": rest // shard}

    def _possible(self, way: dict[str, Any]) -> list[dict[str, Any]]:
        """``way``, or none where the model cannot be divided as it says, which is known once it is built: a weight of
        its experts that its plan does not name, an adapter on their biases."""
        variant = self.variant(way, {}, min(self._sizes(), default=1))
        if variant is None:
            return []
        try:
            self.planner.for_layers_of(variant)
        except InputError:
            return []
        return [way]

    def variant(self, strategy: dict[str, Any], top: dict[str, Any], micro: int) -> Resolved | None:
        """The recipe with other values and the same global batch; None if it contradicts itself."""
        recipe = self.asked.recipe
        values = recipe.model_dump(exclude_unset=True)
        own, other = values.get("strategy", {}), strategy.get("name", recipe.strategy.name) != recipe.strategy.name
        left_out = (*own_keys(), "reshard_after_forward") if other else ()
        values["strategy"] = {key: value for key, value in own.items() if key not in left_out} | strategy
        if other:
            traits = strategies()[strategy["name"]].traits
            if (mesh := self.asked.mesh.divided_alike(self.asked.world_size, traits)) is not None:
                values["strategy"]["mesh"] = mesh
        values["batch"] = {"micro_size": micro, "global_size": self.asked.global_size}
        try:
            varied = resolve(Recipe.model_validate(values | top), self.asked.source, device=self.asked.device)
            check_loop(self.loop, varied)
            return varied
        except InputError:
            return None


def _total(candidate: Candidate) -> float:
    return math.inf if candidate.seconds is None else candidate.seconds.total


def _key(resolved: Resolved) -> tuple[Any, ...]:
    recipe = resolved.recipe
    return (
        recipe.strategy.name,
        recipe.strategy.offload,
        recipe.activation_checkpointing,
        resolved.micro_size,
        resolved.accumulation,
        recipe.strategy.mesh,
        recipe.strategy.sync,
        recipe.strategy.reshard_after_forward,
        resolved.whole_blocks,
        recipe.loss,
        *host_settings(recipe).values(),
    )


def _why_not_adapted(resolved: Resolved, holdings: Holdings) -> str | None:
    reason = resolved.traits.why_no_expert_adapters
    return reason if reason is not None and _adapts_experts(holdings) else None


def _adapts_experts(holdings: Holdings) -> bool:
    """Whether an adapter is on a weight that all experts of a layer share."""
    return any(len(w.shape) == 3 and ".base_layer." in w.name for w in holdings.by_name.values())


_HALVED = 6
"""Of so many tries one halves what is open."""


def largest(over: Callable[[int], float], highest: int, first: int = 1) -> int:
    """The largest size from 1 to ``highest`` that fits, ``over`` saying by how much each is too large (0 or less: it
    fits), all smaller ones too; 0 if 1 does not. Bytes grow about in proportion, so a line through the two sizes next
    to the answer says where to look; where that takes long, the rest is halved. ``first``: where to begin."""
    low, high = 0, highest + 1
    known: dict[int, float] = {}
    size = max(1, min(first, highest))
    while high - low > 1:
        known[size] = over(size)
        low, high = (size, high) if known[size] <= 0 else (low, size)
        size = (low + high) // 2 if len(known) % _HALVED == 0 else _where_line_ends(known, low, high, size)
        size = min(max(size, low + 1), high - 1)
    return low


def _where_line_ends(known: dict[int, float], low: int, high: int, last: int) -> int:
    """The largest size that fits by the two known ones nearest to the answer; with one, twice or half of it."""
    if len(known) == 1:
        return 2 * last if low == last else last // 2
    one, two = sorted(sorted(known, key=lambda size: min(abs(size - low), abs(size - high)))[:2])
    slope = (known[two] - known[one]) / (two - one)
    return math.floor(one - known[one] / slope) if slope > 0 else (low + high) // 2
