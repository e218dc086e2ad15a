"""Seconds of a step on a GPU: what a trace gives a device to do, and published runs (docs/measurements/outside.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.outside import foundry, peft, times
from benchmarks.outside.allocator import in_fitted_half
from cases import every_case
from plan.test_outside import LLAMA3, NEW, OLD, QFOAK, row
from toolkit.planning.hardware import device_named
from toolkit.planning.meter import Meter, kernel
from toolkit.planning.predict import Planner
from toolkit.planning.reached import reached
from toolkit.planning.search import Search
from toolkit.planning.segments import Segment
from toolkit.planning.time import Rates, amounts, computing, handled_bytes, step_seconds, update_passes
from toolkit.planning.work import Attention, Work
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategy_of

A100 = {"gpu": "NVIDIA A100 80GB", "grad_accum": 1}
LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip


# Rows of the half that nothing was fitted to, and of a device that nothing was fitted to.
@every_case(
    "one",
    [
        pytest.param(row("full", micro_batch=8, id="m0097", tokens_per_second_per_gpu=3143.118, **A100), id="full"),
        pytest.param(
            row("lora", id="m0123", kernel_family="foak-fast-kernels", tokens_per_second_per_gpu=3780.585, **A100),
            id="lora, fused kernels",
        ),
        pytest.param(
            row("qlora", autocast=True, micro_batch=8, id="m0165", tokens_per_second_per_gpu=3662.639, **A100),
            id="qlora",
        ),
        pytest.param(
            row(
                "lora",
                autocast=True,
                id="m0375",
                notes=OLD,
                world=2,
                kernel_family="foak-fast-kernels",
                tokens_per_second_per_gpu=3668.019,
                **A100,
            ),
            id="fsdp1",
        ),
        pytest.param(
            row(
                "full",
                source_repo=foundry.SOURCE,
                model="MPT-7b",
                world=8,
                micro_batch=1,
                seq_len=65536,
                id="m0935",
                grad_accum=2,
                gradient_checkpointing="full",
                gpu=A100["gpu"],
                tokens_per_second_per_gpu=1013.0,
            ),
            id="long rows",
        ),
        pytest.param(
            row(
                "full",
                source_repo=foundry.SOURCE,
                model="MPT-7b",
                world=8,
                micro_batch=8,
                seq_len=8192,
                id="m0917",
                grad_accum=2,
                gradient_checkpointing="full",
                gpu="NVIDIA H100 80GB",
                tokens_per_second_per_gpu=6935.0,
            ),
            id="h100",
        ),
        pytest.param(
            row(
                "lora",
                source_repo=peft.SOURCE,
                model="meta-llama/Llama-3.2-3B",
                seq_len=768,
                id="m0035",
                experiment="lora/llama-3.2-3B-rank64",
                mean_tokens_per_sample=209.9,
                grad_accum=1,
                gpu="NVIDIA L40S 48GB",
                adapter={"peft_type": "LORA", "r": 64, "target_modules": ["q_proj", "v_proj"]},
                step_time_s=0.1189,
                optimizer="AdamW",
                allocated_after_step_mean_gib=6.59,
            ),
            id="l40s",
        ),
    ],
)
def test_a_measured_step(one: dict[str, Any]) -> None:
    """Within 12 %: of the rows that nothing was fitted to, nine in ten are."""
    assert times.why_not_timed(one) == ""
    found = times.timed(one)
    assert not found.fitted
    assert found.predicted == pytest.approx(found.measured, rel=0.12)


def planned(**more: Any) -> tuple[Planner, Any]:
    values: dict[str, Any] = {
        "model": {"config": LLAMA}, "tokenizer": {"path": "none"}, "data": {"train": "none", "max_length": 1024},
        "batch": {"micro_size": 4, "accumulation": 2}, "precision": "bf16", "strategy": {"name": "fsdp2"},
        "machine": {"device": "cuda", "processes": 8}, "run": {"max_steps": 2},
    }  # fmt: skip
    resolved = resolve(Recipe.model_validate(values | more), "test", device="cuda")
    return Planner.of(resolved, resolved.recipe.data.max_length), resolved


@pytest.fixture
def meter() -> Iterator[Meter]:
    with Meter() as made:
        yield made


def seen(meter: Meter, operation: Any, *args: Any, **kwargs: Any) -> Work:
    meter.see(operation, args, kwargs, operation(*args, **kwargs))
    return meter.taken()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_kernel_reads_its_operands_and_writes_its_result(meter: Meter) -> None:
    aten, x = torch.ops.aten, empty(64, 32)
    size = 64 * 32 * 2
    assert seen(meter, aten.add.Tensor, x, x) == Work(moved=3 * size, kernels=1)
    assert seen(meter, aten._to_copy.default, x, dtype=torch.float32) == Work(moved=3 * size, kernels=1)
    assert seen(meter, aten.zero_.default, x) == Work(moved=size, kernels=1)
    row_of_x = x[:1].expand(64, 32)  # 64 bytes of memory
    assert seen(meter, aten.mul.Tensor, x, row_of_x).moved == 2 * size + min(size, x.untyped_storage().nbytes())
    for nothing in (aten.view.default, aten.expand.default):
        assert seen(meter, nothing, x, [64, 32]) == Work()
    assert seen(meter, torch.ops.prim.device.default, x) == Work()


def test_of_a_table_only_rows_that_are_looked_up_are_read(meter: Meter) -> None:
    table, ids = empty(100_000, 32), torch.zeros(8, dtype=torch.int64, device="meta")
    assert seen(meter, torch.ops.aten.embedding.default, table, ids) == Work(moved=2 * 8 * 32 * 2, kernels=1)


def test_a_thin_product_is_memory_traffic(meter: Meter) -> None:
    """A rank of 16: 16 operations a byte, where every GPU of the table can do more than 75."""
    wide = seen(meter, torch.ops.aten.mm.default, empty(4096, 4096), empty(4096, 4096))
    thin = seen(meter, torch.ops.aten.mm.default, empty(4096, 4096), empty(4096, 16))
    assert (wide.products, wide.moved) == (2 * 4096**3, 0)
    assert (thin.products, thin.moved) == (0, 2 * (4096 * 4096 + 2 * 4096 * 16))
    single = seen(meter, torch.ops.aten.mm.default, *[empty(4096, 4096, dtype=torch.float32)] * 2)
    assert (single.products, single.wide) == (0, 2 * 4096**3)


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_kernel_computes_half(meter: Meter, causal: bool) -> None:
    query = empty(1, 8, 256, 64)
    work = seen(meter, torch.ops.aten._scaled_dot_product_flash_attention.default, query, query, query, 0.0, causal)
    count = 2 * 2 * 8 * 256 * 256 * 64 / (2 if causal else 1)
    assert work.attention == {Attention("flash", False, 64, 256, causal): count}
    assert work.products == work.moved == 0


def test_a_kernel_that_is_stood_in_for_counts_as_one(meter: Meter) -> None:
    kernel(empty(8, 8), more=100)
    assert meter.taken() == Work(moved=8 * 8 * 2 + 100, kernels=1)


def test_work_grows_in_proportion_to_the_micro_batch() -> None:
    planner, _ = planned()
    whole = planner._trace(replace(planner._shape(planner.resolved, "cast"), micro=8)).segments
    put_together = planner.segments("none", 8, "cast")
    for one, other in zip(whole, put_together, strict=True):
        for name in ("products", "attention", "moved", "operands"):
            assert getattr(one.work, name) == pytest.approx(getattr(other.work, name), rel=1e-3)


def test_unpacking_4_bit_weights_is_counted() -> None:
    adapter = {"r": 8, "target_modules": ["q_proj"]}
    moved = {}
    for method in ("lora", "qlora"):
        planner, resolved = planned(adapter=adapter | {"method": method})
        moved[method] = sum(s.work.moved for s in planner.segments_of(resolved) if s.block == 1)
    weights = 4 * 512 * 512 + 3 * 512 * 1024
    # In the forward and in the backward: half a byte read, two written.
    assert moved["qlora"] - moved["lora"] > 2 * 2.5 * weights


def test_what_is_sent_while_computing_takes_time_of_the_device() -> None:
    planner, resolved = planned()
    holdings, device = planner.skeleton.holdings, device_named("a100-80gb", None)
    segments = planner.segments_of(resolved)
    rates = Rates.on(device)
    hidden = step_seconds(resolved, holdings, segments, device, replace(rates, handled=0.0, latency=0.0))
    found = step_seconds(resolved, holdings, segments, device, replace(rates, latency=0.0))
    assert hidden is not None
    assert found is not None
    sent = sum(handled_bytes(strategy_of(resolved).traffic(resolved, holdings), resolved.accumulation))
    assert hidden.exposed < found.exposed == pytest.approx(rates.handled * sent / (2039e9 * rates.bandwidth))


def test_compiled_blocks_move_what_their_products_read_and_write() -> None:
    device = device_named("h100", None)
    planner, eager = planned()
    _, compiled = planned(compile=True)
    order, segments = list(planner.skeleton.holdings.order), planner.segments_of(eager)
    (ahead, back), (ahead_compiled, back_compiled) = (amounts(segments, order, r, device) for r in (eager, compiled))
    assert (ahead.products, back.attention) == (ahead_compiled.products, back_compiled.attention)
    assert ahead_compiled.moved < 0.8 * ahead.moved
    assert back_compiled.moved < 0.8 * back.moved


def test_a_step_takes_as_long_as_issuing_its_kernels() -> None:
    planner, resolved = planned()
    device, order = device_named("h100", None), list(planner.skeleton.holdings.order)
    tiny = [Segment(0, False, 0, work=Work(kernels=1000))]
    assert computing(tiny, order, resolved, device, Rates.on(device))[0] == pytest.approx(order.count(0) * 1000 * 10e-6)


def test_clipping_and_foreach_kernels_are_passes_over_the_weights() -> None:
    sections: list[dict[str, Any]] = [{}, {"kernel": "foreach"}, {"max_grad_norm": None}]
    assert [update_passes(planned(optimizer=section)[1]) for section in sections] == [10, 23, 7]
    stochastic = {"rounding": "stochastic"}
    assert update_passes(planned(optimizer=stochastic, precision="bf16-pure")[1]) == 10
    assert update_passes(planned(optimizer={"name": "adamw8bit"})[1]) == 7  # float32: four moments' passes are one


def test_frozen_4_bit_weights_cross_pcie_packed() -> None:
    adapter, strategy = {"r": 8, "target_modules": ["q_proj"]}, {"name": "fsdp2", "offload": "all"}
    device, found = device_named("rtx4090", None), {}
    for method in ("lora", "qlora"):
        planner, resolved = planned(adapter=adapter | {"method": method}, strategy=strategy)
        seconds = step_seconds(
            resolved, planner.skeleton.holdings, planner.segments_of(resolved), device, Rates.on(device)
        )
        assert seconds is not None
        found[method] = seconds.offload
    assert found["qlora"] < 0.75 * found["lora"]  # embeddings and head, in 16 bits, are over half of what is left


def test_another_device_has_its_own_rates() -> None:
    _, resolved = planned()
    search = Search(resolved, device_named("a100-80gb", None), 0.05, Rates.on(device_named("a100-80gb", None)))
    other = search.on(device_named("h100", None))
    assert (search.rates.compute, other.rates.compute) == (reached("a100-80gb").products, reached("h100").products)
    assert other.candidate(resolved).as_json()["seconds_range"] == pytest.approx(
        [end * other.candidate(resolved).as_json()["seconds_per_step"] for end in other.rates.spread]
    )


def test_a_fit_finds_the_parts_that_times_were_made_with() -> None:
    parts = (0.8, 0.7, 9.0)
    amounts_of = [(1.0, 0.3, 0.0), (2.0, 0.9, 0.1), (0.5, 0.1, 0.02), (1.5, 0.2, 0.3)]
    rows = [made(f"m{i}", each, parts) for i, each in enumerate(amounts_of)]
    assert times.fit(rows) == pytest.approx(parts)
    hopper = (0.6, 0.7, 9.0)
    assert times.fit([made("m9", each, hopper) for each in amounts_of], parts) == pytest.approx(hopper)
    assert times.spread([(row, row.measured) for row in rows]) == pytest.approx((1.0, 1.0))


def test_a_row_is_judged_by_numbers_of_the_other_half() -> None:
    parts = {True: (0.8, 0.7, 9.0), False: (0.6, 0.5, 4.0)}
    rows = [
        made(f"m{i}", (1 + i % 3, 0.1 * (i % 5), 0.01 * (i % 7)), parts[in_fitted_half(f"m{i}")]) for i in range(60)
    ]
    hopper = [replace(one, id=f"h{one.id}", device="h100") for one in rows]
    for one, predicted, _ in times.swapped([*rows, *hopper]):
        if one.device == "a100-80gb":
            assert predicted == pytest.approx(times.seconds_with(one, parts[not in_fitted_half(one.id)]))


def made(name: str, each: tuple[float, float, float], parts: tuple[float, ...]) -> times.Timed:
    seconds = each[0] / parts[0] + each[1] / parts[1] + each[2] * parts[2] / parts[1]
    return times.Timed(name, "", "source", "a100-80gb", seconds, seconds, seconds, seconds, each, 0.0, ("one",))


def test_pairs_that_measured_the_same_have_no_order() -> None:
    rows = [replace(made("m", (1, 0, 0), (1, 1, 1)), measured=m, predicted=p) for m, p in ((1, 2), (1.01, 1), (2, 3))]
    assert times.order(rows) == (2, 2)
    assert times.order([rows[0], replace(rows[2], predicted=1.0)]) == (0, 1)


def test_the_table_says_what_is_left_out_and_why() -> None:
    shared = {"quality": "exact", "outcome": "ok", "tokens_per_second_per_gpu": 10.0, "gpu": "NVIDIA H100"}
    rows = [
        shared | {"id": "m1", "source_repo": "pytorch/torchtitan", "quantization": "float8", "strategy": "fsdp2"},
        shared | {"id": "m2", "source_repo": "Lightning-AI/litgpt"},
        shared | {"id": "m3", "source_repo": "pytorch/ao", "gpu": "AMD MI300X 192GB"},
        row("lora", id="m4", notes=NEW, quality="approx", model=LLAMA3, kernel_family=QFOAK, **A100),
    ]
    reasons = [times.why_not_timed(one) for one in rows]
    for reason, word in zip(reasons, ("float8", "lengths", "device", "inferred"), strict=True):
        assert word in reason
