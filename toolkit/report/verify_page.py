"""One self-contained HTML page of a verification: every tensor's error by stage and step against its tolerance."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from toolkit.report.style import STYLE
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.outcome import Outcome
from toolkit.verification.passes import Pass
from toolkit.verification.screen import deviation_line

_STYLE = (
    STYLE
    + """td.cell { padding: .1rem .15rem; border: 0; width: 5.2rem } td.cell span { display: block; padding: 0 .3rem;
  border-radius: 3px; color: #111; white-space: nowrap; font-size: .8rem }
"""
)


def verify_page(
    outcome: Outcome, title: str, seconds: float, versions: dict[str, str | None], command: str = ""
) -> str:
    """The page's HTML. It loads nothing from anywhere. ``command``: what was run, and when."""
    verdict = outcome.verdict
    tone = "good" if verdict == "equivalent" else "bad"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}: {verdict}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}: <span class='{tone}'>{verdict}</span></h1>",
        *([f"<p class='soft'>{html.escape(command)}</p>"] if command else []),
        f"<p class='soft'>{html.escape(_facts(outcome))} · {seconds:.0f} s · {html.escape(_packages(versions))}</p>",
        *_difference(outcome),
        *(f"<p>{html.escape(line)}</p>" for line in deviation_line(outcome)),
        "<h2>Stages</h2>",
        _stages(outcome.passes),
        "<h2>Evidence</h2>",
        _evidence(outcome),
        *(section for one in outcome.passes for section in _pass(one)),
        "</body></html>",
    ]
    return "\n".join(parts)


def _facts(outcome: Outcome) -> str:
    recipe = outcome.resolved.recipe
    model = recipe.model.path or (recipe.model.config or {}).get("model_type", "model")
    return f"{model}, {recipe.strategy.name}, {outcome.resolved.world_size} processes, {recipe.precision}"


def _packages(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _difference(outcome: Outcome) -> list[str]:
    lines = []
    if outcome.failure:
        lines.append(f"<p class='bad'>The run ended early: {html.escape(outcome.failure)}</p>")
    for at, (one, stage, measure) in enumerate(outcome.differences):
        place = f"{stage.name}, {one.name} pass, step {measure.step + 1}"
        lines.append(
            f"<p class='bad'>{'Also at' if at else 'First difference at'} {place}: "
            f"<code>{html.escape(measure.tensor)}</code>, error {measure.error:.3g}, "
            f"tolerance {measure.tolerance:.3g}. {html.escape(measure.sentence)}</p>"
        )
    for cause in outcome.diagnoses:
        lines.append(f"<p>Likely cause: {html.escape(cause.cause)}. {html.escape(cause.evidence)}.</p>")
        if cause.reference:
            lines.append(f"<p class='soft'>Seen in {html.escape(cause.reference)}</p>")
    return lines


def _stages(passes: Sequence[Pass]) -> str:
    rows = ["<div class='wide'><table><tr><th>pass</th><th>stage</th><th>compared</th><th>failed</th><th>worst</th>"
            "<th>error</th><th>tolerance</th><th>noise</th></tr>"]  # fmt: skip
    for one in passes:
        for stage in one.stages:
            worst = stage.worst
            wrong = sum(not m.ok for m in stage.measures)
            tone = "bad" if wrong else "good"
            numbers = (
                f"<td><code>{html.escape(worst.tensor)}</code></td><td>{worst.error:.2e}</td>"
                f"<td>{worst.tolerance:.2e}</td><td>{worst.noise:.2e}</td>"
                if worst
                else "<td></td><td></td><td></td><td></td>"
            )
            rows.append(
                f"<tr><td>{one.name}</td><td>{stage.name}</td><td>{len(stage.measures)}</td>"
                f"<td class='{tone}'>{wrong}</td>{numbers}</tr>"
            )
    return "".join(rows) + "</table></div>"


def _evidence(outcome: Outcome) -> str:
    rows = ["<div class='wide'><table><tr><th>pass</th><th>claim</th><th>expected</th><th>seen</th></tr>"]
    for one in outcome.passes:
        for claim in one.claims:
            tone = "good" if claim.ok else "bad"
            rows.append(
                f"<tr><td>{one.name}</td><td>{html.escape(claim.claim)}</td><td>{html.escape(claim.expected)}</td>"
                f"<td class='{tone}'>{html.escape(claim.seen)}</td></tr>"
            )
    return "".join(rows) + "</table></div>"


def _pass(one: Pass) -> list[str]:
    sections = []
    for stage in one.stages:
        if stage.measures:
            opened = " open" if not stage.ok or stage.name == "gradient" else ""
            sections.append(
                f"<details{opened}><summary>{html.escape(one.name)}: {stage.name}, every tensor by step</summary>"
                f"{_grid(stage)}</details>"
            )
    return ["<h2>Every tensor, " + html.escape(one.name) + " pass</h2>", _legend(), *sections]


def _legend() -> str:
    return (
        "<p class='soft'>A cell shows the error. Its colour shows the ratio of error to tolerance: "
        + " ".join(f"<span style='background:{_shade(r)};color:#111;padding:0 .4rem'>{t}</span>" for r, t in (
            (0.0, "0"), (1e-3, "1/1000"), (0.1, "1/10"), (1.0, "1"), (10.0, "above 1")))
        + ". Hover over a cell to see its tolerance and noise.</p>"
    )  # fmt: skip


def _grid(stage: Stage) -> str:
    steps = sorted({measure.step for measure in stage.measures})
    by_tensor: dict[str, dict[int, Measure]] = {}
    for measure in stage.measures:
        kept = by_tensor.setdefault(measure.tensor, {})
        # Several micro-batches of a step share a cell: the worst of them.
        if measure.step not in kept or measure.ratio > kept[measure.step].ratio:
            kept[measure.step] = measure
    head = "".join(f"<th>step {step + 1}</th>" for step in steps)
    rows = [f"<div class='wide'><table><tr><th>tensor</th>{head}</tr>"]
    for tensor, measures in by_tensor.items():
        cells = "".join(_cell(measures.get(step)) for step in steps)
        rows.append(f"<tr><td><code>{html.escape(tensor)}</code></td>{cells}</tr>")
    return "".join(rows) + "</table></div>"


def _cell(measure: Measure | None) -> str:
    if measure is None:
        return "<td class='cell'></td>"
    title = f"error {measure.error:.3g}, tolerance {measure.tolerance:.3g}, noise {measure.noise:.3g}"
    if measure.sentence:
        title += f"; {measure.sentence}"
    shown = "0" if measure.error == 0 else f"{measure.error:.1e}"
    mark = "" if measure.ok else " ✗"
    return (
        f"<td class='cell'><span style='background:{_shade(measure.ratio)}' title='{html.escape(title, quote=True)}'>"
        f"{shown}{mark}</span></td>"
    )


def _shade(ratio: float) -> str:
    """Green to yellow up to the tolerance, by the logarithm; red above it."""
    if ratio > 1:
        return "#ff8f8f"
    nearness = 0.0 if ratio <= 0 else min(1.0, max(0.0, 1 + math.log10(ratio) / 4))
    return f"hsl({140 - 90 * nearness:.0f} 60% {88 - 8 * nearness:.0f}%)"
