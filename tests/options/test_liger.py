"""Liger's own kernels, interpreted on the CPU: where liger-kernel and triton are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from families import EVERY_FAMILY

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")),
    reason="needs liger-kernel and triton",
)

NEAR = 1e-4
"""Relative 2-norms in float32, where sums of 32 to 64 terms are added up in another order: 6e-7 for weights, 1.3e-5 for
adapters, whose gradients cancel, were the largest. An error of a kernel is above 0.1, as below."""

SAVED = {"method": "lora", "r": 4, "modules_to_save": ["norm", "input_layernorm"]}


def compared(sections: dict[str, Any], *more: str) -> dict[str, Any]:
    script = Path(__file__).with_name("liger_interpreted.py")
    # In a process of its own: triton interprets all kernels of a process, or none.
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), json.dumps(sections), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("sections", "replaced"),
    [
        pytest.param({}, (5, 2, 2), id="llama"),
        pytest.param({"activation_checkpointing": "full"}, (5, 2, 2), id="recomputed"),
        pytest.param({"adapter": SAVED}, (5, 2, 2), id="LoRA, norms saved"),
        pytest.param({"adapter": {"method": "ln-tuning"}}, (5, 2, 2), id="ln-tuning"),
        pytest.param({"model": {"config": EVERY_FAMILY["qwen3"]["config"]}}, (9, 2, 2), id="qwen3"),
        pytest.param({"model": {"config": EVERY_FAMILY["gemma3_text"]["config"]}}, (13, 2, 2), id="gemma3_text"),
        pytest.param(
            {"model": {"config": EVERY_FAMILY["mixtral"]["config"]}}, (5, 0, 2), id="mixtral, without experts"
        ),
    ],
)
def test_numbers_are_those_of_torch(sections: dict[str, Any], replaced: tuple[int, int, int]) -> None:
    found = compared(sections)
    assert tuple(found["replaced"].values()) == replaced
    assert 0 < max(found["apart"]) < NEAR  # 0: the kernels did not run
    assert found["torch as before"]  # another model of the process


def test_kept_products_would_be_rotated_twice() -> None:
    """Why ``activation_checkpointing: selective`` is refused. Where this fails, it need not be."""
    assert max(compared({}, "selective")["apart"]) > 0.1
