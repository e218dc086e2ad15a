"""One self-contained HTML page of a plan: memory of every strategy against the device, and over one step."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from toolkit.plan.choice import Candidate, Search
from toolkit.plan.hardware import GIB
from toolkit.plan.memory import TERMS
from toolkit.plan.screen import best_of_each
from toolkit.plan.time import flops
from toolkit.report.style import STYLE

# Told apart by people who do not see red and green alike, too (Okabe and Ito 2008, lightened where text stands on it).
_COLOURS = {
    "parameters": "#0072b2", "gradients": "#56b4e9", "optimizer": "#009e73", "activations": "#e69f00",
    "loss": "#d55e00", "communication": "#cc79a7", "reserve": "#999999",
}  # fmt: skip
_NAMES = {
    "parameters": "weights", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations",
    "loss": "logits and loss", "communication": "buffers of communication", "reserve": "CUDA context, workspaces",
}  # fmt: skip
_STYLE = (
    STYLE
    + """
.plan { display: grid; grid-template-columns: max-content 1fr max-content; gap: .3rem .8rem; align-items: center;
  grid-auto-flow: dense }
.plan > .name { grid-column: 1; white-space: nowrap } .plan > .bar { grid-column: 2 }
.plan > .size { grid-column: 3; text-align: right; font-variant-numeric: tabular-nums }
.bar { position: relative; height: 1.5rem; background: color-mix(in srgb, var(--line) 45%, transparent);
  border-radius: 3px }
.bar > span { position: absolute; top: 0; bottom: 0 }
.bar > i { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 2px solid var(--ink) }
.bar.cut { clip-path: polygon(0 -20%, 100% -20%, 100% 0, calc(100% - .5rem) 25%, 100% 50%,
  calc(100% - .5rem) 75%, 100% 100%, 100% 120%, 0 120%) }
.bar > i.room { border-left: 1px dashed var(--soft) }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .6rem 0 } .key span { white-space: nowrap }
.key b { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem }
svg { display: block; width: 100%; height: auto } svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
td.n, th.n { text-align: right }
@media (max-width: 40rem) { .plan { grid-template-columns: 1fr max-content; grid-auto-flow: row }
  .plan > .size { grid-column: 2 } .plan > .bar { grid-column: 1 / 3; margin-bottom: .5rem }
  .plan > .name { white-space: normal } }
"""
)


def plan_page(
    search: Search,
    candidates: list[Candidate],
    chosen: Candidate | None,
    change: str | None,
    scaled: list[dict[str, Any]] | None,
    assumptions: Sequence[str],
) -> str:
    """The page's HTML. It loads nothing from anywhere."""
    asked = candidates[0]
    recipe = search.asked.recipe
    name = html.escape(str(recipe.model.path or (recipe.model.config or {}).get("model_type", "model")))
    tone, verdict = ("good", "fits") if asked.fits else ("bad", "does not fit")
    pictured = [asked] if chosen is None or chosen is asked else [asked, chosen]
    return "\n".join([
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>plan of {name}: {verdict}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}, {html.escape(asked.label)}: <span class='{tone}'>{verdict}</span></h1>",
        f"<p class='soft'>{html.escape(_facts(search))}</p>",
        *_advice(asked, chosen, change),
        "<h2>Memory of one device, by strategy</h2>",
        _bars(best_of_each(candidates, chosen), chosen, search),
        _key(with_reserve=True),
        *(part for one in pictured for part in _step(one, search, one is chosen)),
        "<h2>Every way that was weighed</h2>",
        _table(candidates, chosen),
        *(["<h2>On paper, on more devices</h2>", _scale(scaled)] if scaled else []),
        "<h2>What is assumed</h2>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in assumptions) + "</ul>",
        "</body></html>",
    ])  # fmt: skip


