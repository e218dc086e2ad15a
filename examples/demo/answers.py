"""What a model answers, and its loss on held-out conversations: plain transformers and PEFT, no toolkit.

    python examples/demo/answers.py MODEL CONVERSATIONS.jsonl [ADAPTER]

The last line is the loss: the mean over all tokens that the assistant writes, its end-of-turn token included.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

SHOWN = 2
SECONDS_BETWEEN_LINES = 5.0


def main(model_path: str, conversations: str, adapter: str | None = None) -> None:
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, about names that PEFT uses
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it misses kernels that nothing here calls
    torch.set_num_threads(1)  # rows are short: a second thread gains little, and costs much where its core is taken
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    rows = [json.loads(line)["messages"] for line in Path(conversations).read_text("utf-8").splitlines()]
    for messages in rows[:SHOWN]:
        show(messages, answer(model, tokenizer, messages[:-1]))
    print(f"   held-out loss: {held_out_loss(model, tokenizer, rows):.4f}")


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """What the model writes next, greedily."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def show(messages: list[dict[str, str]], text: str) -> None:
    source = messages[0]["content"].partition("\n\n")[2]
    print("\n".join(f"   | {line}" for line in source.splitlines()))
    print(f"   Python's own: {messages[1]['content']}")
    print(f"   the model:    {' '.join(text.split())}\n", flush=True)


@torch.no_grad()
def held_out_loss(model: Any, tokenizer: Any, rows: list[list[dict[str, str]]]) -> float:
    """One conversation after another, without batching or padding."""
    total, count, said = 0.0, 0, time.monotonic()
    for number, messages in enumerate(rows):
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        text = prompt + messages[-1]["content"] + tokenizer.eos_token
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        logits = model(input_ids=ids).logits[0, start - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum").item()
        count += ids.shape[1] - start
        if time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"   loss of {number + 1} of {len(rows)} held-out conversations", flush=True)
    return total / count


if __name__ == "__main__":
    main(*sys.argv[1:])
