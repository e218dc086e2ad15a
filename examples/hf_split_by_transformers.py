"""The transformers Trainer on a model that transformers splits over the processes by itself (FSDP2).

toolkit config RECIPE -o launch --for transformers
accelerate launch --config_file launch/accelerate.yaml examples/hf_split_by_transformers.py launch MODEL [lora]

MODEL: a folder or a hub id. Without a GPU start it with launch/launch-script.sh in place of accelerate launch ...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from hf_trainer import Ragged, pad
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    arguments = json.loads((folder / "training_args.json").read_text())
    split = json.loads((folder / "distributed_config.json").read_text())
    training_arguments = TrainingArguments(**arguments)
    # Weights in float32: the optimizer updates them, and FSDP2 computes in bf16 where the file says so.
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, distributed_config=split)
    if "lora" in sys.argv[3:]:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    trainer = Trainer(model=model, args=training_arguments, train_dataset=Ragged(), data_collator=pad)
    trainer.train()
    whole = sum(parameter.numel() for parameter in model.parameters())
    own = sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in model.parameters())
    print(f"rank {os.environ.get('RANK', 0)} holds {own} of {whole} elements", flush=True)
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        print("losses", [round(entry["loss"], 5) for entry in history if "loss" in entry])
        print("norms", [round(float(entry["grad_norm"]), 5) for entry in history if "grad_norm" in entry])
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
