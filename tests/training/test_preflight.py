"""What cannot train is refused before the first step, with its key; what can passes, in every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import processors
from cases import every_case
from families import EVERY_FAMILY, HYBRIDS
from jobs import resolved_from
from media import IMAGE_CLASSIFIERS, SEEING
from tiny import LLAMA, recipe_dict
from toolkit.data.loader import open_data
from toolkit.errors import InputError
from toolkit.inspection.command import Request, inspect
from toolkit.launch.group import WorkerGroup
from toolkit.launch.identity import check_recipe
from toolkit.model.load import load_base
from toolkit.model.padding import padding_note
from toolkit.model.processor import load_tokenizer
from toolkit.recipe.earlier import recipe_version
from toolkit.recipe.limits import limits_of
from toolkit.recipe.preflight import Check, check_known, dropped_layer_notes
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels
from toolkit.training.export import export
from toolkit.training.preflight import preflight
from toolkit.training.run import run
from toolkit.training.session import open_session

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 400, "n_positions": 64}
BERT = EVERY_FAMILY["bert"]["config"] | {"vocab_size": 400}
T5 = EVERY_FAMILY["t5"]["config"] | {"vocab_size": 400}
LED = {
    "model_type": "led", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 400,
    "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 8, "attention_window": 8,
}  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLASSIFIER = {"task": "sequence-classification", "num_labels": 2}
PAIR = [{"prompt": "a b", "completion": " c d"}] * 4


def lone(root: Path, folder: Path, rows: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    """A recipe of one process over these rows."""
    train = folder / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one: dict[str, Any] = {"strategy": {"name": "single"}, "machine": {"processes": 1}}
    made = recipe_dict(root, **one | {key: value for key, value in sections.items() if key != "model"})
    made["model"] = sections["model"]
    made["data"] |= {"train": str(train)}
    made["run"] |= {"output_dir": str(folder / "run")}
    (folder / "run").mkdir(exist_ok=True)
    if made["model"].get("task") == "seq2seq-lm":
        made["data"] |= {"format": "prompt-completion"}
    return made


def before_the_first_step(resolved: Resolved) -> list[Check]:
    """What a run does until then."""
    check_known(resolved)
    session = open_session(resolved)
    return preflight(session, open_data(session.data_recipe, "train", session.tokenizer))


def without_padding(folder: Path, **roles: str) -> dict[str, Any]:
    """A tokenizer of letters without a padding token, whose only special tokens are ``roles``."""
    tokenizer = processors.letters(special=())
    tokenizer.pad_token = None
    for role, token in roles.items():
        tokenizer.add_special_tokens({role: token})
    tokenizer.save_pretrained(folder / "letters")
    return {"path": str(folder / "letters")}


def image_rows(folder: Path) -> list[dict[str, Any]]:
    from PIL import Image

    Image.new("RGB", (32, 32)).save(folder / "0.png")
    return [{"image": "0.png", "label": 0}, {"image": "0.png", "label": 1}]


def of_another_size(folder: Path) -> dict[str, Any]:
    from transformers import ViTImageProcessor

    ViTImageProcessor(size={"height": 48, "width": 48}).save_pretrained(folder / "processor")
    return {"path": str(folder / "processor")}


def of_another_image_token(folder: Path) -> dict[str, Any]:
    processors.llava().save_pretrained(folder / "processor")
    return {"path": str(folder / "processor")}


TEXTS = [{"text": "the model of a rank"}] * 4
LETTERS = [{"text": "a b c"}] * 4
LABELLED = [{"text": "a b c", "label": at % 2} for at in range(4)]
CHAT = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
SEEN = {"messages": [
    {"role": "user", "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text": "a"}]},
    {"role": "assistant", "content": "b"},
]}  # fmt: skip
PROMPT = {"method": "prompt-tuning", "options": {"num_virtual_tokens": 20}}
_LLAVA = SEEING["llava"] | {"text_config": SEEING["llava"]["text_config"] | {"vocab_size": 512}}

MISMATCHES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "a token beyond the embedding": (
        {"model": {"config": LLAMA | {"vocab_size": 280}}}, TEXTS,
        "train.jsonl:1: text: token 'the' has the id 291",
    ),
    "the end of every sample beyond the embedding": (
        {"model": {"config": LLAMA | {"vocab_size": 2}}}, LETTERS,
        "tokenizer.path: eos_token '</s>' has the id 2, and the model's embedding has 2 rows",
    ),
    "a padding token beyond the embedding": (
        {"model": {"config": LLAMA | {"vocab_size": 280}}, "tokenizer": {"options": {"pad_token": "the"}}}, LETTERS,
        "tokenizer.options: pad_token 'the' has the id 291",
    ),
    "random tokens of a mask beyond the embedding": (
        {"model": {"config": BERT | {"vocab_size": 280}, "task": "masked-lm"},
         "tokenizer": {"options": {"mask_token": "<s>"}}}, LETTERS,
        "tokenizer.path: hidden tokens become random ones of the tokenizer's 300, and the model's embedding has 280",
    ),
    "a length beyond the positions": (
        {"model": {"config": GPT2}, "data": {"max_length": 65}}, TEXTS,
        "data.max_length: 65 tokens are more than the model's 64 positions (n_positions)",
    ),
    "virtual tokens that take positions": (
        {"model": {"config": GPT2}, "adapter": PROMPT}, TEXTS,
        "data.max_length: 48 tokens are more than the model's 44 positions (n_positions: 64, less 20 virtual tokens",
    ),
    "a packed sample beyond the positions": (
        {"model": {"config": GPT2}, "data": {"packing": True, "max_length": 128}}, [*LETTERS, {"text": "a" * 70}],
        "train.jsonl:5: text: 71 tokens are more than the model's 64 positions (n_positions); remove this sample, or "
        "set data.max_length: 64",
    ),
    "a target beyond the decoder's positions": (
        {"model": {"config": LED, "task": "seq2seq-lm"}}, [*PAIR, {"prompt": "a", "completion": "b" * 9}],
        "train.jsonl:5: prompt: 10 tokens, but the decoder has 8 positions (max_decoder_position_embeddings); remove "
        "this sample, or set data.max_length: 8",
    ),
    "a decoder without a first token": (
        {"model": {"config": T5 | {"decoder_start_token_id": None, "pad_token_id": None}, "task": "seq2seq-lm"},
         "tokenizer": {"options": {"pad_token": None}}}, PAIR,
        "model.config: the model's config has neither decoder_start_token_id nor pad_token_id",
    ),
    "a classifier that cannot pad": (
        {"model": {"config": LLAMA} | CLASSIFIER, "tokenizer": without_padding}, LABELLED,
        "tokenizer.options: the tokenizer has no padding token, and none of its special tokens can pad",
    ),
    "a model without a decoder behind an encoder": (
        {"model": {"config": LLAMA | {"vocab_size": 400}, "task": "seq2seq-lm"}}, PAIR,
        "model.task: llama has no decoder behind an encoder, which model.task: seq2seq-lm trains",
    ),
    "rows of one length alone": (
        {"model": {"config": {"model_type": "reformer", "is_decoder": True}}}, LETTERS,
        "model.config: this model trains rows of a fixed length alone",
    ),
    "a sample that writes the token at which the model classifies": (
        {"model": CLASSIFIER | {"config": EVERY_FAMILY["bart"]["config"] | {"vocab_size": 400}}},
        [*LABELLED, {"text": "a </s> b", "label": 0}],
        "train.jsonl:5: text: data.train: the sample has '</s>' 2 times, and others have it 1",
    ),
    "a sample that ends with the padding token": (
        {"model": {"config": LLAMA} | CLASSIFIER,
         "tokenizer": lambda folder: without_padding(folder, pad_token="<pad>") | {"options": {"eos_token": None}}},
        [*LABELLED, {"text": "a<pad>", "label": 0}],
        "train.jsonl:5: text: tokenizer.options: the sample ends with '<pad>', which pads rows as well",
    ),
    "a label that the model has not": (
        {"model": {"config": LLAMA} | CLASSIFIER}, [*LABELLED, {"text": "a", "label": 2}],
        "train.jsonl:5: label: 2 is not a class; classes are the integers from 0 to 1 (model.num_labels)",
    ),
    "a template's tokens in pieces": (
        {"model": {"config": LLAMA}, "data": {"format": "messages", "chat_template": CHATML}}, CHAT,
        'data.chat_template: the template writes "<|im_start|>", "<|im_end|>", which the tokenizer has not',
    ),
    "images of another size": (
        {"model": {"config": IMAGE_CLASSIFIERS["vit"], "task": "image-classification", "num_labels": 2},
         "data": {"format": "image"}, "tokenizer": of_another_size}, image_rows,
        "tokenizer.path: the processor makes images of 48 x 48 pixels, and the model takes 32 x 32 (image_size); set "
        "tokenizer.options: {size: {height: 32, width: 32}}",
    ),
    "another token for an image": (
        {"model": {"config": _LLAVA, "task": "image-text-to-text"},
         "data": {"format": "messages"}, "tokenizer": of_another_image_token},
        lambda folder: [image_rows(folder) and SEEN] * 2,
        "tokenizer.path: images are the token ",
    ),
}  # fmt: skip


@every_case(("sections", "rows", "expected"), [pytest.param(*case, id=name) for name, case in MISMATCHES.items()])
def test_a_mismatch_is_refused_before_the_first_step(
    sections: dict[str, Any], rows: Any, expected: str, tiny_root: Path, tmp_path: Path
) -> None:
    given = rows(tmp_path) if callable(rows) else rows
    chosen = sections.get("tokenizer", {})
    sections = sections | {"tokenizer": chosen(tmp_path) if callable(chosen) else chosen}
    made = lone(tiny_root, tmp_path, given, **sections)
    if (template := made["data"].get("chat_template")) is not None:
        (tmp_path / "chat.jinja").write_text(template)
        made["data"]["chat_template"] = str(tmp_path / "chat.jinja")
    resolved = resolved_from(made)
    with pytest.raises(InputError) as refused:
        before_the_first_step(resolved)
    assert expected in str(refused.value)
    assert refused.value.exit_code == 2
    try:  # toolkit data says it as well, with the same words
        told = inspect(Request(resolved.recipe)).refused
    except InputError as error:
        told = [*error.problems]
    said = [problem.removeprefix("recipe.yaml: ") for problem in refused.value.problems]
    assert any(one.endswith(problem) for one in told for problem in said), (told, said)


def test_data_looks_at_the_model_that_labels_and_templates_are_for(tiny_root: Path, tmp_path: Path) -> None:
    """Where the recipe does not say how many classes there are, the model's config does; the fault of a row hides none
    of a template."""
    made = lone(tiny_root, tmp_path, [*LABELLED, {"text": "a", "label": 2}], model={
        "config": LLAMA | {"id2label": {"0": "no", "1": "yes"}}, "task": "sequence-classification"})  # fmt: skip
    found = inspect(Request(Recipe.model_validate(made)))
    assert found.exit_code == 2
    [told] = found.refused
    assert told.endswith(
        "train.jsonl:5: label: 2 is not a class; classes are the integers from 0 to 1 (model.num_labels)"
    )
    (tmp_path / "chat.jinja").write_text(CHATML)
    data = {"format": "messages", "chat_template": str(tmp_path / "chat.jinja")}
    made = lone(tiny_root, tmp_path, [*CHAT, {"messages": 3}], model={"config": LLAMA}, data=data)
    row, template = inspect(Request(Recipe.model_validate(made))).refused
    assert "train.jsonl:5: messages: must be a list" in row
    assert (
        'data.chat_template: the template writes "<|im_start|>", "<|im_end|>", which the tokenizer has not' in template
    )


def test_held_out_rows_are_checked_as_well(tiny_root: Path, tmp_path: Path) -> None:
    """They are packed, so that only the model says that one is too long; it would be read at the first evaluation."""
    (tmp_path / "eval.jsonl").write_text(json.dumps({"text": "a" * 70}) + "\n")
    data = {"packing": True, "max_length": 128, "eval": str(tmp_path / "eval.jsonl")}
    made = lone(tiny_root, tmp_path, LETTERS, model={"config": GPT2}, data=data)
    made["run"] |= {"eval_every": 2}
    with pytest.raises(InputError, match=r"eval.jsonl:1: text: 71 tokens are more than"):
        run(resolved_from(made), resume=False, screen=None)


def test_cached_tokens_are_checked_by_the_model_that_reads_them(tiny_root: Path, tmp_path: Path) -> None:
    """The cache does not know the model: it was written for a larger one."""
    large = lone(tiny_root, tmp_path, TEXTS, model={"config": LLAMA}, data={"cache": str(tmp_path / "cache")})
    before_the_first_step(resolved_from(large))
    small = large | {"model": {"config": LLAMA | {"vocab_size": 280}}}
    with pytest.raises(InputError, match=r"train.jsonl:1: text: tokenizer.path: token 'the' has the id 291"):
        before_the_first_step(resolved_from(small))


def test_a_run_that_has_learned_pieces_goes_on(tiny_root: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML)
    data = {"format": "messages", "chat_template": str(tmp_path / "chat.jinja")}
    session = open_session(resolved_from(lone(tiny_root, tmp_path, CHAT, model={"config": LLAMA}, data=data)))
    samples = open_data(session.data_recipe, "train", session.tokenizer)
    with pytest.raises(InputError, match=r"tokenizer\.add_special_tokens"):
        preflight(session, samples)
    assert all(check.ok for check in preflight(session, samples, resumed=True))


# ---- classifiers over language models


def logits_of(folder: Path, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    """By transformers alone: of each text alone, and of all in a batch; with the model and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
        batch = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    return alone, batch, model, tokenizer


