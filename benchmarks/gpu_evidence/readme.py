"""Measured rows of ds_configs/README.md, from a presets.json that a GPU run wrote, and from no other.

``python -m benchmarks.gpu_evidence.readme docs/measurements/<gpu>-<date>``
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.planning.hardware import GIB

README = Path("ds_configs/README.md")
_HEAD = ("preset", "for", "model", "peak, GiB", "tokens/s", "largest deviation from the plain loop")
_NOT_YET = "not yet"


def write_rows(folder: Path, readme: Path = README) -> int:
    """Put the rows that ``folder`` holds into the table; returns their number.

    Raises InputError if the file has no results of a GPU at the presets' own size.
    """
    file = folder / "presets.json"
    if not file.exists():
        raise InputError(f"{file}: not there; `python -m benchmarks.gpu_evidence presets` on a GPU writes it")
    summary = json.loads(file.read_text(encoding="utf-8"))
    rows = measured_rows(summary, file)
    readme.write_text(_with_rows(readme.read_text(encoding="utf-8"), rows, summary, folder), encoding="utf-8")
    return len(rows)


def measured_rows(summary: dict[str, Any], file: Path) -> dict[str, tuple[str, str, str, str]]:
    """Model, peak, tokens/s and deviation by preset. Raises InputError where any cell was not measured on a GPU."""
    _check_gpu(summary, file, "the summary")
    rows = {}
    for record in summary["cells"]:
        _check_gpu(record, file, record["cell"])
        if record["device"] != summary["device"]:
            raise InputError(f"{file}: {record['cell']}: measured on another device than the file says")
        if record["status"] != "done":
            continue
        result = record["result"]
        # A CPU has no allocator that reserves: whatever else is written, this number only a GPU run has.
        if not result["peak_reserved_bytes"] or not result["tokens_per_second"]:
            raise InputError(f"{file}: {record['cell']}: has no figures of a GPU's allocator")
        rows[record["cell"]] = (
            result["model"],
            f"{result['peak_allocated_bytes'] / GIB:.1f}",
            f"{result['tokens_per_second']:,.0f}",
            _deviation(result["twin"]),
        )
    return rows


def _check_gpu(record: dict[str, Any], file: Path, what: str) -> None:
    device = record["device"]
    if device["type"] != "cuda" or not device["cuda"] or not device["memory_bytes"]:
        raise InputError(f"{file}: {what}: measured on {device['name']}; a preset's row needs results of a GPU")
    if record["tiny"]:
        raise InputError(f"{file}: {what}: a tiny run; a preset's row is of the preset itself")


def _deviation(twin: dict[str, Any]) -> str:
    """Of the pass in the preset's own precision."""
    last = list(twin["deviation"].values())[-1]
    parts = []
    for stage, word in (("forward", "loss"), ("gradient", "gradient")):
        if stage in last:
            parts.append(f"{word} {last[stage]['error']:.1e}")
    return ", ".join(parts)


def _with_rows(text: str, rows: dict[str, tuple[str, str, str, str]], summary: dict[str, Any], folder: Path) -> str:
    lines = text.splitlines()
    table = [at for at, line in enumerate(lines) if line.startswith("|")]
    begin, end = table[0], table[-1] + 1
    assert table == list(range(begin, end)), "one table"
    presets = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[begin + 2 : end]]
    unknown = sorted(set(rows) - {row[0].strip("`") for row in presets})
    if unknown:
        raise InputError(f"{README}: has no row for {', '.join(unknown)}")
    made = [_HEAD, tuple("---" for _ in _HEAD)]
    for row in presets:
        kept = tuple(row[2:]) if len(row) == len(_HEAD) else (_NOT_YET, "", "", "")
        made.append((row[0], row[1], *rows.get(row[0].strip("`"), kept)))
    after = _conditions(summary, folder)
    rest = [line for line in lines[end:] if not _is_of_conditions(line)]
    while rest and not rest[0]:
        rest.pop(0)
    text = "\n".join([*lines[:begin], *(f"| {' | '.join(row)} |" for row in made), "", after, *rest])
    return text.rstrip("\n") + "\n"


def _conditions(summary: dict[str, Any], folder: Path) -> str:
    device, versions = summary["device"], summary["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"Measured in one process on one {device['name']} ({summary['written'][:10]}, CUDA {device['cuda']}, "
        f"{packages}) by `{summary['command']}`, see `{folder.name}`. Peak: of torch's allocator. "
        "Deviation: relative, the largest of any loss and of any tensor's gradient of the preset's twin, which "
        "`toolkit verify` found equivalent."
    )


def _is_of_conditions(line: str) -> bool:
    return bool(re.match(r"Memory and speed on a GPU have not been measured yet|Measured in one process on one ", line))


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {__spec__.name} FOLDER", file=sys.stderr)
        return 2
    try:
        count = write_rows(Path(sys.argv[1]))
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{count} rows written to {README}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
