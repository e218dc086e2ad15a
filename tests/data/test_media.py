"""Images and recordings: from files, bytes and decoded values to the features of a micro-batch."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from media import IMAGE_CLASSIFIERS, WHISPER
from tiny import recipe_dict
from toolkit.data.cache import cached
from toolkit.data.collate import MicroBatch
from toolkit.data.loader import TrainLoader, eval_batches, open_data
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe


@pytest.fixture(scope="module")
def image_processor() -> Any:
    from transformers import ViTImageProcessor

    return ViTImageProcessor(size={"height": 32, "width": 32})


class Speech:
    """A processor as Whisper's: a feature extractor, and a tokenizer that begins with the decoder's start token."""

    def __init__(self) -> None:
        from transformers import WhisperFeatureExtractor

        self.feature_extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
        self.tokenizer = _Letters()


class _Letters:
    eos_token_id, pad_token_id, all_special_ids, is_fast = 2, 0, [0, 2, 3], True

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3, *(ord(letter) % 90 + 5 for letter in text), 2]}


def picture(index: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    pixels = np.full((size[1], size[0], 3), 10 * index, dtype=np.uint8)
    return Image.fromarray(pixels)


def images(folder: Path, count: int = 6, **data: Any) -> Recipe:
    rows = []
    for index in range(count):
        picture(index).save(folder / f"{index}.png")
        rows.append({"image": f"{index}.png", "label": ["cat", "dog"][index % 2]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return image_recipe(folder / "train.jsonl", **data)


def image_recipe(train: Path, **data: Any) -> Recipe:
    values = recipe_dict(train, model={"config": IMAGE_CLASSIFIERS["vit"], "task": "image-classification"})
    values["model"] |= {"num_labels": 2}
    values["data"] = {"train": str(train), "format": "image", "workers": 0, "shuffle": False} | data
    return Recipe.model_validate(values)


def first_window(recipe: Recipe, samples: Any, rank: int = 0) -> list[MicroBatch]:
    loader = TrainLoader(samples, recipe, micro_size=2, accumulation=1, data_size=2, data_rank=rank, device_type="cpu")
    return next(iter(loader))


def test_an_image_is_what_its_processor_makes_of_it(tmp_path: Path, image_processor: Any) -> None:
    recipe = images(tmp_path)
    samples = open_data(recipe, "train", image_processor)
    micro = first_window(recipe, samples)[0]
    assert list(micro.tensors) == ["pixel_values", "labels"]
    own = image_processor([picture(index).convert("RGB") for index in micro.sample_ids], return_tensors="pt")
    assert torch.equal(micro.tensors["pixel_values"], own["pixel_values"])
    assert micro.tensors["labels"].tolist() == [index % 2 for index in micro.sample_ids]
    assert samples.label_names == ["cat", "dog"]
    assert micro.supervised == 2


def test_bytes_in_parquet_are_the_same_as_files(tmp_path: Path, image_processor: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    files = open_data(images(tmp_path), "train", image_processor)
    rows = [{"image": {"bytes": (tmp_path / f"{at}.png").read_bytes(), "path": None}, "label": at % 2}
            for at in range(6)]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    recipe = image_recipe(tmp_path / "train.parquet")
    inside = open_data(recipe, "train", image_processor)
    for at in range(6):
        assert np.array_equal(files[at].features["pixel_values"], inside[at].features["pixel_values"])
    buffer = io.BytesIO()
    picture(1).save(buffer, format="PNG")
    assert inside[1].media == (b"b" + buffer.getvalue(),)


def test_a_cached_entry_gives_the_same_references(tmp_path: Path, image_processor: Any) -> None:
    samples = open_data(images(tmp_path), "train", image_processor)
    kept = cached(tmp_path / "cache", "key", lambda beat: samples.came.columns)
    assert kept.came == "made"
    again = cached(tmp_path / "cache", "key", lambda beat: pytest.fail("not cached"))  # type: ignore[arg-type,return-value]
    assert [again.columns.media_of(at) for at in range(6)] == [samples[at].media for at in range(6)]


def test_a_stream_and_evaluation_give_the_same_images(tmp_path: Path, image_processor: Any) -> None:
    recipe = images(tmp_path)
    whole = open_data(recipe, "train", image_processor)
    streamed = image_recipe(tmp_path / "train.jsonl", streaming=True)
    for row in (tmp_path / "train.jsonl").read_text().splitlines():
        assert "cat" in row or "dog" in row
    text = (tmp_path / "train.jsonl").read_text().replace('"cat"', "0").replace('"dog"', "1")
    (tmp_path / "train.jsonl").write_text(text)
    stream = open_data(streamed, "train", image_processor)
    for one, other in zip(eval_batches(whole, recipe, 2, 2, 1, "cpu"),
                          eval_batches(stream, streamed, 2, 2, 1, "cpu"), strict=True):  # fmt: skip
        assert one.supervised == other.supervised
        assert torch.equal(one.tensors["pixel_values"], other.tensors["pixel_values"])


def test_a_rank_without_samples_computes_an_image_without_loss(tmp_path: Path, image_processor: Any) -> None:
    recipe = images(tmp_path, count=2)
    samples = open_data(recipe, "train", image_processor)
    micro = first_window(recipe, samples, rank=1)[0]
    assert (micro.sample_ids, micro.supervised, micro.tensors["labels"].tolist()) == ([], 0, [-100])
    assert micro.tensors["pixel_values"].shape == (1, 3, 32, 32)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("missing.png", "train.jsonl:1: image: missing.png: no such file"),
        ("broken.png", "train.jsonl:1: image: broken.png: not a readable image: cannot identify image file"),
        (7, "train.jsonl:1: image: must be a path or the bytes of a file, not 7"),
    ],
)
def test_an_image_that_cannot_be_read_is_an_error_at_its_row(
    value: Any, message: str, tmp_path: Path, image_processor: Any
) -> None:
    (tmp_path / "broken.png").write_bytes(b"not an image")
    (tmp_path / "train.jsonl").write_text(json.dumps({"image": value, "label": 0}) + "\n")
    with pytest.raises(InputError) as caught:
        open_data(image_recipe(tmp_path / "train.jsonl"), "train", image_processor)
    assert message in str(caught.value)


def test_a_camera_held_sideways(tmp_path: Path) -> None:
    """The orientation of the EXIF data is applied, as datasets does."""
    from toolkit.data.media import _image

    image = Image.new("RGB", (40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert _image((tmp_path / "turned.jpg").open("rb"), None).size == (20, 40)


def speech(folder: Path, rates: list[int]) -> Recipe:
    import soundfile

    rows = []
    for index, rate in enumerate(rates):
        time = np.arange(rate // 2) / rate
        soundfile.write(folder / f"{index}.wav", 0.4 * np.sin(2 * math.pi * 440 * time), rate)
        rows.append({"audio": f"{index}.wav", "text": "do re"})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = recipe_dict(folder / "train.jsonl", model={"config": WHISPER, "task": "speech-seq2seq"})
    values["data"] = {"train": str(folder / "train.jsonl"), "format": "audio", "workers": 0, "shuffle": False}
    return Recipe.model_validate(values)


def test_a_recording_becomes_features_and_its_words_labels(tmp_path: Path) -> None:
    """At another rate it is resampled; the decoder's start token, which the model adds, is no label."""
    recipe = speech(tmp_path, [16000, 48000])
    samples = open_data(recipe, "train", Speech())
    plain, resampled = samples[0], samples[1]
    assert plain.labels == _Letters()("do re")["input_ids"][1:]
    assert plain.features["input_features"].shape == (1, 8, 100)
    assert np.abs(plain.features["input_features"] - resampled.features["input_features"]).mean() < 0.05
    micro = first_window(recipe, samples)[0]
    assert list(micro.tensors) == ["input_features", "labels"]
    assert micro.supervised == 2 * len(plain.labels)


