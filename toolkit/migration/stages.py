"""From one ZeRO stage to another: what must change in the files beside the stage."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, true
from toolkit.linting.parallel import setting, size

_GATHER = "stage3_gather_16bit_weights_on_model_save"


def what_changes(context: LintContext, source: str, target: str) -> list[str]:
    """The lines of the refusal: DeepSpeed's files stay, so the change is made by hand."""
    changes = list(_from_3(context) if source == "zero3" else _to_3(context) if target == "zero3" else [])
    changes += _rows(context, source, target)
    if not changes:
        return [f"{source} to {target}: only the stage differs; change it in the file"]
    return [f"{source} to {target}: change the stage in the file, and", *(f"  {line}" for line in changes)]


def _from_3(context: LintContext) -> Iterator[str]:
    """Settings that only stage 3 reads."""
    for key, entry in context.accelerate.section("deepspeed_config").items():
        if key.startswith(("zero3_", "offload_param")) and str(entry.node.plain()).lower() not in ("none", "false"):
            why = "is turned off by other stages" if key.startswith("zero3_") else "has no effect in other stages"
            yield f"{context.accelerate.place(entry.start)}: {key} {why}: remove it"
    for key, entry in context.deepspeed.section("zero_optimization").items():
        place = context.deepspeed.place(entry.start)
        if key == "offload_param":
            yield f"{place}: {key} has no effect in other stages: remove it; weights then stay on the GPU"
        elif key == "offload_optimizer" and context.deepspeed.get(f"zero_optimization.{key}.ratio", 1) not in (1, 1.0):
            yield f"{place}: {key}.ratio is for stage 3: other stages reject it"
        elif key.startswith("stage3_"):
            yield f"{place}: {key} has no effect in other stages: remove it"


def _rows(context: LintContext, source: str, target: str) -> Iterator[str]:
    """Sequence parallelism, whose gradients stage 3 alone averages over all ranks."""
    count, found = size(context, "sp"), setting(context, "sp_size")
    if found is not None and count > 1 and "zero3" in (source, target):
        factor = f"{count} times" if source == "zero3" else f"1/{count} of"
        message = f"sp_size: gradients before clipping are {factor} those of {source} (toolkit explain LT527)"
        yield f"{found.place}: {message}"


def _to_3(context: LintContext) -> Iterator[str]:
    """What stage 3 needs to save weights that from_pretrained loads."""
    if "deepspeed" in context.kinds:
        if not true(context.deepspeed.get(f"zero_optimization.{_GATHER}")):
            yield f"{context.deepspeed.path}: set zero_optimization.{_GATHER}: true, or no weights are saved"
    elif not true(context.accelerate.get("deepspeed_config.zero3_save_16bit_model")):
        yield f"{context.accelerate.path}: set zero3_save_16bit_model: true, or no weights are saved"
