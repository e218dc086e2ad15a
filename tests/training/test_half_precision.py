"""A CPU without instructions for 16-bit products is named, since training in bf16 takes many times as long there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

import toolkit.training.run as running
from jobs import resolved_from
from tiny import recipe_dict
from toolkit.half_precision import cpu_emulates
from toolkit.threads import torch_threads


def seconds(dtype: torch.dtype) -> float:
    one = torch.randn(256, 256).to(dtype)
    taken = []
    with torch_threads(1):
        for _ in range(9):
            begun = time.perf_counter()
            torch.mm(one, one)
            taken.append(time.perf_counter() - begun)
    return min(taken)


def test_what_is_named_is_slow() -> None:
    """Zen 3, which has AVX2: 40 to 75 times. A CPU with the instructions: 0.5 to 1 times."""
    assert not cpu_emulates("float32")
    if not cpu_emulates("bfloat16"):
        pytest.skip("this CPU has instructions for products of bfloat16")
    assert seconds(torch.bfloat16) > 4 * seconds(torch.float32)


@pytest.mark.parametrize(
    ("precision", "poor", "shown"), [("bf16", True, True), ("bf16", False, False), ("fp32", True, False)]
)
def test_the_run_says_so(
    precision: str, poor: bool, shown: bool, tiny_root: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(running, "cpu_emulates", lambda dtype: poor and dtype != "float32")
    (tmp_path / "run").mkdir()
    run = {"max_steps": 1, "output_dir": str(tmp_path / "run"), "eval_every": None}
    values = recipe_dict(tiny_root, strategy={"name": "single"}, machine={"processes": 1}, precision=precision, run=run)
    running.run(resolved_from(values), resume=False, screen=sys.stdout)
    output = "this CPU has no instructions for products of bfloat16" in capsys.readouterr().out
    assert output == shown
