"""Products in float8: what they are, which layers have them, that every product is proven, and where it is refused."""

from __future__ import annotations

import contextlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import every_case
from jobs import Run, resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.launch.job import check_machine
from toolkit.options.fp8 import apply as fp8
from toolkit.options.fp8 import reference as definition
from toolkit.options.fp8 import spec
from toolkit.options.fp8.apply import Fp8Linear, fp8_layers
from toolkit.options.fp8.evidence import FLOAT8_LAYERS, ProductWatch, engaged, layers_claim
from toolkit.options.fp8.reference import E4M3, E5M2, Counted, Format, RoundedLinear
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim
from toolkit.training.export import export
from toolkit.training.finding import newest
from toolkit.training.preparation import prepare_model
from toolkit.verification import screen
from toolkit.verification.matrix import what_caught
from toolkit.verification.record.trace import RankTrace
from toolkit.verification.run import verify

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"]
LORA = {"method": "lora", "r": 4, "dropout": 0.1}


def recipe(root: Path, strategy: str = "single", **sections: Any) -> dict[str, Any]:
    machine = {"processes": 1 if strategy == "single" else 2}
    own = {"fp8": True, "precision": "bf16", "strategy": {"name": strategy}, "machine": machine}
    return recipe_dict(root, **(own | {"batch": {"accumulation": 3}} | sections))


def drawn(*shape: int, spread: float = 0.0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw) * (spread * torch.randn(shape, generator=draw)).exp()


# ---------------------------------------------------------------------- what a product is


@every_case(
    ("spread", "dtype", "kind"),
    [(v0, *v1) for v0 in [0.0, 4.0, 12.0] for v1 in [(fp8.FORWARD, E4M3), (fp8.BACKWARD, E5M2)]],
)
def test_values_are_rounded_as_the_definition_says(spread: float, dtype: torch.dtype, kind: Format) -> None:
    for values in (drawn(199, 64, spread=spread).bfloat16(), drawn(199, 64, spread=spread)):
        found, scale = fp8.rounded(values, dtype)
        right = definition.rounded(values, kind)
        assert torch.equal(found.double() * scale.double(), right)
        assert kind.largest / 2 <= found.float().abs().max() <= kind.largest  # the range is used
        step = 2.0 ** -(kind.mantissa + 1)
        near = values.double().abs() > values.double().abs().max() * 2.0**-12
        assert ((right - values.double()).abs() / values.double().abs())[near].max() <= step


def test_a_value_does_not_hang_on_its_neighbours() -> None:
    values = drawn(6, 32).bfloat16()
    alone = fp8.rounded(values[:1], fp8.FORWARD)
    beside, scale = fp8.rounded(torch.cat([values[:1], 5 * values]), fp8.FORWARD)
    large = values[:1].abs() > values.abs().max() / 100  # above what is subnormal
    assert torch.equal((beside[:1].float() * scale)[large], (alone[0].float() * alone[1])[large])


@every_case("dtype", [fp8.FORWARD, fp8.BACKWARD])
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(dtype: torch.dtype) -> None:
    values, scale = fp8.rounded(torch.zeros(4, 16).bfloat16(), dtype)
    assert values.float().abs().max() == 0
    assert scale.isfinite()
    for bad in (float("inf"), float("-inf"), float("nan")):
        tensor = drawn(4, 16).bfloat16()
        tensor[1, 2] = bad
        values, scale = fp8.rounded(tensor, dtype)
        assert not (values.float() * scale).isfinite().any()


