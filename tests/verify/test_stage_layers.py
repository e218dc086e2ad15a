"""Stages whose layers ranks divide (`strategy.mesh` with pipeline and tensor): proven equal, and found where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_stages import FOUR, LORA, QWEN, TIED, run_of, seen

from families import EVERY_FAMILY
from jobs import assert_goes_on, assert_weights, eval_job, loader_for, plain_run, resolved_from, train_job
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.splittable import FAMILIES as LAYERED
from toolkit.recipe.stageable import FAMILIES as STAGED
from toolkit.verification.faults import faults
from toolkit.verification.faults.layers import __name__ as OF_LAYERS
from toolkit.verification.faults.stages import __name__ as OF_STAGES
from toolkit.verification.run import verify
from verdicts import assert_equivalent, assert_found

MESH = {"pipeline": 2, "tensor": 2}


def both(recipe: Callable[..., Resolved], name: str = "ddp", rest: int = 1, /, **sections: Any) -> Resolved:
    """Two stages of two ranks each; ``rest`` of them have copies, or shard them."""
    model = {"config": FOUR} | sections.pop("model", {})
    mesh = MESH | {"replicate" if name == "ddp" else "shard": rest}
    strategy = {"mesh": mesh} | sections.pop("strategy", {})
    return recipe(name, strategy=strategy, machine={"processes": 4 * rest}, model=model, **sections)


@pytest.fixture(scope="module")
def eight() -> Iterator[WorkerGroup]:
    with WorkerGroup(8) as workers:
        yield workers


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model": {"config": FOUR}},
    "qwen3": {"model": {"config": QWEN}, "activation_checkpointing": "full"},
    "tied": {"model": {"config": TIED}},
}


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA | {"target_modules": "all-linear"}], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_two_stages_of_divided_layers_are_equivalent(
    model: str, precision: str, adapter: Any, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    outcome = verify(both(recipe, precision=precision, adapter=adapter, **MODELS[model]), group=four, time_limit=300)
    assert_equivalent(outcome)
    assert seen(outcome, "stages") == {"0-1 | 2-3"}
    assert seen(outcome, "layers-divided") == {"2"}
    assert seen(outcome, "bubble") == {"2 of 8"}
    for one in outcome.passes:
        axes = {c.expected: c.ok for c in one.claims if c.id == "mesh-collectives"}
        assert axes == {"all-reduce tensor": True, "all-reduce pipeline": True}
        gradient = next(stage for stage in one.stages if stage.name == "gradient")
        assert gradient.detection_limit == pytest.approx(4.8e-7, rel=0.01), "4 roundings of factors, nothing else"


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-pure": {"precision": "bf16-pure"},
    "packed-fused": {"data": {"packing": True}, "loss": "fused", "precision": "bf16"},
    "lion": {"optimizer": {"name": "lion", "lr": 1e-4}},
    "foreach": {"optimizer": {"kernel": "foreach"}},
    "not-clipped": {"optimizer": {"max_grad_norm": 0.0}},
    "groups": {"optimizer": {"groups": [{"match": "mlp", "lr": 1e-3, "weight_decay": 0.3}]}},
    "biases": {"model": {"config": FOUR | {"model_type": "qwen2"}}, "precision": "bf16"},
    "one-micro-batch": {"batch": {"accumulation": 1}},
}


@pytest.mark.nightly
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_equivalent(option: str, recipe: Callable[..., Resolved], four: WorkerGroup) -> None:
    assert_equivalent(verify(both(recipe, **OPTIONS[option]), group=four, time_limit=300))


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_eight_processes_are_equivalent(
    name: str, adapter: Any, recipe: Callable[..., Resolved], eight: WorkerGroup
) -> None:
    """Pipeline, tensor, and copies or shards of each part, two of each."""
    model = {"config": TIED}
    outcome = verify(both(recipe, name, 2, model=model, adapter=adapter, precision="bf16"), group=eight, time_limit=500)
    assert_equivalent(outcome)
    collectives = {c.expected for one in outcome.passes for c in one.claims if c.id == "mesh-collectives"}
    rest = {"ddp": {"all-reduce all"}, "fsdp2": {"all-gather all", "reduce-scatter all"}}[name]
    assert collectives == {"all-reduce tensor", "all-reduce pipeline"} | rest


BOTH = sorted(set(LAYERED) & set(STAGED))
"""Model types that are verified with each of the two."""


@pytest.mark.nightly
@pytest.mark.parametrize("family", BOTH)
def test_every_family_is_equivalent(family: str, recipe: Callable[..., Resolved], four: WorkerGroup) -> None:
    model = EVERY_FAMILY.get(family) or {"config": FOUR | {"model_type": family}}
    config = model["config"] | {"attention_dropout": 0.0}
    assert_equivalent(verify(both(recipe, model={"config": config}, precision="bf16"), group=four, time_limit=300))


FOUND = [name for name, kind in faults().items() if kind.__module__ in (OF_LAYERS, OF_STAGES)]
ON_EIGHT = ("stages-copies-not-averaged", "layers-of-other-samples")
"""What needs copies, too."""


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [name for name in FOUND if name not in ON_EIGHT])
def test_what_is_wrong_with_one_of_them_is_found(
    fault: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    """Each fault of stages and of divided layers, where both are."""
    assert_found(both(recipe), fault, four)


@pytest.mark.nightly
def test_runs_are_those_of_one_process_and_go_on_without_a_mesh(
    tiny_root: Path, tmp_path: Path, four: WorkerGroup
) -> None:
    """Weights of 20 steps within 1e-5 of one process's; a checkpoint resumes under other meshes and strategies, and
    theirs here; held-out losses are those of the whole model."""
    divided = run_of(tiny_root, "ddp", strategy={"mesh": MESH}, machine={"processes": 4})
    alone = run_of(tiny_root, "single", machine={"processes": 1}, strategy={"mesh": None})
    run = four.run(train_job, resolved_from(divided), 20)[0]
    plain = plain_run(resolved_from(alone), 20)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert_weights(run, plain)
    straight = four.run(train_job, resolved_from(divided), 4, None, None, 4)[0]
    others: list[tuple[str, dict[str, int] | None, int]] = [
        ("ddp", {"pipeline": 4}, 4), ("fsdp2", {"tensor": 2, "shard": 2}, 2), ("zero3", None, 1),
    ]  # fmt: skip
    for at, (name, mesh, micro) in enumerate(others):
        other = run_of(tiny_root, name, strategy={"mesh": mesh}, machine={"processes": 4}, batch={"micro_size": micro})
        for way, (first, then) in enumerate(((divided, other), (other, divided))):
            folder = tmp_path / f"{at}-{way}"
            assert_goes_on(four, first, then, folder, straight)
    windows = iter(loader_for(resolved_from(divided), 0))
    batches = [micro for _ in range(2) for micro in next(windows)]
    held_out = four.run(eval_job, resolved_from(divided), [batches] * 4)
    whole = run_of(tiny_root, "ddp", strategy={"mesh": None}, machine={"processes": 4}, batch={"micro_size": 1})
    right = four.run(eval_job, resolved_from(whole), [batches[at::4] for at in range(4)])
    assert held_out[0] == pytest.approx(right[0], rel=1e-6)
