"""Bases whose files have linear weights in NF4: the files' values to the bit, adapters on them, and what is refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import every_case
from jobs import resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.launch.job import check_machine
from toolkit.model.packed_layers import packed_layers
from toolkit.options.nf4.evidence import base_claims
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.schema import Recipe
from toolkit.reference.model import plain_model
from toolkit.training.export import export
from toolkit.training.export_check import trained_model
from toolkit.training.finding import newest
from toolkit.training.preparation import prepare_model
from toolkit.verification.cases.twin import twin_adapter
from toolkit.verification.run import verify

pytest.importorskip("bitsandbytes")

WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 128}
"""bitsandbytes 0.50.2 unpacks rows that are no multiple of 64 wrongly on some CPUs, which is what is compared with."""
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOUBLE = NF4 | {"bnb_4bit_use_double_quant": True}
FORMATS: dict[str, dict[str, Any]] = {
    "double": {"bnb_4bit_use_double_quant": True},
    "single": {},
    "in-bfloat16": {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "some-left-out": {"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]},
    "head-too": {"llm_int8_skip_modules": []},
}
LORA = {"method": "lora", "r": 4}
IDS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model saved by transformers and bitsandbytes, as users make them, in several formats."""
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    root = tmp_path_factory.mktemp("packed")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**WIDE)).save_pretrained(root / "plain")
    for name, options in FORMATS.items():
        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
        model = AutoModelForCausalLM.from_pretrained(
            root / "plain", quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
        )
        model.save_pretrained(root / name)
    return {name: root / name for name in ("plain", *FORMATS)}


def recipe(root: Path, folder: Path, strategy: str = "single", **sections: Any) -> dict[str, Any]:
    machine = {"processes": 1 if strategy == "single" else 2}
    model = {"config": None, "path": str(folder)}
    made = {"model": model, "adapter": LORA, "strategy": {"name": strategy}, "machine": machine}
    return recipe_dict(root, **(made | sections))


