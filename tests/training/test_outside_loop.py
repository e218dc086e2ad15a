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
CLASSES = {"task": "sequence-classification", "num_labels": 3}
TARGETS = {"task": "seq2seq-lm"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "qwen2": ("qwen2", {}), "gpt2": ("gpt2", {}), "gemma2": ("gemma2", {}),
    "mixtral": ("mixtral", {}), "opt": ("opt", {}), "llama with an adapter": ("llama", {}),
    "llama, classes": ("llama", CLASSES), "bert, classes": ("bert", CLASSES), "bart, classes": ("bart", CLASSES),
    "t5, targets": ("t5", TARGETS), "bart, targets": ("bart", TARGETS),
}  # fmt: skip
AUTO = {
    None: "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}


def published(folder: Path, family: str, spec: dict[str, Any]) -> Path:
    """Language models pad with </s>, which ends their texts, and their config names no padding token."""
    import transformers

    named = family in ("bert", "bart", "t5")
    tokenizer = processors.letters(special=())
    tokenizer.add_special_tokens({"eos_token": "</s>", "pad_token": "<pad>" if named or spec else "</s>"})
    tokenizer.save_pretrained(folder)
    config = EVERY_FAMILY[family]["config"] | {"eos_token_id": tokenizer.eos_token_id, "vocab_size": 400}
    if named:
        config |= {"pad_token_id": tokenizer.pad_token_id, "decoder_start_token_id": tokenizer.pad_token_id}
    config |= {key: 0.0 for key in config if "drop" in key} | dict.fromkeys(DROPOUTS, 0.0)
    config |= {"dropout_rate": 0.0} if family == "t5" else {}
    labels = {"num_labels": spec["num_labels"]} if spec.get("num_labels") else {}
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**config, **labels)
    getattr(transformers, AUTO[spec.get("task")]).from_config(made).save_pretrained(folder)
    return folder


def adapted(folder: Path) -> Path:
    """An adapter as PEFT saves it, that changes what its base answers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(folder / "adapter")
    return folder / "adapter"


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def by_hand(
    folder: Path, spec: dict[str, Any], samples: list[dict[str, Any]], adapter: Path | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights after the last step."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, AUTO[spec.get("task")]).from_pretrained(folder, attn_implementation="eager")
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    model.train()
    if spec and model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # transformers asks for it
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=LR, momentum=0.9, weight_decay=DECAY)

    def encoded(text: str) -> list[int]:
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    losses = []
    for step in range(STEPS):
        window = samples[2 * MICRO * step : 2 * MICRO * (step + 1)]
        sums, count = [], 0
        for micro in (window[:MICRO], window[MICRO:]):
            ids = [encoded(one.get("prompt", one.get("text"))) for one in micro]
            inputs, mask = padded(ids, tokenizer.pad_token_id), padded([[1] * len(row) for row in ids], 0)
            if "label" in micro[0]:
                labels = torch.tensor([one["label"] for one in micro])
                supervised = len(micro)
            elif "completion" in micro[0]:
                labels = padded([encoded(one["completion"]) for one in micro], -100)
                supervised = int((labels != -100).sum())
            else:
                labels = inputs.masked_fill(mask == 0, -100)
                supervised = int((labels[:, 1:] != -100).sum())
            sums.append(model(input_ids=inputs, attention_mask=mask, labels=labels).loss * supervised)
            count += supervised
        loss = sum(sums) / count
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in trained.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_a_loop_by_hand(case: str, tiny_root: Path, tmp_path: Path) -> None:
    family, spec = CASES[case]
    folder = published(tmp_path / "model", family, spec)
    adapter = adapted(folder) if "adapter" in case else None
    words = [text.replace(" </s>", "") for text in WORDS] if (family, spec) == ("bart", CLASSES) else WORDS
    samples: list[dict[str, Any]] = [{"text": words[at % len(words)]} for at in range(2 * MICRO * STEPS)]
    if spec == CLASSES:
        samples = [one | {"label": at % 3} for at, one in enumerate(samples)]
    if spec == TARGETS:
        samples = [{"prompt": one["text"], "completion": words[at % 4]} for at, one in enumerate(samples)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    recipe = recipe_dict(
        tiny_root, strategy={"name": "single"}, machine={"processes": 1}, precision="fp32",
        batch={"micro_size": MICRO, "accumulation": 2}, schedule={"name": "constant", "warmup_steps": 0},
        optimizer={"name": "sgd", "momentum": 0.9, "lr": LR, "weight_decay": DECAY, "decay": "all",
                   "max_grad_norm": None},
        adapter=None if adapter is None else {"path": str(adapter)},
    )  # fmt: skip
    recipe["model"] = {"path": str(folder), "attention": "eager"} | spec
    recipe["tokenizer"] = {}
    recipe["data"] |= {"train": str(tmp_path / "train.jsonl"), "shuffle": False}
    recipe["data"] |= {"format": "prompt-completion"} if spec == TARGETS else {}
    run = train_job(resolved_from(recipe), STEPS)
    assert run is not None
    losses, weights = by_hand(folder, spec, samples, adapter)
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert run.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.allclose(run.weights[name], weight, rtol=1e-4, atol=1e-6), name  # a few roundings a step
