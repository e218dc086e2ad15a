"""Checkpoints that other tools write: one tiny model, the same batches, and what each package saves of it.

Every function trains for `Plan.steps` optimizer steps and returns nothing; those with ``rank`` run on both ranks of a
process group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

LR, DECAY = 1e-3, 0.1
VOCAB = 61  # odd: shards are padded
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Plan:
    """What is trained, and one defect at most."""

    steps: int = 3
    scale: float = 1.0
    decay: float = DECAY
    zeroed: str = ""
    """A parameter whose gradient is zero."""
    bf16: bool = False
    tied: bool = False
    frozen: bool = False
    """The embedding is frozen."""
    lr: float = LR
    sub_groups: bool = False
    """ZeRO-3 splits its flat parameters into several."""
    constant: bool = False
    """The learning rate does not fall."""
    vocab: int = VOCAB


def make_model(plan: Plan) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**(MODEL | {"tie_word_embeddings": plan.tied, "vocab_size": plan.vocab}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.config.use_cache = False
    if plan.frozen:
        model.get_input_embeddings().requires_grad_(False)
    return model.train()


def rows(step: int, rank: int) -> torch.Tensor:
    """Two rows of equal length: the mean over both ranks is the mean over all tokens."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCAB, (2, 11), generator=draw)


def make_optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": plan.decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.lr)


def make_schedule(optimizer: Any, plan: Plan) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if plan.constant else 1.0 - step / 10)


def plain(file: Path, plan: Plan = Plan(), named: bool = False) -> None:
    """A loop in plain torch on one process, both ranks' rows one after another."""
    model = make_model(plan)
    optimizer = make_optimizer(model, plan)
    schedule = make_schedule(optimizer, plan)
    for step in range(plan.steps):
        for rank in (0, 1):
            ids = rows(step, rank)
            with torch.autocast("cpu", torch.bfloat16, enabled=plan.bf16):
                (model(input_ids=ids, labels=ids).loss * plan.scale / 2).backward()
        if plan.zeroed:
            for name, parameter in model.named_parameters():
                if name == plan.zeroed and parameter.grad is not None:
                    parameter.grad.zero_()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    file.parent.mkdir(parents=True, exist_ok=True)
    saved = {"model": model.state_dict(), "scheduler": schedule.state_dict(), "step": plan.steps}
    torch.save(saved | {"optimizer": optimizer.state_dict()}, file)


def _launched_for(kind: str) -> None:
    """What `accelerate launch` sets, in a group of processes that has served other loops before."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(kind == "DEEPSPEED").lower()
    os.environ["ACCELERATE_USE_FSDP"] = str(kind == "FSDP").lower()
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    if kind != "NO":
        from toolkit.strategies.engines.connect import connect_without_gpu

        connect_without_gpu(kind)


def zero_config(stage: int, plan: Plan) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage} | ({"sub_group_size": 3000} if plan.sub_groups else {}),
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
        "bf16": {"enabled": plan.bf16}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1.0 where this is left out
    }  # fmt: skip


def deepspeed_engine(folder: Path, stage: int, plan: Plan) -> None:
    """DeepSpeed without anything around it: ``engine.save_checkpoint``."""
    import deepspeed
    import torch.distributed as dist

    _launched_for("DEEPSPEED")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = make_model(plan)
    optimizer = make_optimizer(model, plan)
    schedule = make_schedule(optimizer, plan)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=zero_config(stage, plan)
    )
    for step in range(plan.steps):
        ids = rows(step, dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss * plan.scale)
        engine.step()
    engine.save_checkpoint(str(folder))
    dist.barrier()


def accelerate_state(folder: Path, kind: str, full: bool, plan: Plan) -> None:
    """`Accelerator.save_state`. ``kind``: plain, zero1 to zero3, fsdp1 or fsdp2."""
    import torch.distributed as dist
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin

    options: dict[str, Any] = {}
    _launched_for("NO")
    model = make_model(plan)  # first: under ZeRO-3 transformers would split and draw the weights anew
    if kind.startswith("zero"):
        _launched_for("DEEPSPEED")
        config = zero_config(int(kind[-1]), plan)
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
    elif kind.startswith("fsdp"):
        _launched_for("FSDP")
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(kind[-1]),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type="FULL_STATE_DICT" if full else "SHARDED_STATE_DICT",
            use_orig_params=True,
            sync_module_states=False,
            cpu_ram_efficient_loading=False,
        )
    else:
        _launched_for("NO")
        options["cpu"] = True
    accelerator = Accelerator(mixed_precision="bf16" if plan.bf16 else "no", **options)
    if kind == "fsdp1":
        model = accelerator.prepare(model)
        optimizer = make_optimizer_by_name(model, plan)
        optimizer = accelerator.prepare(optimizer)
        schedule = make_schedule(optimizer.optimizer, plan)
    else:
        optimizer = make_optimizer(model, plan)
        schedule = make_schedule(optimizer, plan)
        model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(schedule)
    for step in range(plan.steps):
        ids = rows(step, dist.get_rank())
        accelerator.backward(model(input_ids=ids, labels=ids).loss * plan.scale)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()


def make_optimizer_by_name(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """FSDP1's parameters are flat: what decays is selected by name."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if "norm" not in name], "weight_decay": plan.decay},
        {"params": [p for name, p in trained if "norm" in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.lr)


def trainer(folder: Path, kind: str, plan: Plan, adapter: bool = False) -> None:
    """transformers' Trainer, alone or on two ranks; writes ``checkpoint-N``."""
    import torch.distributed as dist
    from transformers import Trainer, TrainingArguments

    alone = kind == "single"
    options: dict[str, Any] = {}
    if kind.startswith("zero"):
        options["deepspeed"] = zero_config(int(kind[-1]), plan)
        _launched_for("DEEPSPEED")
    elif kind.startswith("fsdp"):
        options["fsdp"] = "full_shard auto_wrap"
        options["fsdp_config"] = {
            "version": int(kind[-1]), "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False, "sync_module_states": False,
        }  # fmt: skip
        _launched_for("FSDP")
    else:
        _launched_for("NO")
    model = make_model(plan)
    if adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
        )
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4 if alone else 2, max_steps=plan.steps,
        learning_rate=plan.lr, weight_decay=plan.decay, max_grad_norm=0.0, report_to=[], use_cpu=alone,
        disable_tqdm=True, save_steps=1 if alone else plan.steps, logging_steps=1, warmup_steps=0,
        lr_scheduler_type="constant", bf16=plan.bf16, dataloader_drop_last=True, **options,
    )  # fmt: skip
    if not alone:
        _launched_for("DEEPSPEED" if kind.startswith("zero") else "FSDP")
    examples = []
    for step in range(plan.steps):
        for rank in (0, 1):
            examples += [{"input_ids": row, "labels": row} for row in rows(step, rank)]

    class InOrder(Trainer):  # type: ignore[misc,unused-ignore]
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(examples)  # type: ignore[arg-type]

    InOrder(model=model, args=arguments, train_dataset=examples).train()
    if not alone:
        dist.barrier()


def universal(source: Path, target: Path) -> None:
    """DeepSpeed's own script over a folder of ``deepspeed_engine``."""
    from types import SimpleNamespace

    from deepspeed.checkpoint import ds_to_universal

    tag = (source / "latest").read_text().strip()
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(source / tag), output_folder=str(target / f"{tag}_universal"), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip
