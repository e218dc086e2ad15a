"""Seconds of a step, predicted with the rates of the plan, and those of rows with tokens per second; the rates are
fitted again on one half of these."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from benchmarks.outside import fms, foundry, fsdp_qlora, peft, titan, torchtune
from benchmarks.outside.allocator import in_fitted_half
from benchmarks.outside.rows import described
from toolkit.planning.hardware import Device, devices
from toolkit.planning.predict import Planner
from toolkit.planning.reached import AMPERE, HOPPER, reached
from toolkit.planning.segments import Segment
from toolkit.planning.time import Rates, amounts, handled_bytes, optimizer_share, step_seconds, update_passes
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of

if TYPE_CHECKING:
    from benchmarks.outside.commands import Answered

SOURCES: dict[str, Any] = {module.SOURCE: module for module in (fms, foundry, fsdp_qlora, peft, torchtune)}
SOURCES |= dict.fromkeys(titan.SOURCES, titan)
"""What a row ran: ``planned``, a context with its planner and recipe, and ``why_not_timed``, empty if it is
predicted."""
DEVICES = {"A100": "a100-80gb", "H100": "h100", "L40S": "l40s", "RTX 3090": "rtx3090", "RTX 4090": "rtx4090",
           "T4": "t4", "B200": "b200"}  # fmt: skip
"""Of toolkit/planning/hardware.py, by a part of the row's ``gpu``."""
FITTED = ("a100-80gb", "h100")
"""Devices with enough rows to fit to; what is known of the first is taken for all others."""
UNKNOWN = {"Lightning-AI/litgpt": "lengths of the timed batches are not known: the longest sample is in the first"}
APART = 0.03
"""Two measured rows that differ by less have no order."""


@dataclass(frozen=True)
class Timed:
    """One row. ``measured``: seconds of a step. ``predicted``: with the plan's rates; ``low`` and ``high``: its
    interval. ``parts``: seconds of products and of kernels but attention at the data sheet's rates, and of a byte of
    memory traffic for each byte that is sent; ``rest``: predicted seconds beside them (attention, links that are waited
    for, offload). ``setting``: what rows must share to be compared with each other."""

    id: str
    what: str
    source: str
    device: str
    measured: float
    predicted: float
    low: float
    high: float
    parts: tuple[float, float, float]
    rest: float
    setting: tuple[Any, ...]
    fits: bool = True

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def fitted(self) -> bool:
        """Whether it is of the half that rates are fitted to."""
        return self.fits and self.device in FITTED and in_fitted_half(self.id)


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
    with source.planned(row) as (planner, resolved):
        resolved = planner.loop.trained(resolved)
        segments = source.segments(planner, resolved) if hasattr(source, "segments") else planner.segments_of(resolved)
    setting = (row["source_repo"], device.name, row["model"], row["micro_batch"], row["seq_len"], row["grad_accum"])
    seconds = seconds_of(row, planner, resolved)
    return _timed(row["id"], described(row), row["source_repo"], device, seconds, planner, resolved, segments, setting)


def of_command(one: Answered) -> Timed:
    """A row that a command predicts, of a project whose kernels or loop are its own: no rate is fitted to it."""
    search, made = one.planned.search, one.candidate
    planner = search.planner.for_layers_of(made.resolved)
    found = _timed(one.typed.id, " ".join(one.typed.words), one.typed.source, search.device, one.typed.seconds, planner,
                   made.resolved, planner.segments_of(made.resolved), (one.typed.id,))  # fmt: skip
    return replace(found, fits=False)


def _timed(
    name: str, what: str, source: str, device: Device, measured: float, planner: Planner, resolved: Resolved,
    segments: list[Segment], setting: tuple[Any, ...],
) -> Timed:  # fmt: skip
    rates = Rates.on(device)
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
        times * (forward.moved + backward.moved) + updating,
        sent / (device.bandwidth * 1e9),
    )
    busy = parts[0] / rates.compute + (parts[1] + rates.handled * parts[2]) / rates.bandwidth
    return Timed(name, what, source, device.name, measured, found.total, found.low, found.high, parts,
                 max(0.0, found.total - busy), setting)  # fmt: skip


def seconds_of(row: dict[str, Any], planner: Planner, resolved: Resolved) -> float:
    """Seconds of one optimizer step as the source measured it."""
    if "tokens_per_second_per_gpu" not in row or row["source_repo"] == peft.SOURCE:  # PEFT's tokens are without padding
        return float(row["step_time_s"])
    tokens = planner.length * resolved.micro_size * resolved.accumulation
    return float(tokens / row["tokens_per_second_per_gpu"])


Parts = tuple[float, float, float]


def fit(rows: Sequence[Timed], known: Parts | None = None) -> Parts:
    """Parts of the data sheet's rates that products and memory reach, and bytes of memory traffic with each byte that
    is sent: least squares of the relative errors over ``rows``, each of which counts the same. ``known``: of another
    device, whose memory and traffic are taken."""
    import torch

    table = torch.tensor([[p / row.measured for p in row.parts] for row in rows], dtype=torch.float64)
    wanted = torch.tensor([1 - row.rest / row.measured for row in rows], dtype=torch.float64)
    if known is not None:
        wanted = wanted - table[:, 1:] @ torch.tensor(_costs(known)[1:], dtype=torch.float64)
        table = table[:, :1]
    solved = torch.linalg.lstsq(table, wanted[:, None]).solution[:, 0].tolist()
    if known is not None:
        return 1 / solved[0], known[1], known[2]
    return 1 / solved[0], 1 / solved[1], solved[2] / solved[1]


