"""FA1xx: FSDP set in the training arguments."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.edits import add, rename, set_value
from toolkit.linting.examples import args, fsdp2
from toolkit.linting.model import Said, Setting
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule
from toolkit.linting.world import World, true

_ARGS = "transformers 5.23.0 training_args.py:_process_fsdp_args"


@rule(
    "FA101",
    "warning",
    source=_ARGS + " (`if not self.fsdp: return None`)",
    fails=args(fsdp_config={"version": 2}),
    passes=args(fsdp=True, fsdp_config={"version": 2}),
)
def config_without_fsdp(world: World) -> Iterator[Said]:
    """fsdp_config stands in the training arguments, but fsdp is not set: nothing reads it."""
    setting = world.arg("fsdp_config")
    if setting and setting.value and not world.trainer_fsdp and world.args.syntax != "shell":
        fix = (
            add(world.args, "", "fsdp", True) if not world.args.has("fsdp") and world.distributed_type is None else None
        )
        yield Said(setting, "nothing reads fsdp_config: fsdp is not set", fix)


@rule(
    "FA102",
    "error",
    source=_ARGS + " (reads by name, refuses nothing)",
    fails=args(fsdp=True, fsdp_config={"reshard_after_foward": False}),
    passes=args(fsdp=True, fsdp_config={"fsdp_reshard_after_forward": False, "version": 2}),
)
def unknown_key(world: World) -> Iterator[Said]:
    """A key of fsdp_config that the Trainer does not read."""
    known = keys.section("transformers", "fsdp_config")
    for key, entry in world.args.section("fsdp_config").items():
        name = key.removeprefix("fsdp_")
        if name in known or key in known:
            continue
        setting = Setting(world.args, f"fsdp_config.{key}", entry)
        near = {"offload_params": "cpu_offload"}.get(name) or nearest(name, known)
        fix = rename(setting, near) if near else None
        yield Said(setting, f'the Trainer does not read "{key}"{meant(near)}', fix, "error" if near else "warning")


@rule(
    "FA103",
    "note",
    source="transformers 5.23.0 training_args.py:_apply_legacy_fsdp_to_config (deprecated)",
    fails=args(fsdp="full_shard auto_wrap"),
    passes=args(fsdp=True),
)
def legacy_text(world: World) -> Iterator[Said]:
    """fsdp as text or a list: a form that goes away. `fsdp: true` with fsdp_config takes its place."""
    setting = world.arg("fsdp")
    if setting and world.trainer_fsdp and not isinstance(setting.value, bool) and world.args.syntax != "shell":
        yield Said(setting, "fsdp as text is deprecated: write true, and the rest in fsdp_config")


@rule(
    "FA104",
    "error",
    source="transformers 5.23.0 training_args.py:_apply_legacy_fsdp_to_config (ValueError)",
    fails=args(fsdp="hybrid_shard auto_wrap"),
    passes=args(fsdp="full_shard auto_wrap"),
)
def legacy_word(world: World) -> Iterator[Said]:
    """A word in fsdp that this version refuses.

    hybrid_shard, hybrid_shard_zero2 and no_shard are for version 1, and version 2 is the default.
    """
    setting = world.arg("fsdp")
    if setting is None or isinstance(setting.value, bool) or not world.trainer_fsdp:
        return
    words = setting.value if isinstance(setting.value, list) else str(setting.value).split()
    for word in map(str, words):
        if word in ("full_shard", "shard_grad_op", "auto_wrap", "offload"):
            continue
        if word in ("hybrid_shard", "hybrid_shard_zero2", "no_shard"):
            if world.fsdp_version == 2:
                yield Said(setting, f"{word} is only available with FSDP1, and version 2 is what runs")
        elif world.args.syntax != "shell" or word.lower() != "true":
            yield Said(setting, f"no fsdp option {word!r}")


@rule(
    "FA105",
    "error",
    source="transformers 5.23.0 trainer.py:create_accelerator_and_postprocess (ValueError)",
    fails=fsdp2("fsdp_activation_checkpointing: true") | args(activation_checkpointing=True),
    passes=fsdp2("fsdp_activation_checkpointing: true") | args(activation_checkpointing=False),
)
def checkpointing_twice(world: World) -> Iterator[Said]:
    """Activation checkpointing by FSDP and by the Trainer: the Trainer refuses the two."""
    ours, theirs = world.checkpointing, world.fsdp("activation_checkpointing")
    if ours and theirs and true(theirs.value) and world.uses == "fsdp":
        yield Said(ours, f"{ours.name} and FSDP's activation_checkpointing are both on: the Trainer refuses that")


@rule(
    "FA106",
    "note",
    source="transformers 5.23.0 training_args.py:_process_fsdp_args (warning; transformers issue 30404)",
    fails=args(fsdp=True, activation_checkpointing=True),
    passes=args(fsdp=True, fsdp_config={"activation_checkpointing": True, "version": 2}),
)
def slower_checkpointing(world: World) -> Iterator[Said]:
    """The Trainer's activation checkpointing under FSDP gathers the weights once more in the backward pass.

    FSDP's own is faster; but see FS410 where there is dropout.
    """
    ours, theirs = world.checkpointing, world.fsdp("activation_checkpointing")
    if ours and world.uses == "fsdp" and not (theirs and true(theirs.value)):
        yield Said(
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
def policy_in_capitals(world: World) -> Iterator[Said]:
    """A wrap policy that the Trainer does not know: it wants capitals."""
    choices = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
    setting = world.fsdp("auto_wrap_policy") if world.trainer_fsdp else None
    if setting and setting.value not in choices:
        near = nearest(str(setting.value), choices, 0.6)
        yield Said(
            setting,
            f"{setting.value!r} is not {', '.join(choices)}{meant(near)}",
            set_value(setting, near) if near else None,
        )
