"""Rows and layers both divided (`strategy.mesh` with context and tensor): proven equal, and found where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from families import EVERY_FAMILY
from jobs import assert_goes_on, assert_weights, eval_job, loader_for, plain_run, resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.splittable import FAMILIES
from toolkit.verification.faults import faults
from toolkit.verification.faults.context import __name__ as OF_PARTS
from toolkit.verification.faults.layers import __name__ as OF_LAYERS
from toolkit.verification.run import verify
from verdicts import assert_equivalent, assert_found

LORA = {"r": 4, "dropout": 0.1}
QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 8}
NAMES = ["ddp", "fsdp2"]


@pytest.fixture(scope="module")
def eight() -> Iterator[WorkerGroup]:
    with WorkerGroup(8) as workers:
        yield workers


def both(recipe: Callable[..., Resolved], name: str = "ddp", rest: int = 1, /, **sections: Any) -> Resolved:
    """Two parts of each row, each of whose layers two ranks divide; ``rest`` such fours have copies, or shard them."""
    mesh = {"context": 2, "tensor": 2, "replicate" if name == "ddp" else "shard": rest}
    strategy = {"mesh": mesh} | sections.pop("strategy", {})
    model = {"config": LLAMA} | sections.pop("model", {})
    return recipe(name, strategy=strategy, machine={"processes": 4 * rest}, model=model, **sections)


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA | {"target_modules": "all-linear"}], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [LLAMA, QWEN], ids=["llama", "qwen3"])
@pytest.mark.parametrize("name", NAMES)
def test_two_parts_of_divided_layers_are_equivalent(
    name: str, model: Any, precision: str, adapter: Any, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    resolved = both(recipe, name, model={"config": model}, precision=precision, adapter=adapter)
    outcome = verify(resolved, group=four, time_limit=300)
    assert_equivalent(outcome)
    for one in outcome.passes:
        axes = {c.expected: c.ok for c in one.claims if c.id == "mesh-collectives"}
        assert axes["all-to-all context"]
        assert axes["all-reduce tensor"]
        gradient = next(stage for stage in one.stages if stage.name == "gradient")
        assert gradient.detection_limit == pytest.approx(4.8e-7, rel=0.01), "four roundings of factors, nothing else"
    logic = outcome.passes[0]
    assert logic.replayed is not None
    assert max(one.gradient for one in logic.replayed.from_natural) < 1e-5, "held against whole rows and layers"


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-pure": {"precision": "bf16-pure"},
    "packed-fused": {"data": {"packing": True}, "loss": "fused", "precision": "bf16"},
    "recomputed": {"activation_checkpointing": "full", "precision": "bf16", "adapter": LORA},
    "terms": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "lion": {"optimizer": {"name": "lion", "lr": 1e-4}},
    "biases": {"model": {"config": LLAMA | {"model_type": "qwen2"}}, "precision": "bf16"},
    "tied": {"model": {"config": LLAMA | {"tie_word_embeddings": True}}, "precision": "bf16"},
    "one-micro-batch": {"batch": {"accumulation": 1}},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_equivalent(option: str, name: str, recipe: Callable[..., Resolved], four: WorkerGroup) -> None:
    assert_equivalent(verify(both(recipe, name, **OPTIONS[option]), group=four, time_limit=300))


@pytest.mark.nightly
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma2"])
def test_every_family_is_equivalent(family: str, recipe: Callable[..., Resolved], four: WorkerGroup) -> None:
    """Every model type whose layers can be divided, where rows are divided too; gemma2's attention is not sdpa."""
    config = dict((EVERY_FAMILY.get(family) or {"config": LLAMA | {"model_type": family}})["config"])
    config |= {"attention_dropout": 0.0, "num_attention_heads": 4}
    resolved = both(recipe, model={"config": config}, precision="bf16")
    assert_equivalent(verify(resolved, group=four, time_limit=300))


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_eight_processes_are_equivalent(
    name: str, adapter: Any, recipe: Callable[..., Resolved], eight: WorkerGroup
) -> None:
    """Two copies of each part, or two that shard it."""
    outcome = verify(both(recipe, name, 2, adapter=adapter, precision="bf16"), group=eight, time_limit=500)
    assert_equivalent(outcome)


ELSEWHERE = {"parts-same-masks", "layers-of-other-samples", "parts-key-heads-mixed"}
"""Dropout in attention, which divided layers do not have; samples of copies; key heads that a fault knows by their
number, which here is that of a rank's query heads."""
ALSO = {"parts-averaged": "gradients-scaled-by-layers"}
"""There are as many ranks of rows as of layers."""
FOUND = [name for name, kind in faults().items() if kind.__module__ in (OF_LAYERS, OF_PARTS) and name not in ELSEWHERE]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FOUND)
def test_what_is_wrong_with_one_of_them_is_found(
    fault: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    """Each fault of divided rows and of divided layers, where both are."""
    assert_found(both(recipe), fault, four, ALSO.get(fault, ""))


def run_of(root: Path, name: str, mesh: dict[str, int] | None, micro: int, adapter: Any = None) -> dict[str, Any]:
    return recipe_dict(
        root,
        model={"config": LLAMA | {"num_hidden_layers": 4}},
        strategy={"name": name, "mesh": mesh},
        machine={"processes": 4},
        batch={"micro_size": micro, "accumulation": 3},
        run={"max_steps": 20},
        adapter=adapter,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA | {"dropout": 0.0}], ids=["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_runs_are_those_of_one_process_and_go_on_without_a_mesh(
    name: str, adapter: Any, tiny_root: Path, tmp_path: Path, four: WorkerGroup
) -> None:
    """Weights of 20 steps within 1e-5 of the plain loop's; a checkpoint resumes under other meshes and strategies, and
    theirs here; held-out losses are those of the whole model."""
    mesh = {"context": 2, "tensor": 2}
    divided = run_of(tiny_root, name, mesh, 4, adapter)
    run = four.run(train_job, resolved_from(divided), 20)[0]
    alone = run_of(tiny_root, "single", None, 4, adapter) | {"machine": {"device": "cpu", "processes": 1}}
    plain = plain_run(resolved_from(alone), 20)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert_weights(run, plain)
    straight = four.run(train_job, resolved_from(divided), 4, None, None, 4)[0]
    others: list[tuple[str, dict[str, int] | None, int]] = [
        ("fsdp2" if name == "ddp" else "ddp", mesh, 4), ("ddp", {"pipeline": 4}, 4), ("zero3", None, 1),
    ]  # fmt: skip
    for at, (other, axes, micro) in enumerate(others):
        then = run_of(tiny_root, other, axes, micro, adapter)
        for way, (first, last) in enumerate(((divided, then), (then, divided))):
            assert_goes_on(four, first, last, tmp_path / f"{at}-{way}", straight)
    windows = iter(loader_for(resolved_from(divided), 0))
    first = [[micro for _ in range(2) for micro in next(windows)]]
    windows = iter(loader_for(resolved_from(divided), 2))
    second = [[micro for _ in range(2) for micro in next(windows)]]
    held_out = four.run(eval_job, resolved_from(divided), [*first * 2, *second * 2])
    whole = resolved_from(run_of(tiny_root, "ddp", None, 1, adapter))
    right = four.run(eval_job, whole, [list(_all(whole, rank)) for rank in range(4)])
    assert held_out[0] == pytest.approx(right[0], rel=1e-6)


def _all(resolved: Resolved, rank: int) -> Iterator[Any]:
    for window in islice(loader_for(resolved, rank), 2):
        yield from window
