"""A plain Accelerate loop with the toolkit's launch files: accelerate.yaml alone selects the strategy.

    toolkit config RECIPE -o launch
    accelerate launch --config_file launch/accelerate.yaml examples/bare_accelerate.py

It trains on ragged samples with gradient accumulation. Every supervised token of a window has the same weight in the
loss. With a folder as argument, it records its first steps there; `toolkit verify --trace FOLDER` proves them equal to
a plain loop.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.verification.loops.recorder import Recorder

ACCUMULATION, MICRO, STEPS = 2, 2, 5


def main() -> None:
    if not torch.cuda.is_available():
        from toolkit.strategies.engines.connect import connect_without_gpu

        connect_without_gpu()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
    )
    recorder = Recorder(sys.argv[1], model) if sys.argv[1:] else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": ACCUMULATION,
            "train_batch_size": MICRO * ACCUMULATION * accelerator.num_processes,
        }
    model, optimizer = accelerator.prepare(model, optimizer)
    if recorder:
        recorder.attach(model, optimizer)
    divides = accelerator.num_processes * ACCUMULATION  # backward() and the ranks' mean divide by these
    for step in range(STEPS):
        window = [sample(step, micro, accelerator.process_index) for micro in range(ACCUMULATION)]
        tokens = sum((labels[:, 1:] != -100).sum() for _, labels in window)
        tokens = accelerator.reduce(tokens.to(accelerator.device), "sum")
        window_loss = torch.zeros((), device=accelerator.device)
        for micro_batch in window:
            ids, labels = (tensor.to(accelerator.device) for tensor in micro_batch)
            with accelerator.accumulate(model):
                logits = model(input_ids=ids, labels=labels).logits[:, :-1].float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
                accelerator.backward(loss * divides / tokens)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            window_loss += loss.detach()
        accelerator.print(f"step {step + 1}  loss {(accelerator.reduce(window_loss, 'sum') / tokens).item():.6f}")
    accelerator.print(f"{accelerator.distributed_type.value} over {accelerator.num_processes} processes")
    # torch 2.13.0 without a GPU: what is still held when the interpreter ends may abort a rank (no active exception).
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


def sample(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels (2, length) int64; the length differs by rank and micro-batch."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(0, 256, (MICRO, 16 + 8 * rank + micro), generator=draw)
    labels = ids.clone()
    labels[0, : 4 + rank] = -100
    return ids, labels


if __name__ == "__main__":
    main()
