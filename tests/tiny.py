"""Small real things that the tests train on: a byte-level tokenizer, ragged text, models of many families."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = [
    "the",
    "a",
    "model",
    "shard",
    "gradient",
    "of",
    "and",
    "rank",
    "loss",
    "is",
    "reduced",
    "by",
    "batch",
    "over",
    "token",
    "step",
    "every",
    "in",
    "train",
]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}


def make_tokenizer(folder: Path) -> Path:
    """A byte-level BPE with bos, eos and pad, trained on the words below, saved as from_pretrained loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


def make_text(file: Path, samples: int, seed: int = 0) -> Path:
    """Ragged lines: 3 to 24 words, so that micro-batches and ranks differ in their tokens."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(3, 24))) for _ in range(samples)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return file


def recipe_dict(root: Path, **sections: Any) -> dict[str, Any]:
    """A recipe over the files that the ``tiny`` fixture made; sections are merged over it."""
    recipe: dict[str, Any] = {
        "model": {"config": LLAMA},
        "tokenizer": {"path": str(root / "tokenizer")},
        "data": {"train": str(root / "train.jsonl"), "max_length": 48, "workers": 0},
        "batch": {"micro_size": 2, "accumulation": 2},
        "optimizer": {"lr": 1.0e-3, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "precision": "fp32",
        "strategy": {"name": "ddp"},
        "machine": {"device": "cpu", "processes": 2},
        "run": {"max_steps": 4, "seed": 3, "output_dir": str(root / "run"), "save_every": 0, "eval_every": 0},
    }
    for key, value in sections.items():
        recipe[key] = recipe.get(key, {}) | value if isinstance(value, dict) and key != "adapter" else value
    return recipe


def make_llama(attention: str = "sdpa") -> tuple[Any, list[Any]]:
    """The model of ``LLAMA``, the same at every call, and its blocks by name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA), attn_implementation=attention)
    model.config.use_cache = False
    return model.train(), [(n, m) for n, m in model.named_modules() if type(m).__name__ == "LlamaDecoderLayer"]
