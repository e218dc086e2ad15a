"""Stages whose experts ranks divide (`strategy.mesh` with pipeline and expert): proven equal, and found where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_experts import LORA, MIXTRAL, ON_EXPERTS, run_of

from families import EVERY_FAMILY
from jobs import assert_goes_on, assert_weights, eval_job, loader_for, plain_run, resolved_from, train_job
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.expertable import FAMILIES as EXPERTS
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.stageable import FAMILIES as STAGED
from toolkit.verification.faults import faults
from toolkit.verification.faults.experts import __name__ as OF_EXPERTS
from toolkit.verification.faults.stages import __name__ as OF_STAGES
from toolkit.verification.run import verify
from verdicts import assert_equivalent, assert_found

FOUR = MIXTRAL | {"num_hidden_layers": 4}
NAMES = ["ddp", "fsdp2"]
COLLECTIVES = {"ddp": ["all-reduce all"], "fsdp2": ["all-gather all", "reduce-scatter all"]}


@pytest.fixture(scope="module")
def eight() -> Iterator[WorkerGroup]:
    with WorkerGroup(8) as workers:
        yield workers


def both(
    recipe: Callable[..., Resolved], name: str = "ddp", copies: int = 1, shards: int = 1, /, **sections: Any
) -> Resolved:
    """Two stages of two ranks each, or of so many copies or shards of these, that divide the experts."""
    model = {"config": FOUR} | sections.pop("model", {})
    mesh = {"pipeline": 2, "expert": 2, "replicate": copies, "shard": shards}
    strategy = {"mesh": mesh} | sections.pop("strategy", {})
    return recipe(name, strategy=strategy, machine={"processes": 4 * copies * shards}, model=model, **sections)


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA, ON_EXPERTS], ids=["full", "lora", "lora-on-experts"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_two_stages_of_divided_experts_are_equivalent(
    name: str, precision: str, adapter: Any, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    outcome = verify(both(recipe, name, precision=precision, adapter=adapter), group=four, time_limit=300)
    assert_equivalent(outcome)
    for one in outcome.passes:
        axes = {c.expected: c.ok for c in one.claims if c.id == "mesh-collectives"}
        assert axes == dict.fromkeys([*COLLECTIVES[name], "all-to-all expert", "all-reduce pipeline"], True)
        assert {c.id for c in one.claims if c.ok} >= {"experts-divided", "stages", "stage-weights", "bubble"}
        gradient = next(stage for stage in one.stages if stage.name == "gradient")
        assert gradient.detection_limit == pytest.approx(4.8e-7, rel=0.01), "four roundings of factors, nothing else"


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-pure": {"precision": "bf16-pure"},
    "packed-fused": {"data": {"packing": True}, "loss": "fused", "precision": "bf16"},
    "recomputed": {"activation_checkpointing": "full", "precision": "bf16"},
    "tied-dropout": {"model": {"config": FOUR | {"tie_word_embeddings": True, "attention_dropout": 0.1}}},
    "lion": {"optimizer": {"name": "lion", "lr": 1e-4}},
    "groups": {"optimizer": {"groups": [{"match": "experts", "lr": 1e-3, "weight_decay": 0.3}]}},
    "frozen-experts": {"model": {"freeze": [r"experts\."]}, "precision": "bf16"},
    "one-micro-batch": {"batch": {"accumulation": 1}},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_equivalent(option: str, name: str, recipe: Callable[..., Resolved], four: WorkerGroup) -> None:
    assert_equivalent(verify(both(recipe, name, **OPTIONS[option]), group=four, time_limit=300))


FAMILIES = sorted(set(EXPERTS) & set(STAGED))
"""Model types that are verified with each of the two."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_equivalent(family: str, name: str, recipe: Callable[..., Resolved], four: WorkerGroup) -> None:
    """DeepSeek-V3's first block has no experts: here the first stage has none at all."""
    resolved = both(recipe, name, model=EVERY_FAMILY[family], precision="bf16")
    assert_equivalent(verify(resolved, group=four, time_limit=300))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_stages_of_whole_experts_are_equivalent(
    name: str, recipe: Callable[..., Resolved], group: WorkerGroup, four: WorkerGroup
) -> None:
    """With adapters on them, which PEFT puts there by default."""
    mesh = {"pipeline": 2} | ({} if name == "ddp" else {"shard": 2})
    processes, workers = (2, group) if name == "ddp" else (4, four)
    resolved = recipe(name, strategy={"mesh": mesh}, machine={"processes": processes}, model={"config": FOUR},
                      adapter=ON_EXPERTS, precision="bf16")  # fmt: skip
    assert_equivalent(verify(resolved, group=workers, time_limit=300))


