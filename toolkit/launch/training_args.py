"""training_args.json: the same run for the transformers Trainer."""

from __future__ import annotations

from typing import Any

from toolkit.optimizers import optimizer_kind
from toolkit.recipe.rates import decay_steps, why_no_wsd
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import asked_options
from toolkit.upstream.transformers import checkpointing_argument


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
        **_optimizer(resolved),
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": resolved.max_grad_norm,
        **_schedule(resolved),
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
        # With adapters under ZeRO-3 the Trainer's non-reentrant checkpoints end in a CheckpointError (peft 0.21.2,
        # deepspeed 0.19.8); elsewhere reentrant ones pass no gradient to an adapter.
        reentrant = resolved.traits.reentrant_adapters and recipe.adapter is not None
        name = checkpointing_argument()
        arguments |= {name: True, f"{name}_kwargs": {"use_reentrant": reentrant}}
    if resolved.accumulation > 1 and resolved.traits.other_sync and resolved.reduces_each_micro_batch:
        # Else the Trainer reduces after the last micro-batch alone: whole gradients, which FSDP1 adds up in 16 bits.
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if recipe.label_smoothing:
        arguments["label_smoothing_factor"] = recipe.label_smoothing
    for option, settings in asked_options(recipe):
        arguments |= option.trainer_arguments(settings, resolved)
    arguments |= {"max_steps": run.max_steps} if run.max_steps else {"num_train_epochs": run.epochs}
    return arguments


def _optimizer(resolved: Resolved) -> dict[str, Any]:
    """What the Trainer has no equivalent of is left out; a decision says so (`config --explain`)."""
    optimizer = resolved.recipe.optimizer
    own = dict(optimizer_kind(optimizer.name).trainer(optimizer) or {})
    found = {"optim": own.pop("optim")} if own else {}
    return found | {"learning_rate": resolved.lr} | own


def _schedule(resolved: Resolved) -> dict[str, Any]:
    """transformers' names and arguments (5.23.0, optimization.py)."""
    schedule = resolved.recipe.schedule
    least = schedule.min_ratio or 0.0
    match schedule.name:
        case "constant":
            # schedulefree has the warm-up itself, and the Trainer gives it warmup_steps.
            own = optimizer_kind(resolved.recipe.optimizer.name).averages
            return {"lr_scheduler_type": "constant" if own else "constant_with_warmup"}
        case "inverse-sqrt":
            return {"lr_scheduler_type": "inverse_sqrt"}
        case "cosine" if least:
            return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": least}}
        case "polynomial":
            kwargs = {"lr_end": resolved.lr * least, "power": schedule.power or 1.0}
            return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": kwargs}
        case "wsd":
            if why_no_wsd(resolved.recipe) is not None:
                return {}
            total = resolved.recipe.run.max_steps
            assert total is not None
            decay: dict[str, Any] = {
                "num_decay_steps": decay_steps(schedule, total),
                "decay_type": schedule.decay_shape or "linear",
                "min_lr_ratio": least,
            }
            return {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": decay}
    return {"lr_scheduler_type": schedule.name}
