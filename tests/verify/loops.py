"""Loops that are not ours: plain Accelerate, transformers' Trainer; a right and a wrong one of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from toolkit.verification.loops.recorder import Recorder


def model_and_batches(count: int) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A tiny Llama with dropout, and ragged right-padded batches of two rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
            attention_dropout=0.1, use_cache=False,
        )
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    batches = []
    for at in range(count):
        width = 5 + 4 * (at % 3)
        ids = torch.randint(3, 64, (2, width), generator=draw)
        labels = ids.clone()
        labels[1, width // 2 :] = -100
        mask = torch.ones_like(ids)
        mask[1, width // 2 :] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return model, batches


def _launched_for(kind: str) -> None:
    """What `accelerate launch` would have set, in a group of processes that has served other loops before."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(kind == "DEEPSPEED").lower()
    os.environ["ACCELERATE_USE_FSDP"] = str(kind == "FSDP").lower()


def _connected() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")


def _window(batches: list[dict[str, torch.Tensor]], step: int) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    """This rank's two micro-batches of a step, and the supervised tokens of all ranks'."""
    import torch.distributed as dist

    window = batches[4 * step + 2 * dist.get_rank() :][:2]
    tokens = torch.tensor(float(sum((b["labels"][:, 1:] != -100).sum() for b in window)))
    dist.all_reduce(tokens)
    return window, tokens


def accelerate_loop(folder: str, right: bool) -> None:
    """Three steps of two micro-batches on each of two ranks. Wrong: every micro-batch's own mean, as most do."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    _launched_for("MULTI_GPU")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, batches = model_and_batches(12)
    recorder = Recorder(folder, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    recorder.attach(model, optimizer)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        window, tokens = _window(batches, step)
        for batch in window:
            with accelerator.accumulate(model):
                output = model(**batch)
                loss = output.loss
                if right:
                    # accelerate divides by the accumulation, DDP by the ranks.
                    loss = loss * (batch["labels"][:, 1:] != -100).sum() * 4 / tokens
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


def same_samples(folder: str) -> None:
    """Two ranks under DDP whose sampler does not know of ranks."""
    from torch.nn.parallel import DistributedDataParallel

    _launched_for("NO")
    _connected()
    model, batches = model_and_batches(3)
    recorder = Recorder(folder, model)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    recorder.attach(wrapped, optimizer)
    for batch in batches:
        wrapped(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp1_loop(folder: str) -> None:
    """Three right steps of two micro-batches on each of two ranks, all parameters in one unit."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    _launched_for("NO")
    _connected()
    model, batches = model_and_batches(12)
    recorder = Recorder(folder, model)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, weight_decay=0.1)
    recorder.attach(wrapped, optimizer)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        window, tokens = _window(batches, step)
        for batch in window:
            loss = wrapped(**batch).loss * (batch["labels"][:, 1:] != -100).sum() * 2 / tokens
            loss.backward()
        wrapped.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def fsdp2_loop(folder: str) -> None:
    """Three right steps of two micro-batches on each of two ranks, the parameters split in their place."""
    import torch.distributed as dist
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from toolkit.strategies.engines.connect import connect_without_gpu

    _launched_for("FSDP")
    connect_without_gpu("FSDP")
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    )
    model, batches = model_and_batches(12)
    recorder = Recorder(folder, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    recorder.attach(model, optimizer)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        window, tokens = _window(batches, step)
        for batch in window:
            # FSDP averages over the ranks.
            loss = model(**batch).loss * (batch["labels"][:, 1:] != -100).sum() * 2 / tokens
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def zero_loop(folder: str, stage: int, bf16: bool, right: bool = True) -> None:
    """Three steps of two micro-batches on each of two ranks under DeepSpeed, by Accelerate."""
    import torch.distributed as dist
    from accelerate import Accelerator, DeepSpeedPlugin

    from toolkit.strategies.engines.connect import connect_without_gpu

    _launched_for("DEEPSPEED")
    connect_without_gpu("DEEPSPEED")
    config = {
        "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": bf16}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=2, mixed_precision="bf16" if bf16 else "no"
    )
    model, batches = model_and_batches(12)
    recorder = Recorder(folder, model)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-3
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    recorder.attach(model, optimizer)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        window, tokens = _window(batches, step)
        for batch in window:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                if right:
                    # DeepSpeed divides by the accumulation and by the ranks.
                    loss = loss * (batch["labels"][:, 1:] != -100).sum() * 4 / tokens
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


def sft_loop(folder: Path, tokenizer: str) -> None:
    """TRL's SFTTrainer with an adapter, three steps of two micro-batches on one process."""
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    _launched_for("NO")
    AcceleratorState._reset_state(reset_partial_state=True)
    model, batches = model_and_batches(12)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    rows = []
    for batch in batches:
        for row in (0, 1):
            length = int(batch["attention_mask"][row].sum())
            rows.append({key: batch[key][row, :length].tolist() for key in ("input_ids", "labels")})
    recorder = Recorder(folder, model)
    arguments = SFTConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=1e-3, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        callbacks=[recorder.callback()],
    )
    trainer.train()


def trainer_loop(folder: Path, deepspeed: dict[str, Any] | None = None) -> None:
    """transformers' Trainer, three steps of two micro-batches on one process, or on two under DeepSpeed."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    from toolkit.strategies.engines.connect import connect_without_gpu

    _launched_for("DEEPSPEED" if deepspeed else "NO")
    AcceleratorState._reset_state(reset_partial_state=True)
    if deepspeed:
        connect_without_gpu("DEEPSPEED")
    model, batches = model_and_batches(12)
    rows = [{key: tensor[row] for key, tensor in batch.items()} for batch in batches for row in (0, 1)]

    def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        width = max(len(e["input_ids"]) for e in examples)
        fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            key: torch.stack([torch.nn.functional.pad(e[key], (0, width - len(e[key])), value=v) for e in examples])
            for key, v in fill.items()
        }

    recorder = Recorder(folder, model)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=1e-3, report_to=[], use_cpu=not deepspeed, save_strategy="no", disable_tqdm=True,
        weight_decay=0.1, deepspeed=deepspeed,
    )  # fmt: skip
    if deepspeed:
        connect_without_gpu("DEEPSPEED")
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[recorder.callback()]
    )
    trainer.train()
