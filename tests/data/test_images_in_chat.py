"""Images in conversations: the processor's own tokens, supervision, cutting, and micro-batches without an image."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import processors
from cases import every_case
from media import SEEING
from tiny import recipe_dict
from toolkit.data.collate import Slot, collate
from toolkit.data.formats import Formatter
from toolkit.data.loader import TrainLoader, open_data
from toolkit.data.rows import Row
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.tasks.labels import IGNORED

PROCESSORS: dict[str, Callable[[], Any]] = {
    "gemma3": processors.gemma3,
    "llava": processors.llava,
    "llava_next": processors.llava_next,
    "pixtral": processors.pixtral,
    "llama4": processors.llama4,
}
SAID = "two cats"


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Any:
    if request.param in ("pixtral", "llama4"):
        pytest.importorskip("torchvision", reason="transformers makes this processor with torchvision alone")
    return PROCESSORS[request.param]()


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    for name, shade in (("a", 40), ("b", 200)):
        Image.fromarray(np.full((24, 40, 3), shade, dtype=np.uint8)).save(tmp_path / f"{name}.png")
    return ["a.png", "b.png"]


def recipe(folder: Path, **data: Any) -> Recipe:
    seeing = SEEING["gemma3"] | {"text_config": SEEING["gemma3"]["text_config"] | {"vocab_size": 512}}
    values = recipe_dict(folder / "train.jsonl", model={"config": seeing, "task": "image-text-to-text"})
    values["data"] = {
        "train": str(folder / "train.jsonl"), "format": "messages", "workers": 0, "max_length": 4096,
    } | data  # fmt: skip
    return Recipe.model_validate(values)


def parts(*content: Any) -> list[dict[str, Any]]:
    return [{"type": "image", "image": one[1]} if isinstance(one, tuple) else {"type": "text", "text": one}
            for one in content]  # fmt: skip


def row(folder: Path, value: dict[str, Any]) -> Row:
    return Row(value, str(folder / "train.jsonl"), 3)


def conversation(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts(*content)}, {"role": "assistant", "content": SAID}]}


def opened(folder: Path, names: list[str]) -> list[Image.Image]:
    return [Image.open(folder / name).convert("RGB") for name in names]


@every_case("asked", [("look: ", ("image", 0), " what?"), (("image", 0), "and", ("image", 1), "?")])
def test_tokens_are_the_processors_own(processor: Any, tmp_path: Path, pictures: list[str], asked: Any) -> None:
    content = [("image", pictures[one[1]]) if isinstance(one, tuple) else one for one in asked]
    formatter = Formatter(recipe(tmp_path), processor)
    [example] = formatter.examples(row(tmp_path, conversation(*content)))
    bare = [{"type": "image"} if isinstance(one, tuple) else {"type": "text", "text": one} for one in content]
    messages = [{"role": "user", "content": bare},
                {"role": "assistant", "content": [{"type": "text", "text": SAID}]}]  # fmt: skip
    text = processor.apply_chat_template(messages, tokenize=False)
    images = opened(tmp_path, [one[1] for one in content if isinstance(one, tuple)])
    own = processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
    assert example.input_ids == np.asarray(own["input_ids"][0]).tolist()
    assert {type(token) for token in example.input_ids} == {int}
    assert formatter.reader is not None
    features = formatter.reader.features(example.media, example.input_ids)
    assert np.array_equal(features["pixel_values"], own["pixel_values"].float().numpy())  # Llama 4's are bf16
    for name in ("token_type_ids",):
        if name in own:
            assert np.array_equal(features[name], own[name].numpy())


def test_the_assistants_words_are_supervised_and_no_token_of_an_image(
    processor: Any, tmp_path: Path, pictures: list[str]
) -> None:
    formatter = Formatter(recipe(tmp_path), processor)
    [example] = formatter.examples(row(tmp_path, conversation(("image", pictures[0]), "what?")))
    assert isinstance(example.labels, list)
    learned = [token for token in example.labels if token != IGNORED]
    assert processor.tokenizer.decode(learned).strip() == f"{SAID}<|im_end|>"
    [(start, end)] = example.places
    assert set(example.labels[start:end]) == {IGNORED}
    assert set(processor.image_token_ids) & set(example.input_ids[start:end])
    assert not set(processor.image_token_ids) & set(example.input_ids[:start] + example.input_ids[end:])


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": SAID}]},
        {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": SAID}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
                      {"role": "assistant", "content": SAID}]},
    ],
)  # fmt: skip
def test_the_rows_list_of_images(value: dict[str, Any], tmp_path: Path, pictures: list[str]) -> None:
    """In the place of a part, of LLaVA's <image>, or before the first user's words."""
    formatter = Formatter(recipe(tmp_path), processors.gemma3())
    [inside] = formatter.examples(row(tmp_path, conversation(("image", pictures[0]), "what?")))
    [listed] = formatter.examples(row(tmp_path, value | {"images": pictures[:1]}))
    assert (listed.input_ids, listed.labels, listed.media) == (inside.input_ids, inside.labels, inside.media)


def test_images_and_places_must_match(tmp_path: Path, pictures: list[str]) -> None:
    formatter = Formatter(recipe(tmp_path), processors.gemma3())
    value = conversation("what?")
    value["messages"][0]["content"] = "<image>what?"
    with pytest.raises(InputError) as caught:
        formatter.examples(row(tmp_path, value | {"images": pictures}))
    assert "train.jsonl:3: images: 2 images for 1 places in the conversation" in str(caught.value)


def test_an_image_is_not_cut(processor: Any, tmp_path: Path, pictures: list[str]) -> None:
    whole = Formatter(recipe(tmp_path), processor)
    [example] = whole.examples(row(tmp_path, conversation(("image", pictures[0]), "x", ("image", pictures[1]), "?")))
    (_, first), (second, end) = example.places
    for most, kept in ((end - 1, 1), (second, 1), (end, 2), (first - 1, 0)):
        [cut] = Formatter(recipe(tmp_path, max_length=most), processor).examples(
            row(tmp_path, conversation(("image", pictures[0]), "x", ("image", pictures[1]), "?"))
        )
        assert cut.cut
        assert (len(cut.media), len(cut.places)) == (kept, kept)
        assert len(cut.input_ids) <= most
        shown = sum(token in processor.image_token_ids for token in cut.input_ids)
        [each] = {sum(t in processor.image_token_ids for t in example.input_ids[a:b]) for a, b in example.places}
        assert shown == kept * each


def test_a_micro_batch_without_an_image_computes_one_without_loss(
    processor: Any, tmp_path: Path, pictures: list[str]
) -> None:
    """The vision tower runs on every rank, in every micro-batch: else collectives of the ranks do not match."""
    text = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
    rows = [text, conversation(("image", pictures[0]), "what?"), text]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    samples = open_data(recipe(tmp_path), "train", processor)
    alone = collate([samples[0]], Slot([0], 0, 0, 0, 1), samples.task, 0, blank=samples.blank)
    assert len(alone.tensors["input_ids"]) == 2
    tiles = len(samples[1].features["pixel_values"])
    assert len(alone.tensors["pixel_values"]) == tiles
    assert (alone.tensors["labels"][1] == IGNORED).all()
    assert alone.supervised == sum(label != IGNORED for label in samples[0].labels[1:])  # type: ignore[index]
    mixed = collate([samples[0], samples[1]], Slot([0, 1], 0, 0, 0, 1), samples.task, 0, blank=samples.blank)
    assert len(mixed.tensors["input_ids"]) == 2
    assert mixed.entries["pixel_values"] == (0, tiles)


def test_other_parts_are_refused(tmp_path: Path) -> None:
    formatter = Formatter(recipe(tmp_path), processors.gemma3())
    value = {"messages": [{"role": "user", "content": [{"type": "video", "video": "x.mp4"}]},
                          {"role": "assistant", "content": SAID}]}  # fmt: skip
    with pytest.raises(InputError) as caught:
        formatter.examples(row(tmp_path, value))
    assert "is of type video; this task takes text and images" in str(caught.value)


def test_a_stream_computes_an_image_in_every_micro_batch(processor: Any, tmp_path: Path, pictures: list[str]) -> None:
    text = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
    rows = [text, text, conversation(("image", pictures[0]), "what?"), text]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    streamed = recipe(tmp_path, streaming=True, shuffle=False)
    samples = open_data(streamed, "train", processor)
    loader = TrainLoader(samples, streamed, micro_size=1, accumulation=2, data_size=1, data_rank=0, device_type="cpu")
    micros = [micro for window in itertools.islice(loader, 2) for micro in window]
    assert len(micros) == 4
    assert all("pixel_values" in micro.tensors for micro in micros)


def test_tokenised_conversations_with_images_are_cached(processor: Any, tmp_path: Path, pictures: list[str]) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(conversation(("image", pictures[0]), "what?")) + "\n")
    own = recipe(tmp_path, cache=str(tmp_path / "cache"))
    made, again = (open_data(own, "train", processor) for _ in range(2))
    assert (made.came.came, again.came.came) == ("made", "cache")
    assert (made[0].input_ids, made[0].media) == (again[0].input_ids, again[0].media)
    assert np.array_equal(made[0].features["pixel_values"], again[0].features["pixel_values"])


def test_an_image_of_another_size_than_when_it_was_tokenised(tmp_path: Path, pictures: list[str]) -> None:
    processor = processors.llava()
    (tmp_path / "train.jsonl").write_text(json.dumps(conversation(("image", pictures[0]), "what?")) + "\n")
    samples = open_data(recipe(tmp_path), "train", processor)
    processor.num_additional_image_tokens += 1  # more tokens for the same image
    with pytest.raises(InputError) as caught:
        samples[0]
    assert "takes 17 tokens now and took 16 when its sample was tokenised" in str(caught.value)
