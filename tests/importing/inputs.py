"""A tiny model with random weights, its tokenizer, and data in the layouts that the tools read."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tiny import LLAMA, WORDS, make_tokenizer

SAMPLES = 12
"""One window: the tools order samples differently, and a step over all of them has no order."""


def make_inputs(root: Path) -> Path:
    """``root/model`` (weights, tokenizer), ``root/text.jsonl`` and ``root/pairs.jsonl``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model(**LLAMA, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "model")
    make_tokenizer(root / "model")
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(root / "model")
    draw = random.Random(0)

    def some(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    _write(root / "text.jsonl", [{"text": some(3, 24)} for _ in range(SAMPLES)])
    _write(root / "pairs.jsonl", [{"prompt": some(3, 9), "completion": " " + some(2, 12)} for _ in range(SAMPLES)])
    return root


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
