"""Each task under the strategies, equal to the plain loop; and the loss is transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import model_types
from families import EVERY_FAMILY
from media import IMAGE_CLASSIFIERS, SEEING, WHISPER
from toolkit.data.collate import drawn_features
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.preflight import dropped_layer_notes
from toolkit.recipe.resolve import Resolved
from toolkit.tasks import task_file, task_names, task_of
from toolkit.tasks.labels import IGNORED, Labels, number_bits
from toolkit.training.loss import loss_sum
from toolkit.verification.cases.prepare import make_case, twin_recipe
from toolkit.verification.compare.replay import Reference
from toolkit.verification.run import verify

Make = Callable[..., Resolved]
STRATEGIES = ["ddp", "zero2", "zero3", "fsdp2"]
MODELS = {
    "token-classification": ["bert", "modernbert", "qwen2"],
    "masked-lm": ["bert", "roberta", "modernbert"],
    "sequence-regression": ["llama", "bert"],
    "sequence-classification": ["bart", "t5"],
}
FORMAT = {"seq2seq-lm": "prompt-completion", "token-classification": "tokens"}


def labelling(task: str, family: str) -> dict[str, Any]:
    return {
        "model": EVERY_FAMILY[family] | {"task": task, "num_labels": 1 if task_of(task).numbers else 3},
        "data": {"format": FORMAT.get(task, "text")},
    }


def test_every_file_of_the_package_is_a_task() -> None:
    assert set(task_names()) == {
        "causal-lm", "image-classification", "image-text-to-text", "masked-lm", "seq2seq-lm", "sequence-classification",
        "sequence-regression", "speech-seq2seq", "token-classification",
    }  # fmt: skip
    for name in task_names():
        assert task_of(name).name == name
        assert task_file(name).is_file()


def _config(task: str) -> dict[str, Any]:
    seen = {
        "image-classification": IMAGE_CLASSIFIERS["vit"],
        "speech-seq2seq": WHISPER,
        "image-text-to-text": SEEING["qwen3_vl"],
    }
    family = {"seq2seq-lm": "t5", "causal-lm": "llama"}.get(task, "bert")
    return seen.get(task) or EVERY_FAMILY[family]["config"]


@pytest.mark.parametrize("task", task_names())
def test_the_loss_is_transformers_own(task: str) -> None:
    """Its mean over the supervised labels of one micro-batch, times their number."""
    import transformers

    numbers = task_of(task).numbers
    config = AutoConfig.for_model(**_config(task), num_labels=1 if numbers else 3)
    torch.manual_seed(0)
    model = getattr(transformers, task_of(task).auto_class).from_config(config).eval()
    ids = torch.randint(3, 90, (3, 7))
    labels = {Labels.SAMPLE: torch.tensor([0, 2, 1])}.get(task_of(task).labels, torch.randint(0, 3, (3, 7)))
    if labels.ndim == 2:
        labels[0, 3:], labels[1, 0] = IGNORED, IGNORED
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if (media := task_of(task).media) is not None:
        tensors = (tensors if media.tokens else {}) | drawn_features(task_of(task), config.to_dict(), 3, 0)
    if media is not None and media.in_text is not None:
        image = torch.tensor([media.in_text(config.to_dict(), 1)]).expand(3, -1)
        tensors["input_ids"] = torch.cat([image, ids], 1)
        tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
        tensors["mm_token_type_ids"] = (tensors["input_ids"] == config.image_token_id).long()
        labels = torch.cat([torch.full_like(image, IGNORED), labels], 1)
    given = torch.tensor([0.25, -100.0, 3.0e4]) if numbers else labels
    labels = torch.tensor([number_bits(one) for one in given.tolist()]) if numbers else labels
    own = model(**tensors, labels=given).loss
    predicted = labels[:, 1:] if task_of(task).labels is Labels.NEXT else labels
    ours = loss_sum(model, config, tensors | {"labels": labels}, task)
    assert ours.item() == pytest.approx(own.item() * int((predicted != IGNORED).sum()), rel=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("task", "family"), [(task, family) for task in MODELS for family in MODELS[task]])
@pytest.mark.nightly
def test_it_is_equal_to_the_plain_loop(task: str, family: str, strategy: str, recipe: Make, group: WorkerGroup) -> None:
    lora = {"r": 2} if strategy in ("zero3", "ddp") else None
    outcome = verify(
        recipe(strategy, adapter=lora, precision="bf16", **labelling(task, family)), group=group, time_limit=120
    )
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


def test_a_classifier_that_reads_the_end_of_a_row_has_one_in_each(recipe: Make, lone_group: WorkerGroup) -> None:
    """Of encoder-decoders; a window's last micro-batch has rows for one rank alone."""
    outcome = verify(recipe("single", **labelling("sequence-classification", "bart")), group=lone_group, time_limit=120)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


@pytest.mark.parametrize("kind", ["m2m_100", "t5"])
def test_a_decoder_behind_an_encoder_by_its_class_s_defaults(kind: str, recipe: Make, group: WorkerGroup) -> None:
    """M2M100 leaves layers out at random: ranks that ran different ones died or hung. T5's config class has no
    ``decoder_start_token_id``: the decoder starts from padding."""
    config, _ = model_types.small_config(kind, "AutoModelForSeq2SeqLM")
    assert config.get("encoder_layerdrop") or "decoder_start_token_id" not in config
    resolved = recipe(
        "ddp", model={"config": config, "task": "seq2seq-lm"}, data={"format": "prompt-completion"}, adapter={"r": 2}
    )
    assert bool(dropped_layer_notes(resolved)) == (kind == "m2m_100")
    outcome = verify(resolved, group=group, time_limit=120, round_trip=False, passes=("logic",))
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


def test_shifted_labels_of_words_are_found(recipe: Make, tmp_path: Any, lone_group: WorkerGroup) -> None:
    """The mistake that is made with this task: a causal model's shift."""
    resolved = recipe("single", **labelling("token-classification", "bert"))
    case = make_case(twin_recipe(resolved, full_size=False), resolved, "logic", tmp_path)
    micro = Reference(case).windows[0][0][1]
    assert micro.supervised == int((micro.tensors["labels"] != IGNORED).sum()) > 0
    assert (micro.tensors["labels"] == IGNORED).any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.reference.loop.task_of", lambda _: task_of("causal-lm"))
        outcome = verify(resolved, group=lone_group, time_limit=120, round_trip=False)
    assert outcome.verdict == "different"
    assert outcome.difference is not None
    assert outcome.difference[1].name == "forward"
