"""The plan on a terminal: a memory bar per strategy, readable without colour."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Any

from toolkit.counts import trained_share
from toolkit.planning.candidate import Candidate
from toolkit.planning.choice import choose, why_chosen
from toolkit.planning.hardware import GIB
from toolkit.planning.scale import fastest_of_each
from toolkit.planning.search import Search
from toolkit.terminal import coloured, fitted, paint, timed, width

if TYPE_CHECKING:
    from toolkit.planning.answers import Answers
    from toolkit.planning.options import PlanOptions

_BAR, _SHORT_BAR = 24, 10
"""Columns of a bar; the second where the terminal has fewer than 110."""
# What stays, what a forward leaves, logits and loss, buffers and reserve.
_SHADES = (("parameters", "█"), ("gradients", "█"), ("optimizer", "█"), ("activations", "▒"), ("loss", "▓"),
           ("communication", "░"), ("reserve", "░"), ("cache", "░"))  # fmt: skip


def show(
    search: Search,
    candidates: list[Candidate],
    chosen: Candidate | None,
    change: str | None,
    request: PlanOptions,
    scaled: list[dict[str, Any]] | None,
    answers: Answers | None = None,
) -> None:
    """Print the plan to standard output, as wide as the terminal."""
    columns, colour = width(), coloured(sys.stdout)
    for line in screen(search, candidates, chosen, change, request, scaled, answers, columns=columns, colour=colour):
        sys.stdout.write(line + "\n")


def screen(
    search: Search,
    candidates: list[Candidate],
    chosen: Candidate | None,
    change: str | None,
    request: PlanOptions,
    scaled: list[dict[str, Any]] | None,
    answers: Answers | None = None,
    *,
    columns: int,
    colour: bool = False,
) -> list[str]:
    """The lines of the plan, each at most ``columns`` wide."""
    from toolkit.planning.loops import loop_named

    asked, one = search.asked, candidates[0]
    recipe, device = asked.recipe, search.device
    holdings = search.planner.holdings
    name = recipe.model.path or (recipe.model.config or {}).get("model_type", "model")
    rows = f"length {search.planner.length}"
    if recipe.data.packing:
        rows = (
            f"packed rows of {search.planner.length}, {asked.micro_size * search.planner.length:,} tokens "
            "per micro-batch"
        )
    told = [
        f"plan  {name} · {trained_share(holdings.elements(True, whole=True), holdings.elements(whole=True))} · "
        f"{recipe.precision} · {rows} · global batch {asked.global_size}",
        f"      {asked.world_size} × {device.name}, {device.memory:.1f} GiB ({search.usable / GIB:.1f} usable)",
        *(f"      {line}" for line in search.notes()),
        "",
    ]
    shown = candidates if request.every else best_of_each(candidates, chosen)
    why = why_chosen(candidates, chosen) if chosen is not None else ""
    lines = [part for line in told for part in fitted(line, columns)]
    lines += _table(shown, chosen, why, columns, colour)
    told = []
    if not request.every:
        told.append(f"  … {len(candidates) - len(shown)} more; --all shows every candidate")
    told.append("  █ weights, gradients, optimizer  ▒ activations  ▓ logits and loss  ░ buffers, context, cache")
    told += ["", f"one step of {one.label}", *_time_lines(one, min(72, columns - 4)), _peak_line(one)]
    if one.fits and (ends := one.interval) is not None:
        told.append(
            f"expected in nvidia-smi, with the allocator's cache: {ends[0] / GIB:.1f} to {ends[1] / GIB:.1f} GiB"
        )
    if one.stages:
        told.append(_stages_line(one))
    told.append(f"host memory of a node while its processes load: {one.host_loading / GIB:.1f} GiB")
    if request.disk is not None:
        told.append(one.storage.line(request.disk))
    if not one.fits:
        told += ["", f"{one.label} {paint('does not fit', 'red', colour)}: {one.reason}"]
        if one.expected <= one.usable:
            told.append(
                f"only the upper end of the interval does not fit: {one.expected / GIB:.1f} GiB are expected, so that "
                "it may run, slower where the allocator has to free its cache"
            )
        told.append(
            f"to make it fit: {change}"
            if change
            else "nothing else fits: tried other strategies, sizes, lengths and adapters"
        )
    if scaled:
        told += ["", *_scale_table(scaled, search.planner.length, request.every, columns)]
    if answers is not None:
        told += answers.lines()
    if search.loop != "toolkit":
        title = loop_named(search.loop).title
        told.append(f"planned for {title}" if title.startswith("a ") else f"planned for the loop of {title}")
    if asked.device == "cuda":
        told.append(f"{_of_times(search)}, see docs/planning.md")
    if chosen is not None:
        done = f"wrote {request.output} · " if request.output else ""
        file = request.source
        follow = str(request.output or (file if file.endswith((".yaml", ".yml")) else "-o recipe.yaml"))
        told.append(f"{done}next: toolkit verify {follow}" if follow != "-o recipe.yaml" else
                    "next: add -o recipe.yaml, then toolkit verify recipe.yaml")  # fmt: skip
    return lines + [part for line in told for part in fitted(line, columns)]


def _of_times(search: Search) -> str:
    rates = search.rates
    if not rates.by_kernel or not search.device.rate(search.asked.precision.compute):
        return "not measured on a GPU yet: context is an assumption"
    low, high = rates.spread
    return (
        "not measured on a GPU by this project: context is an assumption; steps of published runs took "
        f"{low:.2f} to {high:.2f} of the predicted time"
    )


def best_of_each(candidates: list[Candidate], chosen: Candidate | None) -> list[Candidate]:
    """The recipe's candidate, the chosen one, and for each strategy the one that would be chosen, else the smallest."""
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(candidate.resolved.recipe.strategy.name, []).append(candidate)
    shown = [choose(own) or min(own, key=_rank) for own in found.values()]
    for extra in (chosen, candidates[0]):
        if extra is not None and extra not in shown:
            shown.append(extra)
    return sorted(shown, key=_rank)


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    seconds = candidate.seconds.total if candidate.seconds and candidate.fits else 0.0
    return not candidate.fits, seconds, candidate.needed


