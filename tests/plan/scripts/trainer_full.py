"""Full fine-tuning with the Trainer, as the course of Hugging Face writes it: constants on top, argparse below."""

import argparse

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

MODEL = "HuggingFaceTB/SmolLM2-135M"
MAX_LENGTH = 512


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--output", default="out")
    return parser.parse_args()


def main():
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32", attn_implementation="sdpa")

    def encode(batch):
        return tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH)

    rows = load_dataset("json", data_files="train.jsonl")["train"].map(encode, batched=True)
    arguments = TrainingArguments(
        output_dir=args.output,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        optim="adamw_torch",
        bf16=True,
        max_steps=100,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()


if __name__ == "__main__":
    main()
