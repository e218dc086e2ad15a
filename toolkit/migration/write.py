"""Writes a meaning as files: an accelerate config for the new strategy, and the training arguments."""

from __future__ import annotations

import json
from typing import Any

import yaml

from toolkit.linting import keys
from toolkit.linting.installed import installed_before
from toolkit.migration.meaning import Meaning

KEPT = (
    "compute_environment",
    "debug",
    "distributed_type",
    "mixed_precision",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "use_cpu",
    "downcast_bf16",
    "enable_cpu_affinity",
    "dynamo_config",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
)


def fsdp2(meaning: Meaning) -> dict[str, Any]:
    """accelerate.yaml for FSDP2."""
    section: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": meaning.wrap or "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": meaning.reshard,
        "fsdp_state_dict_type": "FULL_STATE_DICT" if meaning.full_checkpoint else "SHARDED_STATE_DICT",
        "fsdp_offload_params": meaning.offload,
        "fsdp_cpu_ram_efficient_loading": meaning.rank0_loading,
    }
    if meaning.wrap_classes and section["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP":
        section["fsdp_transformer_layer_cls_to_wrap"] = meaning.wrap_classes
    if meaning.wrap_size and section["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP":
        section["fsdp_min_num_params"] = meaning.wrap_size
    if meaning.checkpointing is not None:
        section["fsdp_activation_checkpointing"] = meaning.checkpointing
    if meaning.wrap is None:
        meaning.note(
            "fsdp_auto_wrap_policy",
            "TRANSFORMER_BASED_WRAP: one unit per transformer layer; this changes memory, not the result",
        )
    config = _top(meaning, "FSDP") | {"fsdp_config": section}
    if meaning.replicas > 1:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": meaning.replicas,
            "parallelism_config_dp_shard_size": meaning.shards,
        }
    return config


def deepspeed(meaning: Meaning, stage: int) -> dict[str, Any]:
    """accelerate.yaml for ZeRO, without a JSON: the plugin needs none."""
    if meaning.replicas > 1:
        meaning.refuse(
            "parallelism_config",
            "dp_replicate_size: hybrid sharding has no equivalent in DeepSpeed (MiCS was removed, hpZ of ZeRO-3 copies "
            "weights alone); keep FSDP2, or set dp_replicate_size: 1",
        )
    if meaning.offload and stage != 3:
        meaning.refuse("fsdp_offload_params", f"ZeRO-{stage} cannot offload weights: zero3 can")
    if meaning.checkpointing:
        name = _checkpointing_argument()
        meaning.argument(name, True, "fsdp_activation_checkpointing")
        meaning.note("fsdp_activation_checkpointing", f"becomes {name} of the training arguments")
    meaning.note("fsdp_auto_wrap_policy", "DeepSpeed needs no wrapping")
    # Without training arguments the script decides: "auto" becomes the Accelerator's or the Trainer's number.
    steps = meaning.arguments.get("gradient_accumulation_steps", 1 if meaning.arguments else "auto")
    norm = meaning.arguments.get("max_grad_norm", 1.0 if meaning.arguments else "auto")
    if norm == "auto":
        meaning.note(
            "gradient_clipping",
            "DeepSpeed clips: at max_grad_norm under the Trainer, else at 1.0",
        )
    if stage == 3 and not meaning.full_checkpoint:
        meaning.note(
            "zero3_save_16bit_model",
            "on: from_pretrained cannot load shards of ZeRO-3, and accelerate does not merge them as it merges FSDP's",
        )
    section: dict[str, Any] = {
        "zero_stage": stage,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": norm,
        "offload_optimizer_device": "cpu" if meaning.offload else "none",
        "offload_param_device": "cpu" if meaning.offload else "none",
        "zero3_init_flag": stage == 3 and meaning.rank0_loading,
        "zero3_save_16bit_model": stage == 3,
    }
    if meaning.precision in ("bf16", "fp16"):
        meaning.argument(meaning.precision, True, "mixed_precision")
    return _top(meaning, "DEEPSPEED") | {"deepspeed_config": section}


def _checkpointing_argument() -> str:
    """The installed transformers' name; the newest name where none is installed."""
    new = "activation_checkpointing"
    since = keys.section("transformers", "")[new].since
    return "gradient_checkpointing" if since and installed_before("transformers", since) else new


def _top(meaning: Meaning, kind: str) -> dict[str, Any]:
    top = {key: meaning.top[key] for key in KEPT if key in meaning.top}
    top |= {"distributed_type": kind, "mixed_precision": meaning.precision}
    return {key: top[key] for key in KEPT if key in top}


def texts(config: dict[str, Any], arguments: dict[str, Any]) -> dict[str, str]:
    """File names and texts; training_args.json only if it is not empty."""
    made = {"accelerate.yaml": yaml.safe_dump(config, sort_keys=False)}
    if arguments:
        made["training_args.json"] = json.dumps(arguments, indent=2) + "\n"
    return made
