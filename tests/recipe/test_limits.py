"""How long rows may be: by what holds a model's positions, with the same words in every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from families import EVERY_FAMILY
from tiny import recipe_dict
from toolkit.benchmark.command import Request as BenchRequest
from toolkit.benchmark.command import measure as bench
from toolkit.errors import InputError
from toolkit.inspection.command import Request as DataRequest
from toolkit.inspection.command import inspect
from toolkit.launch.command import TrainOptions, write_config
from toolkit.launch.job import train
from toolkit.planning.command import Request as PlanRequest
from toolkit.planning.command import make_plan
from toolkit.recipe.limits import length_notes, limits_of
from toolkit.recipe.load import load_recipe
from toolkit.recipe.model_facts import model_facts
from toolkit.recipe.preflight import check_known, known_notes
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategies
from toolkit.verification.run import resolve_recipe

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64}
PROMPT = {"method": "prompt-tuning", "options": {"num_virtual_tokens": 20}}
FORMATS = {"seq2seq-lm": "prompt-completion", "image-text-to-text": "messages", "speech-seq2seq": "audio"}


def recipe(model: dict[str, Any], **sections: Any) -> Recipe:
    data = {"train": "none", "format": FORMATS.get(model.get("task", ""), "text")} | sections.pop("data", {})
    return Recipe.model_validate({"model": model, "data": data, "run": {"max_steps": 1}, **sections})


def config(kind: str, **keys: Any) -> dict[str, Any]:
    return {"config": {"model_type": kind, **keys}}


SEQ2SEQ, SPEECH = {"task": "seq2seq-lm"}, {"task": "speech-seq2seq"}


@every_case(
    ("model", "sections", "expected"),
    [
        pytest.param(config("gpt2", n_positions=64), {}, (64, True, None), id="a learned table"),
        pytest.param(config("gpt2"), {}, (1024, True, None), id="the class's default"),
        pytest.param(config("opt", max_position_embeddings=64), {}, (64, True, None), id="rows beside the positions"),
        pytest.param(config("gptj", n_positions=64), {}, (64, True, None), id="rotations from a table"),
        pytest.param(config("roberta", max_position_embeddings=130), {}, (128, True, None), id="behind the padding"),
        pytest.param(config("roberta", max_position_embeddings=130, pad_token_id=5), {}, (124, True, None),
                     id="behind another padding token"),
        pytest.param(config("prophetnet", max_position_embeddings=64) | SEQ2SEQ, {}, (64, True, 64),
                     id="a table that sizes itself"),
        pytest.param(config("led", max_encoder_position_embeddings=96, max_decoder_position_embeddings=32) | SEQ2SEQ,
                     {}, (96, True, 32), id="an encoder's and a decoder's"),
        pytest.param(config("whisper", max_target_positions=48) | SPEECH, {}, (None, None, 48), id="a transcript's"),
        pytest.param(config("llama", max_position_embeddings=64), {}, (64, False, None), id="rotations"),
        pytest.param(config("esm", max_position_embeddings=64, position_embedding_type="rotary"), {},
                     (64, False, None), id="a table that the config leaves out for rotations"),
        pytest.param(config("esm", max_position_embeddings=64, pad_token_id=1), {}, (62, True, None), id="... or has"),
        pytest.param(config("deberta-v2", max_position_embeddings=64, position_biased_input=False), {},
                     (None, None, None), id="relative distances"),
        pytest.param(config("t5", n_positions=64) | SEQ2SEQ, {}, (None, None, None), id="a number that limits nothing"),
        pytest.param(config("fsmt", max_position_embeddings=64) | SEQ2SEQ, {}, (None, None, None),
                     id="a table that grows"),
        pytest.param(config("mamba"), {}, (None, None, None), id="no positions"),
        pytest.param(config("llava", text_config={"model_type": "gpt2", "n_positions": 64})
                     | {"task": "image-text-to-text"}, {}, (64, True, None), id="the text part of a larger model"),
        pytest.param(config("gpt2", n_positions=64), {"adapter": PROMPT}, (44, True, None), id="virtual tokens"),
        pytest.param(config("gpt2", n_positions=66),
                     {"strategy": {"name": "ddp", "mesh": {"context": 4}}, "machine": {"processes": 4}},
                     (64, True, None), id="rows that are padded for the ranks of a context"),
    ],
)  # fmt: skip
def test_the_limit_is_that_of_what_holds_the_positions(
    model: dict[str, Any], sections: dict[str, Any], expected: tuple[int | None, bool | None, int | None]
) -> None:
    asked = recipe(model, **sections)
    found = limits_of(asked, model_facts(asked.model))
    rows = (None, None) if found.rows is None else (found.rows.tokens, found.rows.ends)
    assert (*rows, None if found.targets is None else found.targets.tokens) == expected


FILE = """\
model:
  config: {model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, vocab_size: 300, n_positions: 64}
