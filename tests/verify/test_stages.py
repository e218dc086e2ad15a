"""Blocks divided over stages (`strategy.mesh.pipeline`): proven equal, and found where they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from families import EVERY_FAMILY
from jobs import assert_goes_on, assert_weights, eval_job, loader_for, plain_run, resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.mesh import stage_blocks
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.stageable import FAMILIES
from toolkit.training.pipeline import one_forward_one_backward
from toolkit.verification.compare.pipeline import idle_slots
from toolkit.verification.faults import fault_class, faults
from toolkit.verification.faults.stages import __name__ as FAULTS
from toolkit.verification.run import verify
from verdicts import assert_equivalent, assert_found

LORA = {"r": 4, "dropout": 0.1}
FOUR = LLAMA | {"num_hidden_layers": 4}
QWEN = FOUR | {"model_type": "qwen3", "head_dim": 8}
TIED = FOUR | {"tie_word_embeddings": True}
DROPPING = FOUR | {"attention_dropout": 0.1}


BESIDE = {"ddp": "replicate", "fsdp2": "shard"}


def staged(
    recipe: Callable[..., Resolved], stages: int, ranks: int = 1, /, name: str = "ddp", **sections: Any
) -> Resolved:
    """``ranks`` of them have copies of each stage, or shard it."""
    model = {"config": FOUR} | sections.pop("model", {})
    strategy = {"mesh": {"pipeline": stages, BESIDE[name]: ranks}} | sections.pop("strategy", {})
    return recipe(name, strategy=strategy, machine={"processes": stages * ranks}, model=model, **sections)


def seen(outcome: Any, claim: str) -> set[str]:
    return {c.seen for one in outcome.passes for c in one.claims if c.id == claim}


# ------------------------------------------------------------------ proofs


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    "sections",
    [
        {"precision": "bf16", "adapter": LORA, "activation_checkpointing": "full"},
        {"model": {"config": TIED | {"attention_dropout": 0.1}}},
    ],
    ids=["lora-bf16", "tied-dropout"],
)
def test_two_stages_are_equivalent(
    sections: dict[str, Any], recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    outcome = verify(staged(recipe, 2, **sections), group=group, time_limit=200)
    assert_equivalent(outcome)
    assert seen(outcome, "stages") == {"0-1 | 2-3"}
    assert seen(outcome, "schedule") == {"3 forwards, 3 backwards"}
    assert seen(outcome, "bubble") == {"2 of 8"}
    assert seen(outcome, "stage-exchanges") == {
        "3 hidden states sent, 0 hidden states received, 0 gradients sent, 3 gradients received"
    }
    for one in outcome.passes:
        gradient = next(stage for stage in one.stages if stage.name == "gradient")
        assert gradient.detection_limit == pytest.approx(4.8e-7, rel=0.01), "4 roundings of factors, nothing else"


MODELS = {"llama": FOUR, "qwen3": QWEN, "tied": TIED, "dropout": DROPPING}


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("name", "stages", "ranks"), [("ddp", 2, 2), ("ddp", 4, 1), ("fsdp2", 2, 2)], ids=["copies", "four", "shards"]
)
def test_four_processes_are_equivalent(
    name: str, stages: int, ranks: int, model: str, adapter: Any, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    config = {"config": MODELS[model]}
    resolved = staged(recipe, stages, ranks, name, model=config, adapter=adapter, precision="bf16")
    outcome = verify(resolved, group=four, time_limit=300)
    assert_equivalent(outcome)
    collectives = {c.expected for one in outcome.passes for c in one.claims if c.id == "mesh-collectives"}
    asked = {"ddp": {"all-reduce all"}, "fsdp2": {"all-gather all", "reduce-scatter all"}}[name]
    assert collectives == {"all-reduce pipeline"} | (asked if ranks > 1 else set())
    assert seen(outcome, "bubble") == {"2 of 8" if stages == 2 else "6 of 12"}


SHARDED: dict[str, dict[str, Any]] = {
    "bf16-pure": {"precision": "bf16-pure"},
    "checkpointed": {"precision": "bf16", "activation_checkpointing": "full"},
    "gathered-once": {"precision": "bf16", "strategy": {"reshard_after_forward": False}},
    "sync-last": {"strategy": {"sync": "last"}, "model": {"config": TIED}},
    "sync-last-gathered": {"strategy": {"sync": "last", "reshard_after_forward": False}, "precision": "bf16"},
    "masks-fused": {"adapter": LORA, "loss": "fused", "label_smoothing": 0.3},
    "packed-fused": {"data": {"packing": True}, "loss": "fused", "precision": "bf16"},
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("option", SHARDED)
def test_sharded_stages_with_an_option_are_equivalent(
    option: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    sections = dict(SHARDED[option])
    strategy = {"mesh": {"pipeline": 2, "shard": 2}} | sections.pop("strategy", {})
    assert_equivalent(verify(staged(recipe, 2, 2, "fsdp2", strategy=strategy, **sections), group=four, time_limit=300))


@pytest.mark.nightly
def test_copies_of_sharded_stages_are_equivalent(recipe: Callable[..., Resolved]) -> None:
    """Replicate, shard and pipeline, two of each."""
    mesh = {"replicate": 2, "shard": 2, "pipeline": 2}
    model = {"config": TIED}
    resolved = recipe("fsdp2", strategy={"mesh": mesh}, machine={"processes": 8}, model=model, precision="bf16")
    with WorkerGroup(8) as eight:
        outcome = verify(resolved, group=eight, time_limit=300)
    assert_equivalent(outcome)
    collectives = {c.expected for one in outcome.passes for c in one.claims if c.id == "mesh-collectives"}
    assert collectives == {"all-gather shard", "reduce-scatter shard", "all-reduce replicate", "all-reduce pipeline"}


@pytest.mark.nightly
def test_more_than_two_copies_are_equivalent(recipe: Callable[..., Resolved]) -> None:
    """A collective adds up their gradients in an order of its own: the bound has its rounding."""
    with WorkerGroup(6) as six:
        outcome = verify(staged(recipe, 2, 3, model={"config": TIED}), group=six, time_limit=300)
    assert_equivalent(outcome)


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-pure": {"precision": "bf16-pure"},
    "selective": {"activation_checkpointing": "selective", "precision": "bf16"},
    "masks-fused": {"adapter": LORA, "loss": "fused", "label_smoothing": 0.3},
    "packed-fused": {"data": {"packing": True}, "loss": "fused", "precision": "bf16"},
    "terms": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "lion": {"optimizer": {"name": "lion", "lr": 1e-4}},
    "sgd": {"optimizer": {"name": "sgd", "lr": 1e-2}},
    "foreach": {"optimizer": {"kernel": "foreach"}},
    "not-clipped": {"optimizer": {"max_grad_norm": 0.0}},
    "frozen": {"model": {"freeze": ["embed"], "config": FOUR}},
    "head-saved": {"adapter": LORA | {"modules_to_save": ["lm_head"]}, "precision": "bf16"},
    "head-saved-tied": {"adapter": LORA | {"modules_to_save": ["lm_head"]}, "model": {"config": TIED}},
    "biases": {"model": {"config": FOUR | {"model_type": "qwen2"}}, "precision": "bf16"},
    "eager": {"model": {"attention": "eager"}, "precision": "bf16"},
    "one-micro-batch": {"batch": {"accumulation": 1}},
    "groups": {"optimizer": {"groups": [{"match": "mlp", "lr": 1e-3, "weight_decay": 0.3},
                                        {"match": r"layers\.3\.", "lr": 2e-4}]}},
    "ema": {"run": {"ema": {"decay": 0.9, "every": 1, "start": 0}}, "precision": "bf16"},
    "ema-tied": {"run": {"ema": {"decay": 0.9, "every": 2, "start": 1}}, "model": {"config": TIED}},
    "three-blocks": {"model": {"config": FOUR | {"num_hidden_layers": 3}}},
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_in_two_stages_is_equivalent(
    option: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    assert_equivalent(verify(staged(recipe, 2, **OPTIONS[option]), group=group, time_limit=200))


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, {"r": 4, "target_modules": "all-linear"}], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_two_stages_is_equivalent(
    family: str, adapter: Any, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """The families that are named as verified."""
    model = EVERY_FAMILY.get(family) or {"config": FOUR | {"model_type": family}}
    resolved = staged(recipe, 2, model={"config": dict(model["config"])}, precision="bf16", adapter=adapter)
    assert_equivalent(verify(resolved, group=group, time_limit=200))


OF_STAGES = [name for name, kind in faults().items() if kind.__module__ == FAULTS]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault in OF_STAGES for name in fault_class(fault).strategies.names()]
)
def test_what_is_wrong_with_stages_is_found(
    fault: str, name: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    resolved = recipe(name, model={"config": FOUR})
    assert_found(resolved, fault, four)


# ------------------------------------------------------------------ runs


def run_of(root: Path, name: str, **sections: Any) -> dict[str, Any]:
    values = recipe_dict(
        root,
        model={"config": TIED},
        strategy={"name": name, "mesh": {"pipeline": 2}},
        machine={"processes": 2},
        batch={"micro_size": 4, "accumulation": 3},
        data={"packing": True, "max_length": 48},
        run={"max_steps": 20},
    )
    for key, value in sections.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    return values


@pytest.mark.usefixtures("launches")
def test_twenty_steps_are_the_plain_loops(tiny_root: Path, group: WorkerGroup) -> None:
    """Weights within 1e-5 of one process that computes the whole model, with the same samples in the same steps. Rows
    are not packed: each micro-batch has its own length."""
    sections: dict[str, Any] = {"data": {"packing": False}}
    run = group.run(train_job, resolved_from(run_of(tiny_root, "ddp", **sections)), 20)[0]
    alone = run_of(tiny_root, "single", machine={"processes": 1}, strategy={"mesh": None}, **sections)
    plain = plain_run(resolved_from(alone), 20)
    assert run.tokens == plain.tokens
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert_weights(run, plain)


@pytest.mark.nightly
def test_twenty_steps_of_four_processes_are_the_plain_loops(tiny_root: Path, four: WorkerGroup) -> None:
    meshes: list[tuple[str, dict[str, int], int]] = [
        ("ddp", {"pipeline": 2, "replicate": 2}, 2), ("ddp", {"pipeline": 4}, 4),
        ("fsdp2", {"pipeline": 2, "shard": 2}, 2),
    ]  # fmt: skip
    for name, mesh, micro in meshes:
        staged_run = run_of(tiny_root, name, strategy={"mesh": mesh}, machine={"processes": 4},
                            batch={"micro_size": micro})  # fmt: skip
        alone = run_of(tiny_root, "ddp", machine={"processes": 4 // mesh["pipeline"]}, strategy={"mesh": None},
                       batch={"micro_size": micro})  # fmt: skip
        run = four.run(train_job, resolved_from(staged_run), 20)[0]
        plain = plain_run(resolved_from(alone), 20)
        assert_weights(run, plain, about=mesh)


@pytest.mark.usefixtures("launches")
def test_a_run_goes_on_with_stages_and_without(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    """A checkpoint has whole weights by name, whichever stage wrote them. Both run the same samples in a step."""
    stages = run_of(tiny_root, "ddp")
    whole = run_of(tiny_root, "zero3", strategy={"mesh": None}, batch={"micro_size": 2})
    for first, then in ((stages, whole), (whole, stages)):
        folder = tmp_path / first["strategy"]["name"]
        assert_goes_on(group, first, then, folder)


@pytest.mark.nightly
def test_a_run_goes_on_under_every_strategy(tiny_root: Path, tmp_path: Path, four: WorkerGroup) -> None:
    """From two stages with copies, or sharded, to four stages, and to the others, with an adapter too."""
    for first, adapter in (("ddp", None), ("ddp", LORA | {"dropout": 0.0}), ("fsdp2", None)):
        strategy = {"mesh": {"pipeline": 2, BESIDE[first]: 2}}
        two = run_of(tiny_root, first, strategy=strategy, machine={"processes": 4}, batch={"micro_size": 4},
                     adapter=adapter)  # fmt: skip
        folder = tmp_path / f"{first}-{'full' if adapter is None else 'lora'}"
        straight = four.run(train_job, resolved_from(two), 4, None, None, 4)[0]
        four.run(train_job, resolved_from(two), 2, str(folder), None, 4)
        others: list[tuple[str, dict[str, int] | None, int]] = [
            ("ddp", {"pipeline": 4}, 8), ("fsdp2", {"pipeline": 2, "shard": 2}, 4), ("ddp", None, 2),
            ("fsdp2", None, 2), ("fsdp1", None, 2), ("zero1", None, 2), ("ddp", {"tensor": 2, "replicate": 2}, 4),
            ("fsdp2", {"replicate": 2, "shard": 2}, 2),
        ]  # fmt: skip
        for name, mesh, micro in others:
            then = run_of(tiny_root, name, strategy={"mesh": mesh}, machine={"processes": 4},
                          batch={"micro_size": micro}, adapter=adapter)  # fmt: skip
            after = four.run(train_job, resolved_from(then), 2, None, str(next(folder.iterdir())), 4)[0]
            assert after.losses == pytest.approx(straight.losses[2:], rel=1e-5), (name, mesh)
            assert_weights(after, straight, 1e-6, (name, mesh))


@pytest.mark.usefixtures("launches")
def test_held_out_losses_are_those_of_the_whole_model(tiny_root: Path, group: WorkerGroup) -> None:
    """More batches than a first stage may be ahead; each counts once."""
    stages = resolved_from(run_of(tiny_root, "ddp", batch={"micro_size": 2}))
    alone = resolved_from(run_of(tiny_root, "ddp", strategy={"mesh": None}, batch={"micro_size": 2}))
    windows = iter(loader_for(stages, 0))
    batches = [micro for _ in range(4) for micro in next(windows)]
    assert len(batches) > 8
    seen = group.run(eval_job, stages, [batches, batches])
    right = group.run(eval_job, alone, [batches[::2], batches[1::2]])
    assert seen[0] == seen[1]
    assert seen[0] == pytest.approx(right[0], rel=1e-6)


@pytest.mark.usefixtures("launches")
def test_each_stage_reads_its_own_blocks(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    """From safetensors files, and no weight of another stage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FOUR))
    made.save_pretrained(tmp_path / "model")
    resolved = resolved_from(run_of(tiny_root, "ddp", model={"path": str(tmp_path / "model"), "config": None}))
    read = group.run(read_job, resolved)
    sizes = {name: p.numel() for name, p in made.named_parameters()}
    for stage, (elements, why_whole) in enumerate(read):
        inner = "embed" if stage == 0 else "norm.weight|lm_head"
        own = [size for name, size in sizes.items()
               if any(f".layers.{at}." in name for at in (2 * stage, 2 * stage + 1))
               or (".layers." not in name and any(part in name for part in inner.split("|")))]  # fmt: skip
        assert why_whole is None
        assert elements == sum(own) < 0.6 * sum(sizes.values())


