"""The sets that tests are in, and the command that runs what is due of them.

A set is chosen by what a test says of itself: a fixture that starts processes, or one of the marks `nightly`, `real`,
`upstream` and `weekly`. No folder and no list of files decides.

    python tests/sets.py list              the sets, why each exists, and what was last seen green
    python tests/sets.py run NAME...       runs sets; after an interruption, what has passed on this version is left out
    python tests/sets.py due [--run]       what has to run since the code or the packages changed, and runs it

What was seen green is in tests/green.json. A version is the content of the product, the tests and the packages that
are installed; what passed of an interrupted run is in build/tests, by version.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GREEN = ROOT / "tests" / "green.json"
STATE = ROOT / "build" / "tests"
STARTS_PROCESSES = frozenset({"group", "lone_group", "four", "launches"})
"""Fixtures of tests that start processes. A test without one of them must start none."""
WEEK_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class TestSet:
    """``parts``: test folders whose marked tests belong to it, where a mark has several sets. ``follows``: what its
    results depend on, the "code" (product, tests and packages) or the "packages" alone."""

    __test__ = False
    name: str
    why: str
    minutes: int
    """At most, on two idle cores."""
    follows: str = "code"
    every_week: bool = False
    spread: str = ""
    """How pytest-xdist deals its tests out to the cores; "": one after another."""


GROUPS = "loadgroup"
"""Ranks of a training wait for each other much of the time: of the set `process` two pools took 1.8 s a test, one 2.4.
A set whose tests measure seconds or bytes of the machine runs one after another."""
SETS = {
    one.name: one
    for one in (
        TestSet("unit", "starts no process: formulas, files, messages; `make test-quick`", 5, spread="worksteal"),
        TestSet("process", "all that README promises, once: verdicts, trainings, launches", 12, spread=GROUPS),
        TestSet(
            "nightly-verify",
            "every option under every strategy; verdicts of scripts and checkpoints",
            60,
            spread=GROUPS,
        ),
        TestSet("nightly-train", "trainings, resumptions and launches in all combinations", 60, spread=GROUPS),
        TestSet("nightly-plan", "predicted bytes and seconds held to measured ones, cell by cell", 60),
        TestSet("nightly-mesh", "four ranks and more: every axis of the mesh under every strategy", 60, spread=GROUPS),
        TestSet("nightly-rehearsal", "CUDA code paths of every strategy and option without a GPU", 60, spread=GROUPS),
        TestSet(
            "nightly-files", "lint, import, migrate, data, studio and documentation, every case", 60, spread=GROUPS
        ),
        TestSet("nightly-real", "a pretrained model from the package index: strategies, exports, scripts", 60),
        TestSet("upstream", "what other packages do: changes only with their versions", 30, "packages", True),
        TestSet(
            "weekly", "random recipes, the whole kill matrix, mutations, hundreds of ranks: hours", 600, "code", True
        ),
    )
}
DEFAULT = ("unit", "process")
_NIGHTLY_OF = {
    "verify": "verify", "reference": "verify", "capabilities": "verify",
    "training": "train", "cli": "train", "launch": "train", "api": "train", "strategies": "train",
    "plan": "plan", "bench": "plan", "benchmarks": "plan",
    "rehearsal": "rehearsal",
}  # fmt: skip
"""Which part of the night a folder's long tests run in; others are in nightly-files."""


def set_of(marks: Iterable[str], fixtures: Iterable[str], path: Path) -> str:
    """The name of the one set that a test is in, from its marks' and fixtures' names and its file."""
    marks, fixtures = set(marks), set(fixtures)
    if "weekly" in marks:
        return "weekly"
    if "upstream" in marks:
        return "upstream"
    if "real" in marks:
        return "nightly-real"
    if "nightly" in marks:
        if "four" in fixtures:
            return "nightly-mesh"
        folder = path.relative_to(ROOT / "tests").parts[0] if path.is_relative_to(ROOT / "tests") else ""
        return f"nightly-{_NIGHTLY_OF.get(folder, 'files')}"
    return "process" if fixtures & STARTS_PROCESSES else "unit"


def packages() -> dict[str, str]:
    """Installed versions of what constraints.txt pins, and Python's."""
    found = {"python": platform.python_version()}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([A-Za-z0-9_.-]+)==", line):
            try:
                found[match[1].lower()] = metadata.version(match[1])
            except metadata.PackageNotFoundError:
                continue
    return found


