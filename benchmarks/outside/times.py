"""Seconds of a step, predicted with the rates of the plan, and those of rows with tokens per second; the rates are
fitted again on one half of these."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from benchmarks.outside import fms, foundry, fsdp_qlora, peft, titan, torchtune
from benchmarks.outside.allocator import in_fitted_half
from benchmarks.outside.rows import described
from toolkit.planning.hardware import Device, devices
from toolkit.planning.predict import Planner
from toolkit.planning.reached import reached
from toolkit.planning.time import Rates, amounts, handled_bytes, optimizer_share, step_seconds, update_passes
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of

SOURCES: dict[str, Any] = {module.SOURCE: module for module in (fms, foundry, fsdp_qlora, peft, torchtune)}
SOURCES |= dict.fromkeys(titan.SOURCES, titan)
"""What a row ran: ``planned``, a context with its planner and recipe, and ``why_not_timed``, empty if it is
predicted."""
DEVICES = {"A100": "a100-80gb", "H100": "h100", "L40S": "l40s", "RTX 3090": "rtx3090", "RTX 4090": "rtx4090"}
"""Of toolkit/planning/hardware.py, by a part of the row's ``gpu``."""
FITTED = ("a100-80gb", "h100")
"""Devices with enough rows to fit to; what is known of the first is taken for all others."""
UNKNOWN = {"Lightning-AI/litgpt": "lengths of the timed batches are not known: the longest sample is in the first"}
APART = 0.03
"""Two measured rows that differ by less have no order."""


