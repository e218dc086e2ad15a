"""AU3xx: "auto", and the program that would have to resolve it."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext
from toolkit.linting.edits import set_value
from toolkit.linting.examples import ds, shell
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.registry import rule

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_HIDDEN = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_PLUGIN = (
    "stage",
    "offload_optimizer.device",
    "offload_param.device",
    "offload_param.nvme_path",
    "offload_optimizer.nvme_path",
    "stage3_gather_16bit_weights_on_model_save",
)
# DeepSpeedPlugin.__post_init__, set_mixed_precision and Accelerator._prepare_deepspeed of accelerate 1.15.0
_BY_ACCELERATE = {
    *_BATCH,
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    *(f"zero_optimization.{key}" for key in (*_HIDDEN, *_PLUGIN)),
}
_WITH_DUMMIES = {
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
}
# HfTrainerDeepSpeedConfig.trainer_config_process and trainer_config_finalize of transformers 5.23.0
_BY_TRAINER = {*_BY_ACCELERATE, *_WITH_DUMMIES, "optimizer.params.betas", "optimizer.params.eps"}
# Sections that are pydantic models: they drop "auto" and take the default.
_MODELS = ("zero_optimization.", "fp16.", "bf16.", "tensor_parallel.", "hybrid_engine.")
# "auto" is a value of its own there.
_MEANT = ("autotuning", "data_types.keep_in_fp32_modules", "pipeline.stages", "expert_parallel")


def _autos(context: LintContext) -> list[Setting]:
    return [
        Setting(context.deepspeed, path, entry)
        for path, entry in context.deepspeed.walk()
        if entry.node.value == "auto" and not path.startswith(_MEANT)
    ]


def _by_deepspeed_alone(context: LintContext) -> bool:
    return context.reader == "deepspeed"


@rule(
    "AU301",
    "error",
    source='deepspeed 0.19.8 runtime/config_utils.py:DeepSpeedConfigModel.__init__ (drops every "auto")',
    reader="deepspeed",
    fails=ds(bf16={"enabled": "auto"}),
    passes=ds(bf16={"enabled": True}),
)
def auto_becomes_the_default(context: LintContext) -> Iterator[Diagnostic]:
    """ "auto" that DeepSpeed turns into its default.

    The sections of a DeepSpeed config drop every "auto" and take their defaults: bf16 is off, buckets hold
    5e8 elements. Only accelerate and the transformers Trainer put a value there before DeepSpeed sees it.
    """
    if not _by_deepspeed_alone(context):
        return
    for setting in _autos(context):
        if setting.key.startswith(_MODELS):
            yield Diagnostic(
                setting,
                f'"auto" reaches DeepSpeed here, which silently uses its default for {setting.name}',
            )


@rule(
    "AU302",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:_set_batch_related_parameters (TypeError: str and int)",
    reader="deepspeed",
    fails=ds(train_batch_size="auto"),
    passes=ds(train_batch_size=8),
)
def auto_batch_size(context: LintContext) -> Iterator[Diagnostic]:
    """A batch size of "auto" that nothing resolves.

    DeepSpeed calculates with it and raises a TypeError about str and int.
    """
    if _by_deepspeed_alone(context):
        for setting in _autos(context):
            if setting.key in _BATCH:
                yield Diagnostic(setting, f'{setting.key} "auto": DeepSpeed alone uses it as a number and fails')


@rule(
    "AU303",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:get_gradient_clipping (no conversion), engine.py:clip_fp32_gradients",
    reader="deepspeed",
    fails=ds(gradient_clipping="auto"),
    passes=ds(gradient_clipping=1.0),
)
def auto_clipping(context: LintContext) -> Iterator[Diagnostic]:
    """gradient_clipping "auto" that nothing resolves.

    DeepSpeed parses it and fails at the first optimizer step, where it compares it with a norm.
    """
    setting = context.ds("gradient_clipping")
    if setting and setting.value == "auto" and _by_deepspeed_alone(context):
        fix = set_value(setting, 1.0)
        yield Diagnostic(setting, '"auto" is accepted but fails at the first step: DeepSpeed alone needs a number', fix)


@rule(
    "AU304",
    "error",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.fill_match (ValueError)",
    reader="trainer",
    fails=ds(zero={"allgather_bucket_size": "auto"}),
    passes=ds(zero={"reduce_bucket_size": "auto"}),
)
def auto_that_nobody_resolves(context: LintContext) -> Iterator[Diagnostic]:
    """ "auto" in a place where nothing resolves it.

    accelerate and the Trainer fill a short list of keys; any other "auto" raises a ValueError in prepare, and
    DeepSpeed alone takes its default.
    """
    if context.reader not in ("trainer", "accelerator", None):
        return
    known = _BY_ACCELERATE | _WITH_DUMMIES if context.reader == "accelerator" else _BY_TRAINER
    for setting in _autos(context):
        if setting.key not in known:
            who = {"trainer": "the Trainer", "accelerator": "accelerate"}.get(context.reader or "", "any launcher")
            yield Diagnostic(
                setting,
                f'"auto" is not resolved here: {who} does not fill in {setting.name}',
            )


@rule(
    "AU305",
    "note",
    source="transformers 5.23.0 integrations/deepspeed.py:trainer_config_process; "
    "accelerate 1.15.0 accelerator.py:_prepare_deepspeed",
    fails=ds(bf16={"enabled": "auto"}),
    passes=ds(bf16={"enabled": True}),
)
def auto_needs_a_reader(context: LintContext) -> Iterator[Diagnostic]:
    """Values of "auto": fine under the Trainer, not under the deepspeed launcher.

    A note where the files do not say who reads them. `--reader deepspeed` makes it an error, `--reader
    trainer` checks it for the Trainer.
    """
    found = _autos(context)
    if found and context.reader is None:
        names = f"{found[0].key} and {len(found) - 1} more are" if len(found) > 1 else f"{found[0].key} is"
        message = f'{names} "auto": the Trainer resolves this, deepspeed.initialize uses defaults or fails'
        yield Diagnostic(found[0], message)


@rule(
    "AU306",
    "note",
    source="accelerate 1.15.0 accelerator.py:_prepare_deepspeed (DummyOptim, DummyScheduler)",
    reader="accelerator",
    fails=ds(optimizer={"type": "AdamW", "params": {"lr": "auto"}}),
    passes=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4}}),
)
def auto_needs_dummies(context: LintContext) -> Iterator[Diagnostic]:
    """An optimizer or scheduler "auto" that a bare Accelerator resolves only with dummies.

    The script must hand `DummyOptim` and `DummyScheduler` to prepare; a real optimizer beside this section
    raises.
    """
    if context.reader == "accelerator":
        for setting in _autos(context):
            if setting.key in _WITH_DUMMIES:
                yield Diagnostic(
                    setting,
                    "resolved only if the script passes accelerate's DummyOptim and DummyScheduler to prepare",
                )


@rule(
    "AU307",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:get_optimizer_params (no conversion)",
    reader="deepspeed",
    fails=ds(optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    | shell("deepspeed train.py --deepspeed_config ds.json"),
    passes=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4}}),
)
def auto_in_the_optimizer(context: LintContext) -> Iterator[Diagnostic]:
    """An "auto" learning rate that reaches the optimizer.

    DeepSpeed hands the parameters to the optimizer or scheduler as they are, which calculates with the text.
    """
    if _by_deepspeed_alone(context):
        for setting in _autos(context):
            if setting.key.startswith(("optimizer.params.", "scheduler.params.")):
                yield Diagnostic(
                    setting,
                    f'{setting.name} "auto" reaches the {setting.key.partition(".")[0]} as text and fails',
                )