def version(follows: str = "code") -> str:
    """Twelve digits that change with what a set's results depend on."""
    digest = hashlib.sha256(json.dumps(packages(), sort_keys=True).encode())
    if follows == "code":
        for path in _sources():
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _sources() -> Iterator[Path]:
    """Files of the product and its tests, in order; no caches, and not what this command writes."""
    for folder in ("toolkit", "tests", "benchmarks", "docsite", "tools", "examples", "ds_configs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path != GREEN:
                yield path
    yield ROOT / "pyproject.toml"


def passed_before(name: str) -> Path:
    """File with the tests of a set that have passed on this version, a name a line."""
    return STATE / f"{name}-{version(SETS[name].follows)}.passed"


def run(names: tuple[str, ...], extra: list[str], *, fresh: bool = False) -> int:
    """Run a set, or the default ones together; pytest's exit status. What ends green is noted in tests/green.json. The
    default sets are run whole each time."""
    chosen = [SETS[name] for name in names]
    ledger = passed_before(names[-1])
    ledger.parent.mkdir(parents=True, exist_ok=True)
    if fresh or names[-1] in DEFAULT:
        ledger.unlink(missing_ok=True)
    resumed = ledger.exists()
    command = [sys.executable, "-m", "pytest", "--passed", str(ledger), *extra]
    for one in chosen:
        command += ["--set", one.name]
        print(f"{one.name}: {one.why}" + (" (goes on after what has passed on this version)" if resumed else ""))
    if chosen[-1].spread and (cores := len(os.sched_getaffinity(0))) > 1:
        command += ["-n", str(cores), "--dist", chosen[-1].spread, "--no-loadscope-reorder"]
    sys.stdout.flush()
    started = time.time()
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status == 5 and resumed:  # nothing was left to run
        status = 0
    if status == 0 and not extra:
        passed = len(ledger.read_text(encoding="utf-8").splitlines())
        for one in chosen:
            _note_green(one, time.time() - started, resumed, passed, names)
    return status


def _note_green(one: TestSet, seconds: float, resumed: bool, tests: int, names: tuple[str, ...]) -> None:
    seen = read_green()
    entry = {
        "version": version(one.follows),
        "run": " ".join(names),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "clean": not _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/green.json"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "tests": tests,
        "cores": os.cpu_count(),
        "torch": packages().get("torch"),
    }
    # Of a run in several pieces only the last one's time is known.
    seen[one.name] = entry | ({} if resumed else {"seconds": round(seconds)})
    GREEN.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def read_green() -> dict[str, dict[str, Any]]:
    return json.loads(GREEN.read_text(encoding="utf-8")) if GREEN.exists() else {}


def why_due(name: str, seen: dict[str, dict[str, Any]], now: datetime) -> str | None:
    """Why a set has to run; None if what was last seen green is this version, or within its week."""
    one, last = SETS[name], seen.get(name)
    if last is None:
        return "never seen green"
    age = (now - datetime.strptime(last["date"], "%Y-%m-%d %H:%M").replace(tzinfo=UTC)).total_seconds()
    changed = last["version"] != version(one.follows)
    if one.every_week:
        if one.follows == "packages" and changed:
            return "the installed packages are others"
        return "a week ago" if age > WEEK_S else None
    return "the code or the packages have changed" if changed else None


def _table(now: datetime) -> str:
    seen = read_green()
    lines = [f"{'set':18} {'last green':17} {'commit':9} {'tests':>6} {'minutes':>8}  due"]
    for name, one in SETS.items():
        last = seen.get(name, {})
        minutes = f"{last['seconds'] / 60:.1f}" if "seconds" in last else ""
        due = why_due(name, seen, now)
        lines.append(
            f"{name:18} {last.get('date', 'never'):17} {last.get('commit', ''):9} {last.get('tests', ''):>6} "
            f"{minutes:>8}  {due or 'no'}\n    {one.why}; at most {one.minutes} minutes on two idle cores"
        )
    return "\n".join(lines)


def _together(names: list[str]) -> list[tuple[str, ...]]:
    """The default sets in one run, in which tests that start no process fill the time of those that wait; others by
    themselves."""
    rest = [(name,) for name in names if name not in DEFAULT]
    return [DEFAULT, *rest] if set(DEFAULT) <= set(names) else [(name,) for name in names]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the sets and what was last seen green")
    running = commands.add_parser("run", help="run sets, in order; what passed on this version is left out")
    running.add_argument("names", nargs="+", choices=[*SETS, "default"], metavar="NAME")
    running.add_argument("--fresh", action="store_true", help="run what has passed on this version, too")
    due = commands.add_parser("due", help="what has to run, and why")
    due.add_argument("--run", action="store_true", help="run it, in order")
    chosen, extra = parser.parse_known_args(arguments)
    now = datetime.now(UTC)
    if chosen.command == "list":
        print(_table(now))
        return 0
    if chosen.command == "due":
        reasons = {name: why for name in SETS if (why := why_due(name, read_green(), now))}
        for name, why in reasons.items():
            print(f"{name}: {why}")
        if not chosen.run:
            return 0
        runs = _together(list(reasons))
    else:
        runs = _together([one for name in chosen.names for one in (DEFAULT if name == "default" else (name,))])
    statuses = [run(names, extra, fresh=getattr(chosen, "fresh", False)) for names in runs]
    return max(statuses, default=0)


if __name__ == "__main__":
    sys.exit(main())
