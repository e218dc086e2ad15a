"""QLoRA: what 4 bits hold, that they are 4, and that everything else is as under LoRA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cases import every_case
from jobs import Run, resolved_from, train_job, worst
from nights import nightly_but
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.launch.job import check_machine
from toolkit.model.packed_layers import packed_layers, weight_count
from toolkit.options.nf4 import apply, pack
from toolkit.options.nf4.apply import Nf4Linear
from toolkit.options.nf4.evidence import base_claims
from toolkit.options.nf4.reference import nf4_values
from toolkit.recipe.resolve import Resolved
from toolkit.training import merge
from toolkit.training.export import export
from toolkit.training.export_check import trained_model
from toolkit.training.finding import newest
from toolkit.training.preparation import prepare_model
from toolkit.training.session import open_session
from toolkit.verification.matrix import what_caught
from toolkit.verification.run import verify

pytest.importorskip("bitsandbytes")

QLORA = {"method": "qlora", "r": 4, "dropout": 0.1}
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"]


def qlora(root: Path, strategy: str = "single", **sections: Any) -> dict[str, Any]:
    machine = {"processes": 1 if strategy == "single" else 2}
    recipe = {"adapter": QLORA, "strategy": {"name": strategy}, "machine": machine, "batch": {"accumulation": 3}}
    return recipe_dict(root, **(recipe | sections))


# ---------------------------------------------------------------------- what 4 bits hold


@every_case(
    ("shape", "storage"), product([(64, 32), (64, 96), (48, 64), (9, 40)], [torch.uint8, torch.bfloat16, torch.float32])
)
def test_a_weight_comes_back_as_the_paper_defines_it(shape: tuple[int, int], storage: torch.dtype) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        linear = nn.Linear(shape[1], shape[0], dtype=dtype)
        nn.init.normal_(linear.weight)
        layer = Nf4Linear(linear, *pack.packed_nf4(linear.weight.detach(), storage))
        right = nf4_values(layer.weight.detach(), layer.statistics, linear.weight)
        assert torch.equal(layer.dequantised(dtype), right)
        # A normal variable in blocks of 64 and 16 values at its quantiles: 9 % off, whoever computes it.
        assert 0.07 < (right.float() - linear.weight.float()).norm() / linear.weight.float().norm() < 0.11


def test_products_are_those_of_the_dequantised_weight() -> None:
    linear = nn.Linear(32, 24)
    layer = Nf4Linear(linear, *pack.packed_nf4(linear.weight.detach(), torch.uint8))
    plain = layer.plain()
    found = []
    for module in (layer, plain):
        for autocast in (False, True):
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                y = module(x)
            (y.float() ** 2).sum().backward()
            found.append((y, x.grad))
    for (y, g), (y2, g2) in zip(found[:2], found[2:], strict=True):
        assert y.dtype == y2.dtype
        assert torch.equal(y, y2)
        assert torch.allclose(g, g2, rtol=1e-6)  # type: ignore[arg-type]


def test_only_the_blocks_are_quantised_and_a_folder_gives_the_same(tiny_root: Path, tmp_path: Path) -> None:
    from toolkit.model.load import load_base

    adapter = QLORA | {"modules_to_save": ["down_proj"], "target_modules": ["q_proj"]}
    prepared = prepare_model(resolved_from(qlora(tiny_root, adapter=adapter)), 0)
    names = {name.split(".layers.")[-1] for name in packed_layers(prepared.model)}
    assert len(names) == 12
    assert not [name for name in names if "down_proj" in name or "lm_head" in name or "lora" in name]
    plain = load_base(resolved_from(qlora(tiny_root)), 0)
    assert weight_count(prepare_model(resolved_from(qlora(tiny_root)), 0).model) > weight_count(plain)
    plain.save_pretrained(tmp_path / "base")
    model = {"config": None, "path": str(tmp_path / "base")}
    ids = torch.arange(3, 23)[None]
    answers = [
        prepare_model(resolved_from(qlora(tiny_root, **m)), 0).model.eval()(input_ids=ids).logits
        for m in ({}, {"model": model})
    ]
    assert torch.equal(*answers)


def packing_job(resolved: Resolved) -> tuple[int, int, list[str]]:
    """Layers that this rank packs of those there are while its session opens; what differs from its own packing."""
    packed = 0
    right = pack.packed_nf4

    def count(weight: torch.Tensor, storage: torch.dtype) -> Any:
        nonlocal packed
        packed += weight.numel() > pack.BLOCK and not weight.is_meta
        return right(weight, storage)

    apply.packed_nf4 = pack.packed_nf4 = count
    try:
        layers = packed_layers(open_session(resolved).engine.model)
    finally:
        apply.packed_nf4 = pack.packed_nf4 = right
    alone = packed_layers(prepare_model(resolved, 0).model)
    different = []
    for (name, layer), expected in zip(layers.items(), alone.values(), strict=True):
        found, wanted = (vars(one.statistics) | {"weight": one.weight} for one in (layer, expected))
        found, wanted = ({**flat, **vars(flat.pop("state2"))} | {"outer": flat["absmax"]} for flat in (found, wanted))
        for key, value in wanted.items():
            same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
            different += [] if same else [f"{name}.{key}"]
    return packed, len(layers), different


def test_layers_that_transformers_keeps_in_float32_are_not_quantised(tiny_root: Path) -> None:
    """T5's block casts the input of ``wo`` to the dtype of its weight: to bytes, if that is quantised."""
    config = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
              "vocab_size": 300, "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
    made = qlora(tiny_root)
    made |= {"model": {"config": config, "task": "seq2seq-lm"}, "data": made["data"] | {"format": "prompt-completion"}}
    resolved = resolved_from(made)
    model = prepare_model(resolved).model
    names = {part for name in packed_layers(model) for part in name.split(".")}
    assert "wi" in names
    assert "wo" not in names
    ids = torch.arange(3, 9)[None]
    assert torch.isfinite(model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).logits).all()


