"""``strategy.unsharded_blocks``: frozen weights of the first blocks whole on every process, never gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils._pytree import tree_iter

from cases import every_case
from jobs import Run, assert_goes_on, loader_for, plain_run, resolved_from, train_job, worst
from nights import nightly_but
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.optim.adamw8bit import local
from toolkit.recipe.resolve import Resolved
from toolkit.training.loop import Progress, train
from toolkit.training.session import open_session
from toolkit.verification.record.tracer import _Dispatched
from toolkit.verification.run import verify

GRADIENT = 3e-6
"""See test_strategies.py."""
STRATEGIES = ["fsdp1", "fsdp2", "zero3"]
LORA = {"method": "lora", "r": 4, "dropout": 0.0}


def recipe_for(root: Path, name: str, blocks: int | None, **sections: Any) -> dict[str, Any]:
    strategy = {"name": name, "unsharded_blocks": blocks} | sections.pop("strategy", {})
    defaults = {"batch": {"micro_size": 2, "accumulation": 2}, "adapter": LORA, "machine": {"processes": 2}}
    return recipe_dict(root, strategy=strategy, **defaults | sections)


def gathered_job(resolved: Resolved) -> tuple[int, dict[str, int]]:
    """Bytes of whole weights that a third step gathers, and elements of each frozen weight of the first block that
    are on this process before it. (Stage 3 of ZeRO learns its order in the first two.)"""
    session = open_session(resolved)
    loader = loader_for(resolved, session.accelerator.process_index)
    train(session, loader, 2, Progress(), lambda pending: None)
    _, first = session.engine.blocks[0]
    tensors = [*first.named_parameters(), *first.named_buffers()]
    held = {name: local(tensor).numel() for name, tensor in tensors if not tensor.requires_grad}
    total = 0

    def called(operator: str, arguments: Any = ()) -> None:
        nonlocal total
        name = operator.lower().replace("_", "")
        if operator.startswith("c10d::") and "allgather" in name:
            total += sum(tensor.nbytes for tensor in tree_iter(arguments[0]))

    with _Dispatched(called):
        train(session, loader, 3, Progress(2), lambda pending: None)
    return total, held


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_whole_is_not_gathered(name: str, tiny_root: Path, group: WorkerGroup) -> None:
    every, sharded = group.run(gathered_job, resolved_from(recipe_for(tiny_root, name, None)), timeout=200)[0]
    fewer, whole = group.run(gathered_job, resolved_from(recipe_for(tiny_root, name, 1)), timeout=200)[0]
    matrices = 4 * sum(size for key, size in whole.items() if "proj" in key)
    norms = 4 * sum(size for key, size in whole.items() if "norm" in key)
    assert (matrices, norms) == (4 * 9_216, 4 * 64)
    assert sum(sharded.values()) < 9_216  # the measurement sees what is sharded
    # Two micro-batches, for the forward and the backward; stage 3 keeps a model this small in between, and gathers what
    # is below its threshold once per step.
    assert every - fewer == (2 * matrices + norms if name == "zero3" else 4 * (matrices + norms))


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2**-6)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_trains_as_the_plain_loop(
    name: str, precision: str, tolerance: float, tiny_root: Path, group: WorkerGroup
) -> None:
    """In bf16 two roundings of 2^-7: of the product and of what it is added to. What may differ there is for `verify`,
    which derives it tensor by tensor."""
    recipe = recipe_for(tiny_root, name, 2, precision=precision)
    expected = plain_run(resolved_from(recipe), 5)
    found: Run = group.run(train_job, resolved_from(recipe), 5, timeout=200)[0]
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert worst(found.weights, expected.weights)[0] < tolerance
    if precision == "fp32":
        gradients = {name: g for name, g in expected.first_gradient.items() if g is not None and g.norm() > 0}
        assert worst({name: found.first_gradient[name] for name in gradients}, gradients)[0] < GRADIENT


WAYS: dict[str, dict[str, Any]] = {
    "fsdp1": {},
    "fsdp2, bf16": {"precision": "bf16"},
    "fsdp2, gathered once": {"strategy": {"sync": "last", "reshard_after_forward": False}},
    "fsdp2, checkpointing": {"activation_checkpointing": "full"},
    "fsdp2, context": {"strategy": {"mesh": {"context": 2}}, "model": {"attention": "sdpa"}},
    "fsdp2, frozen by name": {"adapter": None, "model": {"freeze": ["layers\\.0\\.", "embed_tokens"]}},
    "fsdp2, 4 bits": {"adapter": {**LORA, "method": "qlora"}, "precision": "bf16"},
    "zero3, 4 bits": {"adapter": {**LORA, "method": "qlora"}, "precision": "bf16"},
    "fsdp1, 4 bits": {"adapter": {**LORA, "method": "qlora"}, "precision": "bf16"},
    "zero3, bf16": {"precision": "bf16"},
    "zero3, selective checkpointing": {"activation_checkpointing": "selective"},
    "zero3, frozen by name": {"adapter": None, "model": {"freeze": ["layers\\.0\\.", "embed_tokens"]}},
    "fsdp1, frozen by name": {"adapter": None, "model": {"freeze": ["layers\\.0\\.", "embed_tokens"]}},
    "zero3, dora": {"adapter": {**LORA, "method": "dora"}},
}


QUICK = ("fsdp1", "fsdp2, context", "fsdp2, 4 bits", "zero3, bf16")


@pytest.mark.nightly
@pytest.mark.parametrize("case", WAYS)
def test_verify_proves_it_and_that_it_is_at_work(case: str, tiny_root: Path, group: WorkerGroup) -> None:
    name, _, _ = case.partition(",")
    blocks = 1 if "by name" in case else 2
    recipe = recipe_for(tiny_root, name, blocks, **WAYS[case])
    outcome = verify(resolved_from(recipe), group=group, time_limit=120)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    for one in outcome.passes:
        [claim] = [claim for claim in one.claims if claim.id == "unsharded-weights"]
        assert claim.ok
        assert int(claim.seen.replace(",", "")) > 0


@pytest.mark.parametrize("name", nightly_but(STRATEGIES, "zero3"))
def test_a_run_that_shards_them_all_the_same_is_refused(name: str, tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(
        resolved_from(recipe_for(tiny_root, name, 2)), group=group, fault="unsharded-ignored", time_limit=120
    )
    assert outcome.exit_code == 1
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "unsharded-not-as-set"


@pytest.mark.parametrize(
    ("first", "then"),
    nightly_but([(("fsdp2", 1), ("zero3", 2)), (("zero3", 1), ("fsdp1", None))], (("fsdp2", 1), ("zero3", 2))),
)
def test_a_run_resumes_with_other_blocks_whole(
    first: tuple[str, int], then: tuple[str, int | None], tiny_root: Path, group: WorkerGroup, tmp_path: Path
) -> None:
    """A checkpoint has what trains: it does not say where frozen weights were."""
    assert_goes_on(group, recipe_for(tiny_root, *first), recipe_for(tiny_root, *then), tmp_path)


@pytest.mark.parametrize("name", nightly_but(STRATEGIES, "fsdp2"))
def test_more_blocks_than_there_are_are_refused(name: str, tiny_root: Path, group: WorkerGroup) -> None:
    with pytest.raises(Exception, match="unsharded_blocks: 99, but the model has 2 blocks; set at most that"):
        group.run(gathered_job, resolved_from(recipe_for(tiny_root, name, 99)), timeout=200)


FOUR = {"machine": {"processes": 4}}


@every_case(
    ("strategy", "sections", "message"),
    [
        ({"name": "zero2"}, {}, "unsharded_blocks: zero2 shards no weights; remove it, or use one of"),
        ({"name": "fsdp2"}, {"adapter": None}, "all weights train, and only frozen ones can stay whole"),
        (
            {"name": "fsdp2", "offload": "all"},
            {"machine": {"processes": 2, "device": "cuda"}},
            "keeps weights on the device, and offload: all is to keep them off it",
        ),
        ({"name": "fsdp2", "mesh": {"tensor": 2, "shard": 2}}, FOUR, "is not supported with strategy.mesh.tensor"),
        ({"name": "fsdp2", "mesh": {"pipeline": 2, "shard": 2}}, FOUR, "is not supported with strategy.mesh.pipeline"),
        (
            {"name": "zero3", "mesh": {"replicate": 2, "shard": 2}},
            FOUR,
            "is not supported with a second copy of the weights",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    strategy: dict[str, Any], sections: dict[str, Any], message: str, tiny_root: Path
) -> None:
    with pytest.raises(InputError, match=message):
        resolved_from(recipe_for(tiny_root, strategy["name"], 1, strategy=strategy, **sections))
