"""Seconds per optimizer step: compute, memory traffic and collectives, with the overlap of a strategy.

This is a roofline model: each part is its amount divided by a rate. Amounts are counted (floating-point operations and
bytes of every kernel of the traced module, including recomputation; bytes of every collective). Rates are the data
sheet's, times the part that kernels reach: fitted to published runs (toolkit/planning/reached.py), or measured by
`--calibrate`. Those of links are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from toolkit.layouts import layouts_of
from toolkit.optimizers import optimizer_kind
from toolkit.planning.attention_rates import part as attention_part
from toolkit.planning.hardware import Device
from toolkit.planning.reached import reached
from toolkit.planning.segments import OUTSIDE, Segment
from toolkit.planning.stages import Stage, step_length
from toolkit.recipe.mesh import Mesh
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of
from toolkit.strategies.memory.base import BYTES, Holdings
from toolkit.strategies.traffic import Axis, Sent, Traffic

LAUNCH = 10e-6
"""Seconds to issue a kernel from Python, assumed. Eight published runs of litgpt with a few hundred tokens take 35 to
77 µs a kernel, no less for one row than for four (docs/measurements/outside.md)."""


@dataclass(frozen=True)
class Rates:
    """Fractions of the data sheet's rates that are reached, and rates that it does not contain. `--calibrate` replaces
    compute, bandwidth, link and latency, and adds ``own``."""

    compute: float = 0.5
    """Of the bf16 rate: by matrix products, or, if not ``by_kernel``, by all floating-point operations of a step."""
    bandwidth: float = 0.8
    by_kernel: bool = False
    """Whether attention (toolkit/planning/attention_rates.py) and the bytes of other kernels take time of their own."""
    handled: float = 0.0
    """Bytes of memory traffic that a device has with each byte that it sends while it computes: copies, casts, sums,
    and what collectives take from the kernels beside them."""
    launch: float = 0.0
    """Seconds to issue a kernel, assumed: a step does not take less than that for each."""
    spread: tuple[float, float] = (1.0, 1.0)
    """Measured by predicted seconds: from, to."""
    link: float = 0.7
    between_nodes: float = 25.0
    """GB/s per direction and node: of one 200 Gb/s adapter."""
    latency: float = 10e-6
    """Seconds of one collective's start, times log2 of the devices."""
    host_bandwidth: float = 50.0
    """GB/s of host memory that the optimizer's update on the CPU reaches."""
    overlap: bool = True
    """Whether communication overlaps with compute. On a CPU the same cores do both."""
    own: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By strategy the seconds, per micro-batch and per step, that it takes beside arithmetic, update and the bytes of
    its collectives over the link: copies into and out of its buffers, hooks, waiting for each other. Not known but
    by `--calibrate`. They are a device's own, whatever the number of devices."""

    @classmethod
    def on(cls, device: Device, between_nodes: float | None = None) -> Rates:
        """What is known of ``device``. ``between_nodes``: GB/s of a node's link, where it is known."""
        part = reached(device.name)
        rates = cls(part.products, part.bandwidth, True, part.handled, LAUNCH, (part.low, part.high))
        return replace(rates, between_nodes=part.between_nodes if between_nodes is None else between_nodes)


@dataclass(frozen=True)
class Seconds:
    """Parts of one step; ``exposed``: communication that computing does not hide. ``total`` is not their sum.
    ``spread``: by which factors a measured step may differ, from and to."""

    compute: float
    optimizer: float
    communication: float
    exposed: float
    offload: float
    bubble: float = 0.0
    """Time in which the slowest pipeline stage waits for other stages."""
    spread: tuple[float, float] = (1.0, 1.0)

    @property
    def total(self) -> float:
        return self.compute + self.optimizer + self.exposed + self.offload + self.bubble

    @property
    def low(self) -> float:
        return self.total * self.spread[0]

    @property
    def high(self) -> float:
        return self.total * self.spread[1]