@dataclass(frozen=True)
class Timed:
    """One row. ``measured``: seconds of a step. ``predicted``: with the plan's rates; ``low`` and ``high``: its
    interval. ``parts``: seconds of products, attention and other kernels at the data sheet's rates, and of a byte of
    memory traffic for each byte that is sent; ``rest``: predicted seconds beside them (links that are waited for,
    offload). ``setting``: what rows must share to be compared with each other."""

    id: str
    what: str
    source: str
    device: str
    measured: float
    predicted: float
    low: float
    high: float
    parts: tuple[float, float, float, float]
    rest: float
    setting: tuple[Any, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def fitted(self) -> bool:
        """Whether it is of the half that rates are fitted to."""
        return self.device in FITTED and in_fitted_half(self.id)


def device_of(row: dict[str, Any]) -> Device | None:
    """The device of a row; None if the table has none of that name."""
    name = next((name for part, name in DEVICES.items() if part in str(row.get("gpu"))), None)
    return None if name is None else devices()[name]


def has_time(row: dict[str, Any]) -> bool:
    """Whether a row says how long a step took."""
    return any(key in row for key in ("tokens_per_second_per_gpu", "step_time_s", "samples_per_second"))


def why_not_timed(row: dict[str, Any]) -> str:
    """Why no time is predicted for a row that has one; empty if it is."""
    if row["source_repo"] not in SOURCES:
        return UNKNOWN.get(row["source_repo"], "no complete configuration")
    if device_of(row) is None:
        return "a device that is not in the table"
    reason: str = SOURCES[row["source_repo"]].why_not_timed(row)
    if not reason and row["quality"] != "exact":
        return "a part of its configuration is inferred"
    return reason


def timed(row: dict[str, Any]) -> Timed:
    """A row that ``why_not_timed`` has nothing against."""
    source, device = SOURCES[row["source_repo"]], device_of(row)
    assert device is not None
    device = source.device(row, device) if hasattr(source, "device") else device
    rates = Rates.on(device)
    with source.planned(row) as (planner, resolved):
        resolved = planner.loop.trained(resolved)
        segments = source.segments(planner, resolved) if hasattr(source, "segments") else planner.segments_of(resolved)
    holdings = planner.skeleton.holdings
    found = step_seconds(resolved, holdings, segments, device, rates)
    assert found is not None
    forward, backward = amounts(segments, list(holdings.order), resolved, device)
    times = resolved.accumulation
    sent = sum(handled_bytes(strategy_of(resolved).traffic(resolved, holdings), times))
    updating = 0.0
    if resolved.recipe.strategy.offload == "none":
        updating = update_passes(resolved) * optimizer_share(resolved, holdings) / (device.bandwidth * 1e9)
    parts = (
        times * (forward.products + backward.products),
        times * (forward.attention + backward.attention),
        times * (forward.moved + backward.moved) + updating,
        sent / (device.bandwidth * 1e9),
    )
    busy = found.compute + (found.optimizer if updating else 0.0) + rates.handled * parts[3] / rates.bandwidth
    setting = (row["source_repo"], device.name, row["model"], row["micro_batch"], row["seq_len"], row["grad_accum"])
    return Timed(
        row["id"], described(row), row["source_repo"], device.name, seconds_of(row, planner, resolved), found.total,
        found.low, found.high, parts, max(0.0, found.total - busy), setting,
    )  # fmt: skip


def seconds_of(row: dict[str, Any], planner: Planner, resolved: Resolved) -> float:
    """Seconds of one optimizer step as the source measured it."""
    if "tokens_per_second_per_gpu" not in row or row["source_repo"] == peft.SOURCE:  # PEFT's tokens are without padding
        return float(row["step_time_s"])
    tokens = planner.length * resolved.micro_size * resolved.accumulation
    return float(tokens / row["tokens_per_second_per_gpu"])


Parts = tuple[float, float, float, float]


def fit(rows: Sequence[Timed], known: Parts | None = None) -> Parts:
    """Parts of the data sheet's rates that products, attention and memory reach, and bytes of memory traffic with each
    byte that is sent: least squares of the relative errors over ``rows``, each of which counts the same. ``known``: of
    another device, whose memory and traffic are taken."""
    import torch

    columns = 4 if known is None else 2
    table = torch.tensor([[p / row.measured for p in row.parts] for row in rows], dtype=torch.float64)
    wanted = torch.tensor([1 - row.rest / row.measured for row in rows], dtype=torch.float64)
    if known is not None:
        wanted = wanted - table[:, 2:] @ torch.tensor(_costs(known)[2:], dtype=torch.float64)
    solved = torch.linalg.lstsq(table[:, :columns], wanted[:, None]).solution[:, 0].tolist()
    if known is not None:
        return 1 / solved[0], 1 / solved[1], known[2], known[3]
    return 1 / solved[0], 1 / solved[1], 1 / solved[2], solved[3] / solved[2]


def _costs(parts: Parts) -> tuple[float, ...]:
    """Seconds for each of a row's ``parts``."""
    return 1 / parts[0], 1 / parts[1], 1 / parts[2], parts[3] / parts[2]


def spread(rows: Sequence[Timed], parts: Parts) -> tuple[float, float]:
    """Measured by predicted: a tenth and nine tenths of ``rows``, in which every source counts the same; the least and
    the most with less than ten rows."""
    factors = []
    for row in rows:
        predicted = row.rest + sum(one * cost for one, cost in zip(row.parts, _costs(parts), strict=True))
        weight = 1 / sum(other.source == row.source for other in rows)
        factors.append((row.measured / predicted, weight))
    factors.sort()
    if len(factors) < 10:
        return factors[0][0], factors[-1][0]
    total, done = sum(weight for _, weight in factors), 0.0
    ends: list[float] = []
    for factor, weight in factors:
        done += weight / total
        if (len(ends) < 1 and done >= 0.1) or (len(ends) == 1 and done >= 0.9):
            ends.append(factor)
    return ends[0], ends[1]


def order(rows: Sequence[Timed]) -> tuple[int, int]:
    """Of all pairs of one setting whose measured times differ, how many are predicted in that order, and all."""
    right = total = 0
    for one, other in pairs(rows):
        total += 1
        right += (one.predicted < other.predicted) == (one.measured < other.measured)
    return right, total


def pairs(rows: Sequence[Timed]) -> Iterator[tuple[Timed, Timed]]:
    """Two rows of one setting that differ in what was done: method, kernels, devices, checkpointing."""
    for one, other in combinations(rows, 2):
        apart = abs(one.measured - other.measured) > APART * max(one.measured, other.measured)
        if one.setting == other.setting and apart:
            yield one, other


def table(rows: list[dict[str, Any]], say: Callable[[str], None] = lambda text: None) -> list[str]:
    """The section on time."""
    having = [row for row in rows if has_time(row)]
    found = []
    for row in having:
        if not why_not_timed(row):
            found.append(timed(row))
            say(f"{row['id']} {found[-1].measured:.3f} s, predicted {found[-1].predicted:.3f} s")
    lines = ["## Time", "", *_fits(found), "", *_by_source(found), ""]
    lines += ["| row | configuration | device | measured s | predicted s | interval s | error | fitted to |",
              "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    lines += [
        f"| {r.id} | {r.what} | {r.device} | {r.measured:.3f} | {r.predicted:.3f} | {r.low:.2f} to {r.high:.2f} | "
        f"{r.error:+.0%} | {'yes' if r.fitted else 'no'} |"
        for r in found
    ]
    lines += ["", "Rows with a time that are left out:", "", "| source | because | rows |", "| --- | --- | --- |"]
    reasons: dict[tuple[str, str], int] = {}
    for row in having:
        if reason := why_not_timed(row):
            reasons[row["source_repo"], reason] = reasons.get((row["source_repo"], reason), 0) + 1
    return lines + [f"| {source} | {why} | {count} |" for (source, why), count in sorted(reasons.items())]


def _fits(found: list[Timed]) -> list[str]:
    lines = ["| device | fitted to | products | attention | memory | traffic of a sent byte | measured by predicted |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    known = None
    for device in FITTED:
        half = [row for row in found if row.device == device and row.fitted]
        parts = fit(half, known)
        known = known or parts
        lines.append(_fit_line(device, str(len(half)), parts, spread(half, parts)))
        lines.append(_fit_line(f"{device} in the plan", "", *_of_plan(device)))
    others = [row for row in found if row.device not in FITTED and in_fitted_half(row.id)]
    assert known is not None
    lines.append(_fit_line("others", f"{len(others)} (the interval alone)", known, spread(others, known)))
    return [*lines, _fit_line("others in the plan", "", *_of_plan(""))]


def _of_plan(device: str) -> tuple[Parts, tuple[float, float]]:
    own = reached(device)
    return (own.products, own.attention, own.bandwidth, own.handled), (own.low, own.high)


def _fit_line(name: str, rows: str, parts: Parts, ends: tuple[float, float]) -> str:
    numbers = f"{parts[0]:.2f} | {parts[1]:.2f} | {parts[2]:.2f} | {parts[3]:.1f} | {ends[0]:.2f} to {ends[1]:.2f}"
    return f"| {name} | {rows} | {numbers} |"


def _by_source(found: list[Timed]) -> list[str]:
    lines = ["| source | device | rows not fitted to | median error | within 15% | from | to | in the interval |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    keys = dict.fromkeys((row.source, row.device) for row in found)
    for source, device in keys:
        rows = [row for row in found if (row.source, row.device) == (source, device) and not row.fitted]
        if rows:
            lines.append(f"| {source} | {device} | {_summary(rows)} |")
    other = [row for row in found if not row.fitted]
    right, total = order(found)
    return [
        *lines,
        f"| all | | {_summary(other)} |",
        "",
        f"Order: of {total} pairs of rows of one source, device, model and batch whose times differ by more than "
        f"{APART:.0%}, {right} are predicted in the measured order.",
    ]


def _summary(rows: list[Timed]) -> str:
    errors = [row.error for row in rows]
    close = sum(abs(error) <= 0.15 for error in errors)
    inside = sum(row.inside for row in rows)
    median = statistics.median(map(abs, errors))
    return f"{len(rows)} | {median:.1%} | {close} | {min(errors):+.0%} | {max(errors):+.0%} | {inside}"