def read_job(resolved: Resolved) -> tuple[int, str | None]:
    """Elements that this rank read while a session opened, and why it loaded the whole model, if it did."""
    from toolkit.model import sources
    from toolkit.training.session import open_session

    read: list[int] = []
    right = sources.Cast.fill

    def fill(self: Any, into: torch.Tensor, start: int) -> None:
        read.append(into.numel())
        right(self, into, start)

    sources.Cast.fill = fill  # type: ignore[method-assign]
    try:
        session = open_session(resolved)
    finally:
        sources.Cast.fill = right  # type: ignore[method-assign]
    return sum(read), session.loaded_whole


# ------------------------------------------------------------------ the schedule


@pytest.mark.parametrize(("stages", "micros"), [(2, 1), (2, 3), (4, 2), (4, 4), (4, 9), (3, 7)])
def test_a_schedule_keeps_few_micro_batches_and_waits_as_little_as_can_be(stages: int, micros: int) -> None:
    """Backwards come in order; a stage holds the activations of as many micro-batches as stages follow, and one more;
    the idle slots are those of a pipeline that fills and empties once."""
    actions = [one_forward_one_backward(stage, stages, micros) for stage in range(stages)]
    for stage, own in enumerate(actions):
        for what in ("forward", "backward"):
            assert [micro for kind, micro in own if kind == what] == list(range(micros))
        held = most = 0
        for what, _ in own:
            held += 1 if what == "forward" else -1
            most = max(most, held)
        assert most == min(micros, stages - stage)
    assert idle_slots(actions) == 2 * (stages - 1)


def test_stages_that_wait_for_each_other_are_seen() -> None:
    first, last = (one_forward_one_backward(stage, 2, 2) for stage in range(2))
    assert idle_slots([first[::-1], last]) is None


def test_blocks_are_divided_evenly_and_the_last_stage_has_no_more() -> None:
    assert stage_blocks(4, 2) == [range(2), range(2, 4)]
    assert stage_blocks(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert stage_blocks(3, 3) == [range(1), range(1, 2), range(2, 3)]
