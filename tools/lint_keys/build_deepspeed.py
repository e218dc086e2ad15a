"""Keys of a DeepSpeed config: its pydantic models, and what its hand-written readers ask for."""

from __future__ import annotations

import argparse
import inspect
from typing import Any
from unittest.mock import patch

from tools.lint_keys.build import Table, facts, from_pydantic
from tools.lint_keys.spy import SpyDict

# Sections read by hand-written code: given as spies, with what makes the reader look inside.
_SPIED: dict[str, dict[str, Any]] = {
    "activation_checkpointing": {},
    "flops_profiler": {},
    "autotuning": {"enabled": False},
    "data_efficiency": {},
    "data_types": {},
    "checkpoint": {},
    "pipeline": {},
    "aio": {},
    "optimizer": {"type": "AdamW", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "torch_autocast": {"dtype": "bfloat16", "lower_precision_safe_modules": []},
    "timers": {},
    "expert_parallel": {},
}


def read() -> Table:
    """Run DeepSpeedConfig on spies for the top level, walk its pydantic models for the rest."""
    from deepspeed.runtime.config import (
        _REMOVED_TOP_LEVEL_CONFIG_KEYS,
        _REMOVED_ZERO_CONFIG_KEYS,
        DeepSpeedConfig,
    )

    spies = {name: SpyDict(content) for name, content in _SPIED.items()}
    top = SpyDict(train_batch_size=1, **spies)
    DeepSpeedConfig(top)
    sections: Table = {path: from_pydantic(model) for path, model in _models().items()}
    # Read outside DeepSpeedConfig: by DeepSpeedConfig._do_warning_check and sequence parallelism, and by the
    # two packages that hand the dict on (accelerate's MS-AMP and tensor parallelism).
    asked = (top.asked | {"vocabulary_size", "sequence_parallel_size", "msamp", "moe"}) - set(
        _REMOVED_TOP_LEVEL_CONFIG_KEYS
    )
    scalars = _scalar_types()
    sections[""] = {
        key: scalars.get(key, {"types": ["dict"] if key in sections or key in spies else ["any"]}) for key in asked
    }
    for name, spy in spies.items():
        sections.setdefault(name, {}).update({key: {"types": ["any"]} for key in spy.asked})
    for key in ("stages", "partition", "seed_layers", "activation_checkpoint_interval"):
        sections["pipeline"][key] = {"types": ["any"]}  # get_pipeline_config copies what it is given
    sections["pipeline"].update({k: {"types": ["bool"]} for k in ("pipe_partitioned", "grad_partitioned")})
    sections["optimizer.params"] = _optimizer_params()
    sections["scheduler.params"] = _scheduler_params()
    sections["removed"] = {key: {"why": why} for key, why in _REMOVED_TOP_LEVEL_CONFIG_KEYS.items()}
    sections["removed.zero_optimization"] = {key: {"why": why} for key, why in _REMOVED_ZERO_CONFIG_KEYS.items()}
    sections["flags"] = _launcher_flags()
    return {path: keys for path, keys in sections.items() if keys}


def _models() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "comms_logger": CommsLoggerConfig,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "tensor_parallel.tp": TPConfig,
        "compile": CompileConfig,
        "zero_optimization.zenflow": ZenFlowConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    }


def _scalar_types() -> dict[str, dict[str, Any]]:
    """Types of the top-level scalars, from the defaults in deepspeed.runtime.constants."""
    from deepspeed.runtime import constants

    found = {}
    for name, key in vars(constants).items():
        default = getattr(constants, f"{name}_DEFAULT", constants)
        if name.isupper() and isinstance(key, str) and isinstance(default, bool | float | str):
            found[key] = facts(type(default), default)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        found[key] = {"types": ["int"]}
    found["gradient_clipping"] = {"types": ["float", "int"], "default": constants.GRADIENT_CLIPPING_DEFAULT}
    found["steps_per_print"] = {"types": ["float", "int"]}
    return found


def _optimizer_params() -> dict[str, dict[str, Any]]:
    """Parameters by the optimizers that take one; a name may have several classes."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    adam = (torch.optim.AdamW, torch.optim.Adam, FusedAdam, DeepSpeedCPUAdam)
    classes: dict[str, tuple[Any, ...]] = {
        "adam": adam,
        "adamw": adam,
        "adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
        "lamb": (FusedLamb,),
        "lion": (FusedLion, DeepSpeedCPULion),
        "SGD": (torch.optim.SGD,),
    }
    # Read by the engine before it makes the optimizer; max_grad_norm is what it raises at.
    known: dict[str, list[str]] = {key: ["adam", "adamw"] for key in ("torch_adam", "adam_w_mode", "legacy_fusion")}
    known["max_grad_norm"] = list(classes)
    for name, group in classes.items():
        for key in {key for cls in group for key in inspect.signature(cls.__init__).parameters}:
            if key not in ("self", "params", "model_params", "args", "kwargs") and name not in known.get(key, []):
                known.setdefault(key, []).append(name)
    return {key: {"types": ["any"], "optimizers": names} for key, names in known.items()}


def _scheduler_params() -> dict[str, dict[str, Any]]:
    from deepspeed.runtime import lr_schedules

    known: dict[str, list[str]] = {}
    for name in lr_schedules.VALID_LR_SCHEDULES:
        for key in inspect.signature(getattr(lr_schedules, name).__init__).parameters:
            if key not in ("self", "optimizer"):
                known.setdefault(key, []).append(name)
    return {key: {"types": ["any"], "schedulers": names} for key, names in known.items()}


def _launcher_flags() -> dict[str, dict[str, Any]]:
    """Flags of the `deepspeed` command; its parser exists only inside a function."""
    from deepspeed.launcher import runner

    with patch.object(argparse.ArgumentParser, "parse_args", lambda parser, args=None: parser):
        parser: Any = runner.parse_args([])
    return {
        option.lstrip("-"): {"dest": action.dest, "takes": 0 if action.nargs == 0 else 1}
        for action in parser._actions
        for option in action.option_strings
        if action.dest != "help"
    }
