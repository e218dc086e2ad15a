"""The largest micro-batch that fits: the plan's guess put right by few probes, out of memory included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from jobs import resolved_from
from tiny import recipe_dict
from toolkit.benchmark.find_batch import Found, find_batch
from toolkit.cli import app
from toolkit.errors import InputError
from toolkit.planning.cache import caching
from toolkit.planning.choice import Search
from toolkit.planning.hardware import GIB, Device
from toolkit.planning.time import Rates
from toolkit.recipe.resolve import Resolved


@pytest.fixture
def asked(tiny_root: Path) -> Resolved:
    """48 samples a process and step."""
    return resolved_from(recipe_dict(tiny_root, batch={"micro_size": 1, "accumulation": 48}))


def _found(asked: Resolved, memory: int, factor: float) -> Found:
    """With a machine that takes ``factor`` times what the plan says."""
    planner = Search(asked, Device("cpu", 1, 0, 0, 0, 0, ""), 0.0, Rates())

    def measure(way: Resolved, usable: int) -> int | None:
        peak = int(planner.candidate(way).peak * factor)
        return peak if peak <= usable else None

    return find_batch(asked, memory, measure, lambda line: None, headroom=0.0)


def test_the_largest_that_fits(asked: Resolved, tmp_path: Path) -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    with caching(tmp_path):  # what one search has traced the next one takes
        planner = Search(asked, Device("cpu", 1, 0, 0, 0, 0, ""), 0.0, Rates())
        planned = {s: planner.candidate(way).peak for s in sizes if (way := planner.variant({}, {}, s))}
        for factor, most in ((1.0, 2), (3.0, 5)):
            peaks = {size: int(peak * factor) for size, peak in planned.items()}
            for right in (1, 6, 48):
                found = _found(asked, peaks[right] + 8, factor)
                assert found.candidates == sizes
                assert found.chosen is not None
                assert (found.chosen.micro_size, found.chosen.accumulation) == (right, 48 // right)
                assert found.chosen.global_size == asked.global_size
                assert len(found.probes) <= most
            assert _found(asked, peaks[1] - 8, factor).chosen is None


@pytest.mark.nightly
def test_it_is_measured_in_processes_that_may_run_out(tiny_root: Path, tmp_path: Path) -> None:
    values = recipe_dict(tiny_root, strategy={"name": "single"}, machine={"processes": 1},
                         batch={"micro_size": 1, "accumulation": 32})  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "toolkit", "bench", "recipe.yaml", "--find-batch", "--memory"]
    run: Any = subprocess.run([*command, "0.008", "--json", "found.json"], cwd=tmp_path, capture_output=True, text=True,
                              timeout=300)  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["usable_bytes"] == int(0.008 * GIB * 0.95)
    assert {probe["fits"] for probe in found["probes"]} == {True, False}
    assert any(probe["peak_bytes"] is None for probe in found["probes"])
    micro, accumulation = found["batch"]["micro_size"], found["batch"]["accumulation"]
    assert micro * accumulation == 32 == found["global_size"]
    assert f"batch: {{micro_size: {micro}, accumulation: {accumulation}}}" in run.stdout


def test_what_it_does_not_go_with() -> None:
    for flags in (["--memory", "1"], ["--find-batch", "--strategies", "zero2"], ["--find-batch", "--memory", "0"]):
        result = CliRunner().invoke(app, ["bench", "recipe.yaml", *flags])
        assert isinstance(result.exception, InputError)
