"""New tokens: the rows that they get, whether they train, and whether hosts find them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import every_case
from families import EVERY_FAMILY
from jobs import loader_for, resolved_from
from tiny import LLAMA, make_text, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.model.load import load_base
from toolkit.model.new_tokens import new_tokens
from toolkit.model.processor import load_tokenizer
from toolkit.planning.skeleton import build
from toolkit.recipe.resolve import Resolved
from toolkit.training import checkpoint
from toolkit.training.export import export
from toolkit.training.loop import Progress, train
from toolkit.training.session import open_session

TOKENS = ["<tool>", "</tool>"]
LORA = {"r": 4}


def recipe(root: Path, strategy: str, *, tie: bool = False, **sections: Any) -> dict[str, Any]:
    """Data in which every sample has a new token."""
    lines = make_text(root / "plain.jsonl", 40).read_text().splitlines()
    marked = [line.replace('"text": "', '"text": "<tool>') for line in lines]
    (root / "marked.jsonl").write_text("\n".join(marked) + "\n")
    processes = 1 if strategy == "single" else 2
    made = recipe_dict(root, strategy={"name": strategy}, machine={"processes": processes}, **sections)
    made["model"] = {"config": LLAMA | {"tie_word_embeddings": tie}} | made["model"].get("own", {})
    made["tokenizer"] |= {"add_tokens": TOKENS, "add_special_tokens": ["<|im_end|>"]}
    made["data"] |= {"train": str(root / "marked.jsonl")}
    return made


@every_case("precision", ["fp32", "bf16"])
def test_new_rows_follow_the_old_ones(precision: str, tiny_root: Path) -> None:
    made = recipe(tiny_root, "single", precision=precision, adapter=LORA)
    resolved = resolved_from(made)
    tokenizer = load_tokenizer(resolved.recipe)
    found = new_tokens(resolved)
    assert found is not None
    assert list(found.ids) == tokenizer.convert_tokens_to_ids([*TOKENS, "<|im_end|>"])
    assert found.rows == len(tokenizer)
    assert tokenizer.tokenize("a<tool>b") == ["a", "<tool>", "b"]
    assert tokenizer.decode(tokenizer("a<|im_end|><tool>").input_ids, skip_special_tokens=True).endswith("a<tool>")
    before = load_base(resolved_from(made | {"tokenizer": {"path": made["tokenizer"]["path"]}}))
    first, again = load_base(resolved), load_base(resolved)
    for name, weight in before.state_dict().items():
        assert torch.equal(first.state_dict()[name][: len(weight)], weight), name
    assert first.get_input_embeddings().weight.shape[0] == first.config.vocab_size == found.rows  # type: ignore[operator]
    assert all(torch.equal(again.state_dict()[name], one) for name, one in first.state_dict().items()), "run.seed's"


def test_a_vocabulary_with_room_is_not_resized(tiny_root: Path) -> None:
    """Many models have more rows than their tokenizer has tokens."""
    made = recipe(tiny_root, "single")
    made["model"]["config"] |= {"vocab_size": 512}
    assert load_base(resolved_from(made)).config.vocab_size == 512  # type: ignore[union-attr]


@every_case("tie", [False, True])
def test_a_resize_that_ties_weights_is_refused(tie: bool, tiny_root: Path) -> None:
    """transformers 5.23.0: BART's set_input_embeddings gives encoder and decoder one table, also where they have their
    own, and the exported config says that they are several. Remove this and the refusal when untied weights stay so."""
    made = recipe_dict(tiny_root, strategy={"name": "single"}, machine={"processes": 1})
    made["model"] = {"task": "seq2seq-lm", "config": EVERY_FAMILY["bart"]["config"] | {"tie_word_embeddings": tie}}
    made["tokenizer"] = {"path": "none", "add_tokens": TOKENS}
    made["data"] = {"train": "built-in", "format": "prompt-completion", "max_length": 48}
    resolved = resolved_from(made)
    if tie:
        assert load_base(resolved).get_input_embeddings().weight.shape[0] == 98  # type: ignore[operator]
        return
    with pytest.raises(InputError, match=r"one weight of model\.shared\.weight, model\.encoder\.embed_tokens\.weight"):
        load_base(resolved)


def train_job(resolved: Resolved, steps: int, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    session = open_session(resolved)
    engine, progress = session.engine, Progress()
    first = {name: engine.full_weight(name) for name in engine.shapes}
    windows = list(islice(loader_for(resolved, session.accelerator.process_index), steps))
    train(session, windows, steps, progress, lambda pending: None)
    checkpoint.save(session, Path(folder), progress)
    return first, {name: engine.full_weight(name) for name in engine.shapes}


@pytest.mark.parametrize(
    ("strategy", "tie"),
    [("ddp", True), ("zero3", False), ("fsdp2", False), pytest.param("zero2", True, marks=pytest.mark.nightly)],
)
def test_rows_train_beside_an_adapter_and_hosts_load_them(
    strategy: str, tie: bool, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    resolved = resolved_from(recipe(tiny_root, strategy, tie=tie, adapter=LORA))
    checkpoints = tmp_path / "run" / "checkpoints"
    (first, last), _ = group.run(train_job, resolved, 3, str(checkpoints))
    rows = {name: tensor for name, tensor in last.items() if "trainable_tokens_delta" in name}
    assert len(rows) == (1 if tie else 2)
    # In every sample, so that its input row has a gradient; a head's row has one wherever there is a loss.
    assert all(not torch.equal(tensor[0], first[name][0]) for name, tensor in rows.items())
    export(tmp_path / "run", tmp_path / "merged", merged=True)
    export(tmp_path / "run", tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    trained = next(tensor for name, tensor in rows.items() if "embed_tokens" in name)
    ids = tokenizer.convert_tokens_to_ids([*TOKENS, "<|im_end|>"])
    assert torch.equal(merged.get_input_embeddings().weight[ids], trained)
    base = load_base(resolved, tokenizer.pad_token_id)
    base.save_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    inputs = tokenizer("<tool>a model</tool>", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(adapted(**inputs).logits, merged(**inputs).logits, rtol=0, atol=1e-5)


@every_case(
    ("sections", "message"),
    [
        ({"adapter": {"method": "ia3"}}, r"under adapter\.method: ia3 the rows .* adapter\.modules_to_save"),
        ({"model": {"own": {"freeze": ["embed_tokens"]}}}, r"in embed_tokens would stay .* drawn: model\.freeze"),
        (
            {"tie": True, "adapter": LORA | {"modules_to_save": ["lm_head"]}},
            r"trains lm_head, whose weight is that of embed_tokens.*modules_to_save: \[embed_tokens\], or leave",
        ),
        ({"adapter": LORA, "loss": "fused"}, r"loss: fused .* rows of new tokens in it; set loss: plain"),
    ],
)
def test_rows_that_would_not_train_are_refused(sections: dict[str, Any], message: str, tiny_root: Path) -> None:
    with pytest.raises(InputError, match=message):
        open_session(resolved_from(recipe(tiny_root, "single", **sections)))


def test_refused_by_the_recipe(tiny_root: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.add_tokens: PEFT 0\.21\.2 reads the embedding outside"):
        resolved_from(recipe(tiny_root, "fsdp1", adapter=LORA))
    made = recipe(tiny_root, "single")
    made["tokenizer"]["add_special_tokens"] = ["<tool>"]
    with pytest.raises(Exception, match="'<tool>' is added twice"):
        resolved_from(made)


@every_case("adapter", [None, LORA])
def test_plan_counts_the_rows(adapter: Any, tiny_root: Path) -> None:
    resolved = resolved_from(recipe(tiny_root, "single", adapter=adapter))
    made = open_session(resolved)
    trained = sum(p.numel() for p in made.engine.parameters.values())
    units = build(resolved).holdings.units()
    assert sum(w.numel * count for weights, count in units for w in weights if w.trains) == trained
