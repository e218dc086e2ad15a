"""One self-contained HTML page of a recipe's data: the numbers, and samples with their supervised tokens marked."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.inspection.measure import Inspected
from toolkit.inspection.shown import Shown
from toolkit.inspection.tokens import Piece, visible
from toolkit.inspection.wording import facts, findings, overview, samples, span, stats
from toolkit.report.style import PALETTE, STYLE

_STYLE = (
    STYLE
    + """:root { --learn: #d5efdd; --learnt: #0b5a2f; --mark: #8a4b08 }
@media (prefers-color-scheme: dark) { :root { --learn: #173d29; --learnt: #a9e8c0; --mark: #f5b971 } }
td.n, th.n { text-align: right } th.n { white-space: nowrap } .place { overflow-wrap: anywhere }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .15rem .7rem; align-items: center;
  font-variant-numeric: tabular-nums } .bars > span { text-align: right }
.bars > div { background: color-mix(in srgb, var(--line) 45%, transparent); border-radius: 2px; height: 1rem;
  display: flex; overflow: hidden } .bars i { display: block; height: 100% }
.sample { border: 1px solid var(--line); border-radius: 6px; margin: .8rem 0; overflow: hidden }
.sample > p { padding: .35rem .7rem; margin: 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere }
.text { font: 13px/1.65 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
  padding: .6rem .7rem; max-height: 32rem; overflow-y: auto; tab-size: 4 }
.text span { border-radius: 2px } .text span:hover { outline: 1px solid var(--ink) }
.l { background: var(--learn); color: var(--learnt); text-decoration: underline; text-decoration-color:
  color-mix(in srgb, var(--learnt) 45%, transparent); text-underline-offset: 3px }
.x { color: var(--mark); font-weight: 600 } .e { opacity: .45; font-weight: 400 }
.packed { border-left: 4px solid var(--line); padding-left: .7rem; margin: 1.2rem 0 }
.packed > h3 { font-size: .95rem; margin: 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: .4rem 0 } dt { font-weight: 600 }
dd { margin: 0; min-width: 0 }
@media (max-width: 40rem) { dl { grid-template-columns: minmax(0, 1fr) } dd { margin-bottom: .4rem } }
"""
)


def data_page(found: Inspected) -> str:
    """The page's HTML. It loads no other files."""
    fields = found.document
    sources = [one["source"] for one in fields["sources"]]
    title = f"{fields['data']}: {sources[0] if len(sources) == 1 else f'{len(sources)} sources'}"
    return "\n".join([
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1 class='place'>{_text(title)}</h1>",
        f"<p class='soft'>{_text(fields['task'])}, format {fields['format']}, max_length {fields['max_length']:,}</p>",
        *(f"<p>{_text(line)}</p>" for line in overview(fields)),
        *_refused(fields["refused"]),
        f"<h2>Lengths</h2><p>{_text(stats(fields['lengths']))}</p>",
        _histogram(fields),
        "<h2>Findings</h2>",
        _findings(fields),
        *(["<h2>Sources</h2>", _sources(fields["sources"])] if len(fields["sources"]) > 1 else []),
        "<h2>One epoch</h2>",
        _arrangements(fields["arrangements"]),
        *(f"<p class='soft'>{_text(note)}</p>" for note in fields["notes"]),
        f"<h2>{'Packed rows' if any(one.packed for one in found.shown) else 'Samples'}</h2>",
        *_shown(found),
        "</body></html>",
    ])  # fmt: skip


def _refused(problems: Sequence[str]) -> Iterator[str]:
    if problems:
        yield f"<h2 class='bad'>Refused by a run: {len(problems):,}</h2>"
        yield "<ul>" + "".join(f"<li class='place bad'>{_text(one)}</li>" for one in problems[:100]) + "</ul>"


def _histogram(fields: dict[str, Any]) -> str:
    buckets = fields["lengths"]["histogram"]
    most, limit = max(one["samples"] for one in buckets), fields["max_length"]
    rows = []
    for one in buckets:
        inside = one["to"] <= limit
        color = PALETTE[0] if inside else PALETTE[3] if one["from"] <= limit else PALETTE[4]
        rows.append(
            f"<span>{span(one)}</span><div><i style='width:{100 * one['samples'] / most:.2f}%;background:{color}'></i>"
            f"</div><span>{one['samples']:,}</span>"
        )
    key = "" if buckets[-1]["to"] <= limit else (
        f"<p class='soft'>Tokens of a sample before the cut. Ranges above data.max_length {limit:,} are dark orange, "
        "the range that contains it is light orange.</p>")  # fmt: skip
    return f"<div class='bars'>{''.join(rows)}</div>{key}"


def _findings(fields: dict[str, Any]) -> str:
    rows = []
    for name, text, places in findings(fields):
        where = f"<br><span class='soft place'>{_text(places)}</span>" if places else ""
        rows.append(f"<dt>{_text(name)}</dt><dd>{_text(text)}{where}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


def _sources(sources: Sequence[dict[str, Any]]) -> str:
    names = ("rows", "samples", "per epoch", "share", "supervised tokens", "share")
    head = "".join(f"<th class='n'>{name}</th>" for name in names)
    rows = []
    for one in sources:
        cells = (f"{one['rows']:,}", f"{one['samples']:,}", f"{one['samples_per_epoch']:,}",
                 f"{one['share_of_samples']:.1%}", f"{one['supervised']:,}",
                 f"{one['share_of_supervised']:.1%}")  # fmt: skip
        numbers = "".join(f"<td class='n'>{cell}</td>" for cell in cells)
        rows.append(f"<tr><td>{_text(one['source'])}</td>{numbers}</tr>")
    return f"<div class='wide'><table><tr><th>source</th>{head}</tr>{''.join(rows)}</table></div>"


def _arrangements(ways: Sequence[dict[str, Any]]) -> str:
    most = max(one["computed_tokens"] for one in ways) or 1
    bars, rows, not_possible = [], [], []
    for one in ways:
        mine = " <span class='soft'>this recipe</span>" if one["recipe"] else ""
        if one["reason"] is not None:
            not_possible.append(f"<p class='soft'>{_text(one['name'])}: not possible: {_text(one['reason'])}</p>")
            continue
        real = 100 * (one["computed_tokens"] - one["padding_tokens"]) / most
        bars.append(
            f"<span style='text-align:left'>{_text(one['name'])}</span><div>"
            f"<i style='width:{real:.2f}%;background:{PALETTE[2]}'></i>"
            f"<i style='width:{100 * one['padding_tokens'] / most:.2f}%;background:{PALETTE[3]}'></i></div>"
            f"<span>{one['padding_share']:.1%}</span>"
        )
        cells = (f"{one['steps']:,}", f"{one['rows']:,}", f"{one['computed_tokens']:,}", f"{one['padding_tokens']:,}",
                 f"{one['padding_share']:.1%}", f"{one['largest_micro_batch']:,}")  # fmt: skip
        numbers = "".join(f"<td class='n'>{cell}</td>" for cell in cells)
        rows.append(f"<tr><td>{_text(one['name'])}{mine}</td>{numbers}</tr>")
    names = ("steps", "rows", "computed tokens", "padding", "share", "largest micro-batch, tokens")
    head = "".join(f"<th class='n'>{name}</th>" for name in names)
    return (
        f"<div class='bars'>{''.join(bars)}</div><p class='soft'>Computed tokens: samples in green, padding in light "
        "orange, with its share.</p>"
        f"<div class='wide'><table><tr><th></th>{head}</tr>{''.join(rows)}</table></div>{''.join(not_possible)}"
    )


# ---------------------------------------------------------------------- samples


def _shown(found: Inspected) -> Iterator[str]:
    if not found.shown:
        only = found.document["only"]
        yield f"<p>{'No sample is ' + _text(only) if only else 'None were asked for'}.</p>"
        return
    yield (
        "<p>prompt <span class='l'>supervised</span> <span class='x'>&lt;special&gt;</span> "
        "<span class='soft'>hover over a token for its id</span></p>"
    )
    packed: int | None = None
    for shown in found.shown:
        if shown.packed != packed:
            yield "</section>" if packed is not None else ""
            row = [one for one in found.shown if one.packed == shown.packed]
            held, most = sum(one.tokens for one in row), found.document["max_length"]
            yield (
                f"<section class='packed'><h3>row {shown.packed}: {samples(len(row))}, {held:,} of {most:,} tokens</h3>"
            )
            packed = shown.packed
        yield _sample(shown)
    yield "</section>" if packed is not None else ""


def _sample(shown: Shown) -> str:
    about = (
        f"<b>sample {shown.number:,}</b> {_text(shown.row)} <span class='soft'>{_text(', '.join(facts(shown)))}</span>"
    )
    target = f"<p>target</p><pre class='text'>{_tokens(shown.target)}</pre>" if shown.target else ""
    label = f"<p>label <b>{_text(shown.label)}</b></p>" if shown.label is not None else ""
    return f"<div class='sample'><p>{about}</p><pre class='text'>{_tokens(shown.pieces)}</pre>{target}{label}</div>"


def _tokens(pieces: Sequence[Piece]) -> str:
    found = []
    for piece in pieces:
        kind = " ".join(name for name, on in (("l", piece.supervised), ("x", piece.special)) if on)
        text = _text(piece.text).replace("\n", "<b class='e'>↵</b>\n")
        ids = ", ".join(map(str, piece.ids))
        found.append(f"<span class='{kind}' title='{ids}'>{text}</span>")
    return "".join(found)


def _text(text: str) -> str:
    return html.escape(visible(text), quote=True)