NEW_PADDING = {"options": {"pad_token": "<|pad|>"}}


@every_case(
    ("model", "options", "padding"),
    [
        pytest.param(LLAMA, {"pad_token": None}, "<s>", id="none"),
        pytest.param(LLAMA, {"pad_token": "</s>"}, "<s>", id="end-of-sequence"),
        pytest.param(LLAMA, {"pad_token": "<|pad|>"}, "<|pad|>", id="a new token"),
        pytest.param(GPT2, {"pad_token": "</s>", "padding_side": "left"}, "<s>", id="learned positions, padded left"),
        pytest.param(LLAMA | {"pad_token_id": 2, "eos_token_id": 2}, {}, "<pad>", id="end-of-sequence in the config"),
    ],
)
def test_a_classifier_pools_at_the_last_real_token_whatever_pads(
    model: dict[str, Any], options: dict[str, Any], padding: str, tiny_root: Path, tmp_path: Path
) -> None:
    rows = [{"text": "a " * (1 + 3 * at) + "rank</s>", "label": at % 2} for at in range(4)]
    sections = {"model": {"config": model} | CLASSIFIER, "tokenizer": {"options": options}, "batch": {"micro_size": 4}}
    made = lone(tiny_root, tmp_path, rows, **sections)
    made["run"] |= {"max_steps": 1, "save_every": 1}
    made["data"]["shuffle"] = False
    resolved = resolved_from(made)
    run(resolved, resume=False, screen=None)
    export(tmp_path / "run", tmp_path / "exported")
    alone, batch, exported, tokenizer = logits_of(tmp_path / "exported", [row["text"] for row in rows])
    assert torch.allclose(alone, batch, atol=1e-6)
    assert (tokenizer.pad_token, tokenizer.padding_side) == (padding, "right")
    assert exported.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    # The last real token is the end of the text, and the model reads it: without it the logits are others.
    with torch.no_grad():
        cut = exported(torch.tensor([tokenizer(rows[3]["text"]).input_ids[:-1]])).logits
    assert not torch.allclose(cut[0], alone[3], atol=1e-4)