def _costs(parts: Parts) -> tuple[float, ...]:
    """Seconds for each of a row's ``parts``."""
    return 1 / parts[0], 1 / parts[1], parts[2] / parts[1]


def seconds_with(row: Timed, parts: Parts) -> float:
    """Predicted seconds of a row's step with these numbers."""
    return row.rest + sum(one * cost for one, cost in zip(row.parts, _costs(parts), strict=True))


def fits(rows: Sequence[Timed]) -> dict[str, Parts]:
    """The numbers of ``rows``, by device: of the A100 and the H100 fitted, of others one of these's with the rate that
    large products reach alone (toolkit/planning/reached.py)."""
    own = {name: [row for row in rows if row.fits and row.device == name] for name in FITTED}
    ampere = fit(own[FITTED[0]])
    hopper = fit(own[FITTED[1]], ampere)
    found = {FITTED[0]: ampere, FITTED[1]: hopper}
    for name in set(DEVICES.values()) - set(FITTED):
        like, of = (hopper, HOPPER) if name == "b200" else (ampere, AMPERE)
        found[name] = (like[0] * reached(name).products / of.products, *ampere[1:])
    return found


def spread(rows: Sequence[tuple[Timed, float]]) -> tuple[float, float]:
    """Measured by predicted seconds: a tenth and nine tenths of ``rows``, in which every source counts the same."""
    factors = sorted(
        (row.measured / predicted, 1 / sum(other.source == row.source for other, _ in rows)) for row, predicted in rows
    )
    total, done = sum(weight for _, weight in factors), 0.0
    ends: list[float] = []
    for factor, weight in factors:
        done += weight / total
        if (len(ends) < 1 and done >= 0.1) or (len(ends) == 1 and done >= 0.9):
            ends.append(factor)
    return ends[0], ends[-1]


def spreads(rows: Sequence[Timed], known: dict[str, Parts]) -> dict[bool, tuple[float, float]]:
    """The intervals of ``rows``: of the A100 (True), and of all others together, which are few."""
    predicted = [(row, seconds_with(row, known[row.device])) for row in rows]
    return {
        ampere: spread([(row, seconds) for row, seconds in predicted if (row.device == FITTED[0]) == ampere])
        for ampere in (True, False)
    }


def swapped(rows: Sequence[Timed]) -> list[tuple[Timed, float, bool]]:
    """Every row with the seconds that are predicted with numbers of the half that it is not of, and whether the
    measured ones are inside that half's interval."""
    found = []
    for side in (True, False):
        fitted = [row for row in rows if in_fitted_half(row.id) == side]
        known = fits(fitted)
        ends = spreads(fitted, known)
        for row in rows:
            if in_fitted_half(row.id) != side:
                predicted = seconds_with(row, known[row.device])
                low, high = ends[row.device == FITTED[0]]
                found.append((row, predicted, low * predicted <= row.measured <= high * predicted))
    return found


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


def table(
    rows: list[dict[str, Any]], predicted: Sequence[Answered] = (), say: Callable[[str], None] = lambda text: None
) -> list[str]:
    """The section on time: of ``rows``, and of those that a command alone predicts."""
    having = [row for row in rows if has_time(row)]
    found = []
    for row in having:
        if not why_not_timed(row):
            found.append(timed(row))
            say(f"{row['id']} {found[-1].measured:.3f} s, predicted {found[-1].predicted:.3f} s")
    found += [of_command(one) for one in predicted if one.typed.seconds and not one.first]
    lines = ["## Time", "", *_swap(found), "", *_fits(found), "", *_by_source(found), ""]
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


def _swap(found: list[Timed]) -> list[str]:
    """What the halves say of each other."""
    rows = swapped(found)
    errors = {row.id: predicted / row.measured - 1 for row, predicted, _ in rows}
    inside = sum(within for *_, within in rows)
    far = ", ".join(f"{name} ({error:+.0%})" for name, error in errors.items() if abs(error) > 0.15)
    lines = [
        f"Fitted to one half and held against the other, both ways: of {len(rows)} rows the median error is "
        f"{statistics.median(map(abs, errors.values())):.1%}, and {inside} ({inside / len(rows):.0%}) are inside. More "
        f"than 15% off: {far}.",
        "",
        "| source | device | rows | median error | inside |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key in dict.fromkeys((row.source, row.device) for row in found):
        own = [one for one in rows if (one[0].source, one[0].device) == key]
        median = statistics.median(abs(errors[row.id]) for row, *_ in own)
        lines.append(f"| {key[0]} | {key[1]} | {len(own)} | {median:.1%} | {sum(within for *_, within in own)} |")
    return lines


def _fits(found: list[Timed]) -> list[str]:
    lines = ["| device | fitted to | products | memory | traffic of a sent byte | measured by predicted |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    half = [row for row in found if in_fitted_half(row.id)]
    known = fits(half)
    ends = spreads(half, known)
    for device in FITTED:
        count = sum(row.device == device for row in half)
        lines.append(_fit_line(device, str(count), known[device], ends[device == FITTED[0]]))
        lines.append(_fit_line(f"{device} in the plan", "", *_of_plan(device)))
    return lines


def _of_plan(device: str) -> tuple[Parts, tuple[float, float]]:
    own = reached(device)
    return (own.products, own.bandwidth, own.handled), (own.low, own.high)


def _fit_line(name: str, rows: str, parts: Parts, ends: tuple[float, float]) -> str:
    numbers = f"{parts[0]:.2f} | {parts[1]:.2f} | {parts[2]:.1f} | {ends[0]:.2f} to {ends[1]:.2f}"
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
