"""Experts divided over ranks (`strategy.mesh.expert`): proven equal, and found where they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from families import EVERY_FAMILY
from jobs import eval_job, loader_for, plain_run, resolved_from, train_job
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.expertable import FAMILIES
from toolkit.recipe.resolve import Resolved
from toolkit.training.session import prepare_model
from toolkit.verification.cases.twin import twin_config
from toolkit.verification.faults import fault_class, faults
from toolkit.verification.faults.experts import __name__ as FAULTS
from toolkit.verification.matrix import what_caught
from toolkit.verification.run import verify

LORA = {"r": 4, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
MIXTRAL: dict[str, Any] = EVERY_FAMILY["mixtral"]["config"]
"""Four experts of which each token has two."""


def divided(recipe: Callable[..., Resolved], experts: int = 2, copies: int = 1, /, **sections: Any) -> Resolved:
    model = {"config": MIXTRAL} | sections.pop("model", {})
    mesh = {"expert": experts, "replicate": copies}
    processes = {"processes": experts * copies}
    return recipe("ddp", strategy={"mesh": mesh}, machine=processes, model=model, **sections)


def assert_equivalent(outcome: Any) -> None:
    told = None if outcome.difference is None else outcome.difference[2]
    assert outcome.verdict == "equivalent", (told, outcome.failure, outcome.unproven)


# ------------------------------------------------------------------ proofs


@pytest.mark.group
@pytest.mark.parametrize(
    "sections",
    [
        {"precision": "bf16", "activation_checkpointing": "full"},
        {"model": EVERY_FAMILY["qwen3_moe"], "adapter": LORA, "data": {"packing": True}, "loss": "fused"},
    ],
    ids=["bf16", "lora-packed"],
)
def test_half_of_the_experts_is_equivalent(
    sections: dict[str, Any], recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    outcome = verify(divided(recipe, **sections), group=group, time_limit=200)
    assert_equivalent(outcome)
    for one in outcome.passes:
        seen = {c.expected: c.ok for c in one.claims if c.id == "mesh-collectives"}
        assert seen == {"all-to-all expert": True}
        assert {c.id for c in one.claims if c.ok} >= {"experts-divided", "experts-alike"}
        gradient = next(stage for stage in one.stages if stage.name == "gradient")
        assert gradient.detection_limit == pytest.approx(4.8e-7, rel=0.01), "four roundings of factors, nothing else"
    logic = outcome.passes[0]
    assert logic.replayed is not None
    assert max(one.gradient for one in logic.replayed.from_natural) < 1e-5, "held against whole layers of experts"


@pytest.mark.slow
@pytest.mark.group
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_equivalent(
    family: str, adapter: Any, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    targets = {"target_modules": ["q_b_proj", "kv_b_proj"]} if family == "deepseek_v3" else {}
    adapter = adapter and adapter | targets
    outcome = verify(
        divided(recipe, model=EVERY_FAMILY[family], adapter=adapter, precision="bf16"), group=group, time_limit=300
    )
    assert_equivalent(outcome)


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-pure": {"precision": "bf16-pure"},
    "selective": {"activation_checkpointing": "selective", "precision": "bf16"},
    "terms": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "lion": {"optimizer": {"name": "lion", "lr": 1e-4}},
    "frozen-experts": {"model": {"freeze": [r"experts\."]}, "precision": "bf16"},
    "balance": {"model": {"config": MIXTRAL | {"output_router_logits": True}}},
    "eager-experts": {"model": {"attention": "eager"}},
    "one-micro-batch": {"batch": {"accumulation": 1}},
}


@pytest.mark.slow
@pytest.mark.group
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_equivalent(option: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    assert_equivalent(verify(divided(recipe, **OPTIONS[option]), group=group, time_limit=300))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(("experts", "copies"), [(2, 2), (4, 1)])
def test_four_processes_are_equivalent(
    experts: int, copies: int, adapter: Any, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    resolved = divided(recipe, experts, copies, adapter=adapter, precision="bf16")
    assert_equivalent(verify(resolved, group=four, time_limit=300))


OF_EXPERTS = [name for name, kind in faults().items() if kind.__module__ == FAULTS]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", OF_EXPERTS)
def test_what_is_wrong_with_experts_is_found(
    fault: str, precision: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    kind = fault_class(fault)
    resolved = recipe("ddp", precision=precision)
    outcome = verify(resolved, group=four, fault=fault, time_limit=300, round_trip=False, stop_early=True)
    stage, where = what_caught(outcome)
    assert stage in kind.stages, (stage, where)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id in kind.diagnoses


def test_there_are_faults_of_experts() -> None:
    assert len(OF_EXPERTS) == 5


def test_dropout_of_adapters_on_experts_is_refused_with_what_to_set(recipe: Callable[..., Resolved]) -> None:
    """PEFT's own words name a class alone."""
    resolved = recipe("single", model={"config": MIXTRAL}, adapter={"r": 4, "dropout": 0.1})
    with pytest.raises(InputError, match=r"ParamWrapper .* set adapter\.dropout: 0, or adapter\.target_modules to lin"):
        prepare_model(resolved, 0)


