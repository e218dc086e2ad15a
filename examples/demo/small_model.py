"""Train a small base model from random weights on real text, fine-tune it with LoRA, and evaluate the exported adapter.

Two recipes in this folder define the training. The script makes the data, runs the same commands as a user, and
evaluates the result with plain transformers and PEFT, without the toolkit.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from corpus import write_corpus
from steps import RECIPES, ROOT, say, toolkit

from toolkit.model.silence import silence_libraries


def main() -> None:
    silence_libraries()
    say("1/6 data: functions and docstrings of Python's standard library")
    counts = write_corpus(ROOT / "data")
    print("   " + ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    say("2/6 a byte-level tokenizer of 2,048 tokens")
    train_tokenizer()
    say("3/6 a base model: every weight, fsdp2, two processes")
    toolkit("train", f"{RECIPES}/base.yaml")
    toolkit("export", f"{ROOT}/base", "-o", f"{ROOT}/base-model")
    say("4/6 LoRA on it: docstrings from signatures, zero2, two processes")
    toolkit("train", f"{RECIPES}/lora.yaml")
    toolkit("export", f"{ROOT}/lora", "-o", f"{ROOT}/adapter")
    say("5/6 what it learned, seen with plain transformers and PEFT")
    show_result()
    say("6/6 the exported adapter against the checkpoint")
    compare_logits()


def train_tokenizer() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (json.loads(line)["text"] for line in (ROOT / "data/source.jsonl").open(encoding="utf-8"))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(ROOT / "tokenizer")


def show_result() -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "adapter")
    base = AutoModelForCausalLM.from_pretrained(ROOT / "base-model").eval()
    pairs = [json.loads(line) for line in (ROOT / "data/docstrings-held-out.jsonl").open(encoding="utf-8")]
    before = held_out_loss(base, tokenizer, pairs)
    tuned = PeftModel.from_pretrained(base, str(ROOT / "adapter")).eval()
    after = held_out_loss(tuned, tokenizer, pairs)
    print(f"   held-out loss of the docstring, per token: {before:.3f} before, {after:.3f} after")
    for prompt in ("def read_file(path, encoding='utf-8'):", "def close(self):"):
        ids = tokenizer(f'{prompt}\n    """', return_tensors="pt").input_ids
        with torch.no_grad():
            made = tuned.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
        print("   " + tokenizer.decode(made[0], skip_special_tokens=True).replace("\n", "\n   "))
    if after >= before:
        sys.exit("the fine-tune did not lower the held-out loss")


def held_out_loss(model: Any, tokenizer: Any, pairs: list[dict[str, str]]) -> float:
    """Mean over tokens of the docstrings, one sample after another, without batching or padding."""
    import torch

    total, count = 0.0, 0
    for pair in pairs:
        prompt = tokenizer(pair["prompt"]).input_ids
        ids = [*tokenizer(pair["prompt"] + pair["completion"]).input_ids, tokenizer.eos_token_id][:128]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        if len(ids) > len(prompt):
            target = torch.tensor(ids[len(prompt) :])
            total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
            count += len(target)
    return total / count


def compare_logits() -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from toolkit.recipe.load import load_recipe
    from toolkit.strategies import resolve
    from toolkit.training.export import trained_model
    from toolkit.training.finding import newest

    overrides = ["strategy.name=single", "machine.processes=1"]
    resolved = resolve(load_recipe(RECIPES / "lora.yaml", overrides), "lora.yaml")
    checkpoint = newest(ROOT / "lora/checkpoints")
    assert checkpoint is not None
    live = trained_model(resolved, checkpoint)
    base = AutoModelForCausalLM.from_pretrained(ROOT / "base-model")
    loaded = PeftModel.from_pretrained(base, str(ROOT / "adapter")).eval()
    ids = torch.randint(3, 2048, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (live(input_ids=ids).logits - loaded(input_ids=ids).logits).abs().max().item()
    print(f"   largest difference of a logit: {difference:.1e}")
    if difference > 1e-5:
        sys.exit("from_pretrained and PEFT do not give the logits that were trained")
