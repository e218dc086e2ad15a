"""A folder as models are published, trained by a recipe and by a loop that shares nothing with the toolkit: it loads
the model by ``from_pretrained``, encodes the texts by the tokenizer, and takes the loss that the model returns.

The plain loop of ``verify`` builds its model as a run does. What both would build otherwise than transformers shows
here: an embedding whose row for the padding token trained nothing, where the tokenizer pads with the token that ends
every turn and the config has no padding token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import processors
from families import EVERY_FAMILY
from jobs import resolved_from, train_job
from tiny import recipe_dict

STEPS, MICRO, LR, DECAY = 3, 2, 0.1, 0.1
WORDS = ["a b </s> c d", "b c", "d", "a </s> a", "c d a", "b"]
"""An encoder-decoder that classifies takes one </s> in a text alone."""
DROPOUTS = (
    "dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "attn_pdrop", "embd_pdrop", "resid_pdrop",
)  # fmt: skip
CLASSIFIER = {"task": "sequence-classification", "num_labels": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "qwen2": ("qwen2", {}), "gpt2": ("gpt2", {}), "gemma2": ("gemma2", {}),
    "mixtral": ("mixtral", {}), "opt": ("opt", {}), "llama, classes": ("llama", CLASSIFIER),
    "bert, classes": ("bert", CLASSIFIER), "bart, classes": ("bart", CLASSIFIER | {"num_labels": 3}),
}  # fmt: skip


def published(folder: Path, family: str, spec: dict[str, Any]) -> Path:
    """Language models pad with </s>, which ends their texts, and their config names no padding token."""
    import transformers

    named = family in ("bert", "bart")
    tokenizer = processors.letters(special=())
    tokenizer.add_special_tokens({"eos_token": "</s>", "pad_token": "<pad>" if named or spec else "</s>"})
    tokenizer.save_pretrained(folder)
    config = EVERY_FAMILY[family]["config"] | {"eos_token_id": tokenizer.eos_token_id, "vocab_size": 400}
    config |= {"pad_token_id": tokenizer.pad_token_id} if named else {}
    config |= {key: 0.0 for key in config if "drop" in key} | dict.fromkeys(DROPOUTS, 0.0)
    labels = {"num_labels": spec["num_labels"]} if spec else {}
    torch.manual_seed(0)
    kind = "AutoModelForSequenceClassification" if spec else "AutoModelForCausalLM"
    made = transformers.AutoConfig.for_model(**config, **labels)
    getattr(transformers, kind).from_config(made).save_pretrained(folder)
    return folder


def by_hand(folder: Path, spec: dict[str, Any], words: list[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights after the last step."""
    import transformers

    kind = "AutoModelForSequenceClassification" if spec else "AutoModelForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager")
    model.train()
    if spec and model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # transformers asks for it
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    losses = []
    for step in range(STEPS):
        rows = list(range(2 * MICRO * step, 2 * MICRO * (step + 1)))
        micros = [[at % len(words) for at in rows[:MICRO]], [at % len(words) for at in rows[MICRO:]]]
        sums, count = [], 0
        for micro in micros:
            ids = [[*tokenizer(words[at])["input_ids"], tokenizer.eos_token_id] for at in micro]
            width = max(map(len, ids))
            inputs = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
            labels = torch.tensor([at % 2 for at in micro]) if spec else inputs.masked_fill(mask == 0, -100)
            supervised = len(micro) if spec else int((labels[:, 1:] != -100).sum())
            sums.append(model(input_ids=inputs, attention_mask=mask, labels=labels).loss * supervised)
            count += supervised
        loss = sum(sums) / count
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_a_loop_by_hand(case: str, tiny_root: Path, tmp_path: Path) -> None:
    family, spec = CASES[case]
    folder = published(tmp_path / "model", family, spec)
    words = [text.replace(" </s>", "") for text in WORDS] if family == "bart" else WORDS
    rows = [words[at % len(words)] for at in range(2 * MICRO * STEPS)]
    labelled = [{"text": text} | ({"label": at % len(words) % 2} if spec else {}) for at, text in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    recipe = recipe_dict(
        tiny_root, strategy={"name": "single"}, machine={"processes": 1}, precision="fp32",
        batch={"micro_size": MICRO, "accumulation": 2}, schedule={"name": "constant", "warmup_steps": 0},
        optimizer={"name": "sgd", "momentum": 0.9, "lr": LR, "weight_decay": DECAY, "decay": "all",
                   "max_grad_norm": None},
    )  # fmt: skip
    recipe["model"] = {"path": str(folder), "attention": "eager"} | spec
    recipe["tokenizer"] = {}
    recipe["data"] |= {"train": str(tmp_path / "train.jsonl"), "shuffle": False}
    run = train_job(resolved_from(recipe), STEPS)
    assert run is not None
    losses, weights = by_hand(folder, spec, words)
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert run.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.allclose(run.weights[name], weight, rtol=1e-4, atol=1e-6), name  # a few roundings a step