def test_a_small_model_has_experts_for_every_rank() -> None:
    """`verify` makes models smaller, of four experts where they can be as few."""
    wide = MIXTRAL | {"hidden_size": 512, "num_hidden_layers": 8, "num_local_experts": 24}
    numbers = [twin_config(wide, experts=ranks)["num_local_experts"] for ranks in (1, 2, 3, 8, 12, 24)]
    assert numbers == [4, 4, 12, 8, 12, 24]


# ------------------------------------------------------------------ runs


def run_of(root: Path, mesh: dict[str, int] | None, name: str = "ddp", **sections: Any) -> dict[str, Any]:
    values = recipe_dict(
        root,
        model={"config": MIXTRAL | {"vocab_size": 300}},
        strategy={"name": name, "mesh": mesh},
        machine={"processes": 2},
        batch={"micro_size": 2, "accumulation": 3},
        run={"max_steps": 20},
    )
    for key, value in sections.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    return values


@pytest.mark.group
def test_twenty_steps_are_the_plain_loops(tiny_root: Path, group: WorkerGroup) -> None:
    """Weights within 1e-5 of one process that computes all experts, with the same samples in the same steps."""
    resolved = resolved_from(run_of(tiny_root, {"expert": 2}))
    run = group.run(train_job, resolved, 20)[0]
    plain = plain_run(resolved_from(run_of(tiny_root, None)), 20)
    assert run.tokens == plain.tokens
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert run.weights.keys() == plain.weights.keys()
    for name, weight in plain.weights.items():
        assert torch.allclose(run.weights[name], weight, rtol=1e-5, atol=1e-5), name


@pytest.mark.group
@pytest.mark.parametrize("other", ["ddp", "fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_divided_experts_and_without(
    other: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    """A checkpoint has whole weights by name, whichever rank wrote a part of them."""
    experts, whole = run_of(tiny_root, {"expert": 2}), run_of(tiny_root, None, other)
    for first, then in ((experts, whole), (whole, experts)):
        folder = tmp_path / str(first["strategy"]["mesh"])
        straight = group.run(train_job, resolved_from(first), 4, None, None, 4)[0]
        group.run(train_job, resolved_from(first), 2, str(folder), None, 4)
        after = group.run(train_job, resolved_from(then), 2, None, str(next(folder.iterdir())), 4)[0]
        assert after.losses == pytest.approx(straight.losses[2:], rel=1e-5)
        for name, weight in straight.weights.items():
            assert torch.allclose(after.weights[name], weight, rtol=1e-5, atol=1e-6), name


@pytest.mark.group
def test_held_out_losses_are_those_of_all_experts(tiny_root: Path, group: WorkerGroup) -> None:
    experts, alone = resolved_from(run_of(tiny_root, {"expert": 2})), resolved_from(run_of(tiny_root, None))
    windows = iter(loader_for(experts, 0))
    batches = [micro for _ in range(2) for micro in next(windows)]
    own = [batches[::2], batches[1::2]]
    assert group.run(eval_job, experts, own)[0] == pytest.approx(group.run(eval_job, alone, own)[0], rel=1e-6)


@pytest.mark.group
def test_each_rank_reads_its_own_experts(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    """From safetensors files, and no expert of another rank, where the files have a layer's experts in one tensor."""
    from test_stages import read_job
    from transformers import AutoConfig, AutoModelForCausalLM

    config = EVERY_FAMILY["gpt_oss"]["config"] | {"vocab_size": 300}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    made.save_pretrained(tmp_path / "model")
    recipe = run_of(tiny_root, {"expert": 2}, model={"path": str(tmp_path / "model"), "config": None})
    sizes = {name: p.numel() for name, p in made.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    for elements, why_whole in group.run(read_job, resolved_from(recipe)):
        assert why_whole is None
        assert elements == sum(sizes.values()) - experts // 2