def test_a_classifier_of_an_earlier_version_pools_as_it_was_trained(tiny_root: Path, tmp_path: Path) -> None:
    """Its checkpoints do not say by what rows were padded: by the tokenizer's own token."""
    sections = {"model": {"config": LLAMA} | CLASSIFIER, "tokenizer": {"options": {"pad_token": "</s>"}}}
    resolved = resolved_from(lone(tiny_root, tmp_path, LABELLED, **sections))
    assert load_tokenizer(resolved.recipe).pad_token == "<s>"
    tokenizer = load_tokenizer(resolved.recipe, own_padding=True)
    assert (tokenizer.pad_token, padding_note(tokenizer)) == ("</s>", None)


def test_a_run_with_an_earlier_versions_default_length_resumes(tiny_root: Path, tmp_path: Path) -> None:
    """It was 1,024 whatever the model's positions, and no row was longer than these."""
    made = lone(tiny_root, tmp_path, TEXTS, model={"config": GPT2})
    del made["data"]["max_length"]
    made["run"] |= {"max_steps": 1, "save_every": 1}
    resolved = resolved_from(made)
    run(resolved, resume=False, screen=None)
    checkpoint = next((tmp_path / "run" / "checkpoints").iterdir())
    kept = json.loads((checkpoint / "recipe.json").read_text())
    assert kept["data"]["max_length"] == 64
    (checkpoint / "recipe.json").write_text(json.dumps(kept | {"data": kept["data"] | {"max_length": 1024}}))
    check_recipe(checkpoint, {"recipe_version": recipe_version()}, resolved.recipe, "r.yaml")
    (checkpoint / "recipe.json").write_text(json.dumps(kept | {"data": kept["data"] | {"max_length": 32}}))
    with pytest.raises(InputError, match="max_length"):
        check_recipe(checkpoint, {"recipe_version": recipe_version()}, resolved.recipe, "r.yaml")