tokenizer: {path: %s}
data:
  train: %s
  max_length: 65
machine: {device: cpu}
run: {max_steps: 1, output_dir: %s}
"""
REFUSED = (
    "data.max_length: 65 tokens are more than the model's 64 positions (n_positions); set data.max_length: 64 or less, "
    "or leave it out"
)


def test_every_command_refuses_a_length_with_the_same_words(tmp_path: Path, tiny_root: Path) -> None:
    file, run = tmp_path / "r.yaml", tmp_path / "run"
    file.write_text(FILE % (tiny_root / "tokenizer", tiny_root / "train.jsonl", run))
    name = str(file)
    commands: dict[str, Any] = {
        "config": lambda *given: write_config(name, None, overrides=given),
        "plan": lambda *given: make_plan(PlanRequest(name, given)),
        "verify": lambda *given: resolve_recipe(name, given),
        "data": lambda *given: inspect(DataRequest(name, given)),
        "bench": lambda *given: bench(BenchRequest(name, given, say=print, log=tmp_path / "log")),
        "train": lambda *given: train(TrainOptions(name, given)),
        "train --dry-run": lambda *given: train(TrainOptions(name, given, dry_run=True)),
    }
    for command, call in commands.items():
        with pytest.raises(InputError) as refused:
            call()
        assert str(refused.value) == f"{file}:6:3: {REFUSED}", command
        with pytest.raises(InputError) as refused:
            call("data.max_length=66")
        assert str(refused.value) == f"override data.max_length=66: {REFUSED.replace('65', '66')}", command
    assert not run.exists()


def test_a_length_that_nobody_asked_for_is_the_models(tmp_path: Path) -> None:
    resolved = resolve(recipe({"config": GPT2}))
    assert resolved.recipe.data.max_length == 64
    assert check_known(resolved) == [
        "data.max_length: set to 64: the model's 64 positions (n_positions), since the recipe sets no length"
    ]
    again = resolve(resolved.recipe)
    assert (again.recipe.data.max_length, check_known(again)) == (64, [])


def test_rotations_get_a_note_and_packed_rows_none() -> None:
    long = {"data": {"max_length": 65}}
    rotated = resolve(recipe(config("llama", max_position_embeddings=64), **long))
    assert rotated.recipe.data.max_length == 65
    [note] = check_known(rotated)
    assert "65 tokens are more than the 64 that the model was made for (max_position_embeddings)" in note
    packed = recipe(config("gpt_neo", max_position_embeddings=64), data={"max_length": 65, "packing": True})
    asked = packed.model_copy(update={"data": packed.data.model_copy(update={"packing": False})})
    with pytest.raises(InputError):
        check_known(resolve(asked))
    # Each packed sample has positions of its own.
    resolved = resolve(packed.model_copy(update={"model": recipe({"config": GPT2}).model}))
    assert check_known(resolved) == []


SLIDE = ["sliding_attention"] * 2


@every_case(
    ("kind", "keys", "window"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mixtral", {"sliding_window": 64}, 64),
        ("phi3", {"sliding_window": 64}, 64),
        ("starcoder2", {"sliding_window": 64}, 64),
        ("qwen3_moe", {"sliding_window": 64, "use_sliding_window": True}, 64),
        ("qwen3_moe", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 64),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "layer_types": SLIDE}, 64),
        ("qwen2", {"sliding_window": 64, "layer_types": SLIDE}, None),
        ("gemma2", {"sliding_window": 64}, None),
        ("gemma3_text", {"sliding_window": 64, "layer_types": SLIDE}, 64),
        ("gpt_oss", {"sliding_window": 64}, None),
        ("minimax", {"sliding_window": 64}, None),
        ("llava", {"text_config": {"model_type": "mistral", "sliding_window": 64}}, 64),
        ("llama", {}, None),
    ],
)  # fmt: skip
def test_a_window_of_every_layer_is_noted_and_silent_where_one_attends_to_all(
    kind: str, keys: dict[str, Any], window: int | None
) -> None:
    long = (window or 64) + 1
    model = config(kind, num_hidden_layers=2, **keys) | ({"task": "image-text-to-text"} if kind == "llava" else {})
    asked = recipe(model, data={"max_length": long})
    facts = model_facts(asked.model)
    noted = [note for note in length_notes(asked, limits_of(asked, facts)) if "sliding window" in note]
    if window is None:
        assert noted == []
        return
    assert noted == [
        f"data.max_length: {long:,} tokens are more than the sliding window of {window:,} that every layer attends in "
        "(sliding_window): no token attends to one further back"
    ]
    fits = asked.model_copy(update={"data": asked.data.model_copy(update={"max_length": window})})
    assert not any("sliding window" in note for note in length_notes(fits, limits_of(fits, facts)))


def test_what_slides_is_what_the_model_computes() -> None:
    """A token one further back than the window changes nothing, the last one within it does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
             "vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    for kind, more in (
        ("mistral", {}), ("phi3", {}), ("starcoder2", {}), ("mixtral", {"num_local_experts": 2}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}), ("gemma2", {"head_dim": 8}),
    ):  # fmt: skip
        keys = small | {"sliding_window": 4, "num_hidden_layers": 2} | more
        asked = recipe(config(kind, **keys), data={"max_length": 16})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys), attn_implementation="eager").eval()
        ids = torch.arange(3, 19)[None]
        changed = ids.clone()
        changed[0, 0] = 2
        with torch.no_grad():
            apart = (model(ids).logits - model(changed).logits).abs().amax(-1)[0]
        # Through two layers a token is seen at most twice the window further on.
        reaches = bool((apart[2 * 4 - 1 :] > 0).any())
        assert reaches == (limits_of(asked, model_facts(asked.model)).window is None), kind


