"""What the transformers Trainer's arguments mean, for every tool that hands them on to it (transformers 5.23.0)."""

from __future__ import annotations

import math
from typing import Any

from toolkit.importing.draft import Draft
from toolkit.importing.table import flag
from toolkit.importing.trainer_schedules import course
from toolkit.recipe.optimizer_names import NOT_PAGED

# transformers/training_args.py OptimizerNames, and what each is in Trainer.get_optimizer_cls_and_kwargs.
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit", "paged_adamw")
_ADAMW_8BIT = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
_LION = ("lion_32bit", "paged_lion_32bit")


def batch(draft: Draft) -> None:
    """Micro-batch and accumulation."""
    for key, target in (
        ("per_device_train_batch_size", "batch.micro_size"),
        ("gradient_accumulation_steps", "batch.accumulation"),
    ):
        if draft.get(key) != "auto":
            draft.carry(key, target, draft.whole(key))
        else:
            draft.differs(key, f"{draft.get(key)!r} is known only at the start of a run; set {target}")


def length(draft: Draft) -> None:
    """Steps or epochs: a positive ``max_steps`` overrides the epochs."""
    steps = draft.whole("max_steps", 0)
    if steps > 0:
        draft.carry("max_steps", "run.max_steps", steps)
        draft.ignore("num_train_epochs", f"{draft.name('max_steps')} decides")
        return
    draft.ignore("max_steps", "not positive: the epochs decide")
    epochs = draft.number("num_train_epochs")
    draft.carry("num_train_epochs", "run.epochs", max(1, math.ceil(epochs)))
    if epochs != int(epochs) or epochs < 1:
        reason = (
            f"the recipe has whole epochs: {math.ceil(epochs)} instead of {epochs:g}, and a schedule of that length"
        )
        draft.differs("num_train_epochs", reason)


def optimizer(draft: Draft) -> None:
    """The optimizer and its numbers."""
    name = str(draft.get("optim"))
    paged = NOT_PAGED if name.startswith("paged") else ""
    if name in _ADAMW:
        draft.carry("optim", "optimizer.name", "adamw", paged)
    elif name in _ADAMW_8BIT:
        draft.carry("optim", "optimizer.name", "adamw8bit", paged)
        draft.differs(
            "optim", "the toolkit's own 8-bit AdamW; bitsandbytes keeps small weights and embeddings in 32 bits"
        )
    elif name in _LION:
        draft.carry("optim", "optimizer.name", "lion", paged)
    elif name == "sgd":
        draft.carry("optim", "optimizer.name", "sgd")
        _sgd_arguments(draft)
    elif name == "schedule_free_adamw":
        draft.carry("optim", "optimizer.name", "schedule-free")
    else:
        draft.unsupported(
            "optim", f"the recipe has adamw, adamw8bit, lion, sgd and schedule-free of the Trainer's, not {name}"
        )
    if name != "sgd" and draft.get("optim_args") not in (None, ""):
        draft.unsupported("optim_args", "arguments of the optimizer beyond those of the recipe")
    draft.ignore("optim_args", "empty")
    draft.carry("learning_rate", "optimizer.lr", draft.number("learning_rate"))
    if name == "sgd" or name in _LION:
        draft.ignore("adam_epsilon", f"{name} has none")
    else:
        draft.carry("adam_epsilon", "optimizer.eps", draft.number("adam_epsilon"))
    if name == "sgd":
        for key in ("adam_beta1", "adam_beta2"):
            draft.ignore(key, "sgd has none")
    else:
        draft.carry("adam_beta1", "optimizer.betas", [draft.number(k) for k in ("adam_beta1", "adam_beta2")])
        if draft.place("adam_beta2"):
            draft.carry("adam_beta2", "optimizer.betas", draft.values["optimizer.betas"])
    draft.carry("max_grad_norm", "optimizer.max_grad_norm", draft.number("max_grad_norm", 0))
    decay = draft.number("weight_decay")
    draft.carry("weight_decay", "optimizer.weight_decay", decay)
    if decay and (why := _other_decay(draft)):
        draft.differs("weight_decay", why)


def _sgd_arguments(draft: Draft) -> None:
    """``optim_args`` of torch.optim.SGD: «momentum=0.9,nesterov=true»."""
    parts = [part.partition("=") for part in str(draft.get("optim_args") or "").split(",") if part.strip()]
    given = {key.strip(): value.strip() for key, _, value in parts}
    draft.set("optimizer.momentum", 0.0, "default of torch.optim.SGD: momentum")
    if "momentum" in given:
        draft.carry("optim_args", "optimizer.momentum", float(given.pop("momentum")))
    if "nesterov" in given:
        draft.carry("optim_args", "optimizer.nesterov", given.pop("nesterov").lower() in ("true", "1", "yes"))
    if given:
        draft.unsupported("optim_args", f"the recipe's sgd has no {', '.join(given)}")


def _other_decay(draft: Draft) -> str | None:
    """What the Trainer decays (Trainer.get_decay_parameter_names) and ``optimizer.decay: matrices`` does not."""
    method = draft.values.get("adapter.method")
    if method is None:
        return "the Trainer decays embeddings too; the recipe decays matrices that are not embeddings"
    if method == "dora":
        return "the Trainer decays DoRA's magnitudes too; the recipe decays matrices"
    saved = draft.values.get("adapter.modules_to_save") or []
    if any("emb" in name or name == "wte" for name in saved):
        return f"the Trainer decays the embeddings of {', '.join(saved)} too; the recipe does not"
    return None


def schedule(draft: Draft) -> None:
    """The learning rate's course and its warm-up."""
    if draft.values.get("optimizer.name") == "schedule-free":
        _own_warmup(draft)
        return
    name = course(draft)
    if name == "constant":
        draft.set("schedule.warmup_steps", 0, f"{name}: has no warm-up")
        for key in ("warmup_steps", "warmup_ratio"):
            draft.ignore(key, "a constant schedule has no warm-up")
        return
    _warmup(draft)


def _own_warmup(draft: Draft) -> None:
    """schedulefree's: the Trainer hands it ``warmup_steps`` as they are, and multiplies its rate by a schedule."""
    name, steps = str(draft.get("lr_scheduler_type")), draft.number("warmup_steps", 0)
    if name == "constant":
        draft.carry("lr_scheduler_type", "schedule.name", "constant")
    else:
        draft.unsupported("lr_scheduler_type", f"schedule-free in a recipe has constant, and no {name} beside it")
        draft.set("schedule.name", "constant", "the schedule of schedule-free")
    if steps >= 1:
        draft.carry("warmup_steps", "schedule.warmup_steps", int(steps))
        draft.differs("warmup_steps", "schedulefree begins with lr / warmup_steps, the recipe with 0: one step behind")
    elif steps > 0:
        draft.unsupported("warmup_steps", "schedulefree has no fraction of the steps: set schedule.warmup_steps")
    else:
        draft.carry("warmup_steps", "schedule.warmup_steps", 0)
    draft.ignore("warmup_ratio", "schedulefree does not read it")
    draft.ignore("lr_scheduler_kwargs", "a constant schedule has no arguments")


def _warmup(draft: Draft) -> None:
    steps, ratio = draft.number("warmup_steps", 0), draft.number("warmup_ratio", 0)
    if steps >= 1:
        draft.carry("warmup_steps", "schedule.warmup_steps", int(steps))
        draft.ignore("warmup_ratio", f"{draft.name('warmup_steps')} decides")
    elif steps > 0:
        draft.carry("warmup_steps", "schedule.warmup_ratio", steps, "a fraction of the steps")
    elif ratio:
        draft.carry("warmup_ratio", "schedule.warmup_ratio", ratio)
        draft.ignore("warmup_steps", "zero: the ratio decides")
    else:
        draft.carry("warmup_steps", "schedule.warmup_steps", 0)
        draft.ignore("warmup_ratio", "zero")


def checkpointing(draft: Draft) -> None:
    """Recomputation of activations: memory and time, not the result."""
    on = any(draft.active(key) for key in ("gradient_checkpointing", "activation_checkpointing"))
    used = "activation_checkpointing" if draft.active("activation_checkpointing") else "gradient_checkpointing"
    if on or draft.values.get("activation_checkpointing") is None:  # accelerate's FSDP config may turn it on
        draft.carry(used, "activation_checkpointing", "full" if on else "none")
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if not draft.done(key):
            draft.ignore(key, "recomputation: memory and time")


def running(draft: Draft) -> None:
    """Seed, folder, logs, checkpoints, workers."""
    draft.carry("seed", "run.seed", draft.whole("seed"))
    if draft.get("output_dir"):
        draft.carry("output_dir", "run.output_dir", str(draft.get("output_dir")))
    draft.ignore("output_dir", "empty")
    _interval(draft, "logging_steps", "logging_strategy", "run.log_every")
    _interval(draft, "save_steps", "save_strategy", "run.save_every")
    if draft.get("save_total_limit"):
        draft.carry("save_total_limit", "run.keep", max(1, draft.whole("save_total_limit")))
    draft.ignore("save_total_limit", "no limit; the recipe keeps run.keep checkpoints")
    if draft.get("dataloader_num_workers") is not None:
        draft.carry("dataloader_num_workers", "data.workers", draft.whole("dataloader_num_workers"))
    if flag(draft.get("use_cpu")):
        draft.carry("use_cpu", "machine.device", "cpu")
    draft.ignore("use_cpu", "the recipe chooses a device itself")
    if draft.active("dataloader_drop_last"):
        draft.differs("dataloader_drop_last", "the last, short batch of an epoch is dropped; the recipe trains on it")
    draft.ignore("dataloader_drop_last", "off, as in the recipe")


