"""TRL's `sft` (TRL 1.16.0: trainer/sft_config.py, trainer/model_config.py, scripts/sft.py, scripts/utils.py)."""

from __future__ import annotations

from typing import Any

from toolkit.importing import trainer_parts as trainer
from toolkit.importing.adapters import lora
from toolkit.importing.beside_lora import given, switch
from toolkit.importing.data_files import columns_format, first_row, source
from toolkit.importing.draft import Draft, model
from toolkit.importing.kernels import trainer_kernels
from toolkit.importing.precision import amp_of, precision
from toolkit.importing.table import Off, Table, nothing, off, parts
from toolkit.importing.training_arguments import TRAINING_ARGUMENTS, TRAINING_DEFAULTS
from toolkit.linting import keys

# Keys of TRL's other trainers, which learn from preferences or rewards.
_OTHER_TRAINERS = {"dpo", "grpo", "kto", "reward", "rloo"}
_TELLTALES = ("reward_funcs", "beta", "num_generations", "max_prompt_length", "max_completion_length")


def method(draft: Draft) -> None:
    """Only supervised fine-tuning is read; keys of other trainers name another method."""
    found = [key for key in _TELLTALES if key in draft.written]
    known = keys_of_other_trainers()
    for key in found:
        draft.block(key, "TRL's trainers of preferences and rewards; the recipe has supervised fine-tuning")
    for key in draft.written:
        if found and key in known and key not in RULES:
            draft.unsupported(key, "an argument of TRL's trainers of preferences and rewards")


def keys_of_other_trainers() -> set[str]:
    """Keys that TRL's `sft` does not have and one of its other commands has, or had."""
    found: set[str] = set(_TELLTALES)
    for section in _OTHER_TRAINERS:
        found |= set(keys.section("trl", section)) | set(keys.gone("trl", section))
    return found - set(keys.section("trl", "sft"))


def the_model(draft: Draft) -> None:
    """Model and adapter."""
    model(draft, path="model_name_or_path", revision="model_revision", attention="attn_implementation")
    lora_keys = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_dora",
                 "use_rslora", "lora_target_parameters")  # fmt: skip
    quantised = [key for key in ("load_in_4bit", "load_in_8bit") if draft.active(key)]
    if draft.active("use_peft"):
        lora(draft, r="lora_r", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target_modules",
             saved="lora_modules_to_save", dora="use_dora")  # fmt: skip
        switch(draft, "use_rslora", "use_rslora")
        given(draft, "lora_target_parameters", "target_parameters")
        draft.carry("use_peft", "adapter.method", draft.values["adapter.method"])
        draft.origins["adapter.method"] = f"{draft.name('use_peft')} and {draft.name('use_dora')}"
        if "load_in_4bit" in quantised:
            draft.set("adapter.method", "qlora", "load_in_4bit")
            draft.differs("load_in_4bit", "TRL trains the adapter in bfloat16 over a 4-bit base; the recipe in float32")
        if "load_in_8bit" in quantised:
            draft.unsupported("load_in_8bit", "the recipe's base is in 4 bits or not quantised")
    else:
        for key in (*lora_keys, "use_peft", *quantised):
            draft.ignore(key, "use_peft is off: every weight trains")
    for key in ("load_in_4bit", "load_in_8bit"):
        if not draft.done(key):
            draft.ignore(key, "off")


