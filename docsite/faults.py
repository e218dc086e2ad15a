"""The page of known faults: what each is, where it was seen, which stage finds it, under which strategies."""

from __future__ import annotations

from typing import Any

from toolkit.verification.diagnose.known import known
from toolkit.verification.faults import faults
from toolkit.verification.faults.base import EVERY, Fault

_HEAD = """\
# Faults and diagnoses

A fault is a known defect of this software stack. `toolkit verify RECIPE --fault ID` injects it into an otherwise
correct run, in the library or loop code where it was observed. The comparison does not know about it and has to find
it (exit status 1). `toolkit verify RECIPE --kill-matrix` runs every fault under every strategy that it applies to;
[the kill matrix](../kill-matrix.md) is the result. [Add a fault](../how-to/add-fault.md) describes how to write one.
"""


def pages() -> dict[str, str]:
    """Markdown by path within the site."""
    found = faults()
    rows = ["| fault | what goes wrong |", "| --- | --- |"]
    rows += [f"| [`{name}`](#{name}) | {fault.title} |" for name, fault in found.items()]
    return {"reference/faults.md": "\n".join([_HEAD, *rows, "", *map(_section, found.values()), *_diagnoses()])}


def _diagnoses() -> list[str]:
    rows = ["## Diagnoses\n", "`diagnosis.id` in the JSON of `toolkit verify`. Names in braces are its `facts`.\n",
            "| id | likely cause | evidence | reported in |", "| --- | --- | --- | --- |"]  # fmt: skip
    rows += [f"| `{name}` | {one.cause} | {one.evidence} | {one.reference} |" for name, one in known().items()]
    return [*rows, ""]


def _section(fault: type[Fault]) -> str:
    strategies = "every strategy" if fault.strategies is EVERY else ", ".join(fault.strategies.names())
    lines = [
        f"## `{fault.id}` {{: #{fault.id} }}\n",
        f"{fault.title[0].upper()}{fault.title[1:]}.\n",
        f"- reported in: {fault.reference or 'no public report; written to cover this mistake'}",
        f"- found at: {', '.join(fault.stages)}",
        f"- diagnosed as: {', '.join(f'`{name}`' for name in fault.diagnoses)}",
        f"- applies to: {strategies}",
    ]
    if fault.needs:
        lines.append(f"- the recipe then also has: `{_recipe(fault.needs)}`")
    return "\n".join(lines) + "\n"


def _recipe(needs: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(needs, default_flow_style=True, width=1000)).strip().removeprefix("{").removesuffix("}")