def in_files(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def by_transformers(folder: Path) -> Any:
    """The model with bitsandbytes' own layers, whatever computes in float32. In training mode (there is no dropout): in
    evaluation bitsandbytes packs the weights once more for the CPU."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"})
    for parameter in model.parameters():
        if type(parameter).__name__ != "Params4bit":
            parameter.data = parameter.data.float()  # transformers 5.23.0 leaves them in the files' dtype
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype, module.compute_type_is_set = torch.float32, True
    return model.train()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)


# ---------------------------------------------------------------------- the files' values


@every_case(("name", "precision", "strategy"), product(FORMATS, ["fp32", "bf16"], ["single", "fsdp2"]))
def test_packed_values_are_those_of_the_files_bit_for_bit(
    name: str, precision: str, strategy: str, tiny_root: Path, folders: dict[str, Path]
) -> None:
    resolved = resolved_from(recipe(tiny_root, folders[name], strategy, precision=precision))
    prepared = prepare_model(resolved, 0)
    stored = in_files(folders[name])
    layers = {
        key.replace("base_model.model.", "").replace(".base_layer", ""): layer
        for key, layer in packed_layers(prepared.model).items()
    }
    packed = {key.removesuffix(".weight.absmax") for key in stored if key.endswith("weight.absmax")}
    assert set(layers) == packed - {"lm_head"}
    assert len(layers) == (11 if name == "some-left-out" else 14)
    for key, layer in layers.items():
        assert torch.equal(bits(layer.weight), bits(stored[f"{key}.weight"]))
        assert torch.equal(layer.statistics.absmax, stored[f"{key}.weight.absmax"])
        if layer.statistics.state2 is not None:
            assert torch.equal(layer.statistics.state2.absmax, stored[f"{key}.weight.nested_absmax"])
            state = bytes(stored[f"{key}.weight.quant_state.bitsandbytes__nf4"].tolist())
            assert layer.statistics.offset.item() == json.loads(state)["nested_offset"]
    assert resolved.stored is not None
    assert resolved.stored.nested == (name in ("double", "in-bfloat16"))
    if strategy == "single":
        assert all(claim.ok for claim in base_claims(prepared.model, prepared.bases, resolved, torch.device("cpu")))
    packed_ones = {id(layer.weight) for layer in layers.values()}
    for key, parameter in prepared.model.named_parameters():
        assert id(parameter) in packed_ones or torch.isfinite(parameter).all(), key


@every_case("name", FORMATS)
def test_it_answers_as_transformers_does(name: str, tiny_root: Path, folders: dict[str, Path]) -> None:
    """In float32, where both multiply the same values."""
    ours = prepare_model(resolved_from(recipe(tiny_root, folders[name], precision="fp32")), 0).model
    theirs = by_transformers(folders[name])
    with torch.no_grad():
        found = ours(input_ids=IDS).logits
        expected = theirs(input_ids=IDS).logits
    assert not any(hasattr(module, "_hf_hook") for module in ours.modules())
    # One rounding of the logits per product of the same matrices: a float32 epsilon times a small number of layers.
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_what_is_trained_whole_starts_from_the_files_values(tiny_root: Path, folders: dict[str, Path]) -> None:
    adapter = LORA | {"modules_to_save": ["down_proj"], "target_modules": ["q_proj"]}
    resolved = resolved_from(recipe(tiny_root, folders["double"], adapter=adapter, precision="fp32"))
    model = prepare_model(resolved, 0).model
    assert len(packed_layers(model)) == 12
    plain = plain_model(resolved, 0)
    for name, parameter in plain.named_parameters():
        if "modules_to_save" in name and "down_proj" in name:
            assert torch.equal(dict(model.named_parameters())[name], parameter)
            assert parameter.std() > 0


# ---------------------------------------------------------------------- adapters on it

STARTED = [name for name, method in METHODS.items() if method.why_not is None]


@every_case("name", ["lora", "vera", "ia3", "prompt-tuning"])
def test_a_method_is_the_plain_loops_or_refused(name: str, tiny_root: Path) -> None:
    check_method(name, tiny_root)


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@every_case("name", STARTED)
def test_every_method_is_the_plain_loops_or_refused(name: str, tiny_root: Path) -> None:
    check_method(name, tiny_root)


def check_method(name: str, tiny_root: Path) -> None:
    """Its forward and its gradients, with trained weights away from where they start."""
    method = METHODS[name]
    model = {"config": WIDE | {"quantization_config": DOUBLE}}
    values = recipe_dict(tiny_root, model=model, adapter={"method": name, "options": dict(method.required)})
    values |= {"strategy": {"name": "single"}, "machine": {"processes": 1}, "precision": "fp32"}
    whole = Recipe.model_validate(values).model_dump(mode="json")
    whole["adapter"] = twin_adapter(whole["adapter"], WIDE)
    if not method.packed:
        with pytest.raises(InputError, match=rf"adapter\.method: {name} reads the weights of the layers"):
            resolved_from(whole)
        return
    answers = []
    for make in (lambda r: prepare_model(r, 0).model, lambda r: plain_model(r, 0)):
        made = make(resolved_from(whole)).eval()
        trained = {key: p for key, p in made.named_parameters() if p.requires_grad}
        torch.manual_seed(1)
        with torch.no_grad():
            for key in sorted(trained):
                trained[key].add_(0.02 * torch.randn(trained[key].shape))
        logits = made(input_ids=IDS).logits
        logits.square().mean().backward()
        answers.append((logits, {key: p.grad for key, p in trained.items()}))
    (found, gradients), (expected, right) = answers
    # The same products of the same values in float32, of which no more than the order of a sum may differ.
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert right.keys() == gradients.keys()
    assert any(gradient is not None and gradient.norm() > 0 for gradient in right.values())
    for key, gradient in right.items():
        assert (gradient is None) == (gradients[key] is None)
        assert gradient is None or (gradients[key] - gradient).norm() <= 1e-4 * gradient.norm()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("strategy", "name", "adapter"),
    [
        ("fsdp2", "double", LORA | {"dropout": 0.1}),
        pytest.param("zero3", "double", LORA, marks=pytest.mark.nightly),
        pytest.param("fsdp1", "in-bfloat16", LORA, marks=pytest.mark.nightly),
        pytest.param("zero2", "single", {"method": "ia3"}, marks=pytest.mark.nightly),
        pytest.param("zero1", "double", LORA, marks=pytest.mark.nightly),
        pytest.param("ddp", "some-left-out", {"method": "vera"}, marks=pytest.mark.nightly),
        pytest.param("ddp", "double", LORA, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("full_size", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_it_is_the_plain_loop_on_the_files_values(
    full_size: bool, strategy: str, name: str, adapter: dict[str, Any], tiny_root: Path, folders: dict[str, Path],
    group: WorkerGroup,
) -> None:  # fmt: skip
    """``full_size``: on the files; else on random weights that are packed in the same format."""
    made = recipe(tiny_root, folders[name], strategy, adapter=adapter, precision="bf16")
    outcome = verify(resolved_from(made), group=group, time_limit=240, full_size=full_size)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    seen = {claim.claim: claim.ok for one in outcome.passes for claim in one.claims}
    nested = ", doubly quantised" if FORMATS[name].get("bnb_4bit_use_double_quant") else ""
    assert seen[f"base weights in NF4{nested}"]


def test_a_base_that_is_unpacked_wrong_is_found(tiny_root: Path, folders: dict[str, Path], group: WorkerGroup) -> None:
    made = recipe(tiny_root, folders["double"], "ddp", adapter=LORA | {"method": "qlora"})
    outcome = verify(resolved_from(made), group=group, fault="base-statistics", time_limit=240, stop_early=True)
    assert outcome.verdict == "different"
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "base-unpacked-wrong"


# ---------------------------------------------------------------------- export


def test_export_gives_the_adapter_or_a_merged_plain_model(
    tiny_root: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = recipe(tiny_root, folders["double"], precision="fp32", optimizer={"lr": 1e-2}, run={"max_steps": 3})
    train_job(resolved_from(made), 3, str(tmp_path / "checkpoints"), None, 3)
    live = trained_model(resolved_from(made), newest(tmp_path / "checkpoints"), 0)  # type: ignore[arg-type]
    with torch.no_grad():
        trained = live(input_ids=IDS).logits
    with pytest.raises(InputError, match="add --dequantise"):
        export(tmp_path, tmp_path / "out", merged=True)
    assert export(tmp_path, tmp_path / "adapter").kind == "adapter"
    assert "as in its files: NF4, double" in (tmp_path / "adapter" / "README.md").read_text(encoding="utf-8")
    base = by_transformers(folders["double"])
    theirs: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).train()
    with torch.no_grad():
        assert (theirs(input_ids=IDS).logits - trained).norm() < 1e-5 * trained.norm()
        assert (base(input_ids=IDS).logits - trained).norm() < 1e-5 * trained.norm()  # the adapter is inside
        with theirs.disable_adapter():
            assert (theirs(input_ids=IDS).logits - trained).norm() > 1e-3 * trained.norm(), "nothing was trained"
    whole = export(tmp_path, tmp_path / "half", merged=True, dequantise=True)
    assert whole.kind == "merged model"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16, "the base's own"
    export(tmp_path, tmp_path / "merged", merged=True, dequantise=True, dtype="fp32")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text(encoding="utf-8"))
    assert merged.dtype == torch.float32
    with torch.no_grad():
        assert (merged.eval()(input_ids=IDS).logits - trained).norm() < 1e-5 * trained.norm()


# ---------------------------------------------------------------------- plan


@pytest.mark.parametrize(
    "name", ["double", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("single", "some-left-out"))]
)
def test_plan_counts_what_is_stored(name: str, tiny_root: Path, folders: dict[str, Path]) -> None:
    from plan.truth import measured
    from toolkit.planning.predict import Planner

    made = recipe(tiny_root, folders[name], precision="bf16")
    resolved = resolved_from(made)
    planner = Planner.of(resolved, 64)
    layers = packed_layers(prepare_model(resolved, 0).model).values()
    units = planner.skeleton.holdings.units()
    weights = [(w, count) for unit, count in units for w in unit if w.packed is not None]
    assert sum(count for _, count in weights) == len(layers)
    assert sum(count * (w.packed or 0) for w, count in weights) == sum(layer.weight.numel() for layer in layers)
    assert sum(count * w.statistics for w, count in weights) == sum(layer.statistics_bytes() for layer in layers)
    # As LoRA's cells in docs/measurements/plan.md, whose worst held-out error is 3.7 %.
    assert planner.memory(resolved).peak == pytest.approx(measured(made, 64), rel=0.037)


# ---------------------------------------------------------------------- refusals


def refused(root: Path, quantization: dict[str, Any], adapter: Any = LORA, **config: Any) -> str:
    model = {"config": WIDE | config | {"quantization_config": quantization}}
    with pytest.raises(InputError) as caught:
        resolved_from(recipe_dict(root, model=model, adapter=adapter))
    return str(caught.value)


@every_case("kind", ["gptq", "awq", "torchao", "eetq"])
def test_other_formats_are_refused_by_name(kind: str, tiny_root: Path) -> None:
    message = refused(tiny_root, {"quant_method": kind, "bits": 4})
    assert f"recipe.yaml: model.config: its weights are quantised already ({kind}): " in message
    assert "set the original model (adapter.method: qlora quantises it to 4 bits)" in message


@every_case(
    ("quantization", "message"),
    [
        (NF4 | {"bnb_4bit_quant_type": "fp4"}, "(bitsandbytes, fp4)"),
        ({"load_in_4bit": True}, "(bitsandbytes, fp4)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "(bitsandbytes, 8 bits)"),
    ],
)
def test_other_formats_of_bitsandbytes_are_refused(quantization: dict[str, Any], message: str, tiny_root: Path) -> None:
    assert message in refused(tiny_root, quantization)


@every_case(
    ("adapter", "message"),
    [
        (None, "model.config: its weights are packed in 4 bits and cannot be trained; set an adapter"),
        (LORA | {"options": {"init_lora_weights": "pissa"}}, "adapter.options.init_lora_weights: pissa starts from"),
        ({"method": "dora"}, "adapter.method: dora reads the weights of the layers that it adapts"),
        (LORA | {"options": {"target_parameters": ["q_proj.weight"]}}, "adapter.options.target_parameters: adapts"),
    ],
)
def test_what_cannot_stand_on_packed_weights_is_refused(adapter: Any, message: str, tiny_root: Path) -> None:
    assert message in refused(tiny_root, DOUBLE, adapter)


def test_weights_outside_of_linear_layers_are_refused(tiny_root: Path) -> None:
    assert "model.config: gpt2 stores weights in Conv1D layers" in refused(tiny_root, DOUBLE, model_type="gpt2")


def test_a_format_that_the_config_does_not_name_is_refused(
    tiny_root: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["single"] / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["bnb_4bit_use_double_quant"] = True
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((folders["single"] / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match="double quantisation of its packed weight is False, expected True"):
        prepare_model(resolved_from(recipe(tiny_root, tmp_path)), 0)


def test_without_bitsandbytes_it_is_reported_before_anything_starts(
    tiny_root: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolved_from(recipe(tiny_root, folders["double"]))
    monkeypatch.setattr("toolkit.options.nf4.spec.version", lambda name: "0.45.1")
    with pytest.raises(InputError, match=r"model: a base in 4 bits needs bitsandbytes 0\.50 or newer; 0\.45\.1 is"):
        check_machine(resolved)
