"""Experts divided over ranks (`strategy.mesh.expert`): proven equal, and found where they are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from families import EVERY_FAMILY
from jobs import Run, assert_goes_on, assert_weights, eval_job, loader_for, plain_run, resolved_from, train_job
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.expertable import FAMILIES
from toolkit.recipe.resolve import Resolved
from toolkit.training.session import prepare_model
from toolkit.verification.cases.twin import twin_config
from toolkit.verification.faults import faults
from toolkit.verification.faults.experts import __name__ as FAULTS
from toolkit.verification.run import verify
from verdicts import assert_equivalent, assert_found

LORA = {"r": 4, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
ON_EXPERTS = {"r": 4, "dropout": 0}
"""PEFT's own choice for a mixture: adapters on attention, and on each expert's matrices."""
MIXTRAL: dict[str, Any] = EVERY_FAMILY["mixtral"]["config"]
"""Four experts of which each token has two."""


def divided(
    recipe: Callable[..., Resolved],
    experts: int = 2,
    copies: int = 1,
    shards: int = 1,
    name: str = "ddp",
    /,
    **sections: Any,
) -> Resolved:
    model = {"config": MIXTRAL} | sections.pop("model", {})
    strategy = {"mesh": {"expert": experts, "replicate": copies, "shard": shards}} | sections.pop("strategy", {})
    processes = {"processes": experts * copies * shards}
    return recipe(name, strategy=strategy, machine=processes, model=model, **sections)


# ------------------------------------------------------------------ proofs

COLLECTIVES = {"ddp": [], "fsdp2": ["all-gather all", "reduce-scatter all"]}
EVIDENCE = {"ddp": ["experts-alike"], "fsdp2": ["mesh", "mesh-copies", "share-of-weights"]}


HALVES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", "activation_checkpointing": "full"},
    "lora-packed": {"model": EVERY_FAMILY["qwen3_moe"], "adapter": LORA, "data": {"packing": True}, "loss": "fused"},
    "lora-on-experts": {"precision": "bf16", "adapter": ON_EXPERTS},
}


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("name", "sections"),
    [
        pytest.param(
            name,
            HALVES[which],
            id=f"{which}-{name}",
            marks=[] if (name, which) in (("ddp", "lora-packed"), ("fsdp2", "bf16")) else [pytest.mark.nightly],
        )
        for which in HALVES
        for name in COLLECTIVES
    ],
)
def test_half_of_the_experts_is_equivalent(
    name: str, sections: dict[str, Any], recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    outcome = verify(divided(recipe, 2, 1, 1, name, **sections), group=group, time_limit=200)
    assert_equivalent(outcome)
    for one in outcome.passes:
        seen = {c.expected: c.ok for c in one.claims if c.id == "mesh-collectives"}
        assert seen == dict.fromkeys([*COLLECTIVES[name], "all-to-all expert"], True)
        assert {c.id for c in one.claims if c.ok} >= {"experts-divided", *EVIDENCE[name]}
        gradient = next(stage for stage in one.stages if stage.name == "gradient")
        assert gradient.detection_limit == pytest.approx(4.8e-7, rel=0.01), "four roundings of factors, nothing else"
    logic = outcome.passes[0]
    assert logic.replayed is not None
    assert max(one.gradient for one in logic.replayed.from_natural) < 1e-5, "held against whole layers of experts"


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("adapter", [None, LORA, ON_EXPERTS], ids=["full", "lora", "lora-on-experts"])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_equivalent(
    family: str, name: str, adapter: Any, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    if adapter is not None and family == "deepseek_v3":
        adapter = adapter | {"target_modules": ["q_b_proj", "kv_b_proj"]}
    if adapter is not None and "target_modules" not in adapter:  # PEFT has no choice of its own for some
        adapter = adapter | {"target_modules": ["q_proj"]}
    if adapter is not None and not adapter["dropout"]:
        adapter = adapter | {"options": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}}
    outcome = verify(
        divided(recipe, 2, 1, 1, name, model=EVERY_FAMILY[family], adapter=adapter, precision="bf16"),
        group=group,
        time_limit=300,
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


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_equivalent(option: str, name: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    assert_equivalent(verify(divided(recipe, 2, 1, 1, name, **OPTIONS[option]), group=group, time_limit=300))


FOUR = {
    "ddp-2x2": (2, 2, 1, "ddp"),
    "ddp-4": (4, 1, 1, "ddp"),
    "fsdp2-sharded": (2, 1, 2, "fsdp2"),
    "fsdp2-copies": (2, 2, 1, "fsdp2"),
    "fsdp2-4": (4, 1, 1, "fsdp2"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA, ON_EXPERTS], ids=["full", "lora", "lora-on-experts"])
@pytest.mark.parametrize("sizes", FOUR)
def test_four_processes_are_equivalent(
    sizes: str, adapter: Any, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    resolved = divided(recipe, *FOUR[sizes], adapter=adapter, precision="bf16")
    assert_equivalent(verify(resolved, group=four, time_limit=300))


@pytest.mark.nightly
def test_weights_kept_gathered_are_equivalent(recipe: Callable[..., Resolved], four: WorkerGroup) -> None:
    """Of sharded experts, too; their gradients are summed once per step."""
    strategy = {"sync": "last", "reshard_after_forward": False}
    assert_equivalent(verify(divided(recipe, *FOUR["fsdp2-sharded"], strategy=strategy), group=four, time_limit=300))


OF_EXPERTS = [
    (fault, name) for fault, kind in faults().items() if kind.__module__ == FAULTS for name in kind.strategies.names()
]


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("fault", "name"), OF_EXPERTS)
def test_what_is_wrong_with_experts_is_found(
    fault: str, name: str, precision: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    resolved = recipe(name, precision=precision)
    assert_found(resolved, fault, four)


def test_there_are_faults_of_experts() -> None:
    assert len(OF_EXPERTS) == 11


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


@contextlib.contextmanager
def first_pair_routes_to_the_first_expert() -> Iterator[None]:
    """Of four ranks the first two. Of the two that have the second half of the experts, one then has no token at all,
    and the other one has some."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    right = MixtralTopKRouter.forward

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        logits, scores, index = right(self, hidden)
        return logits, scores, torch.zeros_like(index) if torch.distributed.get_rank() < 2 else index

    MixtralTopKRouter.forward = forward
    try:
        yield
    finally:
        MixtralTopKRouter.forward = right


