"""Loading by part: every process reads the part of the weights that it keeps, and has the weights of ``load_base``."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from families import EVERY_FAMILY, FAMILIES, HYBRIDS
from jobs import resolved_from, train_job
from media import SEEING
from nights import nightly_but
from tiny import recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.model.by_part import materialise
from toolkit.model.load import load_base
from toolkit.model.sources import sources
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.fsdp1 import _clean
from toolkit.training.preparation import prepare_model

SHARDING = ["zero3", "fsdp1", "fsdp2"]
QUICK: dict[str, dict[str, Any]] = {
    "llama": FAMILIES["llama"],
    "tied": {"config": FAMILIES["llama"]["config"] | {"tie_word_embeddings": True}},
    "mixtral": FAMILIES["mixtral"],
}
SLOW: dict[str, dict[str, Any]] = {
    **{name: EVERY_FAMILY[name] for name in ("qwen2", "gemma3_text", "phi3", "qwen3_moe")},
    "gpt2": FAMILIES["gpt2"],
    "t5": FAMILIES["t5"],
    "bert": FAMILIES["bert"],
    "mamba2": HYBRIDS["mamba2"],
    **{
        name: {"config": SEEING[name], "task": "image-text-to-text", "data": {"format": "messages"}}
        for name in ("qwen2_5_vl", "llava")
    },
}


ALL: dict[str, dict[str, Any]] = {
    **FAMILIES, **EVERY_FAMILY, **HYBRIDS,
    **{name: {"config": c, "task": "image-text-to-text", "data": {"format": "messages"}} for name, c in SEEING.items()},
}  # fmt: skip


def recipe(root: Path, model: dict[str, Any], folder: Path | None, **sections: Any) -> dict[str, Any]:
    model = dict(model)
    usual = "prompt-completion" if model.get("task") == "seq2seq-lm" else "text"
    data = model.pop("data", {"format": usual})
    path = {} if folder is None else {"path": str(folder), "config": None}
    return recipe_dict(root, model=model | path, data=data, **{"adapter": None} | sections)


def saved(root: Path, model: dict[str, Any], folder: Path) -> Path:
    """The model with random weights, in several files with an index."""
    made: Any = load_base(resolved_from(recipe(root, model, None)), 0)
    made.save_pretrained(folder, max_shard_size="40KB")
    return folder


def loaded_job(resolved: Resolved) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, str | None]:
    """After loading by a strategy: whole masters, what a forward computes with (buffers too), how many parameters had
    no memory before it, and why the whole model was loaded."""
    from toolkit.strategies import strategy_of
    from toolkit.strategies.engines.connect import make_accelerator

    accelerator = make_accelerator(resolved)
    prepared = prepare_model(resolved, 0, together=True)
    waiting = len(sources(prepared.model))
    engine = strategy_of(resolved).engine_class()(prepared, accelerator)
    weights = {name: engine.full_weight(name) for name in engine.shapes}
    with engine.gathered() as model:
        buffers = {_clean(name): buffer.detach().clone() for name, buffer in model.named_buffers()}
        copies = {_clean(name): full(parameter) for name, parameter in model.named_parameters()}
    return weights, buffers | copies, waiting, prepared.loaded_whole


def full(parameter: Any) -> torch.Tensor:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


def check(
    strategy: str,
    model: dict[str, Any],
    folder: Path | None,
    root: Path,
    group: WorkerGroup,
    drawn: int = 0,
    **sections: Any,
) -> None:
    """``drawn``: parameters that no file has."""
    resolved = resolved_from(recipe(root, model, folder, strategy={"name": strategy}, **sections))
    expected: Any = prepare_model(resolved, 0).model
    for weights, computed, waiting, reason in group.run(loaded_job, resolved, timeout=400):
        assert waiting == len(list(expected.parameters())) - drawn, reason
        assert list(weights) == [name for name, p in expected.named_parameters() if p.requires_grad]
        for name, weight in weights.items():
            assert torch.equal(weight, expected.get_parameter(name)), name
        for name, tensor in [*expected.named_buffers(), *expected.named_parameters()]:
            assert torch.equal(computed[name], tensor.to(computed[name].dtype)), name


@pytest.mark.parametrize(
    ("name", "strategy"),
    nightly_but(product(QUICK, SHARDING), ("tied", "zero3"), ("mixtral", "fsdp1"), ("llama", "fsdp2")),
)
def test_each_process_reads_its_part(
    name: str, strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    folder = saved(tiny_root, QUICK[name], tmp_path / "base")
    assert len(list(folder.glob("*.safetensors"))) > 1
    check(strategy, QUICK[name], folder, tiny_root, group)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", SHARDING)
@pytest.mark.parametrize("name", list(SLOW))
def test_of_more_families(name: str, strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    check(strategy, SLOW[name], saved(tiny_root, SLOW[name], tmp_path / "base"), tiny_root, group)


@pytest.mark.parametrize("strategy", SHARDING)
def test_random_weights_are_drawn_by_part(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    check(strategy, QUICK["mixtral"], None, tiny_root, group, precision="bf16")


@pytest.mark.nightly
@pytest.mark.parametrize("from_folder", [False, True])
@pytest.mark.parametrize("name", list(ALL))
def test_every_family_has_the_same_weights(name: str, from_folder: bool, tiny_root: Path, tmp_path: Path) -> None:
    folder = saved(tiny_root, ALL[name], tmp_path / "base") if from_folder else None
    resolved = resolved_from(recipe(tiny_root, ALL[name], folder, strategy={"name": "fsdp2"}))
    found: Any = load_base(resolved, 0, by_part=True)
    assert sources(found)
    materialise(found)
    expected: Any = load_base(resolved, 0)
    for kind in ("named_parameters", "named_buffers"):
        tensors, values = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (found, expected))
        assert list(tensors) == list(values)
        for key, value in values.items():
            assert tensors[key].dtype == value.dtype
            assert torch.equal(tensors[key], value), key


LORA = {"method": "lora", "r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize("strategy", nightly_but(SHARDING, "zero3", "fsdp2"))
@pytest.mark.parametrize("adapter", [None, LORA])
def test_masters_and_frozen_weights_in_16_bits(
    adapter: dict[str, Any] | None, strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    """Masters are those of the file to the bit, not rounded to what a forward computes in; an adapter is drawn as on a
    base with values, and a module that is saved with it begins as the base's."""
    folder = saved(tiny_root, QUICK["llama"], tmp_path / "base")
    drawn = 0 if adapter is None else 8
    check(strategy, QUICK["llama"], folder, tiny_root, group, drawn, precision="bf16", adapter=adapter)


