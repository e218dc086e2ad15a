"""Strategies that sum in an order of their own: correct runs of them are called equivalent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from families import EVERY_FAMILY
from nights import nightly_but
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.run import verify

Make = Callable[..., Resolved]
# FSDP2 sums a block's share of the encoder's gradient first, ZeRO-3 a bias's gradient over both axes at once. Where the
# exact gradient is zero (the bias of attention's keys), such sums are nothing but rounding.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "what-decoder-blocks-read": ("fsdp2", "t5", {"precision": "bf16", "data": {"format": "prompt-completion"}}),
    "biases": ("zero3", "bert", {"precision": "fp32"}),
}


@pytest.mark.parametrize("name", nightly_but(CASES, "biases"))
def test_a_correct_run_is_equivalent(name: str, recipe: Make, group: WorkerGroup) -> None:
    strategy, family, sections = CASES[name]
    resolved = recipe(strategy, model=EVERY_FAMILY[family], **sections)
    outcome = verify(resolved, group=group, time_limit=120, round_trip=False)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure)


@pytest.mark.usefixtures("launches")
def test_processes_take_the_threads_that_they_are_given(tmp_path: Path) -> None:
    """torch sums by threads. A caller whose main module imports torch has it imported in each process before the
    process knows how many threads it has."""
    script = tmp_path / "own.py"
    script.write_text(
        "import torch\n"
        "from toolkit.launch.group import WorkerGroup\n"
        "if __name__ == '__main__':\n"
        "    torch.set_num_threads(1)\n"
        "    with WorkerGroup(1, threads=3) as group:\n"
        "        print(group.run(torch.get_num_threads, timeout=60))\n"
    )
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split()[-1] == "[3]", found.stderr