def _interval(draft: Draft, steps: str, strategy: str, target: str) -> None:
    every, when = draft.get(steps), str(draft.get(strategy, "steps")).lower()
    if when in ("no", "false") and target == "run.save_every":
        draft.carry(strategy, target, 0)
        draft.ignore(steps, f"{strategy} is no")
    elif when == "steps" and isinstance(every, int | float) and every >= 1:
        draft.carry(steps, target, int(every))
        draft.ignore(strategy, "steps, as in the recipe")
    else:
        draft.ignore(steps, f"not a number of steps; set {target}")
        draft.ignore(strategy, f"the recipe counts steps; set {target}")


def held_out_share(draft: Draft, key: str) -> None:
    """A share of the rows that the tool holds out, or their number."""
    share = draft.number(key, 0.0)
    if not share:
        draft.ignore(key, "none, as in the recipe")
    elif draft.answers.get("data.eval"):
        draft.differs(key, "the recipe trains all rows and evaluates data.eval, which the command line sets")
    elif "data.eval" in draft.values:
        draft.ignore(key, f"{draft.origins['data.eval']} names the held-out data")
    elif not 0 < share < 1:
        draft.unsupported(key, "a number of rows; the recipe holds out a share: set data.eval_fraction, or data.eval")
    else:
        draft.carry(key, "data.eval_fraction", share)
        draft.differs(
            key, "as many rows are held out, but others: the tool draws them, the recipe goes by their content"
        )


def holds_out(draft: Draft) -> bool:
    """Whether the recipe has held-out data."""
    keys = ("data.eval", "data.eval_fraction")
    return any(key in draft.values or draft.answers.get(key) for key in keys)


def evaluation(draft: Draft) -> None:
    """How often the held-out data is evaluated; nothing where the recipe has none."""
    if not holds_out(draft):
        for key in ("eval_strategy", "eval_steps", "do_eval"):
            draft.ignore(key, "evaluation does not change training; set data.eval")
        return
    every = draft.get("eval_steps") or draft.get("logging_steps")
    if str(draft.get("eval_strategy")) == "steps" and isinstance(every, int | float) and every >= 1:
        draft.carry("eval_steps", "run.eval_every", int(every))
    for key in ("eval_strategy", "eval_steps", "do_eval"):
        if not draft.done(key):
            draft.ignore(key, "evaluation does not change training")


def distribution(draft: Draft) -> None:
    """DeepSpeed and FSDP, where they are named in the arguments themselves."""
    value = draft.get("deepspeed")
    stage = next((str(n) for n in range(4) if isinstance(value, str) and value.startswith(f"zero{n}")), None)
    if value and stage is not None and not value.endswith(".json"):  # presets that tools ship
        draft.carry("deepspeed", "strategy.name", "ddp" if stage == "0" else f"zero{stage}")
        if value.endswith("_offload"):
            draft.carry("deepspeed", "strategy.offload", "optimizer" if stage == "2" else "all")
    elif value and str(draft.values.get("strategy.name", "")).startswith("zero"):
        draft.carry("deepspeed", "strategy.name", draft.values["strategy.name"], "the file that it names")
    elif value:
        draft.differs("deepspeed", f"{value} is not here: set strategy.name to zero1, zero2 or zero3")
    draft.ignore("deepspeed", "off")
    fsdp = draft.get("fsdp")
    if fsdp:
        text = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp)
        config = draft.get("fsdp_config")
        version = config.get("fsdp_version", config.get("version", 1)) if isinstance(config, dict) else 1
        two = "fsdp2" in text or str(version) == "2"
        draft.carry("fsdp", "strategy.name", "fsdp2" if two else "fsdp1")
        if "offload" in text:
            draft.carry("fsdp", "strategy.offload", "all")
    draft.ignore("fsdp", "off")
    draft.ignore("fsdp_config", "how weights are grouped, fetched and saved")


def as_dtype(value: Any) -> str | None:
    """A dtype by torch's name; None where the checkpoint decides."""
    name = str(value).removeprefix("torch.") if value is not None else ""
    known = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    name = known.get(name, name)
    return name if name in ("float32", "bfloat16", "float16") else None
