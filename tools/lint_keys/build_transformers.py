"""Keys of the transformers training arguments and of a PEFT adapter config."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.lint_keys.build import Table, from_dataclass
from tools.lint_keys.spy import SpyDict


def read() -> Table:
    """TrainingArguments, the extra fields of Seq2SeqTrainingArguments, and the nested sections."""
    from transformers import Seq2SeqTrainingArguments, TrainingArguments
    from transformers.distributed import DistributedConfig
    from transformers.trainer_pt_utils import AcceleratorConfig

    base = from_dataclass(TrainingArguments)
    sequence = from_dataclass(Seq2SeqTrainingArguments)
    for entry in base.values():
        # Enums are typed `X | str`: any text parses, only the listed ones construct.
        if "choices" in entry and set(entry["types"]) - {"str", "NoneType"}:
            del entry["choices"]
    for volatile in (
        "logging_dir",
        "run_name",
        "output_dir",
    ):  # defaults that hold this machine's name or time
        base.get(volatile, {}).pop("default", None)
    return {
        "": base,
        "seq2seq": {key: entry for key, entry in sequence.items() if key not in base},
        "accelerator_config": from_dataclass(AcceleratorConfig),
        "distributed_config": from_dataclass(DistributedConfig),
        "layer_classes": _layer_classes(),
        "fsdp_config": {key: {"types": ["any"]} for key in sorted(_fsdp_keys(TrainingArguments))},
    }


def _fsdp_keys(arguments: Any) -> set[str]:
    """What `_process_fsdp_args` asks of `fsdp_config`, for either FSDP version."""
    asked: set[str] = {"xla_fsdp_settings"}
    for version in (1, 2):
        for policy in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
            spy = SpyDict(version=version, auto_wrap_policy=policy)
            stand_in = SimpleNamespace(fsdp=True, fsdp_config=spy, gradient_checkpointing=False)
            stand_in.activation_checkpointing = False
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                arguments._process_fsdp_args(stand_in)
            asked |= spy.asked
    return asked


def read_peft() -> Table:
    """What an adapter_config.json may hold: ``""`` for LoRA, and a section for every other type by its name."""
    from peft import LoraConfig, TaskType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    sections = {kind.value: from_dataclass(cls) for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    sections["LORA"], sections[""] = {}, from_dataclass(LoraConfig)
    for table in sections.values():
        for entry in table.values():
            entry.pop("choices", None)
    sections["task_types"] = {task.value: {} for task in TaskType}
    return sections


def _layer_classes() -> dict[str, dict[str, Any]]:
    """Every class that a model of transformers lists in `_no_split_modules` or defines as a layer or block.

    Read from the models' source text: importing a few hundred modules would take minutes.
    """
    import transformers

    found: set[str] = set()
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        for listed in re.findall(r"_no_split_modules\s*=\s*\[([^\]]*)\]", text):
            found.update(re.findall(r"[\"'](\w+)[\"']", listed))
        found.update(re.findall(r"^class (\w+(?:Layer|Block))\(", text, re.M))
    return {name: {} for name in sorted(found)}
