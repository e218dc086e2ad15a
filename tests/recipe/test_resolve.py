"""Derived values, and what is refused before anything starts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from families import FAMILIES
from jobs import resolved_from
from media import SEEING
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.recipe.model_blocks import block_classes
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategies
from toolkit.strategies.base import Strategy
from toolkit.tasks import task_of


@every_case(
    ("batch", "expected"),
    [
        ({}, (1, 1, 2)),
        ({"micro_size": 3}, (3, 1, 6)),
        ({"micro_size": 3, "accumulation": 2}, (3, 2, 12)),
        ({"global_size": 24, "micro_size": 3}, (3, 4, 24)),
        ({"global_size": 24, "accumulation": 3}, (4, 3, 24)),
        ({"global_size": 24}, (1, 12, 24)),
        ({"global_size": 24, "micro_size": 3, "accumulation": 4}, (3, 4, 24)),
    ],
)
def test_two_of_three_make_the_batch(batch: dict[str, int], expected: tuple[int, int, int], tiny_root: Path) -> None:
    recipe = recipe_dict(tiny_root)
    recipe["batch"] = batch
    resolved = resolved_from(recipe)
    assert (resolved.micro_size, resolved.accumulation, resolved.global_size) == expected


@every_case(
    ("sections", "expected"),
    [
        ({"batch": {"global_size": 5, "accumulation": None}}, "not a multiple of 2 x 2 processes"),
        ({"batch": {"global_size": 9}}, "2 x 2 x 2 = 8; remove one of the three keys"),
        ({"strategy": {"name": "single"}}, "single runs in one process"),
        ({"strategy": {"name": "ddp", "offload": "optimizer"}}, "ddp cannot offload 'optimizer'"),
        ({"strategy": {"name": "zero2", "offload": "all"}}, "zero2 cannot offload 'all'"),
        ({"strategy": {"name": "fsdp2", "offload": "optimizer"}}, "fsdp2 cannot offload"),
        ({"strategy": {"name": "zero1"}, "precision": "fp16"}, "DeepSpeed runs fp16 on a GPU only"),
        ({"data": {"packing": True}, "model": {"config": {"model_type": "mamba"}}},
         "a recurrence or convolution mixes neighbouring samples"),
        ({"data": {"packing": True}, "model": {"config": {"model_type": "opt"}}}, "does not use the positions"),
        ({"data": {"packing": True}, "model": {"attention": "paged|sdpa"}}, "not known to separate packed samples"),
        ({"data": {"packing": True}, "model": {"task": "sequence-classification"}}, "requires model.task: causal-lm"),
        ({"data": {"packing": True, "group_by_length": True}}, "set packing or group_by_length to false"),
        ({"data": {"group_by_length": True, "streaming": True}}, "lengths of streamed samples are not known"),
        ({"data": {"streaming": True}, "run": {"max_steps": None, "epochs": 1}}, "the length of a stream is not known"),
        ({"run": {"max_steps": None}}, "set max_steps or epochs"),
        ({"run": {"eval_every": 5}}, "run.eval_every: no data is held out; set data.eval or data.eval_fraction, or"),
        ({"run": {"eval_at_start": True}}, "run.eval_at_start: needs evaluations, but no data is held out"),
        ({"data": {"mask_probability": 0.3}},
         "data.mask_probability: requires model.task: masked-lm; here it is causal-lm"),
        ({"data": {"format": "tokens"}},
         "data.format: causal-lm requires text, prompt-completion or messages; here it is tokens\n"),
        ({"model": {"task": "seq2seq-lm"}},
         "data.format: seq2seq-lm requires prompt-completion (the prompt goes to the encoder); here it is text\n"),
        ({"model": {"config": None, "path": "./not/there"}}, "no folder ./not/there"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(sections: dict[str, Any], expected: str, tiny_root: Path) -> None:
    with pytest.raises(InputError) as caught:
        resolved_from(recipe_dict(tiny_root, **sections))
    assert expected in str(caught.value) + "\n"


def test_every_decision_has_a_reason(tiny_root: Path) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": "zero3"}))
    assert {"world_size", "batch.global_size", "strategy.wrap", "zero.reduce_bucket_size"} <= {
        decision.key for decision in resolved.decisions
    }
    assert all(decision.reason for decision in resolved.decisions)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_what_a_zero_stage_reads_is_decided_and_written(stage: int, tiny_root: Path) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": f"zero{stage}"}))
    gathers = {"zero.stage3_prefetch_bucket_size", "zero.stage3_param_persistence_threshold"}
    buckets = {"zero.allgather_bucket_size"}
    decided = {decision.key for decision in resolved.decisions}
    assert (gathers | buckets) & decided == (gathers if stage == 3 else buckets)
    config = strategies()[f"zero{stage}"].deepspeed_config(resolved)
    assert config is not None
    written = {f"zero.{key}" for key in config["zero_optimization"]}
    assert (gathers | buckets) & written == (gathers | buckets) & decided


@every_case("family", FAMILIES)
def test_block_classes_are_the_models_own(family: str) -> None:
    import transformers
    from transformers import AutoConfig

    facts = ModelFacts(FAMILIES[family]["config"], None)
    auto_class = task_of(FAMILIES[family].get("task", "causal-lm")).auto_class
    model = getattr(transformers, auto_class).from_config(AutoConfig.for_model(**facts.config))  # type: ignore[arg-type]
    lists = [m for m in model.modules() if isinstance(m, __import__("torch").nn.ModuleList)]
    repeated = {type(block).__name__ for blocks in lists for block in blocks}
    names = block_classes(facts, auto_class)
    assert names
    assert set(names) <= repeated
    assert set(names) <= set(model._no_split_modules)


@every_case("family", SEEING)
def test_a_model_that_sees_has_blocks_of_its_eye_and_of_its_text(family: str) -> None:
    """Gemma 3, SmolVLM and InternVL are made of another model's text, or eye: checkpointing and FSDP's units stood at
    one of the two alone, so that the other half of the model was one unit that kept all it computed."""
    import torch
    import transformers

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**SEEING[family])
        model = transformers.AutoModelForImageTextToText.from_config(config)
    names = block_classes(ModelFacts(SEEING[family], None), "AutoModelForImageTextToText")
    found = {name.rpartition(".")[0] for name, module in model.named_modules() if type(module).__name__ in names}
    lists = [found_in for found_in in found if "language_model" in found_in or "text_model" in found_in]
    assert len(lists) == 1
    assert len(found) == 2, found
    modules = {type(module).__name__ for module in model.modules()}
    assert set(names) <= modules


def test_an_unknown_model_is_refused_where_its_blocks_matter(tiny_root: Path) -> None:
    recipe = recipe_dict(tiny_root, model={"config": None, "path": "nobody/nothing"}, strategy={"name": "fsdp2"})
    with pytest.raises(InputError, match=r"strategy\.wrap: fsdp2 needs the class"):
        resolved_from(recipe)
    assert resolved_from(recipe | {"strategy": {"name": "zero3"}}).blocks == ()
    named = recipe | {"strategy": {"name": "fsdp2", "wrap": ["LlamaDecoderLayer"]}}
    assert resolved_from(named).blocks == ("LlamaDecoderLayer",)


def test_without_a_network_the_answer_comes_at_once(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("toolkit.recipe.hub.getproxies", dict)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)  # huggingface_hub alone tries again and again for half a minute
    resolved = resolved_from(recipe_dict(tiny_root, model={"config": None, "path": "nobody/nothing"}))
    assert "cannot be reached" in (resolved.facts.why_unknown or "")
    assert waits == []


def test_a_strategy_is_found_by_its_file() -> None:
    assert set(strategies()) == {"single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"}
    assert all(isinstance(strategy, Strategy) and strategy.title for strategy in strategies().values())


def test_files_for_gpus_are_resolved_without_one(tiny_root: Path) -> None:
    recipe = recipe_dict(tiny_root, strategy={"name": "zero3", "offload": "all"}, machine={"device": "cuda"})
    assert resolve(Recipe.model_validate(recipe)).device == "cuda"


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        ({"model_type": "llama"}, None, "sdpa"),
        ({"model_type": "gemma2"}, None, "eager"),
        ({"model_type": "convnext"}, None, "eager"),
        ({"model_type": "gemma2"}, "sdpa", "sdpa"),  # refused where the model is loaded, with the recipe's key
    ],
)
def test_the_attention_is_what_the_model_supports(
    config: dict[str, Any], asked: str | None, expected: str, tiny_root: Path
) -> None:
    values = recipe_dict(tiny_root)
    values["model"] = {"config": config, "attention": asked}
    resolved = resolve(Recipe.model_validate(values), "recipe", device="cpu")
    assert resolved.recipe.model.attention == expected
    messages = [decision.reason for decision in resolved.decisions if decision.key == "model.attention"]
    assert messages == (
        [f"{config['model_type']} has no sdpa in the installed transformers"] if expected == "eager" else []
    )
