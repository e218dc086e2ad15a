"""What the form shows of a select, whatever was chosen in it, is what the recipe then has."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra studio is not installed")
from cases import every_case
from toolkit.errors import InputError
from toolkit.recipe.load import validate
from toolkit.recipe.positions import parse
from toolkit.studio.edit import read_mapping
from toolkit.studio.form import Field, empty_options, form, text_keys
from toolkit.studio.recipe_task import recipe
from toolkit.studio.worker import Settings

PLAIN = "model: {path: a/b}\ndata: {train: a.jsonl}\nrun: {max_steps: 1}\n"
STARTS = {
    "without an adapter": PLAIN,
    "with LoRA": f"{PLAIN}adapter: {{method: lora, r: 16, alpha: 32}}\n",
    "with an adapter whose method is the default": f"{PLAIN}adapter: {{r: 16}}\n",
}
SELECTS = [field for group in form() for field in group.fields if field.kind == "choice"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path, (), False, False, tmp_path)


def chosen(settings: Settings, text: str, key: str, value: str | None) -> dict[str, Any]:
    return recipe(settings, {"text": text, "edits": [[key, value]], "as_text": text_keys()})


def shown(field: Field, answer: dict[str, Any]) -> str:
    """The text of the option that the page selects."""
    if field.key in answer["set"]:
        return str(answer["set"][field.key])
    return str(answer["empty"].get(field.key, f"{field.default} (default)" if field.default else "not set"))


def has(text: str, field: Field) -> str | None:
    """The recipe's own value, in the form's words; None where it is not valid."""
    try:
        value: Any = validate(parse(text, "r.yaml"))
    except InputError:
        return None
    for part in field.key.split("."):
        value = None if value is None else getattr(value, part)
    if isinstance(value, bool):
        return str(value).lower()
    return ("none" if field.leads else "not set") if value is None else str(value)


@every_case(("field", "start"), product(SELECTS, STARTS))
def test_every_option_shows_what_the_recipe_has(field: Field, start: str, settings: Settings) -> None:
    options = [None, *(["none"] if field.leads else []), *field.choices]
    compared = 0
    for option in options:
        answer = chosen(settings, STARTS[start], field.key, option)
        resolved = has(answer["text"], field)
        if resolved is not None:  # else the page shows the problem
            compared += 1
            assert shown(field, answer).removesuffix(" (default)") == resolved, (option, answer["text"])
    assert compared, "no option gives a valid recipe"


def test_none_removes_the_adapter_whole(settings: Settings) -> None:
    answer = chosen(settings, STARTS["with LoRA"], "adapter.method", "none")
    assert "adapter" not in answer["text"]
    assert answer["empty"] == {"adapter.method": "none (default)"}


def test_a_rank_without_a_method_is_shown_as_lora(settings: Settings) -> None:
    answer = chosen(settings, PLAIN, "adapter.r", "8")
    assert answer["empty"] == {"adapter.method": "lora (default)"} == empty_options({"adapter": {"r": 8}})


EVALUATED = "model: {path: a/b}\ndata: {train: a.jsonl, eval: e.jsonl}\nrun: {max_steps: 1}\n"
SAY = [{"role": "user", "content": "What: now?"}]


@every_case(
    ("key", "typed", "value", "again"),
    [
        ("data.eval", "org/name:validation", "org/name:validation", None),
        ("data.eval", "news: n.jsonl\n\ncode: org/name:c:test", {"news": "n.jsonl", "code": "org/name:c:test"},
         "news: n.jsonl\ncode: org/name:c:test"),
        ("data.eval", "{news: [{path: n.jsonl}]}", {"news": [{"path": "n.jsonl"}]}, '{"news": [{"path": "n.jsonl"}]}'),
        ("data.eval", "", None, ""),
        ("data.eval_fraction", "0.1", 0.1, None),
        ("run.eval_at_start", "true", True, None),
        ("run.metric", "news.eval_loss", "news.eval_loss", None),
        ("run.sample_prompts", "What is 2: a number?\n# true", ["What is 2: a number?", "# true"], None),
        ("run.sample_prompts", 'true\n"two\\nlines"\n"[x]"', ["true", "two\nlines", "[x]"], None),
        ("run.sample_prompts", '[{role: user, content: "What: now?"}]', [SAY],
         '[{"role": "user", "content": "What: now?"}]'),
        ("run.sample_prompts", '["a", "b"]', ["a", "b"], "a\nb"),
        ("run.sample_max_new_tokens", "8", 8, None),
        ("run.trackers", "[tensorboard, wandb]", ["tensorboard", "wandb"], "tensorboard\nwandb"),
        ("model.freeze", "embed\nlayers\\.0\\.", ["embed", "layers\\.0\\."], None),
    ],
)  # fmt: skip
def test_fields_of_several_lines_show_what_was_typed(
    key: str, typed: str, value: Any, again: str | None, settings: Settings
) -> None:
    """And what is shown, typed once more, changes nothing."""
    for start in (PLAIN, EVALUATED):
        answer = chosen(settings, start, key, typed)
        section, _, name = key.partition(".")
        assert read_mapping(answer["text"])[section].get(name) == value
        shown_text = answer["set"].get(key, "")
        assert shown_text == (typed if again is None else again)
        assert chosen(settings, answer["text"], key, shown_text)["text"] == answer["text"]
        checked = [one["message"] for one in answer["problems"]]
        assert not any("should be" in one or "a prompt is" in one for one in checked), checked