def test_an_empty_recording_is_an_error_at_its_row(tmp_path: Path) -> None:
    recipe = speech(tmp_path, [16000])
    import soundfile

    soundfile.write(tmp_path / "0.wav", np.zeros(0), 16000)
    with pytest.raises(InputError) as caught:
        open_data(recipe, "train", Speech())
    assert "train.jsonl:1: audio: 0.wav: not a readable recording: it is empty" in str(caught.value)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_is_deleted_while_the_run_goes_on(tmp_path: Path, image_processor: Any, workers: int) -> None:
    """An error in words, from a worker process too, where an exception would be a traceback."""
    recipe = images(tmp_path, workers=workers)
    samples = open_data(recipe, "train", image_processor)
    (tmp_path / "1.png").unlink()
    with pytest.raises(InputError) as caught:
        first_window(recipe, samples)
    assert str(caught.value) == (
        f"{tmp_path / '1.png'}: not a readable image: [Errno 2] No such file or directory: '{tmp_path / '1.png'}'; "
        "restore the file, or remove its sample"
    )


def test_a_transcript_beyond_the_decoders_positions_is_an_error_at_its_row(tmp_path: Path) -> None:
    recipe = speech(tmp_path, [16000])
    (tmp_path / "train.jsonl").write_text(json.dumps({"audio": "0.wav", "text": "la" * 40}) + "\n")
    with pytest.raises(InputError) as caught:
        open_data(recipe, "train", Speech())
    assert "train.jsonl:1: text: 81 tokens, but the decoder has 48 positions" in str(caught.value)
    short = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 48})})
    assert len(open_data(short, "train", Speech())[0].labels) == 48  # type: ignore[arg-type]


def test_the_tokenizers_options_reach_it(tmp_path: Path) -> None:
    import processors
    from toolkit.model.processor import load_processor

    processors.letters().save_pretrained(tmp_path)
    values = recipe_dict(
        tmp_path / "train.jsonl", tokenizer={"path": str(tmp_path), "options": {"pad_token": "<|im_end|>"}}
    )
    assert load_processor(Recipe.model_validate(values)).pad_token == "<|im_end|>"
