"""Predictions against what others measured on a GPU. docs/measurements/outside.md has all rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.outside import GIB, Row, predicted, table, why_left_out

# foundation-model-stack/fms-acceleration, commit 876e2ed6fc4e, scripts/benchmarks/refs/a100_80gb.csv: one A100 80GB,
# torch 2.4.1, transformers 4.48.1, flash attention, full checkpointing, max_memory_allocated.
_LORA = {
    "peft_type": "LORA", "r": 16, "lora_alpha": 16, "lora_dropout": 0.1,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}  # fmt: skip


def row(task: str, **more: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "model": "mistralai/Mistral-7B-v0.1", "quality": "exact", "world": 1, "task": task, "seq_len": 4096,
        "micro_batch": 4, "adapter": _LORA, "precision": {"autocast": False}, "notes": "",
    }  # fmt: skip
    return own | more


@pytest.mark.parametrize(
    ("task", "more", "measured"),
    [("full", {}, 67.4606), ("lora", {}, 24.8681), ("qlora", {"precision": {"autocast": True}}, 15.2493)],
)
def test_a_measured_peak(task: str, more: dict[str, Any], measured: float) -> None:
    one = row(task, **more)
    assert why_left_out(one) == ""
    assert predicted(one) / GIB == pytest.approx(measured, rel=0.015)


def test_the_table_says_what_is_left_out() -> None:
    reason = why_left_out(row("lora", world=2))
    lines = table([Row("a", "one", 10.0, 11 * GIB), Row("b", "two", 10.0, left_out=reason)])
    assert lines[0] == "1 rows: median error 10.0%, from +10.0% to +10.0%."
    assert "| a | one | 10.00 | 11.00 | +10.0% |" in lines
    assert f"| {reason} | 1 |" in lines