@pytest.mark.parametrize("precision", nightly_but(["fp32", "bf16"], "bf16"))
def test_each_rank_packs_a_part_of_the_layers_and_has_the_same_bits(
    precision: str, tiny_root: Path, group: WorkerGroup
) -> None:
    odd = LLAMA | {"intermediate_size": 72, "hidden_size": 40, "num_hidden_layers": 3, "num_key_value_heads": 4}
    resolved = resolved_from(qlora(tiny_root, "ddp", precision=precision, model={"config": odd}))
    for packed, layers, different in group.run(packing_job, resolved, timeout=240):
        assert layers == 21
        assert packed in (10, 11), "half of them each"
        assert different == []


# ---------------------------------------------------------------------- that they are 4


def claims_of(resolved: Resolved) -> list[bool]:
    prepared = prepare_model(resolved, 0)
    return [claim.ok for claim in base_claims(prepared.model, prepared.bases, resolved, torch.device("cpu"))]


def test_evidence_counts_the_bits(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes.functional import quantize_4bit

    resolved = resolved_from(qlora(tiny_root))
    assert claims_of(resolved) == [True, True]
    for wrong in ({"compress_statistics": False}, {"quant_type": "fp4"}, {"blocksize": 128}):
        options = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"} | wrong
        monkeypatch.setattr(
            apply, "packed_nf4", lambda w, s, o=options: quantize_4bit(w.flatten(), quant_storage=s, **o)
        )
        assert claims_of(resolved) == [False, False], wrong
    monkeypatch.undo()
    monkeypatch.setattr("toolkit.options.nf4.apply.quantise_base", lambda *_: None)
    assert claims_of(resolved) == [False, False]


@pytest.mark.parametrize(
    ("fault", "stage", "diagnosis"),
    [
        ("base-unquantised", "engagement", "base-not-quantised"),
        ("base-statistics", "forward", "base-unpacked-wrong"),
    ],
)
def test_a_base_that_is_another_is_found(
    fault: str, stage: str, diagnosis: str, tiny_root: Path, group: WorkerGroup
) -> None:
    outcome = verify(resolved_from(qlora(tiny_root, "ddp")), group=group, fault=fault, time_limit=240, stop_early=True)
    assert outcome.verdict == ("not-exercised" if stage == "engagement" else "different")
    assert what_caught(outcome)[0] == stage
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == diagnosis


def test_a_run_without_its_4_bits_is_refused(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.options.nf4.apply.quantise_base", lambda *_: None)
    with pytest.raises(RunFailed, match="base weights in NF4"):
        train_job(resolved_from(qlora(tiny_root)), 1)


# ---------------------------------------------------------------------- under every strategy


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_the_plain_loop_on_dequantised_weights(
    strategy: str, precision: str, tiny_root: Path, group: WorkerGroup
) -> None:
    if precision == "fp32" and strategy != "zero3":
        pytest.skip("a bf16 recipe is verified in fp32 too")
    recipe = qlora(tiny_root, strategy, precision=precision, activation_checkpointing="full")
    outcome = verify(resolved_from(recipe), group=group, time_limit=240)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    seen = {claim.claim: claim.ok for one in outcome.passes for claim in one.claims}
    assert seen["base weights in NF4, doubly quantised"]
    assert seen["bits of such a weight"]


@pytest.mark.parametrize(
    ("saved", "resumed"), nightly_but([("zero3", "zero3"), ("fsdp2", "fsdp2"), ("ddp", "fsdp1")], ("ddp", "fsdp1"))
)
def test_resumed_equals_uninterrupted(
    saved: str, resumed: str, tiny_root: Path, group: WorkerGroup, tmp_path: Path
) -> None:
    first, second = (resolved_from(qlora(tiny_root, name, run={"max_steps": 6})) for name in (saved, resumed))
    whole: Run = group.run(train_job, first, 6, None, None, 6)[0]
    group.run(train_job, first, 3, str(tmp_path), None, 6)
    run: Run = group.run(train_job, second, 3, None, str(newest(tmp_path)), 6)[0]
    folder = newest(tmp_path)
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < 150_000, "the frozen base is not saved"
    if saved == resumed:
        assert run.losses == whole.losses[3:]
        assert all(torch.equal(run.weights[name], weight) for name, weight in whole.weights.items())
    else:
        assert run.losses == pytest.approx(whole.losses[3:], rel=1e-6)
        assert worst(run.weights, whole.weights)[0] < 1e-5


# ---------------------------------------------------------------------- plan


@pytest.mark.parametrize("strategy", nightly_but(["single", "fsdp2"], "fsdp2"))
def test_plan_counts_what_is_stored(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    from plan.truth import measured
    from toolkit.planning.predict import Planner

    wide = LLAMA | {"hidden_size": 128, "intermediate_size": 256}
    recipe = qlora(tiny_root, strategy, model={"config": wide}, precision="bf16")
    resolved = resolved_from(recipe)
    planner = Planner.of(resolved, 64)
    layers = packed_layers(prepare_model(resolved, 0).model).values()
    stored = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    kept = sum(layer.statistics_bytes() for layer in layers)
    weights = [(w, count) for unit, count in planner.skeleton.holdings.units() for w in unit if w.packed is not None]
    assert sum(count * (w.packed or 0) for w, count in weights) == stored
    assert sum(count * w.statistics for w, count in weights) == kept
    # Half a byte a weight; 8 bits for 64 and 32 for 16,384, and a kilobyte of tables a layer.
    elements = sum(count * w.numel for w, count in weights)
    assert stored == elements / 2
    assert kept == pytest.approx(elements / 64 + 4 * elements / 16384 + 1092 * len(layers), rel=0.02)
    real = measured(recipe, 64) if strategy == "single" else max(group.run(measured, recipe, 64))
    # As LoRA's cells in docs/measurements/plan.md, whose worst held-out error is 3.7 %.
    assert planner.memory(resolved).peak == pytest.approx(real, rel=0.03)


# ---------------------------------------------------------------------- export


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def trained(request: pytest.FixtureRequest, tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    recipe = qlora(tiny_root, precision=request.param, optimizer={"lr": 1e-2}, run={"max_steps": 3, "seed": 3})
    folder = tmp_path_factory.mktemp("qlora")
    train_job(resolved_from(recipe), 3, str(folder / "checkpoints"), None, 3)
    return request.param, recipe, folder


def test_export_merges_into_the_dequantised_base(trained: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    precision, recipe, folder = trained
    with pytest.raises(InputError, match="add --dequantise"):
        export(folder, tmp_path / "out", merged=True)
    with pytest.raises(InputError, match="requires --merged"):
        export(folder, tmp_path / "out", dequantise=True)
    assert export(folder, tmp_path / "adapter").kind == "adapter"
    assert "in 4 bits (NF4, double quantisation" in (tmp_path / "adapter" / "README.md").read_text(encoding="utf-8")
    assert export(folder, tmp_path / "merged", merged=True, dequantise=True).kind == "merged model"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not packed_layers(merged)
    assert merged.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
    if precision == "fp32":
        live = trained_model(resolved_from(recipe), newest(folder / "checkpoints"), 0)  # type: ignore[arg-type]
        ids = torch.arange(3, 23)[None]
        with torch.no_grad():
            difference = merged.eval()(input_ids=ids).logits - live(input_ids=ids).logits
        assert difference.abs().max() < 1e-5  # one rounding per weight


def test_a_merge_that_answers_otherwise_is_not_written(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, folder = trained
    right: Callable[[nn.Module], None] = merge.unpack_layers

    def wrong(model: Any) -> None:
        right(model)
        original = model.merge_and_unload

        def other_scaling() -> Any:
            for module in model.modules():
                if isinstance(getattr(module, "scaling", None), dict):
                    module.scaling = {key: 1.05 * value for key, value in module.scaling.items()}
            return original()

        model.merge_and_unload = other_scaling

    monkeypatch.setattr(merge, "unpack_layers", wrong)
    with pytest.raises(RunFailed, match="merged model is not what was trained: logits of"):
        export(folder, tmp_path / "out", merged=True, dequantise=True)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- refusals


@every_case(
    ("config", "expected"),
    [
        ({"model_type": "gpt2"}, "stores weights in Conv1D layers; use lora"),
        ({"model_type": "mixtral"}, "all experts in one tensor; use lora"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "weights of model.path are already quantised"),
    ],
)
def test_what_cannot_be_quantised_is_refused_at_config_time(
    config: dict[str, Any], expected: str, tiny_root: Path
) -> None:
    with pytest.raises(InputError, match=r"adapter\.method: qlora") as caught:
        resolved_from(qlora(tiny_root, model={"config": config}))
    assert expected in str(caught.value)


@every_case(("found", "message"), [(None, "it is not installed"), ("0.45.1", "0.45.1 is installed")])
def test_without_bitsandbytes_it_is_reported_before_anything_starts(
    found: str | None, message: str, tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train`, `verify` and `bench` ask the machine first; who comes another way gets the same message."""
    if found is None:
        monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("toolkit.options.nf4.spec.version", lambda name: found)
    resolved = resolved_from(qlora(tiny_root))
    for start in (check_machine, lambda recipe: prepare_model(recipe, 0)):
        with pytest.raises(InputError, match=message) as caught:
            start(resolved)
        assert "pip install 'bitsandbytes>=0.50'" in str(caught.value)