def _facts(search: Search) -> str:
    asked, holdings = search.asked, search.planner.skeleton.holdings
    return (
        f"{holdings.elements(True) / 1e6:,.1f} M of {holdings.elements() / 1e9:.2f} B weights train, "
        f"{asked.recipe.precision}, length {search.planner.length}, global batch {asked.global_size}; "
        f"{asked.world_size} × {search.device.name} of {search.device.memory:.1f} GiB, "
        f"{search.usable / GIB:.1f} usable"
    )


def _advice(asked: Candidate, chosen: Candidate | None, change: str | None) -> list[str]:
    told = []
    if not asked.fits:
        told.append(f"<p class='bad'>{html.escape(asked.label)}: {html.escape(asked.reason)}</p>")
        how = f"To make it fit: <code>{html.escape(change)}</code>" if change else (
            "No other strategy, size or length makes it fit.")  # fmt: skip
        told.append(f"<p>{how}</p>")
    if chosen is not None and chosen is not asked:
        told.append(f"<p>Fastest that fits: <b>{html.escape(chosen.label)}</b>{_rate(chosen)}</p>")
    return told


def _rate(candidate: Candidate) -> str:
    if candidate.seconds is None:
        return ""
    tokens = candidate.resolved.global_size * candidate.resolved.recipe.data.max_length
    return f", {candidate.seconds.total:.2f} s a step, {tokens / candidate.seconds.total:,.0f} tokens a second"


def _bars(shown: Sequence[Candidate], chosen: Candidate | None, search: Search) -> str:
    """One bar a strategy, all on one scale: up to half more than the device, so that what is far too large does not
    press the rest together."""
    capacity = search.device.bytes
    end = min(max([capacity, *(c.peak for c in shown)]) * 1.04, capacity * 1.5)
    marks = (
        f"<i class='room' style='left:{100 * search.usable / end:.2f}%' title='usable'></i>"
        f"<i style='left:{100 * capacity / end:.2f}%' title='the device'></i>"
    )
    rows = []
    for candidate in shown:
        left, parts = 0.0, []
        for term, size in candidate.breakdown.items():
            width = min(size, max(0.0, end - left))
            if width > 0:
                parts.append(
                    f"<span style='left:{100 * left / end:.2f}%;width:{100 * width / end:.2f}%;"
                    f"background:{_COLOURS[term]}' title='{_NAMES[term]}: {size / GIB:.2f} GiB'></span>"
                )
            left += size
        notes = [*(["fastest that fits"] if candidate is chosen else []), *(["asked"] if candidate.asked else [])]
        note = f" <span class='soft'>{', '.join(notes)}</span>" if notes else ""
        tone = "" if candidate.fits else " bad"
        mark = "" if candidate.fits else "✗ "
        rows.append(
            f"<div class='name'>{html.escape(candidate.label)}{note}</div>"
            f"<div class='size{tone}'>{mark}{candidate.peak / GIB:.1f} GiB</div>"
            f"<div class='bar{' cut' if candidate.peak > end else ''}'>{''.join(parts)}{marks}</div>"
        )
    return f"<div class='plan'>{''.join(rows)}</div>"


def _key(with_reserve: bool) -> str:
    terms = [*TERMS, *(["reserve"] if with_reserve else [])]
    keys = "".join(f"<span><b style='background:{_COLOURS[t]}'></b>{_NAMES[t]}</span>" for t in terms)
    lines = "<span class='soft'>solid line: the device; dashed: what is usable</span>"
    return f"<div class='key'>{keys}{lines}</div>"


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 1000, 260, 52, 22, 10


