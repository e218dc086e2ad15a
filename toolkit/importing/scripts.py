"""Scripts around the transformers Trainer: its arguments, and those of transformers' run_clm.py (both 5.23.0)."""

from __future__ import annotations

from toolkit.importing import trainer_parts as trainer
from toolkit.importing.draft import Draft
from toolkit.importing.kernels import trainer_kernels
from toolkit.importing.model_part import model
from toolkit.importing.precision import amp_of, precision
from toolkit.importing.table import Table, nothing, off, parts
from toolkit.importing.training_arguments import TRAINING_ARGUMENTS, TRAINING_DEFAULTS


def the_model(draft: Draft) -> None:
    """The model, under the names of the example scripts."""
    model(draft, path="model_name_or_path", revision="model_revision", attention="attn_implementation")
    if draft.get("tokenizer_name"):
        draft.carry("tokenizer_name", "tokenizer.path", str(draft.get("tokenizer_name")))
    if draft.active("use_peft"):
        draft.unsupported("use_peft", "how a script of its own makes the adapter is not in its arguments")


def data(draft: Draft) -> None:
    """Which data is in the arguments; what the script makes of a row is not, so the command line must say it."""
    keys = [key for key in ("train_file", "dataset_name") if draft.get(key)]
    for key in keys:
        draft.carry(key, "data.train", str(draft.get(key)))
    if not keys and "data.train" not in draft.answers:
        draft.block("train_file", "no data; name it on this command line: data.train=... data.format=...")
    if draft.get("validation_file"):
        draft.carry("validation_file", "data.eval", str(draft.get("validation_file")))
    length = next((key for key in ("block_size", "max_seq_length", "max_length") if draft.get(key)), None)
    if "data.format" in draft.answers:
        for key in ("block_size", "max_seq_length", "max_length"):
            if key == length:
                draft.carry(key, "data.max_length", int(draft.get(key)))
        if length is None and "data.max_length" not in draft.answers:
            draft.differs("max_length", "where samples are cut is not in the arguments: set data.max_length=...")
        return
    draft.set("data.format", "text", "not certain: see above")
    reason = "how the script makes samples is not in its arguments; state it: data.format=... data.max_length=..."
    if draft.has("block_size") or draft.has("config_overrides"):
        reason = (
            "run_clm.py joins all texts without end-of-sequence tokens and cuts blocks of block_size; samples differ"
        )
    draft.differs(keys[0] if keys else "train_file", reason)
    for key in ("block_size", "max_seq_length", "max_length"):
        if draft.get(key):
            draft.carry(key, "data.max_length", int(draft.get(key)))


def mixed_precision(draft: Draft) -> None:
    """bf16, fp16 or neither; transformers 5 loads the checkpoint's dtype unless the script says otherwise."""
    amp = amp_of(draft)
    weights = trainer.as_dtype(draft.get("dtype"))
    precision(draft, amp or "bf16", amp, weights)
    if draft.place("dtype"):
        draft.carry("dtype", "precision", draft.values["precision"])
    for key in ("bf16", "fp16"):
        draft.ignore(key, "off")


SCRIPTS = Table(
    id="trainer",
    name="transformers Trainer",
    version="transformers 5.23.0",
    source="https://pypi.org/project/transformers/5.23.0/",
    own_rules={
        **TRAINING_ARGUMENTS,
        **parts("model_name_or_path model_revision attn_implementation trust_remote_code tokenizer_name train_file "
                "dataset_name validation_file block_size max_seq_length max_length dtype use_peft"),
        **nothing("where files are", "cache_dir token overwrite_cache use_fast_tokenizer low_cpu_mem_usage "
                  "preprocessing_num_workers keep_linebreaks"),
        **nothing("evaluation does not change training", "max_eval_samples max_predict_samples test_file "
                  "validation_split_percentage num_beams val_max_target_length"),
        **off("a part of the data", "max_train_samples dataset_config_name streaming"),
        **off("another configuration of the model", "config_name config_overrides model_type"),
        **off("a task or text of the script's own", "task_name source_lang target_lang source_prefix text_column "
              "summary_column max_source_length max_target_length pad_to_max_length mlm_probability line_by_line "
              "ignore_pad_token_for_loss lora_r lora_alpha lora_dropout lora_target_modules load_in_4bit "
              "load_in_8bit quantization_config dataset_text_field"),
    },
    defaults={**TRAINING_DEFAULTS, "model_revision": "main"},
    parts=(
        the_model, data, trainer.batch, trainer.length, trainer.distribution, mixed_precision, trainer.optimizer,
        trainer.schedule, trainer.checkpointing, trainer.running, trainer.evaluation,
        trainer_kernels,
    ),
    former={"torch_dtype": "dtype", "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu"},
)  # fmt: skip
