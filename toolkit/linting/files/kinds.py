"""The kind of a file, derived from its keys, and the program that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from toolkit.linting import keys
from toolkit.linting.files.tools import BY_ID, tool_of_keys
from toolkit.linting.files.tree import Node
from toolkit.linting.near import nearest

# Keys that only one kind of file has: one of them decides. Where nothing does, the first kind that fits.
_MARKS = {
    "accelerate": {
        "distributed_type",
        "compute_environment",
        "deepspeed_config",
        "num_machines",
        "num_processes",
    },
    "args": {
        "per_device_train_batch_size",
        "output_dir",
        "num_train_epochs",
        "max_steps",
        "model_name_or_path",
    },
    "deepspeed": {"zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"},
    "peft": {"peft_type", "lora_alpha", "base_model_name_or_path"},
    # transformers' DistributedConfig, as its to_json_file writes it.
    "distributed": {
        "fsdp_size", "fsdp_plan", "fsdp_cpu_offload", "fsdp_mixed_precision", "ep_size", "ep_plan", "ep_implementation",
        "enable_expert_parallel", "enable_sequence_parallel",
    },
}  # fmt: skip
# Where the keys of a kind are listed that has no package of its own name.
_SECTIONS = {"args": ("transformers", ""), "distributed": ("transformers", "distributed_config")}
# Names that two kinds share and that differ in the shape of the value.
_SECTIONS_OF_DEEPSPEED = {"fp16", "bf16", "optimizer", "scheduler", "zero_optimization"}
# Arguments of the example scripts of transformers, beside the training arguments.
_EXAMPLES = {
    "model_name_or_path", "config_name", "tokenizer_name", "cache_dir", "use_fast_tokenizer", "model_revision", "token",
    "trust_remote_code", "torch_dtype", "low_cpu_mem_usage", "dataset_name", "dataset_config_name", "train_file",
    "validation_file", "test_file", "max_train_samples", "max_eval_samples", "max_predict_samples", "streaming",
    "block_size", "overwrite_cache", "validation_split_percentage", "preprocessing_num_workers", "task_name",
    "max_seq_length", "pad_to_max_length", "config_overrides", "model_type", "line_by_line", "mlm_probability",
    "source_lang", "target_lang", "source_prefix", "max_source_length", "max_target_length", "text_column",
    "summary_column", "num_beams", "ignore_pad_token_for_loss", "load_in_4bit", "load_in_8bit", "use_peft", "lora_r",
    "bnb_4bit_quant_storage", "quantization_config", "attention_dropout", "use_reentrant", "dataset_text_field",
    "dtype", "model_dtype", "attn_implementation", "dataset", "model", "seed", "hidden_dropout", "dropout",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recognised:
    """A kind of file, the tool that reads it, and whether that is certain."""

    kind: str
    tool: str = ""
    certain: bool = True


def recognise(root: Node, syntax: str = "yaml") -> Recognised | None:
    """The kind of a file; None if no program is known that reads it."""
    scores = {kind: _score(kind, root) for kind in _MARKS}
    kind = max(scores, key=lambda name: scores[name])
    if kind in ("accelerate", "deepspeed") and scores[kind] >= 10:
        return Recognised(kind)
    tool = tool_of_keys(root)
    if tool is not None and tool.id != "trl":
        return Recognised("tool", tool.id)
    if scores[kind] <= 0:
        return None
    if kind != "args":
        total = len(root.entries or {})
        # A vocabulary has a token "r", too: one key in ten must be known.
        return Recognised(kind) if scores[kind] >= 10 or 5 * scores[kind] >= total else None
    known, foreign = split_known(root)
    if not (scores[kind] >= 10 or len(known) > len(foreign)):
        return None
    if len(foreign) > len(known):
        return Recognised("tool")
    # The example scripts of transformers take no YAML; TRL's take a model and a dataset from one.
    of_trl = tool is BY_ID["trl"] or (syntax == "yaml" and {"model_name_or_path", "dataset_name"} <= set(known))
    return Recognised("args", "trl" if of_trl else "trainer", not foreign)


def split_known(root: Node) -> tuple[list[str], list[str]]:
    """The top-level keys that the Trainer, TRL or their example scripts read, and those that they do not."""
    names = [key for key in root.entries or {} if not key.startswith(("_", "//", "$"))]
    readable = known_to_scripts()
    known = [name for name in names if name in readable]
    rest = [name for name in names if name not in readable]
    return known, [name for name in rest if not _misspelt(name)]


@cache
def _misspelt(name: str) -> bool:
    """Whether a name is close to one that the scripts read."""
    close = {word for word in known_to_scripts() if abs(len(word) - len(name)) < 3 and set(word[:2]) & set(name[:2])}
    return nearest(name, close, 0.88) is not None


@cache
def known_to_scripts() -> set[str]:
    """Arguments of the Trainer, of TRL and of the example scripts, those of earlier versions included."""
    found = {"env", *_EXAMPLES}
    for package, sections in (("transformers", ("", "seq2seq")), ("trl", keys.package("trl")["sections"])):
        for section in sections:
            found |= set(keys.section(package, section)) | set(keys.gone(package, section))
    return found


def _score(kind: str, root: Node) -> int:
    known = keys.section(*_SECTIONS.get(kind, (kind, "")))
    score = 0
    for key, entry in (root.entries or {}).items():
        mapping = entry.node.entries is not None
        if key in _SECTIONS_OF_DEEPSPEED and key != "optimizer" and mapping != (kind == "deepspeed"):
            continue
        if key in _MARKS[kind]:
            score += 10
        elif key in known or (kind == "args" and key in keys.section("transformers", "seq2seq")):
            score += 2
        elif kind == "accelerate" and key in ("fsdp_config", "parallelism_config") and mapping:
            score += 1
    return score
