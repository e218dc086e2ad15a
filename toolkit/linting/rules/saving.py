"""SV7xx: checkpoints that cannot be written or loaded."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, true
from toolkit.linting.edits import add, remove, set_value
from toolkit.linting.examples import args, ds, fsdp, zero
from toolkit.linting.model import Diagnostic
from toolkit.linting.registry import rule

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


@rule(
    "SV701",
    "warning",
    source="accelerate 1.15.0 accelerator.py:get_state_dict (ValueError); transformers 5.23.0 trainer.py:save_model",
    fails=ds(3),
    passes=ds(3, zero={"stage3_gather_16bit_weights_on_model_save": True}),
)
def weights_stay_sharded(context: LintContext) -> Iterator[Diagnostic]:
    """ZeRO-3 does not gather the weights when saving.

    A bare Accelerator's get_state_dict then raises a ValueError; the Trainer catches it, warns and leaves a DeepSpeed
    checkpoint that zero_to_fp32.py must convert, and no file that from_pretrained loads. With PEFT adapters the Trainer
    saves the adapters all the same.
    """
    if context.zero_stage != 3:
        return
    then = {
        "trainer": "the Trainer saves no file that from_pretrained loads (zero_to_fp32.py converts its checkpoint)",
        "accelerator": "get_state_dict fails after the run",
    }.get(context.reader or "", "no file that from_pretrained loads is saved")
    if "deepspeed" in context.kinds:
        setting = context.ds(_GATHER) or context.ds("zero_optimization.gather_16bit_weights_on_model_save")
        old = context.ds("zero_optimization.stage3_gather_fp16_weights_on_model_save")
        if setting is None and old is not None and true(old.value):
            return
        if setting is None:
            fix = add(context.deepspeed, "zero_optimization", _GATHER.partition(".")[2], True)
            key = _GATHER.partition(".")[2]
            message = f"{key} is not set and defaults to off: {then}"
            yield context.at_file(context.deepspeed, message, _GATHER, fix=fix)
        elif setting.value == "auto":
            yield Diagnostic(
                setting,
                f'"auto" becomes false (accelerate\'s default): {then}',
                set_value(setting, True),
            )
        elif not true(setting.value):
            yield Diagnostic(setting, "off: the run saves no weights that from_pretrained loads")
        return
    setting = context.acc("deepspeed_config.zero3_save_16bit_model")
    if setting is None:
        fix = add(context.accelerate, "deepspeed_config", "zero3_save_16bit_model", True)
        message = f"zero3_save_16bit_model is not set and defaults to off: {then}"
        yield context.at_file(context.accelerate, message, "deepspeed_config.zero3_save_16bit_model", fix=fix)
    elif not true(setting.value):
        yield Diagnostic(setting, "off: the run saves no weights that from_pretrained loads")


@rule(
    "SV702",
    "error",
    source="transformers 5.23.0 trainer.py:create_accelerator_and_postprocess (ValueError)",
    fails=args(save_only_model=True, fsdp=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT", "version": 2}),
    passes=args(save_only_model=True, fsdp=True, fsdp_config={"state_dict_type": "FULL_STATE_DICT", "version": 2}),
)
def only_model_and_shards(context: LintContext) -> Iterator[Diagnostic]:
    """save_only_model with sharded state dicts: the Trainer rejects this."""
    setting, kind = context.arg("save_only_model"), context.fsdp("state_dict_type")
    if setting is None or setting.value is not True or context.uses != "fsdp":
        return
    default = "SHARDED_STATE_DICT" if context.fsdp_version == 2 and not context.trainer_fsdp else "FULL_STATE_DICT"
    if str(kind.value if kind else default).upper() == "SHARDED_STATE_DICT":
        yield Diagnostic(setting, "save_only_model is not compatible with SHARDED_STATE_DICT")


@rule(
    "SV703",
    "error",
    source="transformers 5.23.0 trainer.py:create_accelerator_and_postprocess (ValueError)",
    fails=zero("zero_stage: 2")
    | args(save_only_model=True, load_best_model_at_end=True, eval_strategy="steps", bf16=True),
    passes=zero("zero_stage: 2") | args(save_only_model=True, bf16=True),
)
def only_model_and_best(context: LintContext) -> Iterator[Diagnostic]:
    """save_only_model with load_best_model_at_end under DeepSpeed or FSDP: the Trainer rejects this."""
    setting = context.arg("save_only_model")
    if (
        setting
        and setting.value is True
        and context.arg_true("load_best_model_at_end")
        and context.uses in ("deepspeed", "fsdp")
    ):
        yield Diagnostic(setting, f"{context.uses} cannot load the best model at the end when only the model is saved")


@rule(
    "SV704",
    "warning",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.__post_init__ («Setting it to False»)",
    fails=zero("zero_stage: 2", "zero3_init_flag: true"),
    passes=zero("zero_stage: 2", "zero3_init_flag: false"),
)
def stage_3_flags(context: LintContext) -> Iterator[Diagnostic]:
    """A switch of ZeRO-3 under another stage: it is turned off."""
    if context.zero_stage in (0, 1, 2):
        for key in ("zero3_init_flag", "zero3_save_16bit_model"):
            setting = context.acc(f"deepspeed_config.{key}")
            if setting and true(setting.value):
                yield Diagnostic(
                    setting,
                    f"{key} has no effect with ZeRO stage {context.zero_stage}",
                    set_value(setting, False),
                )


@rule(
    "SV705",
    "note",
    source="accelerate 1.15.0 utils/fsdp_utils.py:save_fsdp_model; commands/merge.py",
    fails=fsdp(
        "fsdp_version: 2",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type: SHARDED_STATE_DICT",
    ),
    passes=fsdp(
        "fsdp_version: 2",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type: FULL_STATE_DICT",
    ),
)
def shards_need_merging(context: LintContext) -> Iterator[Diagnostic]:
    """Sharded checkpoints: fast to write, and from_pretrained cannot load them.

    `accelerate merge-weights` makes one file of them.
    """
    setting = context.fsdp("state_dict_type")
    if setting and context.uses == "fsdp" and str(setting.value).upper() == "SHARDED_STATE_DICT":
        yield Diagnostic(
            setting,
            "checkpoints are sharded: accelerate merge-weights writes a file that from_pretrained loads",
        )


@rule(
    "SV706",
    "error",
    source="transformers 5.23.0 trainer.py:create_accelerator_and_postprocess (ValueError)",
    fails=ds(3, train_micro_batch_size_per_gpu="auto") | args(auto_find_batch_size=True),
    passes=ds(2, train_micro_batch_size_per_gpu="auto") | args(auto_find_batch_size=True),
)
def finding_the_batch_size(context: LintContext) -> Iterator[Diagnostic]:
    """auto_find_batch_size under ZeRO-3: the Trainer rejects it."""
    setting = context.arg("auto_find_batch_size")
    if setting and setting.value is True and context.zero_stage == 3:
        yield Diagnostic(setting, "auto_find_batch_size is not supported with ZeRO-3", remove(setting))