def lopsided_job(resolved: Resolved, steps: int) -> Run | None:
    with first_pair_routes_to_the_first_expert():
        return train_job(resolved, steps)


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", ["grouped_mm", "eager"])
def test_a_rank_whose_experts_no_token_has_chosen(kernel: str, tiny_root: Path, four: WorkerGroup) -> None:
    """It takes part in exchanges and in the sum of their gradients, for which the others wait."""
    config = MIXTRAL | {"vocab_size": 300, "experts_implementation": kernel}
    four_processes: dict[str, Any] = {"machine": {"processes": 4}, "model": {"config": config}}
    copied = resolved_from(run_of(tiny_root, {"expert": 2, "replicate": 2}, **four_processes))
    sharded = resolved_from(run_of(tiny_root, {"expert": 2, "shard": 2}, "fsdp2", **four_processes))
    runs = [four.run(lopsided_job, resolved, 3)[0] for resolved in (copied, sharded)]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-6)
    for name, weight in runs[0].weights.items():
        assert torch.allclose(runs[1].weights[name], weight, rtol=1e-5, atol=1e-6), name


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


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("adapter", [None, ON_EXPERTS], ids=["full", "lora-on-experts"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_twenty_steps_are_the_plain_loops(name: str, adapter: Any, tiny_root: Path, group: WorkerGroup) -> None:
    """Weights within 1e-5 of one process that computes all experts, with the same samples in the same steps."""
    resolved = resolved_from(run_of(tiny_root, {"expert": 2}, name, adapter=adapter))
    run = group.run(train_job, resolved, 20)[0]
    plain = plain_run(resolved_from(run_of(tiny_root, None, adapter=adapter)), 20)
    assert run.tokens == plain.tokens
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert_weights(run, plain)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("name", "other", "adapter"),
    [
        ("ddp", "fsdp2", None),
        ("fsdp2", "ddp", None),
        ("ddp", "fsdp2", ON_EXPERTS),
        pytest.param("fsdp2", "ddp", ON_EXPERTS, marks=pytest.mark.nightly),
        pytest.param("fsdp2", "zero3", ON_EXPERTS, marks=pytest.mark.nightly),
        pytest.param("ddp", "ddp", None, marks=pytest.mark.nightly),
        pytest.param("ddp", "zero3", None, marks=pytest.mark.nightly),
        pytest.param("fsdp2", "fsdp2", None, marks=pytest.mark.nightly),
        pytest.param("fsdp2", "zero3", None, marks=pytest.mark.nightly),
    ],
)
def test_a_run_goes_on_with_divided_experts_and_without(
    name: str, other: str, adapter: Any, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    """A checkpoint has whole weights by name, whichever rank wrote a part of them."""
    experts = run_of(tiny_root, {"expert": 2}, name, adapter=adapter)
    whole = run_of(tiny_root, None, other, adapter=adapter)
    for first, then in ((experts, whole), (whole, experts)):
        folder = tmp_path / str(first["strategy"]["mesh"])
        assert_goes_on(group, first, then, folder)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_held_out_losses_are_those_of_all_experts(name: str, tiny_root: Path, group: WorkerGroup) -> None:
    experts, alone = resolved_from(run_of(tiny_root, {"expert": 2}, name)), resolved_from(run_of(tiny_root, None))
    windows = iter(loader_for(experts, 0))
    batches = [micro for _ in range(2) for micro in next(windows)]
    own = [batches[::2], batches[1::2]]
    assert group.run(eval_job, experts, own)[0] == pytest.approx(group.run(eval_job, alone, own)[0], rel=1e-6)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_rank_reads_its_own_experts(name: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    """From safetensors files, and no expert of another rank, where the files have a layer's experts in one tensor."""
    from test_stages import read_job
    from transformers import AutoConfig, AutoModelForCausalLM

    config = EVERY_FAMILY["gpt_oss"]["config"] | {"vocab_size": 300}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    made.save_pretrained(tmp_path / "model")
    recipe = run_of(tiny_root, {"expert": 2}, name, model={"path": str(tmp_path / "model"), "config": None})
    sizes = {name: p.numel() for name, p in made.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    rest = sum(sizes.values()) - experts
    for elements, why_whole in group.run(read_job, resolved_from(recipe)):
        assert why_whole is None
        assert elements == experts // 2 + (rest if name == "ddp" else rest // 2)
