"""Short builders for the rules' failing and passing files."""

from __future__ import annotations

import json
from typing import Any

from toolkit.linting.model import Files

ACCELERATE, DEEPSPEED, ARGUMENTS, ADAPTER = "accelerate.yaml", "ds.json", "args.json", "adapter_config.json"
DISTRIBUTED = "distributed_config.json"


def acc(*lines: str) -> Files:
    """An accelerate config of these lines."""
    return {ACCELERATE: "\n".join(lines) + "\n"}


def multi_gpu(*lines: str) -> Files:
    """An accelerate config for plain data parallel, with these lines added."""
    return acc("distributed_type: MULTI_GPU", "mixed_precision: bf16", "num_processes: 2", *lines)


def fsdp(*lines: str, top: tuple[str, ...] = ()) -> Files:
    """An accelerate config for FSDP: ``lines`` go into fsdp_config."""
    head = ("distributed_type: FSDP", "mixed_precision: bf16", "num_processes: 2", *top)
    return acc(*head, "fsdp_config:", *(f"  {line}" for line in lines))


def fsdp2(*lines: str, top: tuple[str, ...] = ()) -> Files:
    """A valid FSDP2 config, with ``lines`` added to fsdp_config."""
    return fsdp(
        "fsdp_version: 2",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type: FULL_STATE_DICT",
        *lines,
        top=top,
    )


def fsdp1(*lines: str, top: tuple[str, ...] = ()) -> Files:
    """A valid FSDP1 config, with ``lines`` added to fsdp_config."""
    return fsdp(
        "fsdp_version: 1",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type: FULL_STATE_DICT",
        *lines,
        top=top,
    )


def zero(*lines: str, top: tuple[str, ...] = ("mixed_precision: bf16",)) -> Files:
    """An accelerate config for DeepSpeed: ``lines`` go into deepspeed_config."""
    head = ("distributed_type: DEEPSPEED", "num_processes: 2", *top)
    return acc(*head, "deepspeed_config:", *(f"  {line}" for line in lines))


def ds(stage: int | None = 2, **keys: Any) -> Files:
    """A DeepSpeed JSON; ``zero`` holds more of zero_optimization."""
    content: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    if stage is not None:
        content["zero_optimization"] = {"stage": stage, **keys.pop("zero", {})}
    content.update(keys)
    return {DEEPSPEED: json.dumps({k: v for k, v in content.items() if v is not None}, indent=2) + "\n"}


def args(**keys: Any) -> Files:
    """Training arguments as JSON."""
    return {ARGUMENTS: json.dumps({"output_dir": "out", **keys}, indent=2) + "\n"}


def lora(**keys: Any) -> Files:
    """A PEFT adapter config."""
    content = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear", **keys}
    return {ADAPTER: json.dumps(content, indent=2) + "\n"}


def distributed(**keys: Any) -> Files:
    """transformers' DistributedConfig as JSON."""
    return {DISTRIBUTED: json.dumps(keys, indent=2) + "\n"}


def shell(*lines: str) -> Files:
    """A launch script."""
    return {"launch.sh": "\n".join(lines) + "\n"}
