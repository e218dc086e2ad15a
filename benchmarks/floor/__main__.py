"""The table: ``python -m benchmarks.floor [--only wire,operators] [--quick] [--out FOLDER]``.

Each row is a ratio to the bare loop, or to the least possible. Counts hold on any machine under any load. Timed rows
need a machine that nothing else uses; their spread is beside them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.floor.table import Row, as_json, page

PARTS = {
    "operators": "Operators and bytes of a step, toolkit to bare loop",
    "wire": "Bytes on the wire of a step, to the least of the sharding",
    "host": "Host time per micro-batch, to the bare loop",
    "sharded": "Tokens per second, to ddp",
    "peak": "Share of the matrix-product peak",
    "start": "Seconds from the command to the first step, less a bare script's imports",
    "data": "Tokens per second tokenised and packed, to a million",
}
"""Modules of this package, and the titles of their rows. ``operators`` also has those of `QUESTIONS`."""
QUESTIONS = {"questions": "Questions to the device per micro-batch"}
TIMED = frozenset({"host", "sharded", "peak", "start", "data"})


def head(parts: list[str], quick: bool, command: str, load: float) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "peft"))
    lines = [f"`{command}` · {datetime.now(UTC).isoformat(timespec='minutes')} · {packages} · {os.cpu_count()} cores"]
    if quick:
        lines.append("Quick sizes: for a test of the command, not a measurement.")
    if TIMED & set(parts):
        lines.append(f"Load of the machine before the run: {load:.1f} a core.")
        if load > 0.2:  # an idle machine's own processes stay below it
            lines.append("**Other processes used the machine: timed rows are not a measurement.**")
    return "\n\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between: " + ", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="smallest sizes, one turn")
    parser.add_argument("--out", type=Path, help="folder for floor.md and floor.json, for example docs/measurements")
    given = parser.parse_args()
    parts = [part for part in given.only.split(",") if part]
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    from toolkit.model.silence import silence_libraries

    silence_libraries()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    rows: list[Row] = []
    for part in parts:
        begun = time.perf_counter()
        rows += importlib.import_module(f"benchmarks.floor.{part}").measure(given.quick)
        print(f"{part}: {time.perf_counter() - begun:.0f} s", flush=True)
    command = f"python -m benchmarks.floor --only {','.join(parts)}" + (" --quick" if given.quick else "")
    text = page(rows, PARTS | QUESTIONS, head(parts, given.quick, command, load))
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "floor.md").write_text(text, encoding="utf-8")
        found = {"command": command, "load": load, "quick": given.quick, "rows": as_json(rows)}
        (given.out / "floor.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
