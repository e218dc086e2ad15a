"""`toolkit bench`: what is counted, what is printed, and a run of it on a CPU."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cuda_calls import BYTES, CudaCalls
from tiny import LLAMA, recipe_dict
from toolkit.benchmark.cells import Cell, as_json, device_rate, make_cells
from toolkit.benchmark.command import Request, bench_command, table
from toolkit.benchmark.job import Order, Turn, model_flops, turn_job
from toolkit.benchmark.profile import split_time
from toolkit.benchmark.rows import Rows, full_rows
from toolkit.data.collate import Slot, collate
from toolkit.data.formats import Example
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve


def test_rows_are_counted_alike_packed_and_padded() -> None:
    examples = [Example([5] * n, [5] * n) for n in (7, 4, 2)]
    padded = collate(examples, Slot([0, 1, 2], 0, 0, 0, 1), "causal-lm", 0)
    packed = collate(examples, Slot([0, 1, 2], 0, 0, 0, 1, (2, 1)), "causal-lm", 0)
    pairs = 7 * 8 // 2 + 4 * 5 // 2 + 2 * 3 // 2
    assert Rows.of([padded]) == Rows(13, 21, pairs)
    assert Rows.of([packed]) == Rows(13, 22, pairs)


@pytest.mark.parametrize("adapter", [None, {"r": 4}])
def test_flops_are_those_that_torch_counts(adapter: dict[str, Any] | None, tiny_root: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training.loss import loss_sum
    from toolkit.training.session import engage

    sections = {"strategy": {"name": "single"}, "machine": {"processes": 1}, "adapter": adapter,
                "model": {"config": LLAMA | {"num_hidden_layers": 12}}}  # fmt: skip
    resolved = resolve(Recipe.model_validate(recipe_dict(tiny_root, **sections)), device="cpu")
    session = engage(resolved, make_accelerator(resolved), None, 0)
    window = next(full_rows(resolved, session.engine.config, 0))
    with FlopCounterMode(display=False) as counted:
        for micro in window:
            loss_sum(session.engine.model, session.engine.config, micro.tensors, "causal-lm").backward()
    rows = Rows.of(window)
    # torch has no formula for a CPU's attention: what it counts are the weights' products. Norms are weights that
    # nothing is multiplied with, and below the first adapter no gradient of an input is needed: 2 %.
    weights = model_flops(session, resolved, Rows(rows.tokens, rows.slots, 0))
    assert weights == pytest.approx(counted.get_total_flops(), rel=0.02)
    whole = model_flops(session, resolved, rows)
    assert whole is not None
    assert weights is not None
    # Forward and twice that backward, two products of 32 channels for each pair that may attend, in 12 layers.
    assert whole - weights == 3 * 2 * 2 * 32 * 12 * (4 * 48 * 49 // 2)


def test_communication_under_arithmetic_is_hidden() -> None:
    spans = [("gemm", (0.0, 4.0)), ("ncclDevKernel_AllGather", (3.0, 6.0)), ("gemm", (8.0, 9.0)), ("relu", (8.5, 10.0))]
    found = split_time(spans)
    assert found == {"arithmetic": 6.0, "communication_hidden": 1.0, "communication_exposed": 2.0, "idle": 2.0}


def test_a_gpu_is_found_in_the_table_by_its_own_name() -> None:
    assert device_rate("NVIDIA H100 80GB HBM3") == 989e12
    assert device_rate("NVIDIA H100 PCIe") == 756e12
    assert device_rate("NVIDIA A100-SXM4-80GB") == 312e12
    assert device_rate("NVIDIA GeForce RTX 4090") == 165.2e12
    assert device_rate("Something Else") is None


@pytest.fixture
def recipe_file(tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    values = recipe_dict(tiny_root, strategy={"name": "single"}, machine={"processes": 1})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    return "r.yaml"


def test_cells_are_the_recipe_its_strategies_and_options(recipe_file: str) -> None:
    cells, left_out = make_cells(
        recipe_file,
        ["batch.accumulation=1"],
        ["ddp", "zero2"],
        ["data.packing=true,loss=fused", "strategy.offload=all"],
        None,
    )
    assert [cell.label for cell in cells] == ["single", "ddp", "zero2", "data.packing=true,loss=fused"]
    assert cells[3].resolved.recipe.data.packing
    assert cells[3].resolved.loss_kernel == "chunked"
    assert all(cell.resolved.accumulation == 1 for cell in cells)
    assert len(left_out) == 1
    assert "cannot offload" in left_out[0]


def test_the_slowest_rank_is_the_time_of_a_step_and_medians_are_reported(recipe_file: str) -> None:
    [cell], _ = make_cells(recipe_file, ["strategy.name=ddp", "machine.processes=2"], [], [], None)
    for seconds in (1.0, 2.0, 9.0):
        ranks = [Turn(seconds=[seconds], supervised=[10], row_tokens=[40], flops=[1e6], losses=[1.0]),
                 Turn(seconds=[seconds / 2], supervised=[20], row_tokens=[50], flops=[1e6], losses=[1.0])]  # fmt: skip
        cell.turns.append(ranks)
    document = as_json(cell, 1e6)
    assert document["tokens_per_second"] == 45.0
    assert document["supervised_tokens_per_second"] == 15.0
    assert document["seconds_per_step"] == 2.0
    assert document["seconds_spread"] == [1.0, 9.0]
    assert document["mfu"] == pytest.approx(6e6 / (2 * 12 * 1e6))
    failed = Cell("other", cell.resolved, failure="out of memory")
    lines = table({"cells": [document, as_json(failed, None)]}, 80)
    assert any(line.startswith("other") and "out of memory" in line for line in lines)


def measured(label: str, rate: float | None, **more: Any) -> dict[str, Any]:
    numbers = {"tokens_per_second": rate, "seconds_per_step": 1234.5, "seconds_spread": [1.0, 12345.678],
               "peak_allocated_bytes": 139 << 30, "padding": 1.0, "mfu": 0.512}  # fmt: skip
    return {"label": label, **numbers, "phases": {f"phase number {n}": 0.1 for n in range(9)}, **more}


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_table_fits_the_terminal_and_cuts_no_number(columns: int) -> None:
    long = "strategy.name=fsdp2,activation_checkpointing=full,batch.micro_size=1,batch.accumulation=8,loss=fused"
    operations = [{"share": 0.5, "calls": 123456, "name": "void at::native::" + "vectorized_elementwise" * 9}]
    profile = {"trace": "t.json", "device": {f"on the device {n}": 1.0 for n in range(9)}, "operations": operations}
    cells = [measured("zero3", 1234567.0, profile=profile), measured(long, 123.0),
             measured("ddp", None, reason="out of memory: " + "many words " * 30)]  # fmt: skip
    lines = table({"cells": cells}, columns)
    assert max(map(len, lines)) <= columns
    head = next(line for line in lines if "tokens/s" in line)
    assert head.split() == ["tokens/s", "vs", "first", "step", "s", "slowest", "peak", "GiB", "padding", "MFU"]
    rows = [line for line in lines if "139.000" in line]
    assert [line.split()[-7:] for line in rows] == [
        [rate, factor, "1234.500", "12345.678", "139.000", "100.0%", "51.2%"]
        for rate, factor in (("1,234,567", "1.00"), ("123", "0.00"))
    ]
    assert {line.rindex("%") for line in rows} == {len(head) - 1}
    assert long in rows[1] or long.replace(",", ", ") in " ".join(" ".join(lines).split())
    assert (long in rows[1]) == (columns == 200)
    assert [line for line in lines if line.endswith("…")] == [line for line in lines if "vectorized" in line]


@pytest.mark.usefixtures("launches")
def test_a_run_of_it(recipe_file: str, tmp_path: Path) -> None:
    # With processes of the loader's own, as a recipe has them that says nothing about it.
    options = ("data.packing=true,data.workers=2",)
    request = Request(recipe_file, options=options, turns=2, steps=2, warmup=1, profile="trace.json",
                      json_target="out.json")  # fmt: skip
    assert bench_command(request) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["schema"] == "toolkit.bench/1"
    plain, packed = found["cells"]
    for cell in (plain, packed):
        assert cell["tokens_per_second"] > 0
        assert len(cell["tokens_per_second_by_turn"]) == 2
        assert cell["peak_allocated_bytes"] > 0
        assert sum(cell["phases"].values()) == pytest.approx(1.0)
    assert packed["padding"] < plain["padding"]
    assert plain["profile"]["operations"]
    [page] = [one.read_text() for one in (tmp_path / "runs" / "bench").glob("r*.html")]
    assert "data.packing=true" in page
    assert "toolkit backward" not in page
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any(event.get("name") == "toolkit backward" for event in trace["traceEvents"])


@pytest.mark.parametrize("failure", [None, torch.OutOfMemoryError("CUDA out of memory"), ValueError("bad")])
def test_each_rank_limits_its_own_gpu_for_one_cell(
    failure: Exception | None, tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = CudaCalls()

    def train(self: Any) -> None:
        calls.seen.append(("train",))
        if failure is not None:
            raise failure

    monkeypatch.setattr("toolkit.benchmark.job._Run._train", train)
    monkeypatch.setenv("LOCAL_RANK", "1")
    recipe = recipe_dict(tiny_root, strategy={"name": "ddp"}, machine={"device": "cuda", "processes": 2})
    order = Order(recipe, "r.yaml", "cuda", 1, 1, full=True, limit=BYTES // 4)
    with calls.standing_in(), contextlib.suppress(ValueError):
        turn_job(order)
    assert calls.seen == [("set_device", 1), ("limit", 1, 0.25), ("train",), ("limit", 1, 1.0)]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [(Request("r.yaml", turns=0), "--turns 0"), (Request("r.yaml", strategies=("zero9",)), "zero9 is not one of"),
     (Request("r.yaml", tflops=-1.0), "--tflops")],
)  # fmt: skip
def test_bad_input_is_reported(recipe_file: str, request_: Request, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        bench_command(request_)


def test_full_packed_rows_keep_two_samples_apart() -> None:
    values = recipe_dict(Path("nowhere"), data={"packing": True}, strategy={"name": "single"}, machine={"processes": 1})
    resolved = resolve(Recipe.model_validate(values), device="cpu")
    [micro, _] = next(full_rows(resolved, type("Config", (), LLAMA)(), 0))
    assert micro.supervised == 2 * (48 - 2)
    assert int((micro.tensors["position_ids"] == 0).sum()) == 4
    assert isinstance(micro.tensors["labels"], torch.Tensor)


def test_a_page_that_cannot_be_written_is_an_error_before_anything_is_measured(
    recipe_file: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"bench\.html"):
        bench_command(Request(recipe_file, page="file/bench.html"))
