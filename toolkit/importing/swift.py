"""ms-swift's `sft` and `pt` (commit 3602360a5623: swift/arguments, swift/trainers/arguments.py, swift/dataset)."""

from __future__ import annotations

import math

from toolkit.importing import trainer_parts as trainer
from toolkit.importing.adapters import lora
from toolkit.importing.beside_lora import given, initial, new_tokens, switch
from toolkit.importing.data_files import longest_text, source
from toolkit.importing.draft import Draft
from toolkit.importing.kernels import trainer_kernels
from toolkit.importing.model_part import model
from toolkit.importing.precision import amp_of, checkpoint_dtype, precision
from toolkit.importing.swift_rules import RULES
from toolkit.importing.table import Table
from toolkit.importing.training_arguments import TRAINING_DEFAULTS

_FLASH = {"flash_attn": "flash_attention_2"}


def method(draft: Draft) -> None:
    """Supervised fine-tuning and plain text."""
    if draft.command in ("rlhf", "rollout", "sample") or draft.get("rlhf_type"):
        key = "rlhf_type" if draft.get("rlhf_type") else "command"
        draft.block(key, "learning from preferences or rewards; the recipe has supervised fine-tuning")
    draft.ignore("rlhf_type", "off")
    task = str(draft.get("task_type") or "causal_lm")
    if task != "causal_lm":
        draft.block("task_type", f"{task}: a template of ms-swift's own around the classes")
    draft.ignore("task_type", "causal_lm, as in the recipe")
    if str(draft.get("tuner_type")) not in ("lora", "full"):
        draft.block("tuner_type", f"{draft.get('tuner_type')}: the recipe trains all weights or a LoRA adapter")


def the_model(draft: Draft) -> None:
    """Model, attention and adapter."""
    attention = draft.get("attn_impl")
    model(draft, path="model", revision="model_revision")
    if attention:
        draft.carry("attn_impl", "model.attention", _FLASH.get(str(attention), str(attention)))
    if draft.get("model") and not draft.active("use_hf"):
        draft.notes.append("a model's name is looked up on the Hugging Face hub; ms-swift uses ModelScope by default")
    draft.ignore("use_hf", "the recipe uses the Hugging Face hub")
    adapter_keys = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_dora",
                    "adapters", "quant_bits", "quant_method", "use_rslora", "init_weights",
                    "target_parameters")  # fmt: skip
    if str(draft.get("tuner_type")) == "full":
        draft.ignore("tuner_type", "every weight trains, as in a recipe without an adapter")
        for key in adapter_keys:
            draft.ignore(key, "of adapters; every weight trains")
        return
    lora(draft, r="lora_rank", alpha="lora_alpha", dropout="lora_dropout", targets="target_modules",
         saved="modules_to_save", dora="use_dora")  # fmt: skip
    if draft.get("quant_bits"):
        if draft.get("quant_bits") == 4 and draft.get("quant_method") == "bnb":
            draft.carry("quant_bits", "adapter.method", "qlora", "nf4")
        else:
            draft.unsupported("quant_bits", "the recipe's base is in 4 bits (nf4, bnb) or not quantised")
    draft.ignore("quant_method", "with quant_bits")
    draft.carry("tuner_type", "adapter.method", draft.values["adapter.method"])
    paths = draft.names("adapters")
    if len(paths) == 1:
        draft.carry("adapters", "adapter.path", paths[0])
    elif paths:
        draft.unsupported("adapters", "several adapters")
    switch(draft, "use_rslora", "use_rslora")
    initial(draft, "init_weights")
    given(draft, "target_parameters", "target_parameters")


def tokens(draft: Draft) -> None:
    """Tokens that the tokenizer gets (swift/model/register.py). Read after the adapter."""
    wanted = draft.get("new_special_tokens") or []
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    if any(str(token).endswith(".txt") for token in wanted):
        draft.unsupported("new_special_tokens", "a file of tokens; name them in tokenizer.add_special_tokens")
        return
    trained = "with an adapter ms-swift trains the embeddings that modules_to_save names, and else none of their rows"
    new_tokens(draft, "new_special_tokens", [str(t) for t in wanted], special=True, beside_adapter=trained)


def data(draft: Draft) -> None:
    """Data sets, templates and what is learned."""
    wanted = draft.get("dataset") or []
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    sources = [source(str(name).partition("#")[0]) for name in wanted]
    if not wanted and "data.train" not in draft.answers:
        draft.block("dataset", "no data; name it on this command line: data.train=... data.format=...")
    elif None in sources:
        draft.block("dataset", "a folder without a single training file; name the file: data.train=...")
    elif wanted:
        draft.carry("dataset", "data.train", sources[0] if len(sources) == 1 else [{"path": s} for s in sources])
        if any("#" in str(name) for name in wanted):
            draft.unsupported("dataset", "NAME#N: N rows that are drawn; the recipe takes all")
        if any(not str(s).endswith((".jsonl", ".json", ".parquet", ".txt", ".csv")) for s in sources):
            draft.differs(
                "dataset", "a name of ms-swift's own list of data sets; the recipe looks on the Hugging Face hub"
            )
    plain = (
        not draft.active("use_chat_template") if draft.get("use_chat_template") is not None else draft.command == "pt"
    )
    draft.set("data.format", "text" if plain else "messages", "the command" if plain else "use_chat_template")
    _template(draft, plain)
    _lengths(draft, plain)
    if draft.active("packing"):
        draft.carry("packing", "data.packing", True)
        draft.differs("packing", "both keep samples apart; rows, and so the samples of a step, are others")
    if draft.get("val_dataset"):
        draft.ignore("split_dataset_ratio", "val_dataset decides")
    else:
        trainer.held_out_share(draft, "split_dataset_ratio")
    if draft.active("streaming"):
        draft.carry("streaming", "data.streaming", True)
    for key in ("packing", "streaming", "val_dataset"):
        draft.ignore(key, "off, or evaluation")