def test_a_new_token_of_an_option_gets_a_row(tiny_root: Path, tmp_path: Path) -> None:
    made = lone(tiny_root, tmp_path, TEXTS, model={"config": LLAMA}, tokenizer=NEW_PADDING)
    resolved = resolved_from(made)
    model: Any = load_base(resolved, pad_token_id=300)
    assert model.get_input_embeddings().weight.shape[0] == 301
    assert model.config.pad_token_id == 300
    same = resolved_from(made | {"tokenizer": made["tokenizer"] | {"options": {"pad_token": "</s>"}}})
    assert load_base(same).get_input_embeddings().weight.shape[0] == 300  # type: ignore[operator]


# ---- the dry run


def test_a_dry_run_computes_the_longest_micro_batch_and_leaves_nothing(tiny_root: Path, tmp_path: Path) -> None:
    rows = [{"text": "a" * length} for length in (3, 30, 4, 20, 5)]
    made = lone(tiny_root, tmp_path, rows, model={"config": LLAMA})
    made["run"] |= {"save_every": 1, "trackers": ["tensorboard"]}
    answer = run(resolved_from(made), resume=False, screen=None, dry=True)
    assert answer["dry_run"]["shape"] == [2, 31]
    assert answer["dry_run"]["loss"] == pytest.approx(torch.log(torch.tensor(300.0)).item(), abs=0.5)
    assert (answer["steps"], answer["checkpoint"], len(answer["peak_memory_bytes"])) == (0, None, 1)
    claims = {check["claim"]: check for check in answer["preflight"]}
    longest = claims["longest row within the model's positions"]
    assert longest == {"claim": longest["claim"], "value": 31, "limit": None, "ok": True}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"result.json"}


