"""A chart of memory over one step of a plan, as stacked areas."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from toolkit.planning.candidate import Candidate
from toolkit.planning.hardware import GIB
from toolkit.planning.memory import TERMS
from toolkit.planning.search import Search
from toolkit.planning.time import flops
from toolkit.report.style import PALETTE

COLOURS = dict(zip((*TERMS, "reserve"), PALETTE, strict=True)) | {"cache": "#c9ccd1"}
NAMES = {
    "parameters": "weights", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations",
    "loss": "logits and loss", "communication": "communication buffers", "reserve": "CUDA context, workspaces, NCCL",
    "cache": "what the allocator keeps, at most",
}  # fmt: skip
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 1000, 260, 52, 22, 10


def step_pictured(candidate: Candidate, search: Search, which: str) -> list[str]:
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
        for size in nice(top)
    ]
    limit = ""
    if shows_device:
        at = y(search.device.bytes)
        limit = f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{at:.1f}' y2='{at:.1f}' stroke='var(--ink)' stroke-width='2'/>"
        text = f"the device, {search.device.memory:.1f}"
        limit += (
            f"<text x='{_WIDTH - 6}' y='{at - 5:.1f}' text-anchor='end' style='fill:var(--ink);paint-order:stroke;"
            f"stroke:var(--paper);stroke-width:3px'>{text}</text>"
        )
    return [
        f"<h2>One step of {html.escape(candidate.label)}, {which}</h2>",
        f"<p class='soft'>GiB allocated during the last micro-batch and the update, over compute time; the "
        f"peak, {candidate.peak / GIB:.2f} GiB, is in {candidate.memory.peak_phase}. "
        f"{_around(candidate)}</p>",
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='memory over one step'>{''.join(ticks)}"
        f"{''.join(shapes)}{limit}{_phases(candidate, x)}</svg>",
    ]


def _around(candidate: Candidate) -> str:
    phases = candidate.memory.phases
    text = [f"{name} takes {(phases[phase] + candidate.reserve) / GIB:.1f}" for phase, name in (
        ("load", "Loading"), ("evaluate", "an evaluation"), ("save", "saving")) if phase in phases]  # fmt: skip
    host = f"the host {candidate.host_loading / GIB:.1f} while all processes load the model"
    return ", ".join([*text, host]) + "."


def _area(below: Sequence[float], above: Sequence[float], x: Any, y: Any, term: str) -> str:
    forth = " ".join(f"{x(i):.1f},{y(size):.1f}" for i, size in enumerate(above))
    back = " ".join(f"{x(i):.1f},{y(below[i]):.1f}" for i in range(len(below) - 1, -1, -1))
    return f"<polygon points='{forth} {back}' fill='{COLOURS[term]}'><title>{NAMES[term]}</title></polygon>"


def _phases(candidate: Candidate, x: Any) -> str:
    """Names under the axis. «reduce» comes and goes within the backward and has none of its own there."""
    spans: list[tuple[str, int, int]] = []
    for index, place in enumerate(candidate.memory.line):
        phase = "backward" if place.phase == "reduce" else place.phase
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1], index)
        else:
            spans.append((phase, index, index))
    text, free = "", 0.0
    for phase, begin, end in spans:
        middle, half = (x(begin) + x(end)) / 2, 3.4 * len(phase)
        # A name has its place where no other is, and within the picture.
        middle = min(max(middle, free + half), _WIDTH - half)
        text += f"<text x='{middle:.1f}' y='{_HEIGHT - 6}' text-anchor='middle'>{phase}</text>"
        free = middle + half + 6
        if begin:
            text += (
                f"<line x1='{x(begin):.1f}' x2='{x(begin):.1f}' y1='{_TOP}' y2='{_HEIGHT - _BOTTOM + 4}' "
                "stroke='var(--soft)' stroke-dasharray='2 4'/>"
            )
    return text


def _times(candidate: Candidate, search: Search) -> list[float]:
    """When each place is, from 0 to 1: forward and backward take what their operations do, each place of one of
    them as long as another; the update what it takes, and enough to be seen."""
    line = candidate.memory.line
    holdings, resolved = search.planner.holdings, candidate.resolved
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


def nice(top: float) -> list[float]:
    """Up to six round sizes below ``top``."""
    wanted = top / GIB / 6
    power = 10.0 ** math.floor(math.log10(wanted))
    step = GIB * power * next(factor for factor in (1, 2, 5, 10) if factor * power >= wanted)
    return [step * i for i in range(int(top / step) + 1)]