@every_case(("autocast", "bias", "trains"), product([True, False], [True, False], [True, False]))
def test_a_layer_is_the_definition(trains: bool, bias: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias, dtype=torch.float32 if autocast else torch.bfloat16)
    linear.weight.requires_grad_(trains)
    found = []
    for layer in (Fp8Linear(linear), RoundedLinear(linear)):
        x = drawn(3, 7, 64).to(linear.weight.dtype).requires_grad_()  # 21 tokens: no multiple of 16
        linear.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = layer(x)
        y.float().pow(2).sum().backward()
        found.append((y, x.grad, linear.weight.grad, linear.bias.grad if bias else None))
    assert found[0][0].dtype == torch.bfloat16
    for seen, right in zip(*found, strict=True):
        assert (seen is None and right is None) or torch.equal(seen, right)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        plain = linear(drawn(3, 7, 64).to(linear.weight.dtype))
    assert 0.01 < (found[0][0] - plain).norm() / plain.norm() < 0.06  # roundings by 2^-4 at most; not bf16


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.name().startswith("aten::_scaled_mm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("trains", "products", "kept"), [(True, 3, 21 * 64 + 4), (False, 2, 0)])
def test_a_frozen_weight_takes_no_product_and_keeps_no_input(trains: bool, products: int, kept: int) -> None:
    layer = Fp8Linear(nn.Linear(64, 48, bias=False).bfloat16().requires_grad_(trains))
    saved: list[torch.Tensor] = []
    x = drawn(21, 64).bfloat16().requires_grad_()
    with Counting() as seen, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x).sum().backward()
    assert seen.products == products
    assert sum(t.numel() * t.element_size() for t in saved if t is not layer.weight) == kept


# ---------------------------------------------------------------------- which layers


def test_only_the_blocks_are_converted(tiny_root: Path) -> None:
    adapter = LORA | {"modules_to_save": ["down_proj"], "target_modules": ["q_proj"]}
    prepared = prepare_model(resolved_from(recipe(tiny_root, adapter=adapter)), 0)
    names = fp8_layers(prepared.model)
    assert len(names) == len(prepared.options["fp8"]) == 14
    assert not [name for name in names if "lm_head" in name or "lora" in name]
    assert sum("q_proj.base_layer" in name for name in names) == 2
    assert sum("down_proj.modules_to_save" in name for name in names) == 2
    assert layers_claim(prepared.model, 14).ok
    for layer in fp8_layers(prepared.model).values():
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    assert not layers_claim(prepared.model, 14).ok


def test_sizes_that_no_product_takes_stay_and_where_all_do_it_is_reported(tiny_root: Path) -> None:
    heads = {"num_attention_heads": 4, "head_dim": 6}  # 24 and 12 features beside 32 and 64
    prepared = prepare_model(resolved_from(recipe(tiny_root, model={"config": LLAMA | heads})), 0)
    assert {name.rsplit(".", 1)[-1] for name in prepared.options["fp8"]} == {"gate_proj", "up_proj", "down_proj"}
    none = LLAMA | heads | {"intermediate_size": 72}
    with pytest.raises(InputError, match="multiples of 16, but the blocks of LlamaForCausalLM have none"):
        prepare_model(resolved_from(recipe(tiny_root, model={"config": none})), 0)


# ---------------------------------------------------------------------- every product is proven


def worst_product(model: nn.Module) -> dict[str, float]:
    watch = ProductWatch(model, lambda: (0, 0))
    with watch.watching() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=torch.arange(3, 26)[None]).logits.float().pow(2).mean().backward()
    worst: dict[str, float] = {}
    for one in seen:
        worst[one.kind] = max(worst.get(one.kind, 0.0), one.error)
    assert len(seen) == 3 * len(fp8_layers(model))
    assert {one.layer for one in seen} == set(fp8_layers(model))
    return worst


