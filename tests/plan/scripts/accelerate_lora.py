"""LoRA in a loop with accelerate, its settings in a dataclass; held-out rows have a loader of their own."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser


@dataclass
class Settings:
    model_name: str = "Qwen/Qwen2.5-0.5B"
    rows: int = 4
    lr: float = 1e-4


def collate(rows, tokenizer):
    batch = tokenizer([row["text"] for row in rows], padding=True, truncation=True, max_length=256, return_tensors="pt")
    batch["labels"] = batch["input_ids"].clone()
    return batch


def main():
    (settings,) = HfArgumentParser(Settings).parse_args_into_dataclasses()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    tokenizer = AutoTokenizer.from_pretrained(settings.model_name)
    model = AutoModelForCausalLM.from_pretrained(settings.model_name, dtype=torch.float32)
    model.gradient_checkpointing_enable()
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    train_rows, eval_rows = [{"text": "a"}] * 64, [{"text": "b"}] * 16
    loader = DataLoader(train_rows, batch_size=settings.rows, shuffle=True, collate_fn=lambda r: collate(r, tokenizer))
    eval_loader = DataLoader(eval_rows, batch_size=16, collate_fn=lambda r: collate(r, tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True)
    model, optimizer, loader, eval_loader = accelerator.prepare(model, optimizer, loader, eval_loader)
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    for batch in eval_loader:
        with torch.no_grad():
            outputs = model(**batch)


if __name__ == "__main__":
    main()
