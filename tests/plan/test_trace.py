"""What a trace tells: sizes scale exactly, checkpointing and adapters do what they do in a real run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from cases import every_case
from nights import nightly_but
from plan.cells import LLAMA, LORA, MODELS, Cell
from toolkit.errors import InputError
from toolkit.model.loss_terms import CHUNK_BYTES
from toolkit.planning import trace as tracing
from toolkit.planning.autocast import ActedAutocast, NotActedOut
from toolkit.planning.hardware import Device
from toolkit.planning.live import LiveBytes
from toolkit.planning.predict import Planner
from toolkit.planning.profile import expand
from toolkit.planning.search import Search
from toolkit.planning.segment_tracer import Counter
from toolkit.planning.segments import Shape
from toolkit.planning.target import TargetKernels
from toolkit.planning.time import Rates, flops
from toolkit.planning.trace import _traced as traced
from toolkit.planning.trace import trace
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve


def recipe(device: str = "cuda", **sections: Any) -> Resolved:
    values = Cell("llama", False, "ddp", "none", 64).recipe() | sections
    return resolve(Recipe.model_validate(values), device=device)


def planner(device: str = "cuda", **sections: Any) -> Planner:
    return Planner.of(recipe(device, **sections), 64)


@pytest.mark.parametrize(
    ("kind", "compute"),
    nightly_but(
        product(["none", "full", "selective"], ["autocast", "cast", "deepspeed-linear"]),
        ("none", "autocast"),
        ("full", "cast"),
        ("selective", "deepspeed-linear"),
    ),
)
def test_two_traces_give_every_micro_batch_exactly(kind: Any, compute: Any) -> None:
    made = planner(adapter=LORA)
    put_together = made.segments(kind, 5, compute)
    real = trace(made.skeleton, Shape(kind, 5, 64, compute), made.resolved.precision, "cuda", "causal-lm").segments
    assert [(s.block, s.start, s.held, s.flops) for s in put_together] == [
        (s.block, s.start, s.held, s.flops) for s in real
    ]
    # A peak is the greatest of such sums, and another one may be the greatest at another size.
    assert [s.peak for s in put_together] == pytest.approx([s.peak for s in real], rel=1e-3)


def test_a_short_model_stands_for_the_whole() -> None:
    """Eight layers put together from two traced ones weigh what eight traced layers do."""
    eight = planner(model={"config": LLAMA | {"num_hidden_layers": 8}})
    points = list(expand(eight.segments("none", 2, "autocast"), eight.skeleton.holdings.order))
    blocks = [p for p in points if p.event == "leave" and not p.backward and p.block >= 0]
    steps = {b.live - a.live for a, b in itertools.pairwise(blocks[1:])}
    assert len(blocks) == 8
    assert len(steps) == 1
    assert eight.skeleton.holdings.elements() == _real_elements(LLAMA | {"num_hidden_layers": 8})


def _real_elements(config: dict[str, Any]) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).parameters())


def test_tied_weights_count_once() -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    assert planner(model={"config": config}).skeleton.holdings.elements() == _real_elements(config)


def test_checkpointing_saves_less_and_computes_more() -> None:
    made = planner()
    order = list(made.skeleton.holdings.order)
    saved, work = {}, {}
    for kind in ("none", "selective", "full"):
        segments = made.segments(kind, 2, "cast")
        saved[kind] = max(p.live for p in expand(segments, order) if p.event == "leave" and not p.backward)
        work[kind] = flops(segments, order)[1]
    assert saved["full"] < saved["selective"] < saved["none"]
    assert work["none"] == work["selective"] < work["full"]


def test_flops_are_those_of_the_matrices() -> None:
    """Two a weight and token in the forward, twice that in the backward, attention's own beside them."""
    made = planner()
    forward, backward = flops(made.segments("none", 1, "cast"), list(made.skeleton.holdings.order))
    holdings = made.skeleton.holdings
    matrices = holdings.elements() - sum(w.numel for w in holdings.embed)
    assert 2 * 64 * matrices * 0.98 < forward < 2 * 64 * matrices * 1.15
    assert backward == pytest.approx(2 * forward, rel=0.05)


def test_a_lora_model_saves_no_less_than_a_full_one() -> None:
    full, lora = planner(), planner(adapter=LORA)
    high = [max(p.live for p in expand(m.segments("none", 2, "cast"), m.skeleton.holdings.order)) for m in (full, lora)]
    assert high[1] > 0.9 * high[0]


