"""Predictions against what others measured on a GPU. docs/measurements/outside.md has all rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.outside.__main__ import table
from benchmarks.outside.allocator import DEVICE, fit, fitted_half
from benchmarks.outside.fms import SOURCE, predicted, why_left_out
from benchmarks.outside.rows import GIB, Row, held_against

# foundation-model-stack/fms-acceleration, commit 876e2ed6fc4e, scripts/benchmarks/refs/a100_80gb.csv: A100 80GB,
# torch 2.4.1, flash attention, full checkpointing, max_memory_allocated.
_LORA = {
    "peft_type": "LORA", "r": 16, "lora_alpha": 16, "lora_dropout": 0.1,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}  # fmt: skip
MISTRAL, LLAMA3 = "mistralai/Mistral-7B-v0.1", "meta-llama/Meta-Llama-3-8B"
OLD, NEW = "transformers 4.45.2", "transformers 4.48.1"
UPCAST = "Uses the usual prepare_model_for_kbit_training path (norms/embeddings/head in fp32)"
QFOAK = "accelerated-peft-bnb-foak"


def row(task: str, **more: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "id": "m", "model": MISTRAL, "quality": "exact", "outcome": "ok", "world": 1, "task": task, "seq_len": 4096,
        "micro_batch": 4, "adapter": _LORA, "precision": {"autocast": False}, "notes": NEW, "kernel_family": "hf",
        "source_repo": SOURCE,
    }  # fmt: skip
    autocast = more.pop("autocast", None)
    return own | more | ({"precision": {"autocast": autocast}} if autocast is not None else {})


@pytest.mark.parametrize(
    ("one", "measured"),
    [
        pytest.param(row("full"), 67.4602, id="full"),
        pytest.param(row("lora"), 24.8706, id="adapters in float32, without autocast"),
        pytest.param(row("qlora", autocast=True), 15.2493, id="qlora"),
        pytest.param(row("qlora", autocast=True, notes=f"{NEW}. {UPCAST}"), 19.2498, id="norms in float32"),
        pytest.param(
            row("qlora", autocast=True, model="mistralai/Mixtral-8x7B-Instruct-v0.1"), 34.2092, id="4-bit experts"
        ),
        pytest.param(
            row("qlora", autocast=True, model="NousResearch/Llama-2-70b-hf"), 63.4476, id="a block's backward"
        ),
        pytest.param(
            row("lora", model="ibm/PowerLM-3b", notes=OLD, micro_batch=8), 30.8760, id="logits of 4.45 in float32"
        ),
        pytest.param(
            row("lora", autocast=True, notes=OLD, kernel_family="foak-fast-kernels"), 21.9142, id="heads repeated"
        ),
        pytest.param(
            row("lora", autocast=True, notes=OLD, kernel_family="foak-fast-kernels", world=2), 19.7621, id="fsdp1 lora"
        ),
        pytest.param(
            row("full", autocast=True, notes=OLD, kernel_family="foak-fast-kernels", world=4), 33.7382, id="fsdp1"
        ),
        pytest.param(
            row("qlora", autocast=True, notes=OLD, kernel_family=f"{QFOAK}-liger", model=LLAMA3, micro_batch=16),
            37.2414,
            id="liger",
        ),
    ],
)
def test_a_measured_peak(one: dict[str, Any], measured: float) -> None:
    """Within a part in five hundred: what is left are the batch and small tables."""
    assert why_left_out(one) == ""
    assert predicted(one) / GIB == pytest.approx(measured, rel=0.002)


def test_rows_are_predicted_or_left_out_with_a_reason() -> None:
    rows = [
        row("full", peak_allocated_gib=10.0, peak_process_gib=12.0),
        row("full", outcome="oom", quality="approx"),
        row("lora", quality="approx"),
        row("lora", peak_allocated_gib=10.0, model="TheBloke/Mistral-7B-v0.1-GPTQ"),
        row("lora", source_repo="Lightning-AI/litgpt"),
    ]
    found = held_against(rows, predicted=lambda row: 11 * GIB)
    assert [bool(one.left_out) for one in found] == [False, False, True, True]
    text = table(found)
    assert text[0].startswith("1 rows: median error 10.00%, 0 within 1%")
    assert "| m | Mistral-7B-v0.1, full, pure bf16, 4 x 4096, 1 GPU | 10.00 | 11.00 | +10.00% |" in text
    assert any("litgpt's own models" in line for line in text)


def test_the_allocator_is_fitted_on_one_half_of_the_rows() -> None:
    rows = [Row(f"m{at}", "", 10.0, 10 * GIB, process=12.0 if fitted_half(Row(f"m{at}", "", 1.0)) else 99.0)
            for at in range(40)]  # fmt: skip
    model = fit(rows)
    assert (model.low, model.middle, model.high) == pytest.approx((1.2, 1.2, 1.2))
    assert model.interval(10.0) == pytest.approx((12.0, 12.0))
    assert model.interval(1000.0)[1] == DEVICE
    with pytest.raises(ValueError, match="at least 10"):
        fit(rows[:2])
