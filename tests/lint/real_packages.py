"""What the installed packages really make of a set of files; used by tests only, slow to import."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

GPU = "accelerate.utils.dataclasses.is_cuda_available"


def launch_environment(config: str, *flags: str) -> dict[str, str]:
    """The variables that `accelerate launch --config_file config flags` gives its processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    parsed = launch_command_parser().parse_args(["--config_file", config, *flags, "train.py"])
    args, defaults, from_config = _validate_launch_command(parsed)
    before = dict(os.environ)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        made = prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu:
        made = prepare_multi_gpu_env(args)
    else:
        made = prepare_simple_launcher_cmd_env(args)[1]
    return {key: value for key, value in made.items() if before.get(key) != value}


def deepspeed_plugin(env: dict[str, str], prepare: bool = True) -> dict[str, Any]:
    """The DeepSpeed config that a bare Accelerator hands to deepspeed.initialize."""
    from accelerate.utils import DeepSpeedPlugin

    with patch.dict(os.environ, env):
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(env.get("ACCELERATE_MIXED_PRECISION", "no"))
        plugin.fill_match("gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=1)
        if prepare:  # what Accelerator._prepare_deepspeed fills in
            plugin.deepspeed_config_process(
                must_match=False,
                **{
                    "gradient_clipping": 1.0,
                    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
                    "zero_optimization.reduce_bucket_size": 4096,
                    "train_micro_batch_size_per_gpu": 2,
                    "train_batch_size": 4,
                },
            )
        return plugin.deepspeed_config


def fsdp_plugin(env: dict[str, str], **arguments: Any) -> Any:
    """The FSDP plugin of a process with these variables (a GPU is played, for the plugin asks for one)."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, env))
        stack.enter_context(patch(GPU, lambda: True))
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        return FullyShardedDataParallelPlugin(**arguments)


def training_arguments(env: dict[str, str], **values: Any) -> Any:
    """TrainingArguments made in a process with these variables."""
    from transformers import TrainingArguments

    with patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true", **env}):
        return TrainingArguments(output_dir=str(Path.cwd() / "out"), use_cpu=True, **values)


def trainer_deepspeed(env: dict[str, str], **values: Any) -> Any:
    """The DeepSpeed config of the Trainer: its ``config`` and its ``mismatches`` (which it refuses)."""
    from transformers.integrations.deepspeed import propagate_args_to_deepspeed

    arguments = training_arguments(env, **values)
    stored = getattr(arguments, "hf_deepspeed_config", None)
    if stored is None:
        accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=arguments.deepspeed_plugin))
        propagate_args_to_deepspeed(accelerator, arguments)
        stored = arguments.deepspeed_plugin.hf_ds_config
    return stored


def deepspeed_alone(config: dict[str, Any]) -> Any:
    """DeepSpeedConfig as `deepspeed.initialize` makes it, for one process."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    try:
        return DeepSpeedConfig(config)
    except DeepSpeedConfigError as error:  # a bare Exception: distinguished from every other one here
        raise ValueError(str(error)) from error
