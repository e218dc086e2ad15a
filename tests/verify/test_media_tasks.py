"""Tasks of images and sound under the strategies, equal to the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from media import IMAGE_CLASSIFIERS, RELATIVES, SEEING, WHISPER
from toolkit.launch.group import WorkerGroup
from toolkit.model.load import load_base
from toolkit.model.unreached import freeze, unreached
from toolkit.recipe.resolve import Resolved
from toolkit.verification.run import verify

Make = Callable[..., Resolved]
STRATEGIES = ["ddp", "zero2", "zero3", "fsdp2"]


def images(family: str) -> dict[str, Any]:
    model = {"config": IMAGE_CLASSIFIERS[family], "task": "image-classification", "num_labels": 3}
    return {"model": model, "data": {"format": "image"}}


SPEECH = {"model": {"config": WHISPER, "task": "speech-seq2seq"}, "data": {"format": "audio"}}


def seeing(family: str) -> dict[str, Any]:
    return {
        "model": {"config": SEEING[family], "task": "image-text-to-text"},
        "data": {"format": "messages", "max_length": 64},
    }


CASES = {
    **{family: images(family) for family in IMAGE_CLASSIFIERS},
    **{family: seeing(family) for family in SEEING},
    "whisper": SPEECH,
}
ADAPTED = ("vit", "qwen3_vl")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.nightly
def test_it_is_equal_to_the_plain_loop(name: str, strategy: str, recipe: Make, group: WorkerGroup) -> None:
    lora = {"r": 2} if strategy in ("zero3", "ddp") and name in ADAPTED else None
    outcome = verify(recipe(strategy, adapter=lora, precision="bf16", **CASES[name]), group=group, time_limit=120)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


def test_weights_that_no_output_depends_on_are_not_trained(recipe: Make) -> None:
    """LLaVA takes the output of the vision tower's last layer but one."""
    model = load_base(recipe("ddp", **CASES["llava"]))
    resolved = recipe("ddp", **CASES["llava"])
    names = unreached(model, resolved)
    with torch.no_grad():  # as where a checkpoint is exported for its answers
        assert unreached(model, resolved) == names
    assert any("vision_tower" in name and "layers.1." in name for name in names)
    assert not any("layers.0." in name or "language_model" in name for name in names)
    freeze(model, names)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained.isdisjoint(names)
    assert trained


@pytest.mark.parametrize("name", RELATIVES)
def test_a_relative_takes_the_image_that_is_drawn_for_it(name: str, recipe: Make) -> None:
    """transformers' own forward compares features and tokens."""
    model = {"config": RELATIVES[name], "task": "image-text-to-text"}
    resolved = recipe("ddp", model=model, data={"format": "messages", "max_length": 64})
    assert not [name for name in unreached(load_base(resolved), resolved) if "language_model" in name]


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_rotary_tables_of_complex_numbers_keep_their_imaginary_part(precision: str, recipe: Make) -> None:
    """Llama 4's for images: ``Module.to(dtype)`` made them real, in the plain loop, too."""
    import transformers

    model: Any = load_base(recipe("ddp", precision=precision, **CASES["llama4"]))
    own: Any = transformers.AutoModelForImageTextToText.from_config(model.config)
    tables = [one.vision_model.rotary_embedding.freqs_ci for one in (model, own)]
    assert tables[0].dtype == torch.complex64
    assert torch.equal(*tables)
    assert tables[0].imag.abs().sum() > 0
    assert {p.dtype for p in model.parameters()} == {torch.float32 if precision == "fp32" else torch.bfloat16}