def test_a_place_is_no_part_of_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(FILE % ("none", "none", "run"))
    loaded = load_recipe(file)
    assert loaded == load_recipe(file, ["data.max_length=65"])
    assert loaded.written("data.max_length", "source") == f"{file}:6:3"
    assert loaded.written("optimizer.lr", "source") == "source", "a section that is not there"
    assert loaded.model_copy(update={"precision": "bf16"}).written("data.packing", "source") == f"{file}:4:1"


@every_case("name", [name for name in EVERY_FAMILY if name not in ("t5", "bart")])
def test_every_family_has_a_limit_or_none_by_its_mechanism(name: str) -> None:
    """tests/training/test_preflight.py runs their models at the limit, and one token beyond it."""
    asked = recipe(EVERY_FAMILY[name])
    rows = limits_of(asked, model_facts(asked.model)).rows
    assert (rows is not None and rows.ends) == (name in TABLES), rows


TABLES = (
    "gpt2", "gpt_neo", "gptj", "codegen", "gpt_bigcode", "opt", "bert", "roberta", "electra", "distilbert",
)  # fmt: skip


def test_what_a_strategy_does_not_read_is_noted() -> None:
    kept = {}
    for name in strategies():
        processes = 1 if name == "single" else 2
        strategy = {"name": name, "reshard_after_forward": False}
        values = recipe_dict(Path("nowhere"), strategy=strategy, machine={"processes": processes})
        notes = known_notes(resolve(Recipe.model_validate(values), device="cpu"))
        kept[name] = not any("reshard_after_forward: false changes nothing" in note for note in notes)
    assert {name for name, reads in kept.items() if reads} == {"fsdp1", "fsdp2"}


@pytest.mark.parametrize(
    ("changed", "noted"),
    [({}, True), ({"precision": "fp16"}, True), ({"precision": "fp32"}, False), ({"optimizer": {"lr": 2e-4}}, False),
     ({"adapter": None}, False), ({"device": "cuda"}, False)],
)  # fmt: skip
def test_lora_in_16_bits_on_a_cpu_is_noted_where_it_learns_slowly(changed: dict[str, Any], noted: bool) -> None:
    adapter = {"method": "lora", "r": 4, "target_modules": "all-linear"}
    slow = {"precision": "bf16", "adapter": adapter, "optimizer": {"lr": 2e-5}} | changed
    device = slow.pop("device", "cpu")
    values = recipe_dict(Path("nowhere"), machine={"device": device}, **slow)
    notes = known_notes(resolve(Recipe.model_validate(values), device=device))
    assert any("learns much more slowly" in note for note in notes) is noted
