"""`python -m tests.product_mutants check | list | map | run | table`: see the package's docstring.

``run`` appends a JSON line for each mutant to a file; with ``--resume`` it leaves out those that the file has.
Exit status 1 where an entry of the list is useless (``check``), or where a mutant is not killed (``run``).
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from product_mutants.catalogue import Mutant, problems, read_mutants, read_sources
from product_mutants.covered import Map, record
from product_mutants.judge import Judge, place_of
from product_mutants.trees import SETS, new_tree, read_lines


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    return {"check": _check, "list": _list, "map": _map, "run": _run, "table": _table}[options.command](options)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.product_mutants")
    parser.add_argument("command", choices=["check", "list", "map", "run", "table"])
    parser.add_argument("--only", action="append", metavar="ID", help="run: this mutant; may be repeated")
    parser.add_argument("--resume", action="store_true", help="run: leave out what --results has")
    parser.add_argument("--jobs", type=int, default=1, help="run: mutants at a time, each in a tree of its own")
    parser.add_argument("--set", choices=SETS, default="default", help="map, run: the tests")
    parser.add_argument("--file", action="append", default=[], metavar="TESTS", help="map, run: only its tests")
    parser.add_argument("--results", type=Path, default=Path("build/product-mutants/results.jsonl"))
    parser.add_argument("--map", type=Path, default=Path("build/product-mutants/map.json"))
    parser.add_argument("--minutes", type=float, default=60.0, help="run: for one mutant; map: for the set, times 10")
    return parser.parse_args(arguments)


def _check(options: argparse.Namespace) -> int:
    mutants = read_mutants()
    found = problems(mutants, read_sources())
    print("\n".join([*found, f"{len(mutants)} mutants, {len(found)} problems"]))
    return int(bool(found))


def _list(options: argparse.Namespace) -> int:
    sources = read_sources()
    for mutant in read_mutants():
        print(f"{mutant.id:42}{place_of(mutant, sources)}: {mutant.defect}{' (planted)' if mutant.planted else ''}")
    return 0


def _map(options: argparse.Namespace) -> int:
    with new_tree() as tree:
        found, ran = record(tree, (*SETS[options.set], *options.file), 600 * options.minutes)
    found.save(options.map)
    print(f"{options.map}: {len(found.tests)} tests, {len(found.lines)} modules, {ran.seconds / 60:.0f} minutes")
    if ran.status not in (0, 1):
        print(f"pytest ended with {ran.status}:\n{ran.output}")
    return int(ran.status not in (0, 1))


def _run(options: argparse.Namespace) -> int:
    mutants = read_mutants()
    if unknown := set(options.only or ()) - {mutant.id for mutant in mutants}:
        print(f"--only: no mutant is named {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    asked = [mutant for mutant in mutants if not options.only or mutant.id in options.only]
    if found := problems(asked, read_sources()):
        print("\n".join(found), file=sys.stderr)
        return 2
    tests = " ".join([options.set, *options.file])
    done = _latest(options.results, asked, tests) if options.resume else {}
    left = [mutant for mutant in asked if mutant.id not in done]
    known = Map.load(options.map) if options.map.exists() else None
    if known is None:
        print(f"no {options.map}: tests are guessed from what they import", flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        judges: queue.SimpleQueue[Judge] = queue.SimpleQueue()
        for _ in range(min(options.jobs, len(left))):
            tree = stack.enter_context(new_tree())
            judges.put(Judge(tree, known, options.set, options.file, 60 * options.minutes))

        def judge(mutant: Mutant) -> dict[str, Any]:
            mine = judges.get()
            try:
                return asdict(mine.judge(mutant))
            finally:
                judges.put(mine)

        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            for job in as_completed([pool.submit(judge, mutant) for mutant in left]):
                one = done[job.result()["id"]] = job.result()
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(one) + "\n")
                print(f"{one['id']}: {_said(one)} ({one['seconds']:.0f} s)", flush=True)
    print(_counts(done.values()))
    return int(any(one["verdict"] != "killed" for one in done.values()))


def _table(options: argparse.Namespace) -> int:
    mutants, sources = read_mutants(), read_sources()
    done = _latest(options.results, mutants, options.set)
    print("| mutant | module | defect | result |\n| --- | --- | --- | --- |")
    for mutant in mutants:
        name = f"{mutant.id} (planted)" if mutant.planted else mutant.id
        said = _said(done[mutant.id], "`") if mutant.id in done else "not run"
        print(f"| {name} | `{place_of(mutant, sources)}` | {mutant.defect} | {said} |")
    print(f"\n{_counts(done.values())}, {len(mutants) - len(done)} not run")
    return 0


def _latest(results: Path, mutants: list[Mutant], name: str) -> dict[str, dict[str, Any]]:
    """The last result of each mutant, as it is now, with a set of tests."""
    now = {mutant.id: mutant.digest for mutant in mutants}
    lines = [one for one in read_lines(results) if one["set"] == name]
    return {one["id"]: one for one in lines if now.get(one["id"]) == one["digest"]}


def _said(one: dict[str, Any], quote: str = "") -> str:
    if one["verdict"] == "killed":
        return f"killed by {quote}{one['by']}{quote}"
    why = ": ".join(filter(None, (one["when"], one["by"], one["message"])))
    return f"{one['verdict']}{f': {why}' if why else ''}"


def _counts(results: Any) -> str:
    counts = Counter(one["verdict"] for one in results)
    return ", ".join(f"{counts[name]} {name}" for name in ("killed", "survived", "broken", "unfinished"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
