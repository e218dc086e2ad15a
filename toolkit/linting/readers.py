"""The program that reads a set of files, as far as they say."""

from __future__ import annotations

from toolkit.linting.files.tools import BY_ID
from toolkit.linting.files.tree import Source
from toolkit.linting.model import Reader


def infer_reader(kinds: set[str], tool: Source, launch: Source) -> Reader | None:
    """The Trainer, where there are training arguments or a tool that starts it; DeepSpeed, where its script says so."""
    if "tool" in kinds:
        if tool.tool and BY_ID[tool.tool].trainer:
            return "trainer"
        # `--deepspeed FILE` is an argument of the Trainer; deepspeed.add_config_arguments has a bare `--deepspeed`.
        if isinstance(tool.get("deepspeed"), str) or "deepspeed" in tool.unknown:
            return "trainer"
        has_config = tool.has("deepspeed_config") or "deepspeed_config" in tool.unknown
        return "deepspeed" if has_config and not tool.tool else None
    if "args" in kinds:
        return "trainer"
    return "deepspeed" if launch.launcher == "deepspeed" else None
