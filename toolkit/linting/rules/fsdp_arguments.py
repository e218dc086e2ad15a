"""FA1xx: FSDP set in the training arguments."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext, true
from toolkit.linting.edits import add, rename, set_value
from toolkit.linting.examples import args, fsdp2
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_ARGS = "transformers 5.23.0 training_args.py:_process_fsdp_args"


@rule(
    "FA101",
    "warning",
    source=_ARGS + " (`if not self.fsdp: return None`)",
    fails=args(fsdp_config={"version": 2}),
    passes=args(fsdp=True, fsdp_config={"version": 2}),
)
def config_without_fsdp(context: LintContext) -> Iterator[Diagnostic]:
    """fsdp_config is set in the training arguments, but fsdp is not: nothing reads it."""
    setting = context.arg("fsdp_config")
    if setting and setting.value and not context.trainer_fsdp and context.args.syntax != "shell":
        fix = (
            add(context.args, "", "fsdp", True)
            if not context.args.has("fsdp") and context.distributed_type is None
            else None
        )
        yield Diagnostic(setting, "nothing reads fsdp_config: fsdp is not set", fix)


@rule(
    "FA102",
    "error",
    source=_ARGS + " (reads by name, rejects nothing)",
    fails=args(fsdp=True, fsdp_config={"reshard_after_foward": False}),
    passes=args(fsdp=True, fsdp_config={"fsdp_reshard_after_forward": False, "version": 2}),
)
def unknown_key(context: LintContext) -> Iterator[Diagnostic]:
    """A key of fsdp_config that the Trainer does not read."""
    known = keys.section("transformers", "fsdp_config")
    for key, entry in context.args.section("fsdp_config").items():
        name = key.removeprefix("fsdp_")
        if name in known or key in known:
            continue
        setting = Setting(context.args, f"fsdp_config.{key}", entry)
        near = {"offload_params": "cpu_offload"}.get(name) or nearest(name, known)
        fix = rename(setting, near) if near else None
        yield Diagnostic(
            setting, f'the Trainer does not read "{key}"{meant(near)}', fix, "error" if near else "warning"
        )


@rule(
    "FA103",
    "note",
    source="transformers 5.23.0 training_args.py:_apply_legacy_fsdp_to_config (deprecated)",
    fails=args(fsdp="full_shard auto_wrap"),
    passes=args(fsdp=True),
)
def legacy_text(context: LintContext) -> Iterator[Diagnostic]:
    """fsdp as text or a list is deprecated. Use `fsdp: true` with fsdp_config."""
    setting = context.arg("fsdp")
    if setting and context.trainer_fsdp and not isinstance(setting.value, bool) and context.args.syntax != "shell":
        yield Diagnostic(setting, "fsdp as text is deprecated: set it to true, and set the options in fsdp_config")


@rule(
    "FA104",
    "error",
    source="transformers 5.23.0 training_args.py:_apply_legacy_fsdp_to_config (ValueError)",
    fails=args(fsdp="hybrid_shard auto_wrap"),
    passes=args(fsdp="full_shard auto_wrap"),
)
def legacy_word(context: LintContext) -> Iterator[Diagnostic]:
    """A word in fsdp that this version rejects.

    hybrid_shard, hybrid_shard_zero2 and no_shard are for version 1, and version 2 is the default.
    """
    setting = context.arg("fsdp")
    if setting is None or isinstance(setting.value, bool) or not context.trainer_fsdp:
        return
    words = setting.value if isinstance(setting.value, list) else str(setting.value).split()
    for word in map(str, words):
        if word in ("full_shard", "shard_grad_op", "auto_wrap", "offload"):
            continue
        if word in ("hybrid_shard", "hybrid_shard_zero2", "no_shard"):
            if context.fsdp_version == 2:
                yield Diagnostic(setting, f"{word} is only available with FSDP1, but version 2 is used")
        elif context.args.syntax != "shell" or word.lower() != "true":
            yield Diagnostic(setting, f"no fsdp option {word!r}")


@rule(
    "FA105",
    "error",
    source="transformers 5.23.0 trainer.py:create_accelerator_and_postprocess (ValueError)",
    fails=fsdp2("fsdp_activation_checkpointing: true") | args(activation_checkpointing=True),
    passes=fsdp2("fsdp_activation_checkpointing: true") | args(activation_checkpointing=False),
)
def checkpointing_twice(context: LintContext) -> Iterator[Diagnostic]:
    """Activation checkpointing by FSDP and by the Trainer: the Trainer rejects this."""
    ours, theirs = context.checkpointing, context.fsdp("activation_checkpointing")
    if ours and theirs and true(theirs.value) and context.uses == "fsdp":
        yield Diagnostic(ours, f"{ours.name} and FSDP's activation_checkpointing are both on: the Trainer rejects this")


@rule(
    "FA106",
    "note",
    source="transformers 5.23.0 training_args.py:_process_fsdp_args (warning; transformers issue 30404)",
    fails=args(fsdp=True, activation_checkpointing=True),
    passes=args(fsdp=True, fsdp_config={"activation_checkpointing": True, "version": 2}),
)
def slower_checkpointing(context: LintContext) -> Iterator[Diagnostic]:
    """The Trainer's activation checkpointing under FSDP gathers the weights once more in the backward pass.

    FSDP's own is faster; but see FS410 where there is dropout.
    """
    ours, theirs = context.checkpointing, context.fsdp("activation_checkpointing")
    if ours and context.uses == "fsdp" and not (theirs and true(theirs.value)):
        yield Diagnostic(
            ours,
            f"{ours.name} under FSDP costs one more all-gather than fsdp_config's activation_checkpointing",
        )


@rule(
    "FA107",
    "error",
    source=_ARGS + " (ValueError: the comparison is exact)",
    fails=args(fsdp=True, fsdp_config={"auto_wrap_policy": "transformer_based_wrap"}),
    passes=args(fsdp=True, fsdp_config={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
)
def policy_in_capitals(context: LintContext) -> Iterator[Diagnostic]:
    """An unknown wrap policy: the Trainer requires upper case."""
    choices = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
    setting = context.fsdp("auto_wrap_policy") if context.trainer_fsdp else None
    if setting and setting.value not in choices:
        near = nearest(str(setting.value), choices, 0.6)
        yield Diagnostic(
            setting,
            f"{setting.value!r} is not {', '.join(choices)}{meant(near)}",
            set_value(setting, near) if near else None,
        )