def test_a_gpu_attends_by_flash_where_rows_are_full() -> None:
    made = planner()
    made.segments("none", 1, "cast")
    assert {kernel for t in made.traces.values() for kernel in t.attention} == {"flash"}


def test_live_bytes_see_births_deaths_and_resizes() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a.view(10, 100)
        assert live.live == 4000
        del a
        assert live.live == 4000
        b.untyped_storage().resize_(0)
        assert live.live == 0
        c = torch.ones(10, dtype=torch.bfloat16)
        assert (live.live, live.peak) == (20, 4000)
        del b, c
    assert live.live == 0


def _high(made: Planner, compute: Any) -> int:
    return max(p.live for p in expand(made.segments("none", 2, compute), made.skeleton.holdings.order))


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_autocast_on_a_gpu_runs_layer_norms_in_float32(device: str, dtype: torch.dtype) -> None:
    values = torch.zeros(2, 8, dtype=torch.bfloat16)
    with TargetKernels(device).acting(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.functional.layer_norm(values, (8,)).dtype == dtype
    assert torch.nn.functional.layer_norm(values, (8,)).dtype == torch.bfloat16


def test_zero3_keeps_the_input_of_frozen_layers() -> None:
    made = planner(adapter=LORA)
    assert _high(made, "deepspeed-linear") > 1.02 * _high(made, "cast")


def test_experts_cost_what_each_row_meets() -> None:
    """Two experts of four a token: their matrices count twice, not four times."""
    made = planner(model={"config": MODELS["mixtral"]})
    config = MODELS["mixtral"]
    forward, _ = flops(made.segments("none", 1, "cast"), list(made.skeleton.holdings.order))
    layers = config["num_hidden_layers"]
    experts = 2 * 64 * 2 * 3 * config["hidden_size"] * config["intermediate_size"] * layers
    rest = 2 * 64 * (config["vocab_size"] * 128 + layers * (2 * 128 * 128 + 2 * 128 * 64))
    assert 0.98 * (experts + rest) < forward < 1.15 * (experts + rest)


@pytest.mark.parametrize(
    ("name", "kind"),
    nightly_but(
        product(["llama", "gemma3", "mixtral", "bert"], ["none", "full", "selective"]),
        ("llama", "full"),
        ("gemma3", "selective"),
        ("mixtral", "none"),
        ("bert", "full"),
    ),
)
def test_autocast_acted_out_is_autocast(name: str, kind: Any) -> None:
    """The quick trace, on meta tensors with autocast in Python, is byte for byte the one with PyTorch's own."""
    values = Cell(name, False, "ddp", kind, 64).recipe()
    made = Planner.of(resolve(Recipe.model_validate(values), device="cuda"), 64)
    shape = Shape(kind, 2, 64, "autocast")
    quick, real = (
        traced(made.skeleton, shape, made.resolved.precision, "cuda", "causal-lm", meta=meta) for meta in (True, False)
    )
    assert quick.segments == real.segments


@every_case("compute", ["autocast", "cast"])
def test_adapters_on_experts_are_traced_quickly(compute: Any) -> None:
    """PEFT's default for a mixture; it asks for an autocast of the experts' device, which may be «meta»."""
    values = Cell("mixtral", True, "ddp", "none", 64).recipe() | {"adapter": {"method": "lora", "r": 4}}
    made = Planner.of(resolve(Recipe.model_validate(values), device="cuda"), 64)
    assert any(type(one).__name__ == "ParamWrapper" for one in made.skeleton.model.modules())
    shape = Shape("none", 2, 64, compute)
    quick, real = (
        traced(made.skeleton, shape, made.resolved.precision, "cuda", "causal-lm", meta=meta) for meta in (True, False)
    )
    # Weights that an engine casts: fake tensors have three operations more in a layer, on an element for each token.
    rounding = 0 if compute == "autocast" else 2.5e-3
    for one, other in zip(quick.segments, real.segments, strict=True):
        assert one.peak == pytest.approx(other.peak, rel=rounding)
        assert one.held == pytest.approx(other.held, rel=rounding)
        assert one.flops == other.flops


@pytest.mark.parametrize(
    ("name", "kind"),
    nightly_but(
        product(["llama-tied", "gemma3", "t5"], ["none", "full", "selective"]),
        ("llama-tied", "selective"),
        ("gemma3", "full"),
        ("t5", "none"),
    ),
)
def test_the_quick_trace_is_the_slow_one_for_packed_rows_and_fused_losses(name: str, kind: Any) -> None:
    cell = Cell(name, False, "ddp", kind, 64)
    made = Planner.of(resolve(Recipe.model_validate(cell.recipe()), device="cuda"), 64)
    causal = cell.task == "causal-lm"
    shape = Shape(kind, 2, 64, "autocast", fused=name == "llama-tied", masked=causal)
    quick, real = (
        traced(made.skeleton, shape, made.resolved.precision, "cuda", cell.task, meta=meta) for meta in (True, False)
    )
    # In place of a number, fake tensors have an operation on one element more (T5's buckets of positions).
    for one, other in zip(quick.segments, real.segments, strict=True):
        assert replace(one, work=other.work) == other
        assert one.work.moved == pytest.approx(other.work.moved, abs=64)
    if causal:
        assert quick.attention == ("efficient",)  # a mask is nothing for flash


def test_what_meta_tensors_cannot_do_is_traced_slowly_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planner()
    usual = tracing._run

    def refuses(model: Any, skeleton: Any, *args: Any) -> None:
        if args[-1]:
            raise NotImplementedError("aten::strange: no meta kernel")
        usual(model, skeleton, *args)

    monkeypatch.setattr(tracing, "_run", refuses)
    made.segments("none", 1, "cast")
    assert made.slowly == ["aten::strange: no meta kernel"]


def test_another_error_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = planner(), []

    def breaks(*args: Any) -> None:
        calls.append(args[-1])
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(tracing, "_run", breaks)
    with pytest.raises(InputError, match="shapes do not match"):
        made.segments("none", 1, "cast")
    assert calls == [True]


def test_chunks_of_the_fused_loss_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows all logits are one chunk; what two larger traces give is what a trace of its own does."""

    monkeypatch.setitem(CHUNK_BYTES, "cuda", 4 * LLAMA["vocab_size"] * 150)
    made = planner(loss="fused")
    for micro in (1, 3, 8, 12):
        put_together = made.segments("none", micro, "cast")
        shape = Shape("none", micro, 64, "cast", fused=True)
        real = trace(made.skeleton, shape, made.resolved.precision, "cuda", "causal-lm").segments
        assert [s.peak for s in put_together] == pytest.approx([s.peak for s in real], rel=1e-3)
    assert {t.shape.micro for t in made.traces.values()} == {1, 3, 8, 16}


def test_a_product_that_is_not_cast_is_noticed() -> None:
    with pytest.raises(NotActedOut), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        ActedAutocast().check(torch.ops.aten.mm.default, (torch.empty(2, 2), torch.empty(2, 2)))


def test_where_weights_alone_are_too_much_one_candidate_tells() -> None:
    values = Cell("llama", False, "ddp", "none", 64).recipe() | {"batch": {"micro_size": 2, "accumulation": 4}}
    asked = resolve(Recipe.model_validate(values), device="cuda")
    search = Search(asked, Device("small", 0.54, 100, 1000, 100, 30, "made up"), 0.0, Rates())
    assert search.least(asked) > search.usable
    ddp = [c for c in search.all() if c.resolved.recipe.strategy.name == "ddp" and not c.asked]
    assert [(c.resolved.recipe.activation_checkpointing, c.resolved.micro_size) for c in ddp] == [("full", 1)]
    assert len([c for c in search.all(every=True) if c.resolved.recipe.strategy.name == "ddp"]) > 5


def test_dropout_on_a_gpu_keeps_a_byte_for_each_element() -> None:
    kept = []

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.dtype)
        return tensor

    hidden = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with TargetKernels("cuda").acting(), torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        torch.nn.Dropout(0.5)(hidden)
    assert kept == [torch.bool]


def test_the_backward_of_a_softmax_has_a_product_of_its_own_on_a_gpu() -> None:
    """aten/src/ATen/native/cuda/SoftMax.cu: gradient times output, beside both and the result."""
    peaks = {}
    for device in ("cuda", "cpu"):
        scores = torch.empty(4, 64, 64, device="meta", requires_grad=True)
        with TargetKernels(device).acting(), Counter(lambda: None, None) as live:
            loss = torch.softmax(scores, -1)
            live.reset_peak()
            loss.backward(torch.empty_like(loss))
            peaks[device] = live.peak
    assert peaks["cuda"] - peaks["cpu"] == scores.numel() * 4
