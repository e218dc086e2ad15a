"""Layers divided over ranks (`strategy.mesh.tensor`): proven equal, and found where they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from families import EVERY_FAMILY
from jobs import assert_goes_on, assert_weights, plain_run, resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.model.sources import Made
from toolkit.model.tensor import Division, PartOf, Ranks, split_layers
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.splittable import FAMILIES
from toolkit.strategies.engines.pieces import Shape, span, within
from toolkit.verification.faults import faults
from toolkit.verification.faults.layers import __name__ as FAULTS
from toolkit.verification.run import verify
from verdicts import assert_equivalent, assert_found

LORA = {"r": 4, "dropout": 0.1}
PLAIN = LLAMA | {"attention_dropout": 0.0}
QWEN = PLAIN | {"model_type": "qwen3", "head_dim": 8}
SMALL = {key: value for key, value in PLAIN.items() if key != "model_type"}
BESIDE = {"ddp": "replicate", "fsdp2": "shard", "zero1": "shard", "zero2": "shard"}


def in_two(recipe: Callable[..., Resolved], **sections: Any) -> Resolved:
    """Two processes that have half of every layer each."""
    model = {"config": PLAIN} | sections.pop("model", {})
    return recipe("ddp", strategy={"mesh": {"tensor": 2}}, model=model, **sections)


def two_by_two(recipe: Callable[..., Resolved], strategy: str, **sections: Any) -> Resolved:
    mesh = {"tensor": 2, BESIDE[strategy]: 2}
    model = {"config": PLAIN} | sections.pop("model", {})
    return recipe(strategy, strategy={"mesh": mesh}, machine={"processes": 4}, model=model, **sections)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    "sections",
    [
        {"precision": "bf16", "adapter": LORA, "activation_checkpointing": "full"},
        {"model": {"config": QWEN}, "data": {"packing": True}, "loss": "fused"},
    ],
    ids=["lora-bf16", "head-norms-packed"],
)
def test_half_of_every_layer_is_equivalent(
    sections: dict[str, Any], recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """With dropout of hidden states and of inner units, and half as many key heads as query heads."""
    outcome = verify(in_two(recipe, **sections), group=group, time_limit=200)
    assert_equivalent(outcome)
    for one in outcome.passes:
        seen = {c.expected: c.ok for c in one.claims if c.id == "mesh-collectives"}
        assert seen == {"all-reduce tensor": True}
        assert {c.id for c in one.claims if c.ok} >= {"layers-divided", "layers-alike"}
        gradient = next(stage for stage in one.stages if stage.name == "gradient")
        assert gradient.detection_limit == pytest.approx(4.8e-7, rel=0.01)
    logic = outcome.passes[0]
    assert logic.replayed is not None
    assert max(one.gradient for one in logic.replayed.from_natural) < 1e-5, "held against whole layers"


@pytest.mark.usefixtures("launches")
def test_weights_of_an_activation_are_trained_by_all_parts(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    """Apertus' xIELU has two, which no plan names: each rank applies them to its own inner units alone."""
    outcome = verify(in_two(recipe, model={"config": PLAIN | {"model_type": "apertus"}}), group=group, time_limit=200)
    assert_equivalent(outcome)
    logic = outcome.passes[0]
    assert any("alpha_p" in measure.name for stage in logic.stages for measure in stage.measures)