def flops(segments: list[Segment], order: list[int]) -> tuple[int, int]:
    """Floating point operations of one micro-batch's forward, and of its backward with what is recomputed."""
    parts = [0, 0]
    for segment in segments:
        times = 1 if segment.block == OUTSIDE else order.count(segment.block)
        parts[segment.backward] += segment.flops * times
    return parts[0], parts[1]


@dataclass(frozen=True)
class Amounts:
    """Seconds of a part of a step: ``products`` and ``moved`` at the data sheet's rates, ``attention`` at those of its
    kernels. ``kernels``: how many."""

    products: float
    attention: float
    moved: float
    kernels: float

    def seconds(self, rates: Rates) -> float:
        """... at the rates that are reached."""
        busy = self.products / rates.compute + self.attention + self.moved / rates.bandwidth
        return max(busy, self.kernels * rates.launch)


def amounts(segments: list[Segment], order: list[int], resolved: Resolved, device: Device) -> tuple[Amounts, Amounts]:
    """Of one micro-batch's forward, and of its backward with what is recomputed.

    A block that is compiled runs what is between its products as one kernel for each: these read what one product has
    written and write what the next one reads.
    """
    parts = [[0.0] * 4, [0.0] * 4]
    rate, bandwidth = device.rate(resolved.precision.compute) * 1e12, device.bandwidth * 1e9
    wide = device.rate("float32") * 1e12
    implementation = resolved.recipe.model.attention
    for segment in segments:
        times = 1 if segment.block == OUTSIDE else order.count(segment.block)
        work, part = segment.work, parts[segment.backward]
        compiled = resolved.recipe.compile and segment.block != OUTSIDE
        part[0] += times * (work.products / rate + work.wide / wide)
        for kernel, count in work.attention.items():
            part[1] += times * count / rate / attention_part(kernel, device.name, implementation)
        part[2] += times * (min(work.moved, work.operands) if compiled else work.moved) / bandwidth
        part[3] += 0 if compiled else times * work.kernels
    return Amounts(*parts[0]), Amounts(*parts[1])


def computing(
    segments: list[Segment], order: list[int], resolved: Resolved, device: Device, rates: Rates
) -> tuple[float, float]:
    """Seconds of one micro-batch's forward, and of its backward with what is recomputed."""
    if rates.by_kernel:
        forward, backward = amounts(segments, order, resolved, device)
        return forward.seconds(rates), backward.seconds(rates)
    speed = device.bf16 * 1e12 * rates.compute * (1.0 if resolved.precision.compute != "float32" else 0.5)
    ahead, back = flops(segments, order)
    return ahead / speed, back / speed


def exchanged(segments: list[Segment], order: list[int], mesh: Mesh) -> list[Sent]:
    """What a rank sends along each axis in one micro-batch: all but its own part of what it exchanges, which of divided
    rows is their tokens, and of divided experts the tokens that have chosen them, of experts that are chosen alike; and
    what it adds up, around the ring twice."""
    times = [1 if segment.block == OUTSIDE else order.count(segment.block) for segment in segments]
    rows, exchanges, parts, sums = (
        sum(count * getattr(segment, name) for count, segment in zip(times, segments, strict=True))
        for name in ("exchanged", "exchanges", "summed", "sums")
    )
    moved = {"exchanged": (rows, exchanges), "summed": (parts, sums)}
    return [
        Sent(layout.passes * moved[layout.moved][0] * (size - 1) / size, moved[layout.moved][1], layout.name)
        for layout, size in layouts_of(mesh)
        if layout.passes
    ]