def data(draft: Draft) -> None:
    """Data, its format, and what of it is learned."""
    _sources(draft)
    length = draft.get("max_length")
    if length is None:
        draft.differs("max_length", "no limit; the recipe has one, 1024 unless data.max_length is set")
    else:
        draft.carry("max_length", "data.max_length", draft.whole("max_length"))
    trains: Any = draft.values.get("data.train")
    one = trains if isinstance(trains, str) else None
    found = columns_format(first_row(one)) if one else None
    answer = draft.answers.get("data.format")
    if answer is None and found is None and draft.active("assistant_only_loss"):
        found = "messages"
    if answer is None and found is None and draft.active("completion_only_loss"):
        found = "prompt-completion"
    form = answer or found
    if form is None:
        draft.set("data.format", "text", "not certain: see above")
        draft.differs("dataset_name", "TRL reads what the columns hold, which is not known here: set data.format=...")
    elif form == "conversational-prompt":
        draft.set("data.format", "messages", "not certain: see above")
        draft.unsupported(
            "dataset_name", "a prompt and a completion of messages; the recipe learns from whole messages"
        )
    else:
        draft.set("data.format", form, "the command line" if answer else "what the data and the loss settings show")
    _loss(draft, str(form))
    _packing(draft)


def _sources(draft: Draft) -> None:
    listed = draft.mappings("datasets")
    if listed:
        found = [source(str(d.get("path")), files=d.get("data_files"), name=d.get("name"), split=d.get("split"))
                 for d in listed if isinstance(d, dict)]  # fmt: skip
        if None in found or not found:
            draft.block("datasets", "a data set that data.train cannot name")
            return
        value: Any = found[0] if len(found) == 1 and isinstance(found[0], str) else [
            {"path": item} if isinstance(item, str) else item for item in found
        ]  # fmt: skip
        draft.carry("datasets", "data.train", value)
        for extra in ("fraction", "data_dir"):
            if any(isinstance(d, dict) and d.get(extra) is not None for d in listed):
                draft.differs("datasets", f"{extra}: TRL takes the first rows of each data set; the recipe draws them")
        if draft.get("test_split_size"):
            trainer.held_out_share(draft, "test_split_size")
        for key in ("dataset_name", "dataset_config", "dataset_train_split", "dataset_streaming"):
            draft.ignore(key, "datasets decides")
        return
    name = draft.get("dataset_name")
    if not isinstance(name, str):
        if "data.train" not in draft.answers:
            draft.block("dataset_name", "no data; name it on this command line: data.train=...")
        return
    split = draft.get("dataset_train_split")
    value = source(name, name=draft.get("dataset_config"), split=split)
    if value is None:
        draft.block("dataset_name", f"{name}: no single file is the split {split}; name it: data.train=...")
        return
    draft.carry("dataset_name", "data.train", value if isinstance(value, str) else [value])
    for key in ("dataset_config", "dataset_train_split"):
        if draft.place(key):
            draft.carry(key, "data.train", draft.values["data.train"])
    if draft.active("dataset_streaming") or draft.active("streaming"):
        key = "dataset_streaming" if draft.active("dataset_streaming") else "streaming"
        draft.carry(key, "data.streaming", True)


def _loss(draft: Draft, form: str) -> None:
    everything = draft.get("completion_only_loss") is False or str(draft.get("completion_only_loss")).lower() == "false"
    if form == "messages" and not draft.active("assistant_only_loss"):
        draft.differs(
            "assistant_only_loss", "off: TRL learns every token of a conversation; the recipe the assistant's"
        )
    elif form == "messages":
        draft.carry("assistant_only_loss", "data.format", draft.values["data.format"])
        draft.differs(
            "assistant_only_loss", "equal if the chat template ends a conversation with the end-of-sequence token"
        )
    else:
        draft.ignore("assistant_only_loss", "for conversations")
    if form == "prompt-completion" and everything:
        draft.differs("completion_only_loss", "off: TRL learns the prompt too; the recipe the completion")
    elif form == "prompt-completion":
        draft.ignore("completion_only_loss", "the completion is learned, as in the recipe")
    else:
        draft.ignore("completion_only_loss", "for prompts and completions")
    if form == "text" and draft.get("dataset_text_field") != "text":
        draft.carry("dataset_text_field", "data.fields", {"text": draft.get("dataset_text_field")})
    draft.ignore("dataset_text_field", "not used, or text")


