"""XL218: a DeepSpeed JSON that the run does not read."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext
from toolkit.linting.examples import ds, zero
from toolkit.linting.model import Diagnostic
from toolkit.linting.registry import rule


@rule(
    "XL218",
    "warning",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.__post_init__ (without deepspeed_config_file "
    "the plugin makes a config of its own)",
    fails=zero("zero_stage: 2") | ds(),
    passes=zero("deepspeed_config_file: ds.json", top=()) | ds(),
)
def json_that_nothing_names(context: LintContext) -> Iterator[Diagnostic]:
    """A DeepSpeed JSON next to an accelerate config that does not name it.

    accelerate reads a JSON only through deepspeed_config_file, the Trainer through its argument deepspeed. Without
    either, the stage, offload and clipping of the accelerate config are used, or none.
    """
    if not {"accelerate", "deepspeed"} <= context.kinds or context.deepspeed.named_by is not None:
        return
    named = any(context.deepspeed.path in source.names for source in context.sources)
    by_argument = any(
        source.has(key) or source.unsure(key)
        for source in (context.args, context.tool)
        for key in ("deepspeed", "deepspeed_config")
    )
    if named or by_argument or context.sets_acc("deepspeed_config.deepspeed_config_file"):
        return
    yield Diagnostic(
        None,
        f"nothing reads this file: {context.accelerate.path} has no deepspeed_config_file",
        source=context.deepspeed,
    )
