"""TA1xx: values of the training arguments that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, number, true, whole
from toolkit.linting.edits import remove
from toolkit.linting.examples import args
from toolkit.linting.model import Diagnostic
from toolkit.linting.registry import rule


@rule(
    "TA105",
    "error",
    source="transformers 5.23.0 training_args.py:_validate_args (ValueError)",
    fails=args(fp16=True, bf16=True),
    passes=args(bf16=True),
)
def two_precisions(context: LintContext) -> Iterator[Diagnostic]:
    """fp16 and bf16 are both true."""
    for one, other in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if context.args.get(one) is True and context.args.get(other) is True:
            yield Diagnostic(context.arg(one), f"{one} and {other} are both true: TrainingArguments rejects this")


@rule(
    "TA106",
    "error",
    source="transformers 5.23.0 training_args.py:_validate_args (ValueError)",
    fails=args(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps"),
    passes=args(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch"),
)
def best_model(context: LintContext) -> Iterator[Diagnostic]:
    """load_best_model_at_end with saving and evaluating at different times."""
    setting = context.arg("load_best_model_at_end")
    save, evaluate = context.args.get("save_strategy", "steps"), context.args.get("eval_strategy", "no")
    if setting is None or setting.value is not True or save == "best":
        return
    evaluate = "no" if evaluate is False else evaluate
    if save != evaluate:
        yield Diagnostic(
            setting,
            f"load_best_model_at_end needs equal strategies: eval_strategy is {evaluate}, save_strategy is {save}",
        )
        return
    saves, evals = (
        context.args.get("save_steps", 500),
        context.args.get("eval_steps") or context.args.get("logging_steps", 500),
    )
    if save == "steps" and isinstance(saves, int) and isinstance(evals, int) and evals > 0 and saves % evals:
        yield Diagnostic(
            setting,
            f"save_steps {saves} is not a multiple of eval_steps {evals}, which load_best_model_at_end needs",
        )


@rule(
    "TA107",
    "error",
    source="transformers 5.23.0 training_args.py:_validate_args (ValueError)",
    fails=args(dataloader_prefetch_factor=2),
    passes=args(dataloader_prefetch_factor=2, dataloader_num_workers=2),
)
def prefetch_without_workers(context: LintContext) -> Iterator[Diagnostic]:
    """dataloader_prefetch_factor without workers to prefetch."""
    setting = context.arg("dataloader_prefetch_factor")
    if setting and setting.value is not None and context.args.get("dataloader_num_workers", 0) == 0:
        yield Diagnostic(setting, "dataloader_prefetch_factor needs dataloader_num_workers above 0", remove(setting))


@rule(
    "TA108",
    "error",
    source="transformers 5.23.0 training_args.py:_validate_args (ValueError)",
    fails=args(logging_steps=0),
    passes=args(logging_steps=1),
)
def steps_that_cannot_be(context: LintContext) -> Iterator[Diagnostic]:
    """A number of steps that TrainingArguments rejects.

    logging_steps 0 with the steps strategy, negative warmup_steps, or a broken number of steps above 1.
    """
    logging = context.arg("logging_steps")
    if logging and logging.value == 0 and context.args.get("logging_strategy", "steps") == "steps":
        yield Diagnostic(logging, "logging_steps must be above 0 if logging_strategy is steps")
    warmup = context.arg("warmup_steps")
    if warmup and number(warmup.value) and warmup.value < 0:
        yield Diagnostic(warmup, "warmup_steps must not be negative")
    for key in ("logging_steps", "eval_steps", "save_steps"):
        setting = context.arg(key)
        if setting and number(setting.value) and setting.value > 1 and not whole(setting.value):
            yield Diagnostic(setting, f"{key} above 1 must be an integer")


@rule(
    "TA109",
    "error",
    source="transformers 5.23.0 training_args.py:_validate_args (ValueError)",
    fails=args(lr_scheduler_type="reduce_lr_on_plateau"),
    passes=args(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps"),
)
def plateau_without_evaluation(context: LintContext) -> Iterator[Diagnostic]:
    """A schedule that depends on evaluation, without evaluation."""
    setting = context.arg("lr_scheduler_type")
    off = context.args.get("eval_strategy", "no") in ("no", False)
    if setting and setting.value in ("reduce_lr_on_plateau", "greedy") and off:
        yield Diagnostic(setting, f"{setting.value} needs an eval_strategy")


@rule(
    "TA112",
    "error",
    source="transformers 5.23.0 trainer.py:create_accelerator_and_postprocess (ValueError)",
    fails=args(gradient_accumulation_steps=4, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}}),
    passes=args(gradient_accumulation_steps=4),
)
def accumulation_twice(context: LintContext) -> Iterator[Diagnostic]:
    """Gradient accumulation is set in two places of the training arguments."""
    setting = context.arg("accelerator_config.gradient_accumulation_kwargs.num_steps")
    steps = context.args.get("gradient_accumulation_steps", 1)
    if setting is not None and number(steps) and steps > 1:
        yield Diagnostic(
            setting, f"num_steps and gradient_accumulation_steps {steps} are both set: the Trainer rejects this"
        )


@rule(
    "TA113",
    "note",
    source="transformers 5.23.0 trainer.py:set_initial_training_values (max_steps > 0 overrides the epochs)",
    fails=args(max_steps=100, num_train_epochs=3),
    passes=args(num_train_epochs=3),
)
def steps_override_epochs(context: LintContext) -> Iterator[Diagnostic]:
    """max_steps and num_train_epochs are both set: max_steps wins."""
    steps, epochs = context.arg("max_steps"), context.arg("num_train_epochs")
    if steps and epochs and number(steps.value) and steps.value > 0:
        yield Diagnostic(epochs, f"num_train_epochs has no effect: max_steps is {steps.value}")


@rule(
    "TA114",
    "warning",
    source="transformers 5.23.0 training_args.py:__post_init__ (step 7, accelerator_config)",
    fails=args(accelerator_config={"split_batches": True}),
    passes=args(accelerator_config={"split_batches": False}),
)
def split_batches(context: LintContext) -> Iterator[Diagnostic]:
    """split_batches makes the per-device batch size a global one.

    Each process then gets per_device_train_batch_size divided by the number of processes.
    """
    setting = context.arg("accelerator_config.split_batches")
    if setting and true(setting.value):
        yield Diagnostic(setting, "split_batches divides per_device_train_batch_size among the processes")


@rule(
    "TA115",
    "warning",
    source="transformers 5.23.0 training_args.py:__post_init__ (the new name wins)",
    fails=args(gradient_checkpointing=True, activation_checkpointing=False),
    passes=args(activation_checkpointing=True),
)
def two_names_of_checkpointing(context: LintContext) -> Iterator[Diagnostic]:
    """Activation checkpointing under both of its names, with different values: the new name wins."""
    old, new = context.arg("gradient_checkpointing"), context.arg("activation_checkpointing")
    if old and new and old.value != new.value and new.value is not None:
        yield Diagnostic(
            old,
            f"activation_checkpointing is {str(new.value).lower()} and wins: this has no effect",
            remove(old),
        )


@rule(
    "TA117",
    "error",
    source="transformers 5.23.0 training_args.py (parallelism_config stays a dict); accelerate 1.15.0 accelerator.py: "
    "Accelerator.__init__ (AttributeError)",
    fails=args(parallelism_config={"dp_shard_size": 2}),
    passes=args(bf16=True),
)
def parallelism_in_a_file(context: LintContext) -> Iterator[Diagnostic]:
    """parallelism_config among the training arguments of a file.

    Only a ParallelismConfig that a script makes works there: nothing converts a mapping, and the Trainer fails with
    «'dict' object has no attribute». Write the sizes to parallelism_config of the accelerate config.
    """
    setting = context.arg("parallelism_config")
    if setting is not None and isinstance(setting.value, dict) and setting.value:
        message = "nothing makes a ParallelismConfig of this: set parallelism_config in the accelerate config"
        yield Diagnostic(setting, message)
