"""The page of a bench: whole, loading nothing, its bars as long as what they stand for, whatever is missing."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from plan.test_page import _Reader
from toolkit.report.bench_page import bench_page

OPERATION = {"name": "c10d::allreduce_", "seconds": 0.5, "share": 0.25, "calls": 4, "talks": True}


def cell(label: str, seconds: list[list[float]], **changes: Any) -> dict[str, Any]:
    steps = sorted(s for turn in seconds for s in turn)
    rates = [100 * len(turn) / sum(turn) for turn in seconds]
    return {
        "label": label, "asked": label == "zero2", "reason": "", "tokens_per_second": sorted(rates)[len(rates) // 2],
        "tokens_per_second_by_turn": rates, "seconds_per_step": steps[len(steps) // 2],
        "seconds_spread": [steps[0], steps[-1]], "seconds_by_turn": seconds, "peak_allocated_bytes": 3 * 2**30,
        "peak_reserved_bytes": 4 * 2**30, "mfu": 0.42, "padding": 0.1, "profile": None,
        "phases": {"loader": 0.1, "forward": 0.3, "backward": 0.4, "optimizer": 0.15, "host": 0.05},
    } | changes  # fmt: skip


@pytest.fixture
def document() -> dict[str, Any]:
    device = {"arithmetic": 2.0, "communication_hidden": 0.5, "communication_exposed": 0.25, "idle": 0.25}
    profile = {"steps": 2, "trace": "t.json", "operations": [OPERATION], "device": device}
    failed = cell("ddp", [[1.0]], tokens_per_second=None, reason="out of memory: <4 GiB>")
    cells = [cell("zero2", [[1.0, 1.2], [1.1, 0.9]], profile=profile), cell("loss=fused", [[0.5, 0.6]]), failed]
    return {
        "cells": cells, "left_out": ["strategy.offload=all: <no>"], "device": "some GPU", "turns": 2, "steps": 2,
        "warmup": 1, "data": "the recipe's", "seconds": 9.0, "started": "today",
        "versions": {"torch": "2.13.0", "peft": None},
    }  # fmt: skip


def read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.loads == []
    assert "url(" not in page
    assert "@import" not in page
    return reader


def test_the_page_is_whole_and_loads_nothing(document: dict[str, Any]) -> None:
    text = read(bench_page(document, "a recipe & more")).text
    for word in ("a recipe & more", "ddp failed: out of memory: <4 GiB>", "skipped: strategy.offload=all: <no>",
                 "42.0%", "3.00 GiB of 4.00 GiB", "communication, not overlapped, 10.0%", "allreduce_"):  # fmt: skip
        assert word in text


def test_bars_are_as_long_as_what_they_stand_for(document: dict[str, Any]) -> None:
    page = bench_page(document, "r")
    rates = page.split("<h2>Tokens/s</h2>")[1].split("<h2>")[0]
    long = [float(width) for width in re.findall(r"width:([\d.]+)%", rates)]
    wanted = [c["tokens_per_second"] for c in document["cells"][:2]]
    assert long[0] / long[1] == pytest.approx(wanted[0] / wanted[1], rel=1e-3)
    times = page.split("Where a step's time goes")[1].split("<h2>")[0]
    parts = [float(width) for width in re.findall(r"width:([\d.]+)%", times)]
    assert sum(parts[:5]) / sum(parts[5:]) == pytest.approx(1.1 / 0.6, rel=1e-2)
    device = page.split("Profile of the first cell")[1].split("<table>")[0]
    assert sum(float(width) for width in re.findall(r"width:([\d.]+)%", device)) == pytest.approx(100, abs=0.1)


def test_every_step_has_its_dot(document: dict[str, Any]) -> None:
    assert bench_page(document, "r").count("<circle") == 6


def test_what_is_not_known_is_left_out(document: dict[str, Any]) -> None:
    """A CPU: no reserved memory, no rate, no times of a device. And nothing measured at all."""
    bare = copy.deepcopy(document) | {"device": "cpu"}
    for one in bare["cells"]:
        one |= {"peak_reserved_bytes": None, "mfu": None, "peak_allocated_bytes": None, "profile": None}
    text = read(bench_page(bare, "r")).text
    assert "Peak memory" not in text
    assert "MFU needs the peak rate of the device" in text
    bare["cells"] = bare["cells"][2:]
    assert "nothing measured" in read(bench_page(bare, "r")).text