def _template(draft: Draft, plain: bool) -> None:
    scale = str(draft.get("loss_scale"))
    if plain:
        field = next((f for f in ("text", "response", "content") if _has_field(draft, f)), None)
        if field is None:
            draft.differs("dataset", "the column that ms-swift takes the text from is not known; the recipe reads text")
        elif field != "text":
            draft.set("data.fields", {"text": field}, "the column that ms-swift takes the text from")
        for key in ("template", "system", "enable_thinking", "loss_scale", "use_chat_template"):
            draft.ignore(key, "plain text has no template")
        return
    if "data.chat_template" in draft.answers:
        draft.ignore("template", "data.chat_template on the command line stands for it")
    else:
        draft.differs(
            "template",
            "ms-swift's own template of the model, each turn tokenised alone; the recipe uses the tokenizer's chat "
            "template, or data.chat_template=FILE",
        )
    if draft.get("system"):
        draft.unsupported("system", "a system message that the data does not have")
    if scale == "last_round":
        draft.carry("loss_scale", "data.turns", "last")
    elif scale != "default":
        draft.unsupported("loss_scale", f"{scale}: other weights of tokens")
    if draft.place("enable_thinking"):
        draft.carry(
            "enable_thinking", "data.chat_template_kwargs", {"enable_thinking": draft.active("enable_thinking")}
        )
    for key in ("system", "loss_scale", "use_chat_template"):
        draft.ignore(key, "as in the recipe")


def _has_field(draft: Draft, field: str) -> bool:
    trained = draft.values.get("data.train")
    return isinstance(trained, str) and longest_text(trained, field) is not None


def _lengths(draft: Draft, plain: bool) -> None:
    trained, how = draft.values.get("data.train"), str(draft.get("truncation_strategy") or "delete")
    field = (draft.values.get("data.fields") or {}).get("text", "text")
    longest = longest_text(trained, field) if plain and isinstance(trained, str) else None
    if draft.get("max_length") is None:
        draft.differs("max_length", "the model's own limit; the recipe has data.max_length, 1024 unless it is set")
    else:
        draft.carry("max_length", "data.max_length", draft.whole("max_length"))
        if longest is not None and longest < draft.whole("max_length"):
            draft.ignore("truncation_strategy", "no text is longer")
            return
    if how != "right":
        draft.differs(
            "truncation_strategy", f"{how}: what happens to longer samples; the recipe truncates them at the end"
        )
    draft.ignore("truncation_strategy", "truncated, as in the recipe")


def defaults(draft: Draft) -> None:
    """Defaults that depend on other keys (swift/arguments/sft_args.py, swift/trainers/arguments.py)."""
    found = dict(draft.defaults)
    found["learning_rate"] = 1e-5 if str(draft.get("tuner_type")) == "full" else 1e-4
    if draft.get("gradient_accumulation_steps") is None:
        processes = draft.values.get("machine.processes", 1) * draft.values.get("machine.nodes", 1)
        size = draft.whole("per_device_train_batch_size")
        found["gradient_accumulation_steps"] = max(1, math.ceil(16 / size / processes))
    if draft.command == "pt":
        found["loss_scale"] = "all"
    if draft.get("max_epochs"):
        draft.ignore("num_train_epochs", "max_epochs decides")
        draft.own_names = {"num_train_epochs": "max_epochs"}
    draft.defaults = found


def mixed_precision(draft: Draft) -> None:
    """bf16 and fp16 follow torch_dtype, which follows the checkpoint (arguments/base_args/model_args.py)."""
    weights = trainer.as_dtype(draft.get("torch_dtype")) or checkpoint_dtype(draft)
    amp = amp_of(draft)
    if amp is None and not draft.has("bf16") and not draft.has("fp16") and weights is not None:
        amp = "bf16" if weights == "bfloat16" else "fp16"
    key = "torch_dtype" if draft.place("torch_dtype") else "bf16"
    # Trained float16 weights are cast to float32 (pipelines/train/tuner.py).
    precision(draft, key, amp, "float32" if weights == "float16" else weights)
    for name in ("bf16", "fp16", "torch_dtype"):
        draft.ignore(name, "off, or torch_dtype decides")


SWIFT = Table(
    id="swift",
    name="ms-swift",
    version="ms-swift 3602360a5623",
    source="https://github.com/modelscope/ms-swift/tree/3602360a5623",
    own_rules=RULES,
    defaults={
        **{key: value for key, value in TRAINING_DEFAULTS.items() if key not in ("learning_rate", "bf16", "fp16",
                                                                                "gradient_accumulation_steps")},
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
        "logging_steps": 5,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "dataloader_num_workers": 1,
        "tuner_type": "lora",
        "lora_rank": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": ["all-linear"],
        "loss_scale": "default",
        "split_dataset_ratio": 0.0,
    },
    parts=(
        method, the_model, tokens, data, defaults, trainer.batch, trainer.length, trainer.distribution, mixed_precision,
        trainer.optimizer, trainer.schedule, trainer.checkpointing, trainer.running, trainer.evaluation,
        trainer_kernels,
    ),
    former={"train_type": "tuner_type", "evaluation_strategy": "eval_strategy"},
)  # fmt: skip
