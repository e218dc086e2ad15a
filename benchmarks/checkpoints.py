"""Host memory and bytes read and written while a checkpoint is saved, resumed and exported. Part of
``python -m benchmarks.loading``."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benchmarks.measuring import MIB, forget_peak, moved, status
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved

Row = dict[str, Any]


def keep(case: Resolved, tiny: Resolved, folder: str) -> Row:
    """Bytes that this process's peak grows by while it saves and resumes, and that it writes and reads; seconds of
    both, until the files are on the disk. ``tiny`` is saved and resumed before: everything is imported then."""
    from toolkit.model.silence import silence_libraries
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training import checkpoint
    from toolkit.training.loop import Progress
    from toolkit.training.session import engage

    silence_libraries()
    for name, one in (("tiny", tiny), ("large", case)):
        session = engage(one, make_accelerator(one), None, 0)
        before, wrote, begun = forget_peak(), moved("wchar"), perf_counter()
        saved = checkpoint.save(session, Path(folder) / name, Progress())
        found: Row = {"save": status("VmHWM") - before, "written": moved("wchar") - wrote}
        found["saving_s"] = perf_counter() - begun
        sleep(2.5)  # a later start resumes; files of this moment are hashed anew (toolkit/training/manifest.py)
        before, read, begun = forget_peak(), moved("rchar"), perf_counter()
        loaded = checkpoint.load_newest(session, saved.parent, print)
        assert loaded.path == saved
        found |= {"resume": status("VmHWM") - before, "read": moved("rchar") - read}
        found["resuming_s"] = perf_counter() - begun
        del session
    return found


def take(tiny: str, large: str, out: str, in_turn: bool) -> Row:
    """The same while a checkpoint is exported, one tensor after another or from the whole model."""
    from toolkit.launch.identity import saved_recipe
    from toolkit.model.silence import silence_libraries
    from toolkit.strategies import resolve
    from toolkit.training import export
    from toolkit.training.finding import whole_manifest
    from toolkit.training.streamed import Job, write_in_turn

    silence_libraries()
    for name, source in (("tiny", tiny), ("large", large)):
        before, wrote, read = forget_peak(), moved("wchar"), moved("rchar")
        folder = Path(source)
        manifest = whole_manifest(folder, when_read=True)
        case = resolve(export.alone(saved_recipe(folder, manifest)), source, device="cpu")
        target = Path(out) / f"{name} {in_turn}"
        if in_turn:
            write_in_turn(Job(case, folder, manifest, None, target))
        else:
            export.write_model(export.trained_model(case, folder), case.recipe, target, merged=False)
        found = {"export": status("VmHWM") - before, "written": moved("wchar") - wrote, "read": moved("rchar") - read}
    return found


def measure(folder: Path, cases: Any, world: int, strategies: tuple[str, ...], fits: Any, exports: bool) -> list[Row]:
    """A row for each strategy, and with ``exports`` two of the export of the last one's checkpoint."""
    rows: list[Row] = []
    place: Path | None = None
    with WorkerGroup(world) as group:
        for strategy in strategies:
            if not fits(strategy, world, by_part=True):
                continue
            if place is not None:
                shutil.rmtree(place)
            place = folder / f"{strategy}-{world}"
            found = group.run(keep, *cases(strategy, world), str(place), timeout=3000)
            rows.append(
                {"strategy": strategy, "processes": world} | {k: max(one[k] for one in found) for k in found[0]}
            )
            print(json.dumps(rows[-1]), flush=True)
    for in_turn in (True, False) if exports and place is not None else ():
        with WorkerGroup(1) as group:
            steps = [str(next((place / name).glob("step-*"))) for name in ("tiny", "large")]  # type: ignore[operator]
            [found] = group.run(take, *steps, str(folder), in_turn, timeout=3000)
            rows.append({"strategy": "export", "processes": 1, "in_turn": in_turn} | found)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def section(rows: list[Row], size: int, largest: int) -> list[str]:
    """Of the page of docs."""
    lines = [
        "## Checkpoints", "",
        "MiB that the highest resident memory of a process grows by while a checkpoint of the trained weights is saved "
        "and resumed, the largest of the N, and MiB that it writes and reads. Saving has its part in files of 1 GiB; "
        "resuming validates each block when it is read. Seconds "
        "are the slowest process's: saving until the files are on the disk, resuming files that the system may still "
        "have in memory.", "",
        "| strategy | N | model/N | saving | written | seconds | resuming | read | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for row in rows:
        if row["strategy"] != "export":
            cells = [f"{size / row['processes'] / MIB:,.0f}"]
            for memory, bytes_, seconds in (("save", "written", "saving_s"), ("resume", "read", "resuming_s")):
                cells += [f"{row[memory] / MIB:,.0f}", f"{row[bytes_] / MIB:,.0f}", f"{row[seconds]:.1f}"]
            lines.append(f"| {row['strategy']} | {row['processes']} | {' | '.join(cells)} |")
    lines += [
        "", "## Export", "",
        "`toolkit export` of the last of these checkpoints in one process. "
        f"Two tensors are {2 * largest / MIB:,.0f} MiB.",
        "", "| | memory | written | read |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for row, (key, in_turn) in product(rows, (("one tensor after another", True), ("the whole model", False))):
        if row.get("in_turn") is in_turn:
            lines.append(
                f"| {key} | " + " | ".join(f"{row[k] / MIB:,.0f}" for k in ("export", "written", "read")) + " |"
            )
    return lines
