"""A self-contained HTML page of a plan: memory of every strategy against the device, and over one step."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from toolkit.counts import trained_share
from toolkit.planning.candidate import Candidate
from toolkit.planning.choice import EQUAL, why_chosen
from toolkit.planning.hardware import GIB
from toolkit.planning.memory import TERMS
from toolkit.planning.scale import fastest_of_each
from toolkit.planning.screen import best_of_each
from toolkit.planning.search import Search
from toolkit.report.step_picture import COLOURS, NAMES, step_pictured
from toolkit.report.style import BARS, STYLE
from toolkit.terminal import timed

_STYLE = STYLE + BARS


def plan_page(
    search: Search,
    candidates: list[Candidate],
    chosen: Candidate | None,
    change: str | None,
    scaled: list[dict[str, Any]] | None,
    assumptions: Sequence[str],
) -> str:
    """The page's HTML. It loads no other files."""
    asked = candidates[0]
    recipe = search.asked.recipe
    name = html.escape(str(recipe.model.path or (recipe.model.config or {}).get("model_type", "model")))
    tone, verdict = ("good", "fits") if asked.fits else ("bad", "does not fit")
    why = "" if chosen is None else why_chosen(candidates, chosen)
    pictured = [asked] if chosen is None or chosen is asked else [asked, chosen]
    return "\n".join([
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>plan of {name}: {verdict}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}, {html.escape(asked.label)}: <span class='{tone}'>{verdict}</span></h1>",
        f"<p class='soft'>{html.escape(_facts(search))}</p>",
        *_advice(asked, chosen, why, change),
        "<h2>Memory of one device, by strategy</h2>",
        _bars(best_of_each(candidates, chosen), chosen, why, search),
        _key(with_reserve=True),
        *(part for one in pictured for part in step_pictured(one, search, why if one is chosen else "the recipe")),
        "<h2>All candidates</h2>",
        _table(candidates, chosen, why),
        *(["<h2>Predicted for more devices</h2>", _scale(scaled)] if scaled else []),
        "<h2>Assumptions</h2>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in assumptions) + "</ul>",
        "</body></html>",
    ])  # fmt: skip


def plan_parts(
    search: Search,
    candidates: list[Candidate],
    chosen: Candidate | None,
    change: str | None,
    assumptions: Sequence[str],
) -> dict[str, str]:
    """The page in pieces of HTML, for a page around them. Rows of ``bars`` and ``table`` that can be taken over have
    the candidate's number in ``data-way``."""
    asked = candidates[0]
    why = "" if chosen is None else why_chosen(candidates, chosen)
    return {
        "facts": html.escape(_facts(search)),
        "asked": html.escape(asked.label),
        "reason": html.escape(asked.reason),
        "change_text": html.escape(change or ""),
        "chosen_label": "" if chosen is None else html.escape(chosen.label),
        "chosen_why": html.escape(why),
        "size_and_rate": f"{asked.needed / GIB:.1f} of {asked.capacity / GIB:.1f} GiB{_rate(asked)}",
        "chosen_rate": "" if chosen is None else _rate(chosen).removeprefix(", "),
        "bars": _bars(best_of_each(candidates, chosen), chosen, why, search, numbers=candidates),
        "key": _key(with_reserve=True),
        "step": "".join(step_pictured(asked, search, "the recipe")) + _also(chosen, asked, search, why),
        "table": _table(candidates, chosen, why),
        "assumptions": "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in assumptions) + "</ul>",
    }


def _also(chosen: Candidate | None, asked: Candidate, search: Search, why: str) -> str:
    """The step of the candidate that is recommended, folded: the page is about the recipe, like the terminal's."""
    if chosen is None or chosen is asked:
        return ""
    inner = "".join(step_pictured(chosen, search, why))
    return f"<details><summary>One step of {html.escape(chosen.label)}, {html.escape(why)}</summary>{inner}</details>"