def test_a_product_of_anything_else_is_seen(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare_model(resolved_from(recipe(tiny_root)), 0).model
    right = worst_product(model)
    assert list(right) == ["output", "gradient of the input", "gradient of the weight"]
    assert 0.5 < max(right.values()) <= 1
    real, cast = torch._scaled_mm, fp8.rounded

    def other_format(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        return cast(tensor, fp8.FORWARD)

    def one_scale_off(left: Any, other: Any, **given: Any) -> torch.Tensor:
        return real(left, other, **(given | {"scale_a": given["scale_a"] * 2}))

    def a_token_short(left: Any, other: Any, **given: Any) -> torch.Tensor:
        found = real(left, other, **given)
        found[-1] = 0
        return found

    with monkeypatch.context() as patch:
        patch.setattr(fp8, "rounded", other_format)
        worst = worst_product(model)
        assert worst["output"] <= 1
        assert worst["gradient of the input"] > 2
        assert worst["gradient of the weight"] > 2
    for wrong in (one_scale_off, a_token_short):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_scaled_mm", wrong)
            assert min(worst_product(model).values()) > 10


@pytest.mark.parametrize(
    ("fault", "stage", "diagnosis"),
    [
        pytest.param("float8-layer-left", "gradient", "float8-products-missing", marks=pytest.mark.nightly),
        ("float8-other-scale", "products", "float8-product-wrong"),
    ],
)
def test_faults_are_found_and_named(
    fault: str, stage: str, diagnosis: str, tiny_root: Path, group: WorkerGroup
) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": "fsdp2"}))  # bf16 and fp8 come with the fault
    outcome = verify(resolved, group=group, fault=fault, time_limit=240, stop_early=True, round_trip=False)
    assert outcome.exit_code == 1
    assert what_caught(outcome)[0] in (stage, "engagement")
    assert bool(outcome.unproven) or stage == "products"
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == diagnosis


def test_it_counts_as_exercised_only_where_float8_products_ran(tiny_root: Path) -> None:
    def claims(layers: str, *ran: int, **sections: Any) -> list[bool]:
        traces = [RankTrace(rank, operators={"fp8": count}) for rank, count in enumerate(ran)]
        traces[0].claims = [Claim(FLOAT8_LAYERS, "linear layers in float8", layers, layers, True)]
        resolved: Resolved = resolved_from(recipe(tiny_root, "ddp", **sections))
        return [claim.ok for claim in engaged(traces, resolved, Counted(14, 28, 42, 28))]

    assert claims("14", 35, 35) == [True, True]
    assert claims("14", 49, 49, activation_checkpointing="full") == [True, True]
    assert claims("14", 49, 48, activation_checkpointing="full") == [True, False]
    assert claims("14", 49, 49, compile=True) == [True, True]
    assert claims("13", 35, 34) == [False, False]
    assert claims("14", 0, 0) == claims("14", 0, 0, compile=True) == [True, False]


# ---------------------------------------------------------------------- under every strategy


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "way"), [("ddp", "fused"), *product(STRATEGIES, ("lora", "full"))])
def test_it_is_the_plain_loop_on_rounded_products(strategy: str, way: str, tiny_root: Path, group: WorkerGroup) -> None:
    sections: dict[str, Any] = {"activation_checkpointing": "full"} if way == "lora" else {}
    sections |= {"adapter": LORA} if way == "lora" else {"precision": "bf16-pure"} if strategy == "zero3" else {}
    if way == "fused":
        sections = {"adapter": LORA, "loss": "fused"}
    outcome = verify(resolved_from(recipe(tiny_root, strategy, **sections)), group=group, time_limit=240)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    logic, precision = outcome.passes
    assert "products" not in [stage.name for stage in logic.stages]
    stage = next(stage for stage in precision.stages if stage.name == "products")
    assert stage.ok
    assert len(stage.measures) > 5 * 14 * 2  # five steps, each of the layers, forward and backward
    deviation = outcome.fields()["deviation_from_bf16"]
    assert len(deviation["steps"]) == 5
    # A rounding to e4m3 moves a tensor by 2.4 % (docs/speed.md), to e5m2 by 4.7 %; a gradient passes through several.
    assert 0.01 < deviation["gradient"] < 0.3
    assert 0 < deviation["loss"] < 0.01
    assert f"gradient {deviation['gradient']:.1%} off" in screen.deviation_line(outcome)[0]
    assert "informational" in "\n".join(screen.ending(outcome, 1.0, "recipe.yaml"))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("launches")
def test_verified_with_machine_code(tiny_root: Path) -> None:
    resolved = resolved_from(recipe(tiny_root, compile=True, adapter=LORA, activation_checkpointing="full"))
    outcome = verify(resolved, time_limit=800)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    seen = {claim.claim: claim.ok for claim in outcome.passes[-1].claims}
    assert seen["blocks run compiled"]
    assert seen["float8 products in step 5"]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.nightly)])
