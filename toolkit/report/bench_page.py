"""A self-contained HTML page of a bench: rates, times, memory, and the phases of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.report.bench_pictures import PHASES, key, key_of_memory, memory, part, phases, rates, safe, size, steps
from toolkit.report.style import BARS, STYLE

_STYLE = STYLE + BARS + "td.name { white-space: nowrap } .dots { min-width: 38rem }\n"
_DEVICE = {
    "arithmetic": ("compute", "#0072b2"),
    "communication_hidden": ("communication, overlapped", "#56b4e9"),
    "communication_exposed": ("communication, not overlapped", "#d55e00"),
    "idle": ("idle, waiting for the host", "#999999"),
}


def bench_page(document: dict[str, Any], title: str) -> str:
    """The page's HTML, from the result that ``--json`` writes. It loads no other files."""
    cells = [cell for cell in document["cells"] if cell["tokens_per_second"] is not None]
    failed = [cell for cell in document["cells"] if cell["tokens_per_second"] is None]
    best = max(cells, key=lambda cell: cell["tokens_per_second"], default=None)
    verdict = "nothing measured" if best is None else f"{best['tokens_per_second']:,.0f} tokens/s"
    of_best = "" if best is None or len(cells) == 1 else f" <span class='soft'>{safe(best['label'])}</span>"
    profile = next((cell["profile"] for cell in cells if cell.get("profile")), None)
    return "\n".join([
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>bench of {safe(title)}: {verdict}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{safe(title)}: {verdict}{of_best}</h1>",
        f"<p class='soft'>{safe(_facts(document))}</p>",
        *(f"<p class='bad'>{safe(cell['label'])} failed: {safe(cell['reason'])}</p>" for cell in failed),
        *(f"<p class='soft'>skipped: {safe(line)}</p>" for line in document["left_out"]),
        *(_measured(cells, document) if cells else []),
        *(_profiled(profile) if profile else []),
        "</body></html>",
    ])  # fmt: skip


def _measured(cells: Sequence[dict[str, Any]], document: dict[str, Any]) -> list[str]:
    lines = [
        "<h2>Tokens/s</h2>",
        "<p class='soft'>A bar is the median of all turns; a line is one turn.</p>",
        rates(cells),
        "<h2>Every timed step, by turn</h2>",
        "<p class='soft'>Seconds. A dot is one step (its slowest process); a line is the median of a turn.</p>",
        steps(cells),
        "<h2>Where a step's time goes</h2>",
        f"<p class='soft'>{_clock(document)}</p>",
        phases(cells),
        key((name, colour) for name, colour in PHASES.items()),
    ]
    if any(cell["peak_allocated_bytes"] is not None for cell in cells):
        lines += ["<h2>Peak memory of one process</h2>", memory(cells), key_of_memory(cells)]
    return [*lines, "<h2>All numbers</h2>", _table(cells)]


def _facts(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    return (
        f"{document['started']}; {document['device']}; "
        f"{document['turns']} turns of {document['steps']} steps after {document['warmup']} "
        f"untimed ones, interleaved; data: {document['data']}; {document['seconds']:.0f} s; {versions}"
    )


def _clock(document: dict[str, Any]) -> str:
    if document["device"] == "cpu":
        return "Seconds of a median step, measured on the host; «host» is the loop itself."
    return (
        "Seconds of a median step, measured on the host. The device runs asynchronously: "
        "--profile measures what it does."
    )


def _table(cells: Sequence[dict[str, Any]]) -> str:
    names = ("tokens/s", "turns", "step s", "steps", "allocated", "reserved", "padding", "MFU")
    head = "".join(f"<th class='n'>{name}</th>" for name in names)
    rows = [f"<div class='wide'><table><tr><th>cell</th>{head}</tr>"]
    for cell in cells:
        turns, (low, high) = cell["tokens_per_second_by_turn"], cell["seconds_spread"]
        numbers = (
            f"{cell['tokens_per_second']:,.0f}",
            f"{min(turns):,.0f} – {max(turns):,.0f}",
            f"{cell['seconds_per_step']:.4f}",
            f"{low:.4f} – {high:.4f}",
            size(cell["peak_allocated_bytes"]),
            size(cell["peak_reserved_bytes"]),
            f"{cell['padding']:.1%}",
            "–" if cell["mfu"] is None else f"{cell['mfu']:.1%}",
        )
        lines = "".join(f"<td class='n'>{number}</td>" for number in numbers)
        rows.append(f"<tr><td class='name'>{safe(cell['label'])}</td>{lines}</tr>")
    unknown = any(cell["mfu"] is None for cell in cells)
    why = "<p class='soft'>MFU needs the peak rate of the device: --tflops.</p>" if unknown else ""
    return "".join(rows) + "</table></div>" + why


def _profiled(profile: dict[str, Any]) -> list[str]:
    lines = [f"<h2>Profile of the first cell, {profile['steps']} steps</h2>"]
    device = profile["device"]
    if device:
        shares = device | {"arithmetic": device["arithmetic"] - device["communication_hidden"]}
        whole = sum(shares[name] for name in _DEVICE) or 1.0
        parts, left = "", 0.0
        for name, (text, colour) in _DEVICE.items():
            parts += part(left / whole, shares[name] / whole, colour, f"{text}: {shares[name]:.4f} s")
            left += shares[name]
        keys = [(f"{text}, {shares[name] / whole:.1%}", colour) for name, (text, colour) in _DEVICE.items()]
        lines += [f"<div class='bar'>{parts}</div>", key(keys)]
    rows = "".join(
        f"<tr><td class='n'>{op['share']:.1%}</td><td class='n'>{op['seconds']:.4f}</td><td class='n'>{op['calls']}"
        f"</td><td><code>{safe(op['name'])}</code>{' <span class=soft>communication</span>' if op['talks'] else ''}"
        "</td></tr>"
        for op in profile["operations"]
    )
    lines.append(
        "<div class='wide'><table><tr><th class='n'>share</th><th class='n'>seconds</th><th class='n'>calls</th>"
        f"<th>operation (self time)</th></tr>{rows}</table></div>"
    )
    lines.append(f"<p class='soft'>Full trace: {safe(profile['trace'])}, for ui.perfetto.dev.</p>")
    return lines
