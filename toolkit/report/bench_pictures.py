"""The charts of a bench: bars of rates, times and memory, a dot for every step."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from toolkit.report.style import PALETTE

PHASES = dict(zip(("forward", "backward", "optimizer", "loader", "host"), PALETTE, strict=False))
_GIB = 2**30


def rates(cells: Sequence[dict[str, Any]]) -> str:
    """A bar for each cell's median rate, a line in it for each turn."""
    end = 1.04 * max(max(cell["tokens_per_second_by_turn"]) for cell in cells)
    first = cells[0]["tokens_per_second"]
    rows = []
    for cell in cells:
        rate = cell["tokens_per_second"]
        marks = "".join(
            f"<i style='left:{100 * turn / end:.2f}%' title='turn {number + 1}: {turn:,.0f}'></i>"
            for number, turn in enumerate(cell["tokens_per_second_by_turn"])
        )
        beside = f" <span class='soft'>× {rate / first:.2f}</span>" if len(cells) > 1 else ""
        rows.append(_row(cell, f"{rate:,.0f}{beside}", part(0, rate / end, PALETTE[0], f"{rate:,.0f}") + marks))
    return f"<div class='plan'>{''.join(rows)}</div>"


def phases(cells: Sequence[dict[str, Any]]) -> str:
    """A median step of each cell, in its parts."""
    end = 1.04 * max(cell["seconds_per_step"] for cell in cells)
    rows = []
    for cell in cells:
        parts, left = "", 0.0
        for name, colour in PHASES.items():
            seconds = cell["phases"][name] * cell["seconds_per_step"]
            parts += part(left / end, seconds / end, colour, f"{name}: {seconds:.4f} s, {cell['phases'][name]:.1%}")
            left += seconds
        rows.append(_row(cell, f"{cell['seconds_per_step']:.3f} s", parts))
    return f"<div class='plan'>{''.join(rows)}</div>"


def memory(cells: Sequence[dict[str, Any]]) -> str:
    """Peak bytes of each cell: allocated, and reserved beyond that."""
    sizes = [(cell["peak_allocated_bytes"] or 0, cell["peak_reserved_bytes"] or 0) for cell in cells]
    end = 1.04 * max(max(pair) for pair in sizes)
    rows = []
    for cell, (allocated, reserved) in zip(cells, sizes, strict=True):
        parts = part(0, allocated / end, PALETTE[0], f"allocated: {size(allocated)}")
        if reserved > allocated:
            title = f"reserved: {size(reserved)}"
            parts += part(allocated / end, (reserved - allocated) / end, PALETTE[6], title)
        rows.append(_row(cell, size(allocated) + (f" of {size(reserved)}" if reserved else ""), parts))
    return f"<div class='plan'>{''.join(rows)}</div>"


def key_of_memory(cells: Sequence[dict[str, Any]]) -> str:
    """The legend of the bars of ``memory``."""
    if any(cell["peak_reserved_bytes"] for cell in cells):
        return key((("allocated", PALETTE[0]), ("additionally reserved from the device", PALETTE[6])))
    return "<p class='soft'>Bytes of all storages, counted in an additional untimed turn.</p>"


def _row(cell: dict[str, Any], title: str, inside: str) -> str:
    asked = " <span class='soft'>this recipe</span>" if cell["asked"] else ""
    name = f"<div class='name'>{safe(cell['label'])}{asked}</div>"
    return f"{name}<div class='size'>{title}</div><div class='bar'>{inside}</div>"


def part(left: float, width: float, colour: str, title: str) -> str:
    """A stretch of a bar, as shares of the whole; ``title`` where it is pointed at."""
    return (
        f"<span style='left:{100 * left:.2f}%;width:{100 * width:.2f}%;background:{colour}' "
        f"title='{html.escape(title, quote=True)}'></span>"
    )


def key(entries: Iterable[tuple[str, str]]) -> str:
    """Names and their colours."""
    keys = "".join(f"<span><b style='background:{colour}'></b>{name}</span>" for name, colour in entries)
    return f"<div class='key'>{keys}</div>"


_WIDTH, _LEFT, _ROW, _GAP = 1000, 230, 16, 8


def steps(cells: Sequence[dict[str, Any]]) -> str:
    """A row of dots for each turn of each cell, on one scale from zero."""
    end = 1.03 * max(cell["seconds_spread"][1] for cell in cells)
    shapes, top = [], 6.0

    def x(seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 10) * seconds / end

    for cell in cells:
        turns = cell["seconds_by_turn"]
        middle = top + _ROW * len(turns) / 2 + 4
        label = cell["label"] if len(cell["label"]) <= 32 else cell["label"][:31] + "…"
        shapes.append(
            f"<text x='{_LEFT - 10}' y='{middle:.0f}' text-anchor='end' style='fill:var(--ink)'>"
            f"<title>{safe(cell['label'])}</title>{safe(label)}</text>"
        )
        for number, seconds in enumerate(turns):
            y = top + _ROW * (number + 0.5)
            at = x(statistics.median(seconds))
            shapes.append(f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='var(--line)'/>")
            shapes += [
                f"<circle cx='{x(s):.1f}' cy='{y:.1f}' r='4' fill='{PALETTE[1]}' stroke='{PALETTE[0]}'>"
                f"<title>turn {number + 1}: {s:.4f} s</title></circle>"
                for s in seconds
            ]
            shapes.append(
                f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{y - 7:.1f}' y2='{y + 7:.1f}' stroke='var(--ink)' "
                "stroke-width='2'/>"
            )
        top += _ROW * len(turns) + _GAP
    step = _round(end)
    for number in range(int(end / step) + 1):
        at = x(number * step)
        shapes.insert(0, f"<line x1='{at:.1f}' x2='{at:.1f}' y1='0' y2='{top:.0f}' stroke='var(--line)'/>")
        shapes.append(f"<text x='{at:.1f}' y='{top + 14:.0f}' text-anchor='middle'>{number * step:.4g}</text>")
    view = f"0 0 {_WIDTH} {top + 20:.0f}"
    role = "role='img' aria-label='seconds of every step'"
    return f"<div class='wide'><svg class='dots' viewBox='{view}' {role}>{''.join(shapes)}</svg></div>"


def _round(top: float) -> float:
    """A round step of which up to six make ``top``."""
    power = 1e-6
    while True:
        for factor in (1, 2, 5):
            if factor * power * 6 >= top:
                return factor * power
        power *= 10


def size(count: int | None) -> str:
    """Bytes in GiB or MiB."""
    if count is None:
        return "–"
    return f"{count / _GIB:.2f} GiB" if count >= _GIB / 10 else f"{count / 2**20:.1f} MiB"


def safe(text: str) -> str:
    """Text with markup escaped."""
    return html.escape(str(text))
