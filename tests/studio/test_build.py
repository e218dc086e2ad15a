"""The page Build: the form is the schema, text and form say the same, the archive is what `toolkit config` writes."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from cases import every_case
from studio_server import Server
from tiny import LLAMA
from toolkit.errors import InputError
from toolkit.planning import reuse
from toolkit.planning.command import Request, make_plan
from toolkit.recipe.load import validate
from toolkit.recipe.positions import parse
from toolkit.recipe.schema import Recipe
from toolkit.studio.edit import REMOVED, edited, read_mapping
from toolkit.studio.form import BASICS, Field, form
from toolkit.studio.plan_task import _edits
from toolkit.studio.starts import DEMO_MODEL, STARTS, starts

TEXT = f"""# my recipe
model: {{config: {yaml.safe_dump(LLAMA, default_flow_style=True, width=1000).strip()}}}
data:
  train: data.jsonl  # mine
  max_length: 64
batch: {{micro_size: 1, accumulation: 2}}
precision: bf16
strategy: {{name: zero2}}
machine: {{device: cuda, processes: 2}}
run: {{max_steps: 10}}
"""


def fields() -> dict[str, Field]:
    return {field.key: field for group in form() for field in group.fields}


def test_every_key_of_the_schema_has_its_field() -> None:
    expected = set()
    for name, part in Recipe.model_fields.items():
        inner = [
            kind
            for kind in (part.annotation, *getattr(part.annotation, "__args__", ()))
            if hasattr(kind, "model_fields")
        ]
        expected |= {f"{name}.{key}" for key in inner[0].model_fields} if inner else {name}
    assert set(fields()) | {"machine.processes"} == expected
    assert set(BASICS) <= expected


def test_fields_know_their_choices_and_defaults() -> None:
    found = fields()
    assert found["precision"].choices == ("fp32", "bf16", "fp16", "bf16-pure")
    assert "zero3" in found["strategy.name"].choices
    assert found["data.max_length"].default == "1024"
    assert found["compile"].choices == ("true", "false")
    assert found["model.config"].kind == "long"
    assert found["model.path"].as_text
    assert found["adapter.target_modules"].as_text
    assert not found["data.cache"].as_text, "false is no folder"


@every_case(
    ("changes", "expected"),
    [
        ([("strategy.name", "zero3")], TEXT.replace("zero2", "zero3")),
        ([("data.max_length", 128)], TEXT.replace("max_length: 64", "max_length: 128")),
        ([("data.packing", True)], TEXT.replace("max_length: 64", "max_length: 64\n  packing: true")),
        ([("batch.accumulation", REMOVED)], TEXT.replace(", accumulation: 2", "")),
        ([("optimizer.lr", 0.001)], TEXT + "optimizer: {lr: 0.001}\n"),
        ([("loss", "fused")], TEXT.replace("max_steps: 10}", "max_steps: 10}\nloss: fused")),
    ],
)
def test_a_change_of_the_form_keeps_the_rest_of_the_text(changes: list, expected: str) -> None:
    assert edited(TEXT, changes) == expected


def test_any_changes_mean_what_was_wanted() -> None:
    """Whatever the text looks like: in place where that is possible, else written anew."""
    draw = random.Random(3)
    keys = (
        "strategy.name",
        "batch.micro_size",
        "adapter.r",
        "data.train",
        "optimizer.betas",
        "model.config",
        "precision",
    )
    values = (
        "zero3",
        4,
        "a: b",
        "#x",
        [0.9],
        {"model_type": "x", "y": [1]},
        True,
        "",
        1e-4,
        "yes",
        "1e3",
        "0x1",
        REMOVED,
    )
    texts = (
        TEXT,
        "",
        "{}",
        "model: {path: x}\n",
        "strategy:\n",
        "batch: null\ndata: [a]\n",
        "a: &a {name: x}\nstrategy: *a\n",
    )
    for number in range(400):
        text = draw.choice(texts)
        changes = [(draw.choice(keys), draw.choice(values)) for _ in range(draw.randrange(1, 4))]
        made = edited(text, changes)
        wanted = read_mapping(text)
        for key, value in changes:
            section, _, name = key.rpartition(".")
            if section and not isinstance(wanted.get(section), dict):
                if value is REMOVED:
                    continue
                wanted[section] = {}
            inner = wanted[section] if section else wanted
            inner.pop(name, None)
            if value is not REMOVED:
                inner[name] = value
        message = (number, text, changes)
        assert without_empty(read_mapping(made)) == without_empty(wanted), message


def without_empty(values: dict) -> dict:
    return {key: value for key, value in values.items() if value not in ({}, None)}


def test_the_form_and_the_text_say_the_same(local: Server) -> None:
    found = local.ask("/api/recipe", {"text": TEXT, "edits": [["adapter.r", "8"], ["data.train", "1e3"]]}).json()
    assert found["problems"] == []
    assert (found["set"]["adapter.r"], found["set"]["data.train"]) == ("8", "1e3")
    values = read_mapping(found["text"])
    assert (values["adapter"]["r"], values["data"]["train"]) == (8, "1e3"), "a text that looks like a number stays text"
    assert "# mine" in found["text"]
    assert any(key == "batch.global_size" or "global" in key for key, _, _ in found["decisions"])
    names = ("accelerate.yaml", "training_args.json", "launch.sh", "deepspeed.json")
    assert set(found["files"]) == {"recipe.yaml", *(f"launch/{name}" for name in names)}


def test_mistakes_have_their_lines(local: Server) -> None:
    found = local.ask("/api/recipe", {"text": TEXT.replace("max_length: 64", "max_lenght: 64"), "edits": []}).json()
    assert found["problems"] == [{"line": 5, "message": "data.max_lenght: unknown key; did you mean max_length?"}]


def test_the_archive_is_what_config_writes(local: Server, tmp_path: Path) -> None:
    answer = local.ask("/api/archive", {"text": TEXT})
    assert answer.headers["content-type"] == "application/zip"
    assert local.ask("/api/archive", {"text": TEXT}).body == answer.body
    archive = zipfile.ZipFile(io.BytesIO(answer.body))
    archive.extract("recipe.yaml", tmp_path)
    subprocess.run([sys.executable, "-m", "toolkit", "config", "recipe.yaml", "-o", "launch"], cwd=tmp_path, check=True,
                   capture_output=True, timeout=200)  # fmt: skip
    # An archive is unpacked anywhere: its paths begin in its own folder.
    here = f"{tmp_path}/".encode()
    of_one_machine = b"where deepspeed.json is on this machine: correct it if you move these files."
    of_any = b"relative to the folder in which `accelerate launch` is started."
    written = {
        f"launch/{file.name}": file.read_bytes().replace(here, b"").replace(of_one_machine, of_any)
        for file in (tmp_path / "launch").iterdir()
    }
    assert {name: archive.read(name) for name in archive.namelist() if name != "recipe.yaml"} == written
    assert archive.getinfo("launch/launch.sh").external_attr >> 16 & 0o111


def test_an_archive_of_a_wrong_recipe_is_refused(local: Server) -> None:
    assert local.ask("/api/archive", {"text": "model: 1"}).status == 422


def test_what_would_make_it_fit_becomes_changes() -> None:
    message = (
        "train with 8-bit moments: optimizer.name=adamw8bit loss=fused, batch.micro_size=1 batch.accumulation=4 (-1.0)"
    )
    assert _edits(message) == [["optimizer.name", "adamw8bit"], ["loss", "fused"], ["batch.micro_size", "1"],
                            ["batch.accumulation", "4"]]  # fmt: skip
    assert _edits(None) == []


def test_a_plan_that_does_not_fit_says_what_does(local: Server) -> None:
    """Apply what the plan says until it fits; then it does."""
    asked = {"text": TEXT.replace("bf16", "fp32"), "gpu": None, "memory": 1.15}
    found = local.ask("/api/plan", asked).json()
    assert found["problems"] == []
    assert "class='plan'" in found["bars"]
    assert not found["fits"]
    assert found["change"], found["change_text"]
    text = local.ask("/api/recipe", {"text": asked["text"], "edits": found["change"]}).json()["text"]
    again = local.ask("/api/plan", asked | {"text": text}).json()
    assert again["fits"], again["reason"]


def test_every_way_of_a_plan_can_be_taken(local: Server) -> None:
    asked = {"text": TEXT, "gpu": "h100", "memory": None}
    found = local.ask("/api/plan", asked).json()
    for way in found["ways"][:: max(1, len(found["ways"]) // 5)]:
        made = local.ask("/api/recipe", {"text": TEXT, "edits": way}).json()
        assert made["problems"] == [], way
        assert read_mapping(made["text"])["strategy"]["name"] == way[0][1]


def test_a_hostile_name_is_shown_as_text(local: Server) -> None:
    evil = "<img src=x onerror=alert(1)>"
    text = TEXT.replace("model_type: llama", f"model_type: llama, name_or_path: '{evil}'").replace("config:", "config:")
    for asked in (text, TEXT.replace("zero2", f"'{evil}'")):
        answer = local.ask("/api/plan", {"text": asked, "gpu": "h100", "memory": None})
        assert all(evil not in part for part in answer.json().values() if isinstance(part, str))


def recipe(text: str) -> Recipe:
    return validate(parse(text, "recipe.yaml"))


CHANGES = ["zero2>zero3", "64>32"]
MORE_CHANGES = [
    "", "zero2>ddp", "processes: 2>processes: 4", "micro_size: 1>micro_size: 2", "bf16>fp32",
    *(f"precision: bf16>precision: bf16\n{line}"
      for line in ("adapter: {method: lora, r: 4}", "activation_checkpointing: full", "loss: fused", "z_loss: 0.0001",
                   "optimizer: {name: sgd}")),
]  # fmt: skip


@pytest.mark.parametrize(
    "changes", [CHANGES, pytest.param(MORE_CHANGES, marks=pytest.mark.nightly)], ids=["few", "more"]
)
def test_kept_planners_change_no_number(changes: list[str]) -> None:
    """Plans after others of the same process equal those of a new process."""
    parts = {change: change.partition(">") for change in changes}
    texts = {change: TEXT.replace(before, after) if change else TEXT for change, (before, _, after) in parts.items()}
    fresh = {change: make_plan(Request(recipe(text), gpu="h100")) for change, text in texts.items()}
    try:
        reuse.keep(4)
        make_plan(Request(recipe(TEXT), gpu="rtx4090"))
        kept = {change: make_plan(Request(recipe(text), gpu="h100")) for change, text in texts.items()}
    finally:
        reuse.keep(0)
    for change, plan in kept.items():
        assert plan.to_json()["candidates"] == fresh[change].to_json()["candidates"], change
        assert plan.change == fresh[change].change, change


def test_a_planner_is_kept_where_only_the_strategy_changes() -> None:
    try:
        reuse.keep(4)
        first = make_plan(Request(recipe(TEXT), gpu="h100")).search.planner
        assert make_plan(Request(recipe(TEXT.replace("zero2", "zero3")), gpu="l4")).search.planner is first
        assert make_plan(Request(recipe(TEXT.replace("64", "32")), gpu="h100")).search.planner is not first
    finally:
        reuse.keep(0)
    assert make_plan(Request(recipe(TEXT), gpu="h100")).search.planner is not first


@pytest.mark.parametrize("title", list(STARTS))
def test_what_one_can_start_from_is_a_recipe(title: str) -> None:
    assert recipe(STARTS[title][1]).data.max_length


@pytest.mark.nightly
def test_what_one_can_start_from_fits_its_gpu_but_the_last(tmp_path: Path) -> None:
    fits = []
    for gpu, text in STARTS.values():
        (tmp_path / "r.yaml").write_text(text)
        fits.append(make_plan(Request(str(tmp_path / "r.yaml"), gpu=gpu)).fits)
    assert fits == [True, True, True, True, False]
    assert "tie_word_embeddings: true" in STARTS["1B, LoRA, 1 GPU"][1], "as Llama 3.2 1B has them"


def test_the_model_of_the_demo_comes_first_where_it_is(tmp_path: Path) -> None:
    assert starts(tmp_path) == starts(None) == STARTS
    (tmp_path / DEMO_MODEL).mkdir(parents=True)
    assert starts(tmp_path) == STARTS, "its data is not there"
    (tmp_path / "runs/demo/data").mkdir(parents=True)
    (tmp_path / "runs/demo/data/conversations.jsonl").touch()
    title, (_, text) = next(iter(starts(tmp_path).items()))
    assert "make demo" in title
    assert recipe(text).model.path == DEMO_MODEL
    assert list(starts(tmp_path))[1:] == list(STARTS)


def test_no_mapping_is_an_error() -> None:
    with pytest.raises(InputError):
        read_mapping("- a\n")


def test_the_public_server_reads_no_folder(public: Server, place: Path) -> None:
    for path in (str(place.parent), ".", "..", "/etc", "~/x", "a/b/c", "a/../b"):
        found = public.ask(
            "/api/recipe", {"text": f"model: {{path: '{path}'}}\ndata: {{train: x}}\n", "edits": []}
        ).json()
        assert "reads no folders" in found["problems"][0]["message"], path
    assert public.ask("/api/plan", {"text": TEXT, "gpu": "h100", "memory": None}).json()["problems"] == []