def _facts(search: Search) -> str:
    asked, holdings = search.asked, search.planner.holdings
    return (
        f"{trained_share(holdings.elements(True), holdings.elements())}, "
        f"{asked.recipe.precision}, length {search.planner.length}, global batch {asked.global_size}; "
        f"{asked.world_size} × {search.device.name} of {search.device.memory:.1f} GiB, "
        f"{search.usable / GIB:.1f} usable"
    )


def _advice(asked: Candidate, chosen: Candidate | None, why: str, change: str | None) -> list[str]:
    lines = []
    if not asked.fits:
        lines.append(f"<p class='bad'>{html.escape(asked.label)}: {html.escape(asked.reason)}</p>")
        how = f"To make it fit: <code>{html.escape(change)}</code>" if change else (
            "Nothing else fits: other strategies, sizes, lengths and adapters were tried.")  # fmt: skip
        lines.append(f"<p>{how}</p>")
    if chosen is not None and chosen is not asked:
        lines.append(f"<p>{why[0].upper()}{why[1:]}: <b>{html.escape(chosen.label)}</b>{_rate(chosen)}</p>")
    return lines


def _rate(candidate: Candidate) -> str:
    if candidate.seconds is None:
        return ""
    tokens = candidate.resolved.global_size * candidate.resolved.recipe.data.max_length
    return f", {timed(candidate.seconds.total)} per step, {tokens / candidate.seconds.total:,.0f} tokens/s"


def _bars(
    shown: Sequence[Candidate],
    chosen: Candidate | None,
    why: str,
    search: Search,
    numbers: Sequence[Candidate] = (),
) -> str:
    """One bar a strategy, all on one scale: up to half more than the device, so that what is far too large does not
    press the rest together. ``numbers``: all candidates, to name each in ``data-way``."""
    capacity = search.device.bytes
    end = min(max([capacity, *(c.needed for c in shown)]) * 1.04, capacity * 1.5)
    marks = (
        f"<i class='room' style='left:{100 * search.usable / end:.2f}%' title='usable'></i>"
        f"<i style='left:{100 * capacity / end:.2f}%' title='the device'></i>"
    )
    rows = []
    for candidate in shown:
        left, parts = 0.0, []
        for term, size in candidate.shares.items():
            width = min(size, max(0.0, end - left))
            if width > 0:
                parts.append(
                    f"<span style='left:{100 * left / end:.2f}%;width:{100 * width / end:.2f}%;"
                    f"background:{COLOURS[term]}' title='{NAMES[term]}: {size / GIB:.2f} GiB'></span>"
                )
            left += size
        if candidate.needed > search.usable:
            over = min(candidate.needed, end)
            parts.append(
                f"<span class='over' style='left:{100 * search.usable / end:.2f}%;"
                f"width:{100 * (over - search.usable) / end:.2f}%' title='more than is usable'></span>"
            )
        notes = [*([why] if candidate is chosen else []), *(["this recipe"] if candidate.asked else [])]
        note = f" <span class='soft'>{', '.join(notes)}</span>" if notes else ""
        tone = "" if candidate.fits else " bad"
        mark = "" if candidate.fits else "✗ "
        taken = f" data-way='{numbers.index(candidate)}'" if candidate in numbers and not candidate.asked else ""
        rows.append(
            f"<div class='name'{taken}>{html.escape(candidate.label)}{note}</div>"
            f"<div class='size{tone}'>{mark}{candidate.needed / GIB:.1f} GiB</div>"
            f"<div class='bar{' cut' if candidate.needed > end else ''}'>{''.join(parts)}{marks}</div>"
        )
    return f"<div class='plan'>{''.join(rows)}</div>"


def _key(with_reserve: bool) -> str:
    terms = [*TERMS, *(["reserve", "cache"] if with_reserve else [])]
    keys = "".join(f"<span><b style='background:{COLOURS[t]}'></b>{NAMES[t]}</span>" for t in terms)
    lines = "<span class='soft'>solid line: device memory; dashed line: usable memory</span>"
    return f"<div class='key'>{keys}{lines}</div>"