def test_resumed_equals_uninterrupted(strategy: str, tiny_root: Path, group: WorkerGroup, tmp_path: Path) -> None:
    values = recipe(tiny_root, strategy, adapter=LORA, run={"max_steps": 4})
    resolved = resolved_from(values)
    whole: Run = group.run(train_job, resolved, 4, None, None, 4)[0]
    bf16: Run = group.run(train_job, resolved_from(values | {"fp8": False}), 1, None, None, 4)[0]
    assert whole.losses[0] != bf16.losses[0]
    group.run(train_job, resolved, 2, str(tmp_path / "checkpoints"), None, 4)
    saved = newest(tmp_path / "checkpoints")
    run: Run = group.run(train_job, resolved, 2, None, str(saved), 4)[0]
    assert run.losses == whole.losses[2:]
    assert all(torch.equal(run.weights[name], weight) for name, weight in whole.weights.items())
    with pytest.raises(InputError, match=r"fp8 \(checkpoint: True, recipe: False\)"):
        train_job(resolved_from(recipe(tiny_root, adapter=LORA, run={"max_steps": 4}, fp8=False, batch={
            "accumulation": 6})), 1, None, str(saved), 4)  # fmt: skip
    assert export(tmp_path, tmp_path / "merged", merged=True).kind == "merged model"


# ---------------------------------------------------------------------- plan


def test_plan_counts_what_is_kept_in_float8(tiny_root: Path) -> None:
    from plan.truth import measured
    from toolkit.planning.predict import Planner

    wide = {"config": LLAMA | {"hidden_size": 128, "intermediate_size": 256}}
    peaks = []
    for on in (True, False):
        values = recipe(tiny_root, model=wide, fp8=on)
        resolved = resolved_from(values)
        peaks.append(Planner.of(resolved, 64).memory(resolved).peak)
        if on:
            assert peaks[0] == pytest.approx(measured(values, 64), rel=0.01)
    assert peaks[0] < 0.95 * peaks[1]


# ---------------------------------------------------------------------- refusals


@every_case(
    ("sections", "message"),
    [
        ({"precision": "fp32"}, "precision is fp32; use precision: bf16"),
        ({"precision": "fp16"}, "outside the range of fp16 .* use precision: bf16"),
        ({"adapter": {"method": "qlora"}}, "qlora stores the base in 4 bits; use adapter.method: lora"),
        ({"model": {"config": {"model_type": "gpt2"}}}, "stores weights in Conv1D layers; use bf16"),
        ({"model": {"config": {"model_type": "mixtral"}}}, "all experts in one tensor; use bf16"),
        ({"model": {"config": LLAMA | {"hidden_size": 36}}}, "multiples of 16, but this model's width is 36"),
        (
            {"model": {"config": LLAMA | {"quantization_config": {"quant_method": "gptq"}}}},
            "those of model.path are quantised",
        ),
    ],
)
def test_refused_at_config_time(tiny_root: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"fp8: .*{message}.*, or set fp8: false"):
        resolved_from(recipe(tiny_root, **sections))


@pytest.mark.parametrize(("found", "ok"), [(((8, 0),), False), (((9, 0), (8, 6)), False), (((8, 9), (9, 0)), True)])
def test_a_gpu_without_float8_is_refused_once_it_is_known(
    found: tuple[tuple[int, int], ...], ok: bool, tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "compute_capabilities", lambda: found)
    monkeypatch.setattr("toolkit.launch.job.cuda_device_count", lambda: len(found))
    resolved = resolved_from(
        recipe(tiny_root, machine={"device": "cuda", "processes": 1})
    )  # `config` serves any machine
    with contextlib.nullcontext() if ok else pytest.raises(InputError, match=r"fp8: needs GPUs of .* 8\.9 or newer"):
        check_machine(resolved)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: min(found))
    with contextlib.nullcontext() if ok else pytest.raises(InputError, match="use bf16 products"):
        fp8.check_device(resolved)
