"""The row of the padding token in the embedding trains as in transformers' own model: its config has no padding token,
and the tokenizer pads with the token that ends every turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import processors
from jobs import resolved_from
from tiny import LLAMA, recipe_dict
from toolkit.training.session import open_session


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and its tokenizer, as they are published: the tokenizer pads with </s>, the config says nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = processors.letters(special=())
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = {key: value for key, value in LLAMA.items() if key not in ("pad_token_id", "vocab_size")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, vocab_size=len(tokenizer) + 5))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def recipe(root: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    rows = folder.parent / "train.jsonl"
    rows.write_text('{"text": "a b </s> c d"}\n{"text": "b"}\n' * 4)
    one: dict[str, Any] = {"strategy": {"name": "single"}, "machine": {"processes": 1}, "precision": "fp32"}
    made = recipe_dict(root, **one | sections)
    made["model"] = {"path": str(folder)}
    made["tokenizer"] = {}
    made["data"] |= {"train": str(rows)}
    made["run"] |= {"output_dir": str(folder.parent / "run"), "max_steps": 2}
    return made


def test_its_gradient_is_transformers_own(tiny_root: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    session = open_session(resolved_from(recipe(tiny_root, folder)))
    pad = session.tokenizer.pad_token_id
    ids = torch.tensor([[5, 6, pad, 7, 8, pad]])
    found = []
    for model in (session.engine.model, AutoModelForCausalLM.from_pretrained(folder)):
        model(input_ids=ids, labels=ids).loss.backward()
        found.append(model.get_input_embeddings().weight.grad)
    assert found[1][pad].norm() > 0
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-7)
