"""Other tools whose files look like training arguments: what tells them apart.

A file is a tool's if it has enough of the keys that only this tool reads; a command is, by the script it starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from toolkit.linting.files.tree import Node


@dataclass(frozen=True, slots=True)
class Tool:
    """A training tool: its name, the keys that mark its files, and its scripts."""

    id: str
    name: str
    marks: frozenset[str] = frozenset()
    needs: int = 2  # how many of the marks a file of this tool has at least
    script: str = r"(?!)"  # the path or module that a launcher starts
    trainer: bool = False  # it hands a DeepSpeed JSON to the transformers Trainer


TOOLS = (
    Tool(
        "torchtune",
        "torchtune",
        frozenset({"_component_", "checkpointer", "tokenizer", "metric_logger", "log_peak_memory_stats",
                   "enable_activation_offloading", "max_steps_per_epoch", "optimizer_in_bwd"}),
        3,
        r"(^|_)finetune_(single_device|distributed)|(^|/)recipes/\w+\.py$",
    ),
    Tool(
        "axolotl",
        "Axolotl",
        frozenset({"base_model", "sequence_len", "micro_batch_size", "num_epochs", "sample_packing", "val_set_size",
                   "dataset_prepared_path", "lora_target_linear", "saves_per_epoch", "evals_per_epoch",
                   "pad_to_sequence_len", "lora_model_dir", "special_tokens", "wandb_watch", "eval_sample_packing",
                   "tokenizer_type", "plugins", "liger_rms_norm", "flash_attention", "lr_scheduler"}),
        3,
        r"(^|[./])axolotl[./]cli|(^|/)scripts/finetune\.py$",
        True,
    ),
    Tool(
        "llamafactory",
        "LLaMA-Factory",
        frozenset({"stage", "finetuning_type", "template", "cutoff_len", "preprocessing_num_workers", "plot_loss",
                   "overwrite_cache", "max_samples", "dataset_dir", "lora_target", "export_dir", "infer_backend",
                   "adapter_name_or_path", "pref_beta", "quantization_bit", "image_max_pixels", "kernel_config",
                   "sample_backend", "dist_config", "model_class", "export_size", "use_v1_kernels",
                   "train_dataset", "peft_config", "use_adam_mini", "use_galore", "freeze_trainable_layers"}),
        2,
        r"llama_?factory|(^|/)src/train(_bash)?\.py$",
        True,
    ),
    Tool(
        "swift",
        "ms-swift",
        frozenset({"split_dataset_ratio", "train_type", "tuner_type", "rlhf_type", "padding_free", "attn_impl",
                   "model_author", "external_plugins", "colocate_groups", "steps_per_generation", "teacher_model",
                   "offload_teacher_model", "attention_backend", "recompute_granularity", "lr_warmup_fraction",
                   "gkd_logits_topk", "load_from_cache_file", "custom_register_path", "loss_scale", "sampler_engine"}),
        2,
        r"(^|[./])swift[./]cli|(^|/)swift/|(^|[./])megatron[./]",
        True,
    ),
    Tool(
        "open-instruct",
        "open-instruct",
        frozenset({"dataset_mixer", "dataset_mixer_list", "dataset_mix_dir", "with_tracking", "checkpointing_steps",
                   "use_slow_tokenizer", "keep_last_n_checkpoints", "tokenizer_name", "hf_metadata_dataset",
                   "gradient_checkpointing", "max_train_samples", "preprocessing_num_workers", "exp_name"}),
        4,
        r"open_instruct[./]",
    ),
    Tool(
        "openrlhf",
        "OpenRLHF",
        frozenset({"pretrain", "micro_train_batch_size", "actor_num_gpus_per_node", "zero_stage", "input_key",
                   "apply_chat_template", "max_epochs", "ref_num_gpus_per_node", "micro_rollout_batch_size"}),
        3,
        r"(^|[./])openrlhf[./]",
    ),
    Tool(
        "trl",
        "TRL",
        frozenset({"dataset_train_split", "dataset_test_split", "use_peft", "reward_funcs", "num_generations",
                   "max_prompt_length", "max_completion_length", "dataset_mixture", "lora_target_modules",
                   "attn_implementation", "packing", "model_revision", "assistant_only_loss", "torch_dtype",
                   "dataset_num_proc", "completion_only_loss", "max_seq_length", "eos_token", "packing_strategy"}),
        2,
        r"(^|[./])trl[./](scripts|experimental)|(^|/)examples/scripts/\w+\.py$|(^|/)open_r1/(sft|grpo)\.py$"
        r"|(^|/)scripts/(run_)?(sft|dpo|orpo|cpt)\.py$",
        True,
    ),
)  # fmt: skip
BY_ID = {tool.id: tool for tool in TOOLS}
# Scripts of the transformers examples that use its Trainer.
TRAINER_SCRIPT = re.compile(r"(^|/)run_(?!\w*no_trainer)(\w+)\.py$")


def tool_of_keys(root: Node) -> Tool | None:
    """The tool whose marks a file has most of; None if no tool has enough."""
    keys = set(root.entries or {})
    if any("_component_" in (e.node.entries or {}) for e in (root.entries or {}).values()):
        return BY_ID["torchtune"]
    counts = [(len(tool.marks & keys), tool) for tool in TOOLS]
    enough = [(count / tool.needs, count, tool) for count, tool in counts if count >= tool.needs]
    return max(enough, key=lambda found: found[:2])[2] if enough else None


def tool_of_script(script: str | None) -> Tool | None:
    """The tool that a script or module belongs to."""
    return next((tool for tool in TOOLS if script and re.search(tool.script, script)), None)