def counted_job(resolved: Resolved) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that this process reads of the files, and whole masters."""
    from toolkit.model.stored import Stored

    read, total = Stored.read, 0

    def counts(stored: Stored, start: int, stop: int) -> torch.Tensor:
        nonlocal total
        found = read(stored, start, stop)
        total += found.nbytes
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stored, "read", counts)
        weights = loaded_job(resolved)[0]
    return total, weights


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_zero3_reads_a_file_in_16_bits_once(
    kept: torch.dtype, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    """DeepSpeed makes masters from what was rounded to 16 bits: where that loses bits they are read again."""
    made: Any = load_base(resolved_from(recipe(tiny_root, QUICK["llama"], None)), 0)
    size = sum(p.numel() for p in made.parameters()) * kept.itemsize
    made.to(kept).save_pretrained(tmp_path / "base")
    values = recipe(tiny_root, QUICK["llama"], tmp_path / "base", strategy={"name": "zero3"}, precision="bf16")
    times = 1 if kept == torch.bfloat16 else 2
    expected: Any = prepare_model(resolved_from(values), 0).model
    for read, weights in group.run(counted_job, resolved_from(values), timeout=400):
        assert times * size / 2 <= read < 1.05 * times * size / 2  # parts are padded
        for name, weight in weights.items():
            assert weight.dtype == torch.float32
            assert torch.equal(weight, expected.get_parameter(name)), name


def broken_job(resolved: Resolved) -> list[str]:
    """Names of weights that differ where every range is read one element too late."""
    from toolkit.model.stored import Stored

    read = Stored.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stored, "read", lambda self, a, b: torch.roll(read(self, 0, self.numel), -1)[a:b])
        weights = loaded_job(resolved)[0]
    expected: Any = load_base(resolved, 0)
    return [name for name, weight in weights.items() if not torch.equal(weight, expected.get_parameter(name))]


@pytest.mark.parametrize("strategy", nightly_but(SHARDING, "fsdp1"))
def test_a_range_that_is_off_by_one_is_seen(strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    folder = saved(tiny_root, QUICK["llama"], tmp_path / "base")
    resolved = resolved_from(recipe(tiny_root, QUICK["llama"], folder, strategy={"name": strategy}))
    for different in group.run(broken_job, resolved, timeout=400):
        assert "model.embed_tokens.weight" in different
        assert len(different) > 10


def trained_job(resolved: Resolved, whole: bool) -> Any:
    from toolkit.model.sources import NotByPart
    from toolkit.training import preparation

    prepared = preparation._prepared

    def refuse(*args: Any, by_part: bool) -> Any:
        if by_part:
            raise NotByPart("asked for")
        return prepared(*args, by_part=by_part)

    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr(preparation, "_prepared", refuse)
        return train_job(resolved, 2)


@pytest.mark.parametrize("strategy", nightly_but(SHARDING, "zero3"))
def test_training_is_the_same(strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    folder = saved(tiny_root, QUICK["llama"], tmp_path / "base")
    values = recipe(tiny_root, QUICK["llama"], folder, strategy={"name": strategy}, precision="bf16", adapter=LORA)
    found, expected = (group.run(trained_job, resolved_from(values), whole, timeout=400)[0] for whole in (False, True))
    assert found.losses == expected.losses
    assert found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "files that are not safetensors": ({}, "safetensors"),
    "an adapter that starts from values of the base": (
        {"adapter": LORA | {"modules_to_save": [], "options": {"init_lora_weights": "pissa"}}}, "values of the base"),
    "new tokens": ({"tokenizer": {"path": "none", "add_tokens": ["<a>"]}}, "new tokens"),
    "a base in 4 bits": ({"adapter": LORA | {"method": "qlora", "modules_to_save": []}}, "4 bits"),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_loaded_whole_says_why(case: str, tiny_root: Path, tmp_path: Path) -> None:
    """Outside of a process group: the reason is found before anything is sharded."""
    sections, reason = WHOLE[case]
    folder = saved(tiny_root, QUICK["llama"], tmp_path / "base")
    if case.startswith("files"):
        weights = load_base(resolved_from(recipe(tiny_root, QUICK["llama"], folder)), 0).state_dict()
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    resolved = resolved_from(recipe(tiny_root, QUICK["llama"], folder, strategy={"name": "fsdp2"}, **sections))
    prepared = prepare_model(resolved, 0, together=True)
    assert prepared.loaded_whole is not None
    assert reason in prepared.loaded_whole
    assert not any(parameter.is_meta for parameter in prepared.model.parameters())