def test_other_weights_between_divided_layers_are_refused() -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))
    model.model.layers[1].mlp.scale = torch.nn.RMSNorm(16)
    with pytest.raises(InputError, match=r"recipe: strategy\.mesh\.tensor: model\.layers\.1\.mlp\.scale has weights"):
        split_layers(model, Ranks(2, 0, lambda tensor: None), "recipe")


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("model", [PLAIN, QWEN], ids=["llama", "qwen3"])
@pytest.mark.parametrize("strategy", BESIDE)
def test_two_by_two_is_equivalent(
    strategy: str, model: dict[str, Any], adapter: Any, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    resolved = two_by_two(recipe, strategy, model={"config": model}, adapter=adapter, precision="bf16")
    outcome = verify(resolved, group=four, time_limit=300)
    assert_equivalent(outcome)
    shared = {"all-gather shard", "reduce-scatter shard", "all-reduce replicate"}
    seen = {c.expected for one in outcome.passes for c in one.claims if c.id == "mesh-collectives"}
    assert "all-reduce tensor" in seen
    assert not seen - {"all-reduce tensor"} - shared


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_a_quarter_of_every_layer_is_equivalent(
    adapter: Any, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    resolved = recipe(
        "ddp", strategy={"mesh": {"tensor": 4}}, machine={"processes": 4}, adapter=adapter, precision="bf16",
        model={"config": PLAIN | {"num_key_value_heads": 4}},
    )  # fmt: skip
    outcome = verify(resolved, group=four, time_limit=300)
    assert_equivalent(outcome)


@pytest.mark.nightly
def test_copies_of_sharded_parts_are_equivalent(recipe: Callable[..., Resolved]) -> None:
    """Replicate, shard and tensor, two of each."""
    mesh = {"replicate": 2, "shard": 2, "tensor": 2}
    model = {"config": PLAIN}
    resolved = recipe("fsdp2", strategy={"mesh": mesh}, machine={"processes": 8}, model=model, precision="bf16")
    with WorkerGroup(8) as eight:
        outcome = verify(resolved, group=eight, time_limit=300)
    assert_equivalent(outcome)
    seen = {c.expected for one in outcome.passes for c in one.claims if c.id == "mesh-collectives"}
    assert seen == {"all-gather shard", "reduce-scatter shard", "all-reduce replicate", "all-reduce tensor"}


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-pure": {"precision": "bf16-pure"},
    "selective": {"activation_checkpointing": "selective", "precision": "bf16"},
    "terms": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "lion": {"optimizer": {"name": "lion", "lr": 1e-4}},
    "sgd": {"optimizer": {"name": "sgd", "lr": 1e-2}},
    "foreach": {"optimizer": {"kernel": "foreach"}},
    "groups": {"optimizer": {"groups": [{"match": "mlp", "lr": 3e-3}]}},
    "frozen": {"model": {"freeze": ["embed"], "config": PLAIN}},
    "head-saved": {"adapter": LORA | {"modules_to_save": ["lm_head"]}, "precision": "bf16"},
    "tied": {"model": {"config": PLAIN | {"tie_word_embeddings": True}}, "precision": "bf16"},
    "biases": {"model": {"config": PLAIN | {"model_type": "qwen2"}}, "precision": "bf16"},
    "classification": {"model": {"task": "sequence-classification", "num_labels": 3,
                                 "config": PLAIN | {"pad_token_id": 0}}},
    "eager": {"model": {"attention": "eager"}, "precision": "bf16"},
    "sync-every": {"strategy": {"sync": "every"}},
    "sync-every-packed": {"strategy": {"sync": "every"}, "data": {"packing": True, "max_length": 48},
                          "batch": {"micro_size": 1, "accumulation": 3}},
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    "option", ["bf16-pure", "selective", "lion", "groups", "frozen", "head-saved", "tied", "biases", "classification"]
)
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_an_option_under_zero_is_equivalent(
    name: str, option: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    assert_equivalent(verify(two_by_two(recipe, name, **OPTIONS[option]), group=four, time_limit=300))


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_in_two_is_equivalent(option: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    sections = dict(OPTIONS[option])
    strategy = {"mesh": {"tensor": 2}} | sections.pop("strategy", {})
    model = {"config": PLAIN} | sections.pop("model", {})
    resolved = recipe("ddp", strategy=strategy, model=model, **sections)
    assert_equivalent(verify(resolved, group=group, time_limit=200))


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, {"r": 4, "target_modules": "all-linear"}], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_two_is_equivalent(
    family: str, adapter: Any, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """The families that are named as verified."""
    model = EVERY_FAMILY.get(family) or {"config": PLAIN | {"model_type": family}}
    config = dict(model["config"]) | {"attention_dropout": 0.0}
    model = {"config": config}
    resolved = recipe("ddp", strategy={"mesh": {"tensor": 2}}, model=model, precision="bf16", adapter=adapter)
    assert_equivalent(verify(resolved, group=group, time_limit=200))


OF_LAYERS = [name for name, kind in faults().items() if kind.__module__ == FAULTS]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", BESIDE)
@pytest.mark.parametrize("fault", OF_LAYERS)
def test_what_is_wrong_with_layers_is_found(
    fault: str, strategy: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    resolved = recipe(strategy, model={"config": PLAIN})
    assert_found(resolved, fault, four)


def divided(root: Path, name: str, **sections: Any) -> dict[str, Any]:
    values = recipe_dict(
        root,
        model={"config": PLAIN},
        strategy={"name": name, "mesh": {"tensor": 2}},
        machine={"processes": 2},
        batch={"micro_size": 4, "accumulation": 2},
        data={"packing": True, "max_length": 48},
        run={"max_steps": 20},
    )
    for key, value in sections.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    return values


@pytest.mark.usefixtures("launches")
def test_twenty_steps_are_the_plain_loops(tiny_root: Path, group: WorkerGroup) -> None:
    """Weights within 1e-5 of one process that computes whole layers, with the same samples in the same steps."""
    run = group.run(train_job, resolved_from(divided(tiny_root, "ddp")), 20)[0]
    alone = divided(tiny_root, "single", machine={"processes": 1}, strategy={"mesh": None})
    plain = plain_run(resolved_from(alone), 20)
    assert run.tokens == plain.tokens
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_weights(run, plain)


@pytest.mark.usefixtures("launches")
def test_a_run_goes_on_with_whole_layers_and_with_divided_ones(
    tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    """A checkpoint has whole weights, whoever wrote their parts."""
    parts = divided(tiny_root, "ddp")
    whole = divided(tiny_root, "zero3", strategy={"mesh": None}, batch={"micro_size": 2})
    for first, then in ((parts, whole), (whole, parts)):
        folder = tmp_path / first["strategy"]["name"]
        assert_goes_on(group, first, then, folder)


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA | {"dropout": 0.0}], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_parts_under_zero_are_those_of_one_process_and_resumed(
    name: str, adapter: Any, tiny_root: Path, tmp_path: Path, four: WorkerGroup
) -> None:
    """Weights of 20 steps; afterwards an engine of the same processes has all of them for its group again."""
    square = {"mesh": {"tensor": 2, "shard": 2}}
    on_four: dict[str, Any] = {"machine": {"processes": 4}, "adapter": adapter}
    parts = divided(tiny_root, name, strategy=square, batch={"micro_size": 2}, **on_four)
    whole = divided(tiny_root, "zero2", strategy={"mesh": None}, batch={"micro_size": 1}, **on_four)
    alone = divided(tiny_root, "single", strategy={"mesh": None}, machine={"processes": 1}, adapter=adapter)
    run = four.run(train_job, resolved_from(parts), 20)[0]
    plain = plain_run(resolved_from(alone), 20)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert_weights(run, plain)
    for first, then in ((parts, whole), (whole, parts), (parts, parts)):
        assert_goes_on(four, first, then, tmp_path / f"{first is parts}-{then is parts}")


@pytest.mark.nightly
def test_parts_are_sharded_resumed_and_read_from_files(tiny_root: Path, tmp_path: Path, four: WorkerGroup) -> None:
    """Under fsdp2, loaded by part from safetensors: columns of a matrix, and rows of those."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**PLAIN)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model = {"path": str(tmp_path / "model"), "config": None}
    square = {"mesh": {"tensor": 2, "shard": 2}}
    parts = divided(tiny_root, "fsdp2", model=model, strategy=square, machine={"processes": 4}, batch={"micro_size": 2})
    whole = divided(tiny_root, "ddp", model=model, strategy={"mesh": None}, machine={"processes": 4},
                    batch={"micro_size": 1})  # fmt: skip
    straight = four.run(train_job, resolved_from(whole), 4, None, None, 4)[0]
    for first, then in ((parts, whole), (whole, parts), (parts, parts)):
        folder = tmp_path / f"{first['strategy']['name']}-{then['strategy']['name']}"
        assert_goes_on(four, first, then, folder, straight)


@pytest.mark.parametrize(
    ("shape", "dim", "start", "stop", "runs"),
    [
        ((6, 4), 1, 0, 24, 1),
        ((6, 4), 1, 3, 21, 1),
        ((6, 4), 1, 5, 7, 1),
        ((3, 8), 0, 2, 23, 1),
        ((8,), 0, 1, 7, 1),
        ((6, 4), 1, 8, 8, 1),
        ((6, 4), 1, 0, 24, 2),
        ((6, 4), 1, 8, 16, 4),
        ((6, 6), 1, 1, 34, 2),
        ((6, 6), 1, 8, 10, 3),
        ((6, 4), 1, 5, 7, 2),
    ],
)
def test_a_piece_of_a_part_is_found_in_the_whole(shape: Shape, dim: int, start: int, stop: int, runs: int) -> None:
    """Each element once, in its place, whichever part it is."""
    count = 3
    whole = torch.arange(count * torch.Size(shape).numel())
    whole = whole.view(*(size * count if at == dim else size for at, size in enumerate(shape)))
    for index in range(count):
        part = Division(dim, index, count, runs).part(whole).reshape(-1)
        seen = torch.full((stop - start,), -1)
        for piece, places in within(span(start, stop), shape, dim, index, count, runs):
            assert (seen[places] == -1).all()
            if piece.flat:
                values = whole.reshape(-1)[piece.start[0] : piece.start[0] + piece.numel]
            else:
                values = whole[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))]
            seen[places] = values.reshape(-1)
        assert torch.equal(seen, part[start:stop])


@pytest.mark.parametrize(("dim", "runs"), [(0, 1), (1, 1), (1, 2), (1, 4), (0, 2)])
def test_a_part_is_read_as_it_is_cut(dim: int, runs: int) -> None:
    whole = torch.randn(7 if dim else 8, 8)
    division = Division(dim, 1, 2, runs)
    assert torch.equal(division.join([division.part(whole, index) for index in range(2)]), whole)
    made = Made(lambda: whole)
    cast = _Read(whole)
    right = division.part(whole).reshape(-1)
    for source in (made, cast):
        part = PartOf(source, tuple(whole.shape), division)
        assert torch.equal(part.whole().reshape(-1), right)
        for start, stop in ((0, right.numel()), (3, 17), (4, 8), (27, 28)):
            into = torch.empty(stop - start)
            part.fill(into, start)
            assert torch.equal(into, right[start:stop]), (source, start, stop)


class _Read:
    """A source that is read by ranges."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def fill(self, into: torch.Tensor, start: int) -> None:
        into.copy_(self.values.reshape(-1)[start : start + into.numel()])

    def whole(self) -> torch.Tensor:
        return self.values