def _packing(draft: Draft) -> None:
    if draft.active("packing"):
        strategy = draft.get("packing_strategy")
        draft.carry("packing", "data.packing", True)
        if strategy == "bfd":
            draft.differs("packing", "both pack best-fit decreasing; rows, and so the samples of a step, are others")
        else:
            draft.unsupported("packing_strategy", f"{strategy}: samples are cut in the middle")
    draft.ignore("packing", "off, as in the recipe")
    if not draft.done("packing_strategy"):
        draft.ignore("packing_strategy", "best-fit decreasing, or packing is off")


def mixed_precision(draft: Draft) -> None:
    """TRL turns bf16 on unless fp16 is (trainer/base_config.py), and loads float32 unless dtype says otherwise."""
    default = draft.get("bf16") is None and not draft.active("fp16")
    amp = "bf16" if default else amp_of(draft)
    key = "fp16" if amp == "fp16" else "bf16"
    precision(draft, key, amp, trainer.as_dtype(draft.get("dtype")))
    if draft.place("dtype"):
        draft.carry("dtype", "precision", draft.values["precision"])
    for name in ("fp16", "bf16"):
        if not draft.done(name):
            draft.ignore(name, "off")


RULES = {
    **TRAINING_ARGUMENTS,
    **parts(
        "model_name_or_path model_revision attn_implementation trust_remote_code use_peft lora_r lora_alpha "
        "lora_dropout lora_target_modules lora_modules_to_save use_dora use_rslora lora_target_parameters "
        "load_in_4bit load_in_8bit dtype dataset_name "
        "dataset_config dataset_train_split dataset_streaming streaming datasets test_split_size dataset_text_field "
        "max_length completion_only_loss assistant_only_loss packing packing_strategy"
    ),
    **nothing("how data is prepared or padded", "dataset_num_proc pad_to_multiple_of padding_free eval_packing"),
    **nothing("the order of samples is drawn from run.seed", "shuffle_dataset"),
    **nothing("evaluation does not change training; set data.eval", "dataset_test_split"),
    **nothing("about generation, or for tracking", "ignore_bias_buffers wandb_entity wandb_project wandb_run_group "
              "config env benchmarks callbacks system_prompt_for_benchmarks"),
    **off("chat templates of other models: write a Jinja file and set data.chat_template", "chat_template_path"),
    **off("another text in the conversations", "chat_template system_prompt eos_token pad_token"),
    **off("arguments of the model's loading", "model_init_kwargs"),
    **off("a load-balancing loss", "router_aux_loss_coef"),
    **off("a mixture of data sets of the alignment handbook", "dataset_mixture dataset_mixer dataset_splits"),
    **off("columns that a script of its own reads", "dataset_kwargs dataset_prompt_column"),
    "truncation_mode": Off("the recipe keeps the start of long samples", ("keep_start",)),
    "loss_type": Off("another loss", (None, "nll", "chunked_nll")),
    "lora_task_type": Off("another task", ("CAUSAL_LM",)),
}  # fmt: skip

TRL = Table(
    id="trl",
    name="TRL",
    version="TRL 1.16.0",
    source="https://pypi.org/project/trl/1.16.0/",
    loop="trl",
    own_rules=RULES,
    defaults={
        **TRAINING_DEFAULTS,
        "learning_rate": 2e-5,
        "logging_steps": 10,
        "gradient_checkpointing": True,
        "bf16": None,
        "dtype": "float32",
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "dataset_train_split": "train",
        "dataset_text_field": "text",
        "max_length": 1024,
        "packing_strategy": "bfd",
    },
    parts=(
        method, the_model, data, trainer.batch, trainer.length, trainer.distribution, mixed_precision,
        trainer.optimizer, trainer.schedule, trainer.checkpointing, trainer.running, trainer.evaluation,
        trainer_kernels,
    ),
    former={"torch_dtype": "dtype", "max_seq_length": "max_length", "evaluation_strategy": "eval_strategy",
            "use_liger": "use_liger_kernel"},
)  # fmt: skip
