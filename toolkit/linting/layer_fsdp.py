"""Topics of FSDP: version, state dict, wrapping, sharding."""

from __future__ import annotations

from toolkit.linting.context import LintContext, true
from toolkit.linting.layer_answers import Answers, by_default, not_read, topic, written


@topic("fsdp_version", "version", "fsdp_config.version")
def _fsdp_version(context: LintContext) -> Answers:
    yaml = context.acc("fsdp_config.fsdp_version")
    bare = (
        written(
            yaml,
            "the launcher passes it to the plugin",
            int(yaml.value) if str(yaml.value) in ("1", "2") else yaml.value,
        )
        if yaml
        else by_default(1, "accelerate")
    )
    trainer = bare
    if context.trainer_fsdp:
        arg = context.fsdp("version")
        trainer = (
            written(arg, "fsdp is set: the Trainer creates the plugin", context.fsdp_version)
            if arg
            else by_default(2, "TrainingArguments", "fsdp is set without a version")
        )
    return bare, not_read("DeepSpeed has no FSDP"), trainer


@topic("fsdp_state_dict_type", "state_dict_type", "fsdp_config.state_dict_type")
def _state_dict(context: LintContext) -> Answers:
    yaml, version = context.acc("fsdp_config.fsdp_state_dict_type"), context.acc("fsdp_config.fsdp_version")
    two = version is not None and str(version.value) == "2"
    bare = (
        written(yaml, "the launcher passes it to the plugin")
        if yaml
        else by_default("SHARDED_STATE_DICT" if two else "FULL_STATE_DICT", f"accelerate for version {2 if two else 1}")
    )
    trainer = bare
    if context.trainer_fsdp:
        arg = context.fsdp("state_dict_type")
        trainer = (
            written(arg, "fsdp is set: the Trainer creates the plugin")
            if arg
            else by_default("FULL_STATE_DICT", "TrainingArguments", "fsdp is set without a type")
        )
    return bare, not_read("DeepSpeed has no FSDP"), trainer


@topic("fsdp_auto_wrap_policy", "auto_wrap_policy")
def _wrap(context: LintContext) -> Answers:
    yaml = context.acc("fsdp_config.fsdp_auto_wrap_policy")
    bare = written(yaml, "the launcher passes it to the plugin") if yaml else by_default("NO_WRAP", "accelerate")
    trainer = bare
    if context.trainer_fsdp:
        arg = context.fsdp("auto_wrap_policy")
        trainer = (
            written(arg, "fsdp is set: the Trainer creates the plugin")
            if arg
            else by_default("TRANSFORMER_BASED_WRAP", "TrainingArguments")
        )
    return bare, not_read("DeepSpeed has no FSDP"), trainer


@topic("fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward", "reshard_after_forward")
def _sharding(context: LintContext) -> Answers:
    strategy, reshard = (
        context.acc("fsdp_config.fsdp_sharding_strategy"),
        context.acc("fsdp_config.fsdp_reshard_after_forward"),
    )
    version = context.acc("fsdp_config.fsdp_version")
    if version is not None and str(version.value) == "2":
        bare = (
            written(reshard, "version 2 reads reshard_after_forward alone", true(reshard.value))
            if reshard
            else by_default(True, "accelerate for version 2")
        )
    else:
        bare = (
            written(strategy, "version 1 reads sharding_strategy first")
            if strategy
            else by_default("FULL_SHARD", "accelerate for version 1", "reshard_after_forward is never reached")
        )
    trainer = bare
    if context.trainer_fsdp:
        arg = context.fsdp("reshard_after_forward")
        if context.fsdp_version == 2:
            trainer = (
                written(arg, "fsdp is set: the Trainer creates the plugin", true(arg.value))
                if arg
                else by_default(True, "TrainingArguments")
            )
        else:
            trainer = bare
    return bare, not_read("DeepSpeed has no FSDP"), trainer
