"""A script as people write them around the transformers Trainer: its flags are imported, and it runs with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from importing.trainers import losses_of


@dataclass
class ScriptArguments:
    """The script's own flags."""

    model_name_or_path: str
    train_file: str
    max_seq_length: int = 32


def main(flags: list[str]) -> list[float]:
    """Train as the flags say; returns the losses."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        HfArgumentParser,
        Trainer,
        TrainingArguments,
    )

    own, arguments = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses(flags)
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)

    def sample(text: str) -> dict[str, Any]:
        return tokenizer(text + tokenizer.eos_token, truncation=True, max_length=own.max_seq_length)

    rows = [sample(json.loads(line)["text"]) for line in Path(own.train_file).read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return losses_of(Trainer(model, arguments, data_collator=collator, train_dataset=rows))
