"""What is exported of a pretrained model is what was trained: in plain transformers and PEFT, and in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1200), pytest.mark.usefixtures("launches")]

QUESTION = [{"role": "user", "content": "Write the docstring of this Python function.\n\ndef close(self):\n    pass"}]
WORDS = 12
"""Tokens of an answer."""
LIMIT = 1e-5
"""Relative difference of all logits: an adapter in the weights rounds otherwise than beside them, in each of 30 layers.
The largest of one logit was 1e-4, of up to 35."""


def toolkit(*arguments: str, cwd: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def trained(recipe: dict[str, Any], folder: Path) -> str:
    """Train as a user does; returns what the run answered to the question at its end."""
    run = {
        "max_steps": 3,
        "sample_prompts": [QUESTION],
        "sample_max_new_tokens": WORDS,
        "save_every": 3,
        "eval_every": 3,
    }
    held_out = Path(recipe["data"]["train"]).with_name("conversations-held-out.jsonl")
    changed = {"run": recipe["run"] | run, "data": recipe["data"] | {"eval": str(held_out)}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | changed), "utf-8")
    toolkit("train", "recipe.yaml", cwd=folder)
    lines = (folder / "run/samples.jsonl").read_text("utf-8").splitlines()
    return json.loads(lines[-1])["answer"]


def generated(model: Any, tokenizer: Any) -> str:
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=WORDS, do_sample=False)
    return tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def logits(model: Any, tokenizer: Any) -> Any:
    import torch

    prompt = tokenizer.apply_chat_template(QUESTION, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        return model(**prompt).logits


def apart(found: Any, right: Any) -> float:
    """The relative difference of two tensors, in the 2-norm."""
    return ((found - right).norm() / right.norm()).item()


@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_an_adapter_beside_and_in_the_weights_answers_as_the_run_did(
    strategy: str, recipe: dict[str, Any], model: str, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    answer = trained(recipe | {"strategy": {"name": strategy}, "optimizer": {"lr": 5e-3}}, tmp_path)
    toolkit("export", "run", "-o", "adapter", cwd=tmp_path)
    toolkit("export", "run", "-o", "merged", "--merged", cwd=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model).eval()
    before = logits(base, tokenizer)
    beside = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    right = logits(beside, tokenizer)
    assert apart(before, right) > 100 * LIMIT, "it has learned nothing that would show"
    assert apart(logits(merged, tokenizer), right) < LIMIT
    assert generated(beside, tokenizer) == generated(merged, tokenizer) == answer


def test_every_weight_answers_as_the_run_did(recipe: dict[str, Any], model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    full = {"adapter": None, "optimizer": {"lr": 2.0e-5}, "strategy": {"name": "zero3"}}
    answer = trained(recipe | full, tmp_path)
    toolkit("export", "run", "-o", "exported", cwd=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    base = AutoModelForCausalLM.from_pretrained(model).eval()
    assert apart(logits(base, tokenizer), logits(exported, tokenizer)) > 100 * LIMIT
    assert exported.lm_head.weight is exported.model.embed_tokens.weight, "tied as before"
    assert generated(exported, tokenizer) == answer
