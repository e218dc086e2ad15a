"""Images in planned rows: counted by number and size, described, and refused where a model cannot have them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from media import SEEING
from nights import nightly_but
from plan.cells import MODELS, Cell
from plan.truth import resolved_from
from toolkit.errors import InputError
from toolkit.planning import skeleton, trace
from toolkit.planning.command import Request, make_plan
from toolkit.planning.images import Images
from toolkit.planning.predict import Planner
from toolkit.tasks.image_shapes import check_images, image_shape, size_step


def planned(model: str, length: int = 256, images: Images | None = None, lora: bool = False) -> Planner:
    cell = Cell(model, lora, "single", "none", 128)
    return Planner.of(resolved_from(cell.recipe()), length, images=images)


def peak(planner: Planner) -> int:
    return planner.memory(planner.resolved).peak


@pytest.mark.nightly
def test_more_and_larger_images_take_more() -> None:
    small, two, large = (Images(1, (64, 64)), Images(2, (64, 64)), Images(1, (128, 128)))
    peaks = [peak(planned("qwen3_vl", images=images)) for images in (small, two, large)]
    assert peaks[0] < peaks[1] < peaks[2], "16, 2 x 16 and 64 tokens of the same row"
    tokens = [len(i.in_row(MODELS["qwen3_vl"], "image-text-to-text", 256)[0]) for i in (small, two, large)]
    assert tokens == [18, 36, 66]


@pytest.mark.parametrize("name", nightly_but(SEEING, "qwen3_vl", "gemma3"))
def test_the_short_model_is_traced_with_as_many_tokens_as_it_asks_for(name: str) -> None:
    """transformers' own forward compares features and tokens: a trace ends in an error where they differ."""
    planner = planned(name if name != "gemma3" else "gemma3-vl", lora=True)
    config = planner.skeleton.config.to_dict()
    assert planner.images == Images()
    segments = planner.segments_of(planner.resolved)
    assert sum(s.block >= 0 and not s.backward for s in segments) == len(planner.skeleton.blocks)
    vision = config["vision_config"]
    layers = vision.get("depth") or vision["num_hidden_layers"]
    assert len(planner.skeleton.holdings.order) == layers + config["text_config"]["num_hidden_layers"]
    step = size_step(config)
    if step == 16:
        assert image_shape(config, (48, 96)).tokens == (48 // 16) * (96 // 16)


@pytest.mark.nightly
def test_blocks_that_are_named_by_number_are_kinds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short model of one block of a kind weighs what all the blocks do. Without these kinds it is another model:
    Qwen3-VL's has no deepstack, LLaVA's has no last block but one, VipLlava's no second one."""
    for name in ("qwen3_vl", "qwen2_5_vl", "llava", "vipllava"):
        short = planned(name, lora=True)
        peaks = [peak(short)]
        with monkeypatch.context() as patch:
            patch.setattr(
                skeleton, "choose_blocks", lambda model, blocks: ({n for n, _ in blocks}, [*range(len(blocks))])
            )
            whole = planned(name, lora=True)
            peaks.append(peak(whole))
        assert len(short.skeleton.blocks) < len(whole.skeleton.blocks) == 10
        # What Qwen3-VL's mergers keep belongs to no block: 1.1 % of this small model.
        assert peaks[0] == pytest.approx(peaks[1], rel=0.015), name


def test_weights_that_no_output_depends_on_do_not_train() -> None:
    llava = planned("llava").skeleton
    frozen = [weight.name for weight in llava.holdings.by_name.values() if not weight.trains]
    assert any("vision_tower" in name and ".layers." in name for name in frozen), "the block behind the features"
    assert not any("language_model" in name or "projector" in name for name in frozen)


def test_places_of_images_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "Values", contextlib.nullcontext)
    with pytest.raises(InputError, match="cannot be traced without running it"):
        peak(planned("qwen2_5_vl"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"image_size": "64x64"}, "--image-size: this model's images all have the size of its config"),
        ({"image_size": "64"}, "--image-size 64: width and height in pixels, for example 1024x768"),
        ({"images": 0}, "--images 0: must be at least 1"),
        ({"images": 40}, "data.max_length: 128 tokens do not hold 40 x 4 tokens of images and one of text; raise it"),
    ],
)
def test_images_that_cannot_be_are_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SEEING["gemma3"]))
    with pytest.raises(InputError) as caught:
        make_plan(Request(str(file), gpu="h100", length=128, **more))
    assert str(caught.value).startswith(message)


def test_a_model_whose_images_are_not_known_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """What PaliGemma wants to know of each token is not what Gemma 3 does: it would train something else."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "paligemma", "text_config": {}, "vision_config": {"image_size": 32}}))
    with pytest.raises(InputError, match=r"does not know the images of paligemma \(known: Qwen2-VL to Qwen3\.5"):
        make_plan(Request(str(file), gpu="h100"))


def test_a_config_may_leave_out_defaults() -> None:
    """As save_pretrained writes it: without the marks that a family is known by."""
    check_images({"model_type": "qwen3_vl", "text_config": {}, "vision_config": {"depth": 2}})
    with pytest.raises(InputError, match="does not know the images of llama"):
        check_images({"model_type": "llama"})


def test_a_model_whose_own_forward_fails_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It ended in a traceback; torch logged another one."""
    config = json.loads(json.dumps(SEEING["qwen3_vl"]))
    config["vision_config"]["out_hidden_size"] = 48
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match="the forward of Qwen3VLForConditionalGeneration fails on one small sample"):
        make_plan(Request(str(file), gpu="h100", length=128))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("size", "tokens"), [((32, 64), 16 + 36), ((64, 64), 16 + 72), ((64, 48), 16 + 56)])
def test_tiles_and_the_end_of_each_row_are_counted(size: tuple[int, int], tokens: int) -> None:
    """LLaVA-NeXT, 4 x 4 patches a tile: the image in small, and each row of the tiles' patches without padding,
    with one token more."""
    assert image_shape(SEEING["llava_next"], size).tokens == tokens
    assert Images(1, size).in_row(SEEING["llava_next"], "image-text-to-text", 128)[1]["image_sizes"].tolist() == [
        [*size]
    ]


def test_a_text_model_has_no_images(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["llama"]))
    with pytest.raises(InputError, match=r"--images, --image-size: for model\.task: image-text-to-text"):
        make_plan(Request(str(file), gpu="h100", images=1))


@pytest.mark.nightly
def test_a_models_config_is_enough_and_the_images_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from toolkit.planning.screen import show

    file = tmp_path / "config.json"
    file.write_text(json.dumps(SEEING["qwen3_vl"]))
    request = Request(str(file), gpu="h100", length=128, images=2, image_size="96x64", lora=4)
    found = make_plan(request)
    assert found.search.asked.recipe.model.task == "image-text-to-text"
    message = "every row has 2 images of 96 x 64 pixels, 52 of its 128 tokens (--images, --image-size)"
    assert message in found.to_json()["assumptions"]
    show(found.search, found.candidates, found.chosen, found.change, request, None)
    assert message in capsys.readouterr().out
    explained = make_plan(Request(str(file), gpu="h100", length=128, explain=True, fit=("length",)))
    assert explained.answers is not None
    assert explained.answers.explanation is not None
    assert explained.answers.explanation.by_token > 0