def dry(resolved: Resolved) -> dict[str, Any]:
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda *_: None  # the group goes on to other tests
    try:
        return run(resolved, resume=False, screen=None, dry=True)
    finally:
        torch.distributed.destroy_process_group = destroy


SHARDED = [
    {"strategy": {"name": "fsdp2"}, "batch": {"micro_size": 3, "accumulation": 2}},
    {"strategy": {"name": "zero3"}, "data": {"packing": True}},
    {"strategy": {"name": "ddp"}, "data": {"streaming": True}},
    {"strategy": {"name": "zero1"}, "adapter": {"method": "lora", "r": 4}},
    {"strategy": {"name": "ddp", "mesh": {"pipeline": 2}}, "batch": {"micro_size": 1, "accumulation": 4}},
]


@pytest.mark.nightly
@pytest.mark.parametrize("sections", SHARDED, ids=lambda one: one["strategy"]["name"])
def test_a_dry_run_under_every_strategy(
    sections: dict[str, Any], group: WorkerGroup, tiny_root: Path, tmp_path: Path
) -> None:
    made = recipe_dict(tiny_root, **sections)
    made["run"] |= {"output_dir": str(tmp_path)}
    first, second = group.run(dry, resolved_from(made))
    assert first["dry_run"]["loss"] == second["dry_run"]["loss"]
    assert len(first["peak_memory_bytes"]) == 2
    assert all(peak > 0 for peak in first["peak_memory_bytes"])


