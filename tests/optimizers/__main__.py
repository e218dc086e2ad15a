"""``python -m tests.optimizers [-o FILE.md] [WORD ...]``: verify every optimizer under every strategy, as a table.

With words, cells with one of them in their name or strategy alone; optimizers that are not among them keep their rows
of FILE.md. Exit status 1 if a cell is neither equivalent nor
refused.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

from tests.optimizers.cells import Cell, cells, groups, judge, limits
from toolkit.optimizers import optimizer_names
from toolkit.results import versions
from toolkit.strategies import strategies

HEAD = """\
# Optimizers under every strategy

`toolkit verify` of one recipe for each cell: a Llama of two layers in bf16, two processes on a CPU (`single`: one), in
two passes (float32, and bf16 as in the recipe), with a checkpoint that is resumed and an exported model. «equivalent»:
every weight, every tensor of the optimizer's state, the clipping coefficient and the learning rate are those of the
formula in float64 (`toolkit/reference/optimizers`), and the resumed run is equal to the uninterrupted one bit for bit.
«refused»: an error before training, with the reason ([optimizers and
schedules](../how-to/optimizers-and-schedules.md)).

Written by `python -m tests.optimizers -o docs/measurements/optimizers.md`.
"""
LIMITS = """
## Detection limits

The largest tolerance of a tensor in the float32 pass, relative, in the 2-norm, under `ddp`. Muon's is larger because
its iteration is in bf16 by definition; orthogonalising shards instead of whole matrices changes an update by 40 to
70 %. A norm's weight of 1 may change by less than its own rounding; its optimizer state then shows what the update does
not.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.optimizers")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    wanted = [c for c in cells() if not asked.words or any(w in (c.optimizer, c.strategy) for w in asked.words)]
    verdicts: dict[Cell, str] = {}
    found: dict[str, dict[str, float]] = {}
    with groups() as group_for:
        for cell in wanted:
            begun = time.perf_counter()
            verdicts[cell], outcome = judge(cell, group_for(cell))
            print(
                f"{cell.optimizer} | {cell.strategy} | {verdicts[cell]} | {time.perf_counter() - begun:.0f} s",
                flush=True,
            )
            if outcome is not None and cell.strategy == "ddp":
                found[cell.optimizer] = limits(outcome)
            if outcome is not None and verdicts[cell] != "equivalent":
                print(outcome.difference or outcome.failure or outcome.unproven, flush=True)
    if asked.output:
        kept = asked.output.read_text(encoding="utf-8") if asked.words and asked.output.exists() else ""
        asked.output.write_text(page(verdicts, found, kept), encoding="utf-8")
    return int(any(verdict not in ("equivalent", "refused") for verdict in verdicts.values()))


def page(verdicts: dict[Cell, str], found: dict[str, dict[str, float]], kept: str = "") -> str:
    """The tables as Markdown. ``kept``: an earlier page, whose rows of other optimizers stay."""
    columns = [name for name in strategies() if any(cell.strategy == name for cell in verdicts)]
    verdict_rows, limit_rows = (_rows(part) for part in (*kept.partition(LIMITS)[::2],))
    rows = [f"| optimizer | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for name in dict.fromkeys(cell.optimizer for cell in verdicts):
        row = {cell.strategy: verdict for cell, verdict in verdicts.items() if cell.optimizer == name}
        verdict_rows[name] = f"| {name} | {' | '.join(row.get(column, '') for column in columns)} |"
    rows += [verdict_rows[name] for name in optimizer_names() if name in verdict_rows]
    table = ["| optimizer | update | state |", "| --- | --- | --- |"]
    for name, limit in found.items():
        shown = [f"{limit[key]:.1e}" if key in limit else "none" for key in ("update", "optimizer-state")]
        limit_rows[name] = f"| {name} | {' | '.join(shown)} |"
    table += [limit_rows[name] for name in optimizer_names() if name in limit_rows]
    packages = ", ".join(f"{name} {version}" for name, version in sorted(versions().items()))
    return HEAD + "\n" + "\n".join(rows) + "\n" + LIMITS + "\n" + "\n".join(table) + f"\n\nMeasured with {packages}.\n"


def _rows(text: str) -> dict[str, str]:
    """A table's rows by optimizer."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


if __name__ == "__main__":
    sys.exit(main())