def _table(shown: list[Candidate], chosen: Candidate | None, why: str, columns: int, colour: bool) -> list[str]:
    """A row for each candidate, with heads. Below 110 columns the bar is shorter, below 90 there is no tok/s; a label
    or a note that still has no room goes on below."""
    wide_bar = _BAR if columns >= 110 else _SHORT_BAR
    timed_at_all = any(c.seconds is not None for c in shown)
    heads = ["   GiB", *([f"{'per step':>9}"] if timed_at_all else []),
             *([f"{'tok/s':>9}"] if timed_at_all and columns >= 90 else [])]  # fmt: skip
    numbers = sum(2 + len(head) for head in heads) + 1
    label = min(max(len(c.label) for c in shown), columns - 4 - wide_bar - numbers)
    lines = [f"  {'':{label}}  {'':{wide_bar}} " + "".join(f"  {head}" for head in heads)]
    for one in shown:
        cells = [f"{one.needed / GIB:6.1f}"]
        if one.seconds is not None and one.tokens_per_second is not None:
            cells += [f"{timed(one.seconds.total):>9}", f"{one.tokens_per_second:>9,.0f}"][: len(heads) - 1]
        first, *more = textwrap.wrap(one.label, label, break_long_words=False, break_on_hyphens=False)
        mark = " " if one.fits else paint("✗", "red", colour)
        row = f"  {first:<{label}}  {_bar(one, wide_bar)}{mark}" + "".join(f"  {cell}" for cell in cells)
        long = 4 + label + wide_bar + 1 + sum(2 + len(cell) for cell in cells)
        notes = [*([why] if one is chosen else []), *(["this recipe"] if one.asked else [])]
        if one.unmeasured:
            notes.append(f"{', '.join(one.unmeasured)}: not validated")
        note = f"← {'; '.join(notes)}" if notes else ""
        green = colour and one is chosen
        if note and not more and long + 2 + len(note) <= columns:
            lines.append(f"{row}  {paint(note, 'green', green)}")
            continue
        lines += [row, *(f"    {part}" for part in more)]
        lines += [paint(part, "green", green) for part in fitted(f"    {note}", columns)] if note else []
    return lines


