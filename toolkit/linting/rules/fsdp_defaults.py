"""FS4xx: FSDP keys that are not set, and keys that versions 1 and 2 read differently."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext
from toolkit.linting.edits import add, both, remove, rename, set_value
from toolkit.linting.examples import fsdp, fsdp1, fsdp2
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.registry import rule

_PLUGIN = "accelerate 1.15.0 utils/dataclasses.py:FullyShardedDataParallelPlugin.__post_init__"
_ONLY_1 = (
    "backward_prefetch",
    "forward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "sharding_strategy",
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _strategy(setting: Setting | None) -> str | None:
    if setting is None:
        return None
    value = str(setting.value).upper()
    return _STRATEGIES[int(value) - 1] if value in ("1", "2", "3", "4", "5") else value


@rule(
    "FS401",
    "warning",
    source=_PLUGIN + ' (FSDP_AUTO_WRAP_POLICY defaults to "NO_WRAP")',
    fails=fsdp("fsdp_version: 2", "fsdp_state_dict_type: FULL_STATE_DICT"),
    passes=fsdp2(),
)
def no_wrap_policy(context: LintContext) -> Iterator[Diagnostic]:
    """No wrap policy: the whole model is one FSDP unit.

    accelerate's default is no wrapping: every forward gathers the entire model at once, and sharding saves
    little. FSDP from the training arguments wraps transformer layers by default.
    """
    policy = context.acc("fsdp_config.fsdp_auto_wrap_policy")
    if not context.fsdp_from_yaml:
        return
    if policy is None and context.sets_acc("fsdp_config.fsdp_auto_wrap_policy"):
        return
    if policy is None:
        fix = add(context.accelerate, "fsdp_config", "fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        message = "fsdp_auto_wrap_policy is not set: accelerate wraps nothing, so the model is one unit"
        yield context.at_file(context.accelerate, message, "fsdp_config.fsdp_auto_wrap_policy", fix=fix)
    elif str(policy.value).upper() == "NO_WRAP":
        yield Diagnostic(
            policy, "NO_WRAP makes the model one unit: each forward gathers the whole model", severity="note"
        )


@rule(
    "FS402",
    "warning",
    source=_PLUGIN + " (1); transformers 5.23.0 training_args.py:_process_fsdp_args (2)",
    fails=fsdp("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type: FULL_STATE_DICT"),
    passes=fsdp2(),
)
def no_version(context: LintContext) -> Iterator[Diagnostic]:
    """fsdp_version is not set: accelerate uses FSDP1, transformers 5.23 uses FSDP2.

    The fix sets the version that is used now. If keys of version 1 are also set, this is a note.
    """
    if context.fsdp_from_yaml and not context.sets_acc("fsdp_config.fsdp_version"):
        of_one = any(context.fsdp(name) is not None for name in _ONLY_1)
        fix = add(context.accelerate, "fsdp_config", "fsdp_version", 1)
        message = "fsdp_version is not set: accelerate uses FSDP1 (the Trainer's own default is 2)"
        severity = "note" if of_one else None
        yield context.at_file(context.accelerate, message, "fsdp_config.fsdp_version", fix=fix, severity=severity)
    elif context.trainer_fsdp and context.fsdp("version") is None:
        yield Diagnostic(context.arg("fsdp"), "fsdp_config.version is not set: the Trainer uses FSDP2", severity="note")


@rule(
    "FS403",
    "warning",
    source=_PLUGIN + ": set_state_dict_type",
    fails=fsdp("fsdp_version: 2", "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
    passes=fsdp2(),
)
def no_state_dict_type(context: LintContext) -> Iterator[Diagnostic]:
    """fsdp_state_dict_type is not set: full under version 1, sharded under version 2.

    A sharded checkpoint has no file that from_pretrained loads: `accelerate merge-weights` makes one. Under
    the Trainer's own FSDP the default is full.
    """
    if context.fsdp_from_yaml and not context.sets_acc("fsdp_config.fsdp_state_dict_type"):
        runs = "FULL_STATE_DICT" if context.fsdp_version == 1 else "SHARDED_STATE_DICT"
        fix = add(context.accelerate, "fsdp_config", "fsdp_state_dict_type", runs)
        message = f"fsdp_state_dict_type is not set: version {context.fsdp_version} saves {runs}"
        yield context.at_file(context.accelerate, message, "fsdp_config.fsdp_state_dict_type", fix=fix)


@rule(
    "FS404",
    "error",
    source=_PLUGIN + " (version 2 takes true or false); accelerate commands/to_fsdp2.py:ARGUMENT_VALUE_MAPPING",
    fails=fsdp2("fsdp_sharding_strategy: HYBRID_SHARD"),
    passes=fsdp2("fsdp_reshard_after_forward: true"),
)
def strategy_under_2(context: LintContext) -> Iterator[Diagnostic]:
    """A sharding strategy of version 1 under FSDP2.

    fsdp_sharding_strategy is not read there, so HYBRID_SHARD, NO_SHARD and SHARD_GRAD_OP silently become full
    sharding; accelerate's own converter does the same. Hybrid sharding in version 2 is
    parallelism_config with dp_replicate_size and dp_shard_size.
    """
    if context.fsdp_version != 2 or context.uses != "fsdp":
        return
    strategy = context.fsdp("sharding_strategy")
    name = _strategy(strategy)
    if strategy is not None and name not in (None, "FULL_SHARD") and context.fsdp("reshard_after_forward") is None:
        fix = None
        if name == "SHARD_GRAD_OP" and context.fsdp_from_yaml:
            fix = both(rename(strategy, "fsdp_reshard_after_forward"), set_value(strategy, False))
        advice = "; use parallelism_config's dp_replicate_size and dp_shard_size" if name.startswith("HYBRID") else ""
        yield Diagnostic(strategy, f"{name} is not read under FSDP2: the model is fully sharded{advice}", fix)
    reshard = context.fsdp("reshard_after_forward")
    if reshard is not None and str(reshard.value).upper() in _STRATEGIES:
        value = str(reshard.value).upper()
        fix = set_value(reshard, value == "FULL_SHARD") if value in ("FULL_SHARD", "SHARD_GRAD_OP") else None
        yield Diagnostic(
            reshard,
            f"{reshard.value} is a strategy of version 1: FSDP2 accepts only true or false",
            fix,
        )


@rule(
    "FS405",
    "error",
    source=_PLUGIN + " (sharding_strategy is set from FSDP_SHARDING_STRATEGY first); accelerator.py:1947",
    fails=fsdp1("fsdp_reshard_after_forward: SHARD_GRAD_OP"),
    passes=fsdp1("fsdp_sharding_strategy: SHARD_GRAD_OP"),
)
def reshard_under_1(context: LintContext) -> Iterator[Diagnostic]:
    """reshard_after_forward under FSDP1 is never used.

    The plugin takes sharding_strategy, which the environment always sets (FULL_SHARD where nothing is
    written), and looks at reshard_after_forward only where that is missing. Under the Trainer it is the
    same.
    """
    if context.fsdp_version != 1 or context.uses != "fsdp":
        return
    reshard, strategy = context.fsdp("reshard_after_forward"), context.acc("fsdp_config.fsdp_sharding_strategy")
    runs = _strategy(strategy) or "FULL_SHARD"
    asked = _strategy(reshard)
    if reshard is None or asked == runs or (asked == "TRUE" and runs == "FULL_SHARD"):
        return
    fix = None
    if strategy is None and asked in _STRATEGIES and context.fsdp_from_yaml:
        fix = rename(reshard, "fsdp_sharding_strategy")
    yield Diagnostic(reshard, f"{reshard.value} has no effect under FSDP1: the run uses {runs}", fix)


@rule(
    "FS406",
    "warning",
    source=_PLUGIN + " (version 2 ignores them)",
    fails=fsdp2("fsdp_use_orig_params: false"),
    passes=fsdp2(),
)
def keys_of_version_1(context: LintContext) -> Iterator[Diagnostic]:
    """Keys of FSDP1 under version 2: they have no effect."""
    if context.fsdp_version != 2 or context.uses != "fsdp":
        return
    for name in _ONLY_1:
        setting = context.fsdp(name)
        if setting is None or (name == "sharding_strategy" and _strategy(setting) != "FULL_SHARD"):
            continue
        if name == "sync_module_states" and setting.value is False:
            continue  # FS407: it stops the launcher
        if str(setting.value).upper() not in ("NONE", "NO_PREFETCH"):
            yield Diagnostic(setting, f"{setting.name} has no effect under FSDP2", remove(setting))
