"""Which program reads the arguments of a launch command."""

from __future__ import annotations

from toolkit.linting.files.kinds import Recognised, split_known
from toolkit.linting.files.launchers import LAUNCHERS
from toolkit.linting.files.shell_reader import Command
from toolkit.linting.files.tools import BY_ID, TRAINER_SCRIPT, tool_of_keys, tool_of_script

# Training arguments that scripts with a parser of their own do not have.
_DISTINCTIVE = {
    "do_train", "eval_strategy", "evaluation_strategy", "fsdp_transformer_layer_cls_to_wrap", "load_best_model_at_end",
    "logging_strategy", "overwrite_output_dir", "save_strategy", "save_total_limit", "ddp_find_unused_parameters",
    "tf32", "logging_first_step", "remove_unused_columns", "dataloader_drop_last",
}  # fmt: skip
# Training arguments that other parsers have too.
_COMMON = {"output_dir", "per_device_train_batch_size", "num_train_epochs"}
# Arguments of scripts that follow accelerate's or DeepSpeed's own examples: their parsers are not the Trainer's.
_OWN_PARSER = {
    "with_tracking",
    "num_warmup_steps",
    "checkpointing_steps",
    "zero_stage",
    "deepspeed_config",
    "data_path",
}


def reader_of(command: Command) -> Recognised:
    """The kind of the arguments, and the tool that reads them; ``tool`` is empty if the script is not known."""
    if command.launcher not in LAUNCHERS:
        return _of_tool(command.launcher)
    tool = tool_of_script(command.script) or tool_of_keys(command.args)
    if tool is not None and tool.id != "trl":
        return _of_tool(tool.id)
    written = set(command.args.entries or {}) | set(command.unknown_arguments)
    known, foreign = split_known(command.args)
    if tool is not None and (tool_of_script(command.script) or not foreign):
        return Recognised("args", "trl", not foreign)
    if TRAINER_SCRIPT.search(command.script or "") and not written & _OWN_PARSER:
        return Recognised("args", "trainer", not foreign)
    marks = len(written & _DISTINCTIVE)
    if marks and not foreign and not written & _OWN_PARSER:
        return Recognised("args", "trainer")
    if (marks > 2 and len(known) > len(foreign)) or (written & _COMMON and not foreign and not written & _OWN_PARSER):
        return Recognised("args", "trainer", certain=False)
    return Recognised("tool")


def _of_tool(name: str) -> Recognised:
    return Recognised("args", name) if name == "trl" else Recognised("tool", BY_ID[name].id)
