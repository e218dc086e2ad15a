"""The transformers Trainer with the toolkit's launch files: training_args.json and accelerate.yaml.

toolkit config RECIPE -o launch
accelerate launch --config_file launch/accelerate.yaml examples/hf_trainer.py launch/training_args.json
"""

from __future__ import annotations

import json
import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Ragged(Dataset[dict[str, torch.Tensor]]):
    """64 samples of random token ids, 12 to 27 tokens long."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (12 + index % 16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to the longest sample of a batch: ids with 0, labels with -100."""
    pad_to = {"input_ids": 0, "labels": -100}
    pad_sequence = torch.nn.utils.rnn.pad_sequence
    batch = {key: pad_sequence([s[key] for s in samples], True, value) for key, value in pad_to.items()}
    batch["attention_mask"] = (batch["labels"] != -100).long()
    return batch


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        arguments = json.load(file)
    if not torch.cuda.is_available():
        from toolkit.strategies.engines.connect import connect_without_gpu

        connect_without_gpu()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
    )
    training_arguments = TrainingArguments(**arguments)
    if not torch.cuda.is_available():
        connect_without_gpu()
    trainer = Trainer(model=model, args=training_arguments, train_dataset=Ragged(), data_collator=pad)
    trainer.train()
    if trainer.is_world_process_zero():
        state = trainer.accelerator.state
        print(f"{state.distributed_type.value} over {state.num_processes} processes")
        print("losses", [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry])
    trainer.model = trainer.model_wrapped = trainer.optimizer = None
    trainer.accelerator.free_memory()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