# ---- what trains passes

_TEXT = {**EVERY_FAMILY, **HYBRIDS}


@pytest.mark.nightly
@pytest.mark.parametrize("name", _TEXT)
def test_the_preflight_passes_what_trains(name: str, tiny_root: Path, tmp_path: Path) -> None:
    """Every family of docs/measurements/families.md that reads text."""
    model = _TEXT[name]
    model = model | {"config": model["config"] | {"vocab_size": 320}}
    task = task_of(model.get("task", "causal-lm"))
    rows = PAIR if task.labels is Labels.TARGET else LABELLED if task.classes else LETTERS
    checks = before_the_first_step(resolved_from(lone(tiny_root, tmp_path, rows, model=model)))
    assert checks
    assert all(check.ok for check in checks)


@pytest.mark.nightly
@pytest.mark.parametrize("name", _TEXT)
def test_a_limit_is_where_the_model_ends(name: str, tiny_root: Path, tmp_path: Path) -> None:
    """Where positions are a table, the longest row that is allowed computes, and one token more does not; elsewhere a
    row beyond the limit computes."""
    model = _TEXT[name]
    model = model | {"config": model["config"] | {"vocab_size": 320}}
    if model["config"].get("max_position_embeddings") is None and "n_positions" not in model["config"]:
        model["config"] |= {"max_position_embeddings": 64}
    resolved = resolved_from(lone(tiny_root, tmp_path, LETTERS, model=model, data={"max_length": 16}))
    limits = limits_of(resolved.recipe, resolved.facts)
    built: Any = load_base(resolved).eval()

    def computes(length: int, targets: int = 8) -> bool:
        inputs = {"input_ids": torch.randint(5, 300, (1, length))}
        if task_of(resolved.recipe.model.task).labels is Labels.TARGET:
            inputs["decoder_input_ids"] = torch.randint(5, 300, (1, targets))
        try:
            with torch.no_grad():
                built(**inputs)
        except (IndexError, RuntimeError):
            return False
        return True

    most = 64 if limits.rows is None else limits.rows.tokens
    assert computes(most)
    assert computes(most + 1) == (limits.rows is None or not limits.rows.ends)
    if limits.targets is not None:
        assert computes(8, limits.targets.tokens)
        assert not computes(8, limits.targets.tokens + 1)


def test_layers_that_a_nested_config_leaves_out_are_named(tiny_root: Path) -> None:
    """wav2vec 2's class leaves out a tenth."""
    config = {"model_type": "speech-encoder-decoder", "encoder": {"model_type": "wav2vec2"},
              "decoder": {"model_type": "bert"}}  # fmt: skip
    recipe = recipe_dict(tiny_root, model={"config": config, "task": "speech-seq2seq"}, data={"format": "audio"})
    [note] = dropped_layer_notes(resolved_from(recipe | {"strategy": {"name": "ddp"}}))
    assert note.startswith("model: layerdrop: 0.1 in its config is taken for 0")