def _why_not(candidate: Candidate, chosen: Candidate | None) -> str:
    """Of one that fits."""
    if candidate.seconds is None or chosen is None or chosen.seconds is None:
        return "fits; times are unknown"
    return "as fast" if candidate.seconds.total <= chosen.seconds.total * (1 + EQUAL) else "slower"


def _table(candidates: Sequence[Candidate], chosen: Candidate | None, chosen_for: str) -> str:
    staged = any(c.stages for c in candidates)
    head = "".join(
        f"<th class='n'>{name}</th>"
        for name in (
            "GiB",
            "host",
            "host, loading",
            "s per step",
            "computing",
            "update",
            "waiting for links",
            "offload",
            *(["pipeline bubble"] if staged else []),
        )
    )
    rows = [f"<div class='wide'><table><tr><th>candidate</th>{head}<th>reason</th></tr>"]
    for c in candidates:
        seconds = c.seconds
        parts = [None] * 6 if seconds is None else [
            seconds.total, seconds.compute, seconds.optimizer, seconds.exposed, seconds.offload, seconds.bubble,
        ]  # fmt: skip
        sizes = [f"{size / GIB:.1f}" for size in (c.needed, c.host, c.host_loading)]
        numbers = [*sizes, *("–" if p is None else f"{p:.3f}" for p in parts[: 6 if staged else 5])]
        why = f"<span class='good'>{chosen_for}</span>" if c is chosen else html.escape(c.reason) or _why_not(c, chosen)
        cells = "".join(f"<td class='n'>{n}</td>" for n in numbers)
        asked = " <span class='soft'>this recipe</span>" if c.asked else ""
        if c.stages:
            peaks = ", ".join(f"{peak / GIB:.1f}" for _, peak in c.stages)
            asked += f" <span class='soft'>GiB of each stage: {peaks}</span>"
        if c.unmeasured:
            asked += f" <span class='soft'>({html.escape(', '.join(c.unmeasured))}: not validated)</span>"
        rows.append(f"<tr><td>{html.escape(c.label)}{asked}</td>{cells}<td>{why}</td></tr>")
    return "".join(rows) + "</table></div>"


def _scale(rows: Sequence[dict[str, Any]]) -> str:
    best = fastest_of_each(list(rows))
    names = list(dict.fromkeys(_words(row)[0] for row in best if row["devices"] > 1))
    alone = {row["devices"]: row for row in best if row["devices"] == 1}
    by_place = {(row["devices"], _words(row)[0]): row for row in best}
    timed = any(row["seconds"] is not None for row in best)
    chosen = "fastest mesh that fits, in bold the fastest of all" if timed else "smallest mesh"
    text = ["<p class='soft'>GiB per device, and the share of a step spent waiting for links and pipeline stages, "
            "with the recipe's "
            f"micro-batch on every device; of each strategy the {chosen}.</p>"
            "<div class='wide'><table><tr><th class='n'>devices</th>",
            *(f"<th class='n'>{name}</th>" for name in names), "</tr>"]  # fmt: skip
    for count in dict.fromkeys(row["devices"] for row in best):
        cells = []
        for name in names:
            row = by_place.get((count, name)) or alone.get(count)
            if row is None:
                cells.append("<td class='n'>–</td>")
                continue
            waits = "" if row["waiting"] is None else f", {100 * (row['waiting'] + row['bubble']):.0f} %"
            tone = "" if row["fits"] else " bad"
            sized = f"{row['peak_bytes'] / GIB:.1f}{waits}"
            sized = f"<b>{sized}</b>" if row["fastest"] else sized
            mesh = " ".join(_words(row)[1:])
            cells.append(f"<td class='n{tone}'>{sized}{f' <span class=soft>{mesh}</span>' if mesh else ''}</td>")
        text.append(f"<tr><td class='n'>{count}</td>{''.join(cells)}</tr>")
    return "".join(text) + "</table></div>"


def _words(row: dict[str, Any]) -> list[str]:
    """A row's strategy, then its mesh."""
    return str(row["strategy"]).split(" ")
