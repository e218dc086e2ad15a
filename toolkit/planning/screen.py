"""The plan on a terminal: a memory bar per strategy, readable without colour."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from toolkit.counts import trained_share
from toolkit.planning.candidate import Candidate
from toolkit.planning.choice import choose, why_chosen
from toolkit.planning.hardware import GIB
from toolkit.planning.scale import fastest_of_each
from toolkit.planning.search import Search
from toolkit.recipe.load import source_of

if TYPE_CHECKING:
    from toolkit.planning.answers import Answers
    from toolkit.planning.command import Request

_WIDTH = 24
# What stays, what a forward leaves, logits and loss, buffers and reserve.
_SHADES = (("parameters", "█"), ("gradients", "█"), ("optimizer", "█"), ("activations", "▒"), ("loss", "▓"),
           ("communication", "░"), ("reserve", "░"))  # fmt: skip


def show(
    search: Search,
    candidates: list[Candidate],
    chosen: Candidate | None,
    change: str | None,
    request: Request,
    scaled: list[dict[str, Any]] | None,
    answers: Answers | None = None,
) -> None:
    """Print the plan to standard output."""
    from toolkit.planning.loops import LOOPS

    asked = search.asked
    recipe, device = asked.recipe, search.device
    holdings = search.planner.holdings
    name = recipe.model.path or (recipe.model.config or {}).get("model_type", "model")
    out = sys.stdout
    rows = f"length {search.planner.length}"
    if recipe.data.packing:
        rows = (
            f"packed rows of {search.planner.length}, {asked.micro_size * search.planner.length:,} tokens "
            "per micro-batch"
        )
    out.write(
        f"plan  {name} · {trained_share(holdings.elements(True, whole=True), holdings.elements(whole=True))} · "
        f"{recipe.precision} · {rows} · global batch {asked.global_size}\n"
        f"      {asked.world_size} × {device.name}, {device.memory:.1f} GiB ({search.usable / GIB:.1f} usable)\n"
    )
    out.write("".join(f"      {line}\n" for line in search.planner.notes()) + "\n")
    shown = candidates if request.every else best_of_each(candidates, chosen)
    label = max(len(c.label) for c in shown)
    for candidate in shown:
        out.write(_line(candidate, label, why_chosen(candidates, candidate) if candidate is chosen else None) + "\n")
    if not request.every:
        hidden = len(candidates) - len(shown)
        out.write(f"  … {hidden} more; --all shows every candidate\n")
    out.write("  █ weights, gradients, optimizer  ▒ activations  ▓ logits and loss  ░ buffers, context\n")
    out.write(f"\none step of {candidates[0].label}\n{_time_line(candidates[0])}\n")
    if (ends := candidates[0].interval) is not None:
        out.write(
            f"expected in nvidia-smi, with the allocator's cache: {ends[0] / GIB:.1f} to {ends[1] / GIB:.1f} GiB\n"
        )
    if candidates[0].stages:
        out.write(_stages_line(candidates[0]) + "\n")
    out.write(f"host memory of a node while its processes load: {candidates[0].host_loading / GIB:.1f} GiB\n")
    if request.disk is not None:
        out.write(candidates[0].storage.line(request.disk) + "\n")
    if not candidates[0].fits:
        out.write(f"\n{candidates[0].label} does not fit: {candidates[0].reason}\n")
        out.write(
            f"to make it fit: {change}\n"
            if change
            else "nothing else fits: tried other strategies, sizes, lengths and adapters\n"
        )
    if scaled:
        out.write("\n" + _scale_table(scaled, search.planner.length, request.every))
    if answers is not None:
        out.write("".join(f"{line}\n" for line in answers.lines()))
    if request.loop != "toolkit":
        out.write(f"planned for the loop of {LOOPS[request.loop].title}\n")
    if asked.device == "cuda":
        out.write(f"{_of_times(search)}, see docs/planning.md\n")
    if chosen is not None:
        done = f"wrote {request.output} · " if request.output else ""
        file = source_of(request.recipe)
        follow = request.output or (file if file.endswith((".yaml", ".yml")) else "-o recipe.yaml")
        out.write(f"{done}next: toolkit verify {follow}\n" if follow != "-o recipe.yaml" else
                  "next: add -o recipe.yaml, then toolkit verify recipe.yaml\n")  # fmt: skip


def _of_times(search: Search) -> str:
    rates = search.rates
    if not rates.by_kernel or not search.device.bf16:
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
    return not candidate.fits, seconds, candidate.peak


def _line(candidate: Candidate, label: int, why: str | None) -> str:
    """One candidate; ``why``: the reason if it is chosen, else None."""
    mark = " " if candidate.fits else "✗"
    text = f"  {candidate.label:<{label}}  {_bar(candidate)}{mark} {candidate.peak / GIB:6.1f} GiB"
    if candidate.seconds is not None:
        text += f"  {candidate.seconds.total:7.2f} s {candidate.tokens_per_second:>9,.0f} tok/s"
    notes = [why] if why else []
    if candidate.asked:
        notes.append("this recipe")
    if candidate.unmeasured:
        notes.append(f"{', '.join(candidate.unmeasured)}: not validated")
    return text + (f"  ← {'; '.join(notes)}" if notes else "")


def _bar(candidate: Candidate) -> str:
    """A bar of ``_WIDTH`` for the whole device; longer bars are truncated."""
    bar, total = "", 0
    for term, shade in _SHADES:
        total += candidate.breakdown.get(term, 0)
        until = round(_WIDTH * total / candidate.capacity)
        bar += shade * max(0, min(_WIDTH, until) - len(bar))
    return f"{bar:·<{_WIDTH}}"


def _stages_line(candidate: Candidate) -> str:
    """Peak memory of each pipeline stage, and the bubble."""
    peaks = " · ".join(f"{blocks[0]}–{blocks[-1]} {peak / GIB:.1f} GiB" for blocks, peak in candidate.stages)
    if candidate.seconds is None:
        return f"stages, by block: {peaks}"
    share = candidate.seconds.bubble / candidate.seconds.total
    return f"stages, by block: {peaks}; pipeline bubble {share:.0%} of a step".replace("%", " %")


def _time_line(candidate: Candidate) -> str:
    """Memory over the step, as a row of block characters of eight heights."""
    line = candidate.memory.line
    columns = 72
    heights = "▁▂▃▄▅▆▇█"
    cells, phases = [], []
    for column in range(columns):
        part = line[
            column * len(line) // columns : max((column + 1) * len(line) // columns, column * len(line) // columns + 1)
        ]
        peak = max(place.total for place in part)
        cells.append(heights[min(7, int(8 * peak / max(1, candidate.memory.peak + 1)))])
        phases.append(part[0].phase)
    row, names, last = "".join(cells), "", ""
    for column, phase in enumerate(phases):
        if phase != last and len(names) <= column and phase in ("forward", "loss", "backward", "step"):
            names = f"{names:<{column}}{phase} "
            last = phase
    return f"  {row}  peak in {candidate.memory.peak_phase}\n  {names}".rstrip()


def _scale_table(rows: list[dict[str, Any]], length: int, every: bool) -> str:
    shown = rows if every else fastest_of_each(rows)
    label = max(len(row["strategy"]) for row in shown)
    timed = any(row["seconds"] is not None for row in rows)
    text = (
        "predicted, with the same micro-batch on every device"
        + ("" if every else f"; the {'fastest' if timed else 'smallest'} mesh of each strategy, --all shows every one")
        + f":\n  devices  {'strategy':<{label}}    GiB   step s       tok/s  waiting\n"
    )
    for row in shown:
        known = row["seconds"] is not None
        seconds = f"{row['seconds']:7.2f}" if known else "      –"
        rate = f"{row['samples_per_second'] * length:11,.0f}" if known else "          –"
        share = f"{100 * (row['waiting'] + row['bubble']):.0f} %" if known else "–"
        note = "  ← fastest that fits" if row["fastest"] else "" if row["fits"] else "  does not fit"
        text += (
            f"  {row['devices']:>7}  {row['strategy']:<{label}}  {row['peak_bytes'] / GIB:5.1f}  {seconds} {rate}  "
            f"{share:>6}{note}\n"
        )
    return text