EIGHT = {"ddp-copies": ("ddp", 2, 1), "fsdp2-copies": ("fsdp2", 2, 1), "fsdp2-sharded": ("fsdp2", 1, 2)}


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, ON_EXPERTS], ids=["full", "lora-on-experts"])
@pytest.mark.parametrize("sizes", EIGHT)
def test_eight_processes_are_equivalent(
    sizes: str, adapter: Any, recipe: Callable[..., Resolved], eight: WorkerGroup
) -> None:
    """Two stages, two ranks that divide experts, and two copies or shards of these."""
    resolved = both(recipe, *EIGHT[sizes], adapter=adapter, precision="bf16")
    assert_equivalent(verify(resolved, group=eight, time_limit=500))


FOUND = [name for name, kind in faults().items() if kind.__module__ in (OF_EXPERTS, OF_STAGES)]
ELSEWHERE = {
    "experts-copies-apart", "experts-router-apart", "experts-sharded-over-all",
}  # fmt: skip
"""What needs copies of experts or shards of them, or DDP itself."""


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [name for name in FOUND if name not in ELSEWHERE])
def test_what_is_wrong_with_one_of_them_is_found(
    fault: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    """Each fault of stages and of divided experts, where both are."""
    assert_found(both(recipe), fault, four)


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, ON_EXPERTS], ids=["full", "lora-on-experts"])
@pytest.mark.parametrize("name", NAMES)
def test_runs_are_those_of_one_process_and_go_on_without_a_mesh(
    name: str, adapter: Any, tiny_root: Path, tmp_path: Path, four: WorkerGroup
) -> None:
    """Weights of 20 steps within 1e-5 of the plain loop's; a checkpoint resumes under other meshes and strategies, and
    theirs here; held-out losses are those of the whole model."""
    mesh = {"pipeline": 2, "expert": 2}
    here = {"machine": {"processes": 4}, "batch": {"micro_size": 4}, "adapter": adapter}
    divided = run_of(tiny_root, mesh, name, **here)
    run = four.run(train_job, resolved_from(divided), 20)[0]
    plain = plain_run(resolved_from(run_of(tiny_root, None, batch={"micro_size": 4}, adapter=adapter)), 20)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert_weights(run, plain)
    straight = four.run(train_job, resolved_from(divided), 4, None, None, 4)[0]
    others: list[tuple[str, dict[str, int] | None, int]] = [
        ("fsdp2" if name == "ddp" else "ddp", mesh, 4), ("ddp", {"expert": 4}, 2), ("zero3", None, 2),
    ]  # fmt: skip
    for at, (other, axes, micro) in enumerate(others):
        then = run_of(tiny_root, axes, other, **here | {"batch": {"micro_size": micro}})
        for way, (first, last) in enumerate(((divided, then), (then, divided))):
            assert_goes_on(four, first, last, tmp_path / f"{at}-{way}", straight)
    windows = iter(loader_for(resolved_from(divided), 0))
    batches = [micro for _ in range(2) for micro in next(windows)]
    held_out = four.run(eval_job, resolved_from(divided), [batches[::2], batches[1::2]] * 2)
    whole = resolved_from(run_of(tiny_root, None, **here | {"batch": {"micro_size": 2}}))
    right = four.run(eval_job, whole, [batches[at::4] for at in range(4)])
    assert held_out[0] == pytest.approx(right[0], rel=1e-6)
