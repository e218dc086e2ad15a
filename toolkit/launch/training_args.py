"""training_args.json: the same run for the transformers Trainer."""

from __future__ import annotations

from typing import Any

from toolkit.recipe.resolve import Resolved

_OPTIMIZERS = {"adamw8bit": "adamw_bnb_8bit"}
"""The Trainer's own name for the like: the toolkit's is not among its optimizers."""


def training_args(resolved: Resolved) -> dict[str, Any]:
    """Keyword arguments of transformers' TrainingArguments; nothing is left to its defaults that the recipe says.

    Strategy and processes are not here: the Trainer takes them from accelerate.yaml and deepspeed.json.
    """
    recipe = resolved.recipe
    run, optimizer, schedule = recipe.run, recipe.optimizer, recipe.schedule
    mixed = resolved.precision.mixed
    arguments: dict[str, Any] = {
        "output_dir": run.output_dir,
        "seed": run.seed,
        "data_seed": run.seed,
        "per_device_train_batch_size": resolved.micro_size,
        "per_device_eval_batch_size": resolved.micro_size,
        "gradient_accumulation_steps": resolved.accumulation,
        "average_tokens_across_devices": True,
        "optim": _OPTIMIZERS.get(optimizer.name) or f"adamw_torch{'_fused' if optimizer.kernel == 'fused' else ''}",
        "learning_rate": optimizer.lr,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": resolved.max_grad_norm,
        "lr_scheduler_type": "constant_with_warmup" if schedule.name == "constant" else schedule.name,
        # transformers 5 takes a share of the steps here where the value is below 1
        "warmup_steps": resolved.warmup_steps if resolved.warmup_steps is not None else schedule.warmup_ratio,
        "bf16": mixed and resolved.precision.compute == "bfloat16",
        "fp16": mixed and resolved.precision.compute == "float16",
        "dataloader_num_workers": recipe.data.workers,
        "dataloader_pin_memory": resolved.device == "cuda",
        "logging_steps": run.log_every,
        "save_strategy": "steps" if run.save_every else "no",
        "save_steps": run.save_every or 500,
        "save_total_limit": run.keep,
        "eval_strategy": "steps" if recipe.eval_interval else "no",
        "eval_steps": recipe.eval_interval or 500,
        "report_to": list(run.trackers) or ["none"],
    }
    if recipe.activation_checkpointing != "none":
        # transformers 5.17 knows this name alone; later 5.x call it activation_checkpointing and take both.
        # With adapters under ZeRO-3 the Trainer's non-reentrant checkpoints end in a CheckpointError (peft 0.21.2,
        # deepspeed 0.19.8); elsewhere reentrant ones pass no gradient to an adapter.
        reentrant = resolved.traits.reentrant_adapters and recipe.adapter is not None
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    arguments |= {"max_steps": run.max_steps} if run.max_steps else {"num_train_epochs": run.epochs}
    return arguments