def step_seconds(
    resolved: Resolved, holdings: Holdings, segments: list[Segment], device: Device, rates: Rates, away: int = 0
) -> Seconds | None:
    """Seconds of one optimizer step; None if the device's rates are not known.

    ``away``: bytes of a micro-batch's activations that go to the host and come back.
    """
    if not device.rate(resolved.precision.compute):
        return None
    forward, backward = computing(segments, list(holdings.order), resolved, device, rates)
    micro_batches = resolved.accumulation
    compute = micro_batches * (forward + backward)
    traffic = strategy_of(resolved).traffic(resolved, holdings)
    wire = Wire(resolved, device, rates)
    own_per_micro, own_at_end = rates.own.get(resolved.recipe.strategy.name, (0.0, 0.0))
    per_micro = own_per_micro + sum(wire.seconds(*sent) for sent in traffic.per_micro)
    at_end = own_at_end + sum(wire.seconds(*sent) for sent in traffic.at_end)
    hidden_under = micro_batches * (forward + backward if traffic.also_forward else backward)
    hideable = micro_batches * per_micro
    own_work = handled_bytes(traffic, micro_batches)
    per_byte = rates.handled / (device.bandwidth * 1e9 * rates.bandwidth)
    exposed = max(0.0, own_work[1] * per_byte, at_end - backward) if traffic.end_overlaps else at_end
    exposed += max(0.0, own_work[0] * per_byte, hideable - hidden_under)
    # Attention waits for its exchanges, and computes between them; so do layers for their sums.
    sent = exchanged(segments, list(holdings.order), resolved.mesh)
    waited = micro_batches * sum(wire.seconds(*one) for one in sent)
    if not rates.overlap:
        exposed = hideable + at_end
    exposed += waited
    share = optimizer_share(resolved, holdings)
    passes = update_passes(resolved)
    offload = 0.0
    if resolved.recipe.strategy.offload == "none":
        optimizer = passes * share / (device.bandwidth * 1e9 * rates.bandwidth)
    else:
        optimizer = passes * share / (rates.host_bandwidth * 1e9)
        offload = 2 * share / (device.pcie * 1e9 * rates.link)
        if resolved.recipe.strategy.offload == "all":
            precision = resolved.precision
            weights = holdings.elements(True) * BYTES[precision.compute] + holdings.frozen_bytes(
                BYTES[precision.frozen]
            )
            offload += 2 * micro_batches * weights / resolved.state_ranks / (device.pcie * 1e9 * rates.link)
    optimizer += _whole_updates(
        resolved, holdings, wire, (device.bf16 or device.rate("float32")) * 1e12 * rates.compute
    )
    if away:  # out under the forward, back under the backward
        pcie = away / (device.pcie * 1e9 * rates.link)
        offload += micro_batches * (max(0.0, pcie - forward) + max(0.0, pcie - backward))
    return Seconds(compute, optimizer, hideable + at_end + waited, exposed, offload, spread=rates.spread)


def staged_seconds(
    resolved: Resolved, stages: Sequence[Stage], segments: list[Segment], device: Device, rates: Rates
) -> Seconds | None:
    """`step_seconds` of a pipeline: the slowest stage's compute, plus the bubble of the 1F1B schedule. Sends and
    receives overlap with the compute of other micro-batches, except where a stage waits for them."""
    parts = [step_seconds(resolved, s.holdings, s.segments(segments), device, rates) for s in stages]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    turns = [computing(s.segments(segments), list(s.holdings.order), resolved, device, rates) for s in stages]
    hop = Wire(resolved, device, rates).seconds(stages[0].hidden, 1, "pipeline")
    micros = resolved.accumulation
    took = step_length([ahead for ahead, _ in turns], [back for _, back in turns], hop, micros)
    busy = max(part.compute for part in known)
    return Seconds(
        max(part.compute for part in known),
        max(part.optimizer for part in known),
        max(part.communication + 2 * micros * hop for part in known),
        max(part.exposed for part in known),
        max(part.offload for part in known),
        took - busy,
        rates.spread,
    )


def handled_bytes(traffic: Traffic, micro_batches: int) -> tuple[float, float]:
    """Bytes that a device sends while it computes, in a step: with each micro-batch, and at the end."""
    at_end = sum(Sent(*one).size for one in traffic.at_end) if traffic.end_overlaps else 0.0
    return micro_batches * sum(Sent(*one).size for one in traffic.per_micro), at_end


def optimizer_share(resolved: Resolved, holdings: Holdings) -> float:
    """Bytes of the weights that one device updates, in the trained dtype."""
    shares = holdings.shares(resolved) if "optimizer" in resolved.traits.shards else [(holdings, 1)]
    return sum(own.elements(True) / ranks for own, ranks in shares) * BYTES[resolved.precision.trainable]


def update_passes(resolved: Resolved) -> float:
    """How often a step reads or writes a tensor of the weights' size: its optimizer's passes, and with clipping the
    gradients once for their norm and twice to scale them. Moments of 8 bits, each read and written once, are a byte an
    element."""
    section = resolved.recipe.optimizer
    kind = optimizer_kind(section.name)
    passes: float = kind.passes
    if section.kernel == "foreach" and kind.foreach_passes:
        passes = kind.foreach_passes
    elif kind.packed:
        passes = kind.passes - 4 + 4 / BYTES[resolved.precision.trainable]
    return passes + (3 if section.max_grad_norm else 0)


def _whole_updates(resolved: Resolved, holdings: Holdings, wire: Wire, speed: float) -> float:
    """Seconds of updates that need whole tensors: their products, on every rank, and what they gather."""
    kind, section = optimizer_kind(resolved.recipe.optimizer.name), resolved.recipe.optimizer
    trained = [(w, count) for unit, count in holdings.units() for w in unit if w.trains]
    seconds = sum(count * kind.flops(section, w.shape, w.matrix) for w, count in trained) / speed
    if "weights" not in resolved.traits.shards:
        return seconds
    size = BYTES[resolved.precision.trainable] * (resolved.mesh.shard - 1) / resolved.mesh.shard
    gathered = [(kind.gathers(w.matrix) * w.numel, kind.gathers(w.matrix), count) for w, count in trained]
    axis: Axis = "shard" if resolved.mesh.hybrid else "all"
    return seconds + sum(count * wire.seconds(elements * size, calls, axis) for elements, calls, count in gathered)


class Wire:
    """How long bytes take: a ring goes at the speed of its slowest hop, the one between nodes where it crosses them.
    Rings that cross at once share a node's link: of all ranks, or of consecutive ones, there is one in a node; of ranks
    that hold copies as many as the node has parts."""

    def __init__(self, resolved: Resolved, device: Device, rates: Rates) -> None:
        machine, mesh = resolved.recipe.machine, resolved.mesh
        sizes = mesh.axes | {
            "all": mesh.stage_size // mesh.columns,
            "shard": mesh.shard,
            "replicate": mesh.replicate,
            "pipeline": 2,
            "copies": mesh.expert_shards,
        }
        node = machine.processes // mesh.columns
        beyond = mesh.stage_size > machine.processes  # a stage's ranks are consecutive
        # Whether rings cross, other axes' do not, and how many at once: of every place within a layer there is one;
        # every rank of a stage has a neighbour of its own.
        crosses = {
            "all": (beyond, mesh.columns),
            "shard": (mesh.shard > node, mesh.columns),
            "replicate": (beyond, mesh.columns * min(mesh.shard, node)),
            "pipeline": (machine.nodes > 1, min(mesh.stage_size, machine.processes)),
            "copies": (mesh.shard > node, mesh.expert),
        }
        within, between = device.link * rates.link, rates.between_nodes * rates.link
        slowest = {axis: min(within, between / rings) for axis, (across, rings) in crosses.items() if across}
        self.speeds = {axis: 1e9 * slowest.get(axis, within) for axis in sizes}
        self.latencies = {axis: rates.latency * math.log2(max(2, size)) for axis, size in sizes.items()}

    def seconds(self, size: float, collectives: float, axis: Axis = "all") -> float:
        return 0.0 if size == 0 else size / self.speeds[axis] + collectives * self.latencies[axis]
