"""`python -m tests.fuzz_recipes --hours H [--seed S] [--count N]`: draw, verify, note, sum up.

Results go to a file, a JSON line for each recipe with the version of the code that judged it; a second run with the
same file continues after the last seed in it.
Exit status 1 where a recipe is neither equivalent, nor refused with a reason, nor explained in known.py.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from families import EVERY_FAMILY
from fuzz_recipes.draw import draw_recipe
from fuzz_recipes.judge import EXPLAINED, Groups, Judged, judge, quiet, shrink
from fuzz_recipes.version import version


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    results = Path(options.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    quiet()
    from toolkit.model.silence import silence_libraries

    silence_libraries()
    done = _read(results)
    deadline = time.monotonic() + 3600 * options.hours
    code = version()  # before the first recipe: source may change while recipes are judged
    groups = Groups(results.with_suffix(".log").absolute())
    try:
        for seed in range(options.seed, options.seed + options.count):
            if seed in done:
                continue
            if time.monotonic() > deadline:
                break
            family, recipe = draw_recipe(seed, tuple(options.family or EVERY_FAMILY))
            judged = judge(seed, family, recipe, groups, options.time_limit)
            done[seed] = judged.to_json() | {"version": code}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[seed]) + "\n")
            if options.verbose:
                print(f"{seed} {family} {recipe['strategy']['name']} {judged.verdict} {judged.seconds} s", flush=True)
            if not judged.explained:
                _report(judged, results)
                if options.shrink:
                    _report(shrink(judged, groups, options.time_limit, options.shrink), results, "smaller: ")
    finally:
        groups.close()
    chosen = [done[seed] for seed in sorted(done) if options.seed <= seed < options.seed + options.count]
    print(summary(chosen))
    return int(any(one["verdict"] not in EXPLAINED for one in chosen))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_recipes")
    parser.add_argument("--hours", type=float, default=1.0, help="no recipe is begun after that")
    parser.add_argument("--seed", type=int, default=0, help="of the first recipe; the others follow")
    parser.add_argument("--count", type=int, default=10**6, help="recipes at most")
    parser.add_argument("--family", action="append", choices=sorted(EVERY_FAMILY), help="only these; may be repeated")
    parser.add_argument("--results", default="runs/fuzz/results.jsonl", help="a JSON line for each recipe")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for one pass of one recipe")
    parser.add_argument(
        "--shrink", type=float, default=0.0, metavar="SECONDS", help="time to make a failing one smaller"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each recipe")
    return parser.parse_args(arguments)


def _read(results: Path) -> dict[int, dict[str, Any]]:
    """What is done already; a last line that was cut off is not."""
    done: dict[int, dict[str, Any]] = {}
    if results.exists():
        for line in results.read_text(encoding="utf-8").splitlines():
            try:
                one = json.loads(line)
            except ValueError:
                continue
            done[one["seed"]] = one
    return done


def _report(judged: Judged, results: Path, prefix: str = "") -> None:
    """The failure, and a command that shows it again. A recipe in JSON is a recipe in YAML."""
    name = "smaller" if prefix else "recipe"
    file = results.parent / f"{name}-{judged.seed}.yaml"
    file.write_text(json.dumps(judged.recipe, indent=1) + "\n", encoding="utf-8")
    print(f"{prefix}{judged.seed} {judged.family}: {judged.verdict} {judged.stage}: {judged.why}")
    print(f"    toolkit verify {shlex.quote(str(file))}", flush=True)


def summary(results: list[dict[str, Any]]) -> str:
    """Counts by verdict, by strategy and by family."""
    verdicts = Counter(one["verdict"] for one in results)
    strategies = Counter(one["recipe"]["strategy"]["name"] for one in results)
    families = Counter(one["family"] for one in results)
    unexplained = [one for one in results if one["verdict"] not in EXPLAINED]
    lines = [
        f"{len(results)} recipes, {len(families)} families, {sum(one['seconds'] for one in results) / 60:.0f} minutes",
        "verdicts: " + ", ".join(f"{name} {count}" for name, count in verdicts.most_common()),
        "strategies: " + ", ".join(f"{name} {count}" for name, count in sorted(strategies.items())),
        "families: " + ", ".join(f"{name} {count}" for name, count in sorted(families.items())),
        *_by_version(results),
        f"unexplained: {len(unexplained)}",
        *(f"  {one['seed']} {one['family']}: {one['verdict']} {one['stage']}: {one['why']}" for one in unexplained),
    ]
    return "\n".join(lines)


def _by_version(results: list[dict[str, Any]]) -> list[str]:
    """Verdicts, that is recipes that were not refused, of each version of the code, and how many did not hold."""
    lines = []
    for code in dict.fromkeys(one.get("version", "unknown") for one in results):
        own = [one for one in results if one.get("version", "unknown") == code and one["verdict"] != "refused"]
        failing = sum(one["verdict"] not in EXPLAINED for one in own)
        lines.append(f"version {code}: {len(own)} verdicts, {failing} unexplained")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