def _step(candidate: Candidate, search: Search, is_chosen: bool) -> list[str]:
    """Stacked areas over the time of one step."""
    line = candidate.memory.line
    times = _times(candidate, search)
    top = max(candidate.peak * 1.1, 1)
    shows_device = search.device.bytes <= top * 1.6
    if shows_device:
        top = max(top, search.device.bytes * 1.1)
    inner_width, inner_height = _WIDTH - _LEFT, _HEIGHT - _BOTTOM - _TOP

    def x(place: int) -> float:
        return _LEFT + inner_width * times[place]

    def y(size: float) -> float:
        return _TOP + inner_height * (1 - size / top)

    below = [candidate.reserve] * len(line)
    shapes = [_area([0] * len(line), below, x, y, "reserve")] if candidate.reserve else []
    for term in TERMS:
        above = [base + place.terms[term] for base, place in zip(below, line, strict=True)]
        if above != below:
            shapes.append(_area(below, above, x, y, term))
        below = above
    ticks = [
        f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{y(size):.1f}' y2='{y(size):.1f}' stroke='var(--line)'/>"
        f"<text x='{_LEFT - 6}' y='{y(size) + 4:.1f}' text-anchor='end'>{size / GIB:.3g}</text>"
        for size in _nice(top)
    ]
    limit = ""
    if shows_device:
        at = y(search.device.bytes)
        limit = f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{at:.1f}' y2='{at:.1f}' stroke='var(--ink)' stroke-width='2'/>"
        told = f"the device, {search.device.memory:.1f}"
        limit += (
            f"<text x='{_WIDTH - 6}' y='{at - 5:.1f}' text-anchor='end' style='fill:var(--ink);paint-order:stroke;"
            f"stroke:var(--paper);stroke-width:3px'>{told}</text>"
        )
    which = "the fastest that fits" if is_chosen else "as asked"
    return [
        f"<h2>One step of {html.escape(candidate.label)}, {which}</h2>",
        f"<p class='soft'>GiB alive in the last micro-batch and the update, as long as their computing takes; the "
        f"peak, {candidate.peak / GIB:.2f} GiB, is in {candidate.memory.peak_phase}. "
        f"{_around(candidate)}</p>",
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='memory over one step'>{''.join(ticks)}"
        f"{''.join(shapes)}{limit}{_phases(candidate, x)}</svg>",
    ]


def _around(candidate: Candidate) -> str:
    phases = candidate.memory.phases
    told = [f"{name} takes {(phases[phase] + candidate.reserve) / GIB:.1f}" for phase, name in (
        ("load", "Loading"), ("save", "saving")) if phase in phases]  # fmt: skip
    host = f"the host {candidate.host_loading / GIB:.1f} while all processes load"
    return ", ".join([*told, host]) + "."


def _area(below: Sequence[float], above: Sequence[float], x: Any, y: Any, term: str) -> str:
    forth = " ".join(f"{x(i):.1f},{y(size):.1f}" for i, size in enumerate(above))
    back = " ".join(f"{x(i):.1f},{y(below[i]):.1f}" for i in range(len(below) - 1, -1, -1))
    return f"<polygon points='{forth} {back}' fill='{_COLOURS[term]}'><title>{_NAMES[term]}</title></polygon>"


def _phases(candidate: Candidate, x: Any) -> str:
    """Names under the axis. «reduce» comes and goes within the backward and has none of its own there."""
    spans: list[tuple[str, int, int]] = []
    for index, place in enumerate(candidate.memory.line):
        phase = "backward" if place.phase == "reduce" else place.phase
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1], index)
        else:
            spans.append((phase, index, index))
    told, free = "", 0.0
    for phase, begin, end in spans:
        middle, half = (x(begin) + x(end)) / 2, 3.4 * len(phase)
        # A name has its place where no other is, and within the picture.
        middle = min(max(middle, free + half), _WIDTH - half)
        told += f"<text x='{middle:.1f}' y='{_HEIGHT - 6}' text-anchor='middle'>{phase}</text>"
        free = middle + half + 6
        if begin:
            told += (
                f"<line x1='{x(begin):.1f}' x2='{x(begin):.1f}' y1='{_TOP}' y2='{_HEIGHT - _BOTTOM + 4}' "
                "stroke='var(--soft)' stroke-dasharray='2 4'/>"
            )
    return told