def _bar(candidate: Candidate, columns: int) -> str:
    """A bar of ``columns`` for the whole device; longer bars are truncated."""
    shares = candidate.shares
    bar, total = "", 0
    for term, shade in _SHADES:
        total += shares.get(term, 0)
        until = round(columns * total / candidate.capacity)
        bar += shade * max(0, min(columns, until) - len(bar))
    return f"{bar:·<{columns}}"


def _stages_line(candidate: Candidate) -> str:
    """Peak memory of each pipeline stage, and the bubble."""
    peaks = " · ".join(f"{blocks[0]}–{blocks[-1]} {peak / GIB:.1f} GiB" for blocks, peak in candidate.stages)
    if candidate.seconds is None:
        return f"stages, by block: {peaks}"
    share = candidate.seconds.bubble / candidate.seconds.total
    return f"stages, by block: {peaks}; pipeline bubble {share:.0%} of a step".replace("%", " %")


def _time_lines(candidate: Candidate, columns: int) -> list[str]:
    """Memory over the step, as a row of block characters of eight heights, and its phases below."""
    line = candidate.memory.line
    heights = "▁▂▃▄▅▆▇█"
    cells, phases = [], []
    for column in range(columns):
        part = line[
            column * len(line) // columns : max((column + 1) * len(line) // columns, column * len(line) // columns + 1)
        ]
        peak = max(place.total for place in part)
        cells.append(heights[min(7, int(8 * peak / max(1, candidate.memory.peak + 1)))])
        phases.append(part[0].phase)
    names, last = "", ""
    for column, phase in enumerate(phases):
        if phase != last and len(names) <= column and phase in ("forward", "loss", "backward", "step"):
            names = f"{names:<{column}}{phase} "
            last = phase
    return [f"  {''.join(cells)}", f"  {names}".rstrip()]


def _peak_line(candidate: Candidate) -> str:
    return f"  peak {candidate.peak / GIB:.1f} GiB, in {candidate.memory.peak_phase}"


def _scale_table(rows: list[dict[str, Any]], length: int, every: bool, columns: int) -> list[str]:
    shown = rows if every else fastest_of_each(rows)
    label = max(len(row["strategy"]) for row in shown)
    any_timed = any(row["seconds"] is not None for row in rows)
    told = "predicted, with the same micro-batch on every device" + (
        ":"
        if every
        else f"; the {'fastest' if any_timed else 'smallest'} mesh of each strategy, --all shows every one:"
    )
    lines = [told, f"  devices  {'strategy':<{label}}    GiB   per step       tok/s  waiting"]
    for row in shown:
        known = row["seconds"] is not None
        rate = f"{row['samples_per_second'] * length:11,.0f}" if known else "          –"
        share = f"{100 * (row['waiting'] + row['bubble']):.0f} %" if known else "–"
        line = (
            f"  {row['devices']:>7}  {row['strategy']:<{label}}  {row['peak_bytes'] / GIB:5.1f}  "
            f"{timed(row['seconds']) if known else '–':>9} {rate}  {share:>7}"
        )
        note = "  ← fastest that fits" if row["fastest"] else "" if row["fits"] else "  does not fit"
        short = "  ← fastest that fits" if row["fastest"] else "" if row["fits"] else " ✗"
        together = len(line) + len(note) <= columns
        lines += [line + note] if together else [line + short] if len(short) <= 2 else [line, f"         {short}"]
    return lines