def _times(candidate: Candidate, search: Search) -> list[float]:
    """When each place is, from 0 to 1: forward and backward take what their operations do, each place of one of
    them as long as another; the update what it takes, and enough to be seen."""
    line = candidate.memory.line
    holdings, resolved = search.planner.skeleton.holdings, candidate.resolved
    segments = search.planner.segments_of(resolved)
    forward, backward = flops(segments, list(holdings.order))
    computing = forward + backward
    update = 0.02
    if candidate.seconds is not None and candidate.seconds.compute:
        per_micro = candidate.seconds.compute / resolved.accumulation
        update = max(update, candidate.seconds.optimizer / (per_micro + candidate.seconds.optimizer))
    lasts = {
        "forward": (1 - update) * forward / computing, "backward": (1 - update) * backward / computing, "step": update,
    }  # fmt: skip
    parts = ["forward" if p.phase in ("forward", "loss") else "step" if p.phase == "step" else "backward" for p in line]
    found, now = [], 0.0
    for index, part in enumerate(parts):
        now += lasts[part] / parts.count(part)
        found.append(0.0 if index == 0 else now)
    return found


def _nice(top: float) -> list[float]:
    """Up to six round sizes below ``top``."""
    wanted = top / GIB / 6
    power = 10.0 ** math.floor(math.log10(wanted))
    step = GIB * power * next(factor for factor in (1, 2, 5, 10) if factor * power >= wanted)
    return [step * i for i in range(int(top / step) + 1)]


def _table(candidates: Sequence[Candidate], chosen: Candidate | None) -> str:
    head = "".join(
        f"<th class='n'>{name}</th>"
        for name in ("GiB", "host", "host, loading", "s a step", "computing", "update", "waiting for links", "offload")
    )
    rows = [f"<div class='wide'><table><tr><th>way</th>{head}<th>why not</th></tr>"]
    for c in candidates:
        seconds = c.seconds
        parts = [None] * 5 if seconds is None else [
            seconds.total, seconds.compute, seconds.optimizer, seconds.exposed, seconds.offload]  # fmt: skip
        sizes = [f"{size / GIB:.1f}" for size in (c.peak, c.host, c.host_loading)]
        numbers = [*sizes, *("–" if p is None else f"{p:.3f}" for p in parts)]
        why = "<span class='good'>the fastest that fits</span>" if c is chosen else html.escape(c.reason) or "slower"
        if c.fits and c.seconds is None and c is not chosen:
            why = "fits; times are not known"
        cells = "".join(f"<td class='n'>{n}</td>" for n in numbers)
        asked = " <span class='soft'>asked</span>" if c.asked else ""
        if c.unmeasured:
            asked += f" <span class='soft'>({html.escape(', '.join(c.unmeasured))}: not measured)</span>"
        rows.append(f"<tr><td>{html.escape(c.label)}{asked}</td>{cells}<td>{why}</td></tr>")
    return "".join(rows) + "</table></div>"


def _scale(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["strategy"] for row in rows if row["strategy"] != "single"))
    by_place = {(row["devices"], row["strategy"]): row for row in rows}
    told = ["<p class='soft'>GiB on each device, and the share of a step that waits for links, with the asked "
            "micro-batch on every device.</p><div class='wide'><table><tr><th class='n'>devices</th>",
            *(f"<th class='n'>{name}</th>" for name in names), "</tr>"]  # fmt: skip
    for count in dict.fromkeys(row["devices"] for row in rows):
        cells = []
        for name in names:
            row = by_place.get((count, name)) or (by_place.get((count, "single")) if count == 1 else None)
            if row is None:
                cells.append("<td class='n'>–</td>")
                continue
            waits = "" if row["waiting"] is None else f", {100 * row['waiting']:.0f} %"
            tone = "" if row["fits"] else " bad"
            cells.append(f"<td class='n{tone}'>{row['peak_bytes'] / GIB:.1f}{waits}</td>")
        told.append(f"<tr><td class='n'>{count}</td>{''.join(cells)}</tr>")
    return "".join(told) + "</table></div>"
