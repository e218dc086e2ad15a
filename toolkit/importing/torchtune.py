"""torchtune's fine-tuning recipes (commit bd2a0fc7c314: recipes, torchtune/datasets, torchtune/models)."""

from __future__ import annotations

import re

from toolkit.importing.data_files import first_row, longest_text, row_count, source
from toolkit.importing.draft import Draft
from toolkit.importing.table import Table
from toolkit.importing.torchtune_rules import RULES
from toolkit.recipe.optimizer_names import NOT_PAGED

# Families whose weights have these names on the Hugging Face hub; Phi fuses them.
_FAMILIES = re.compile(
    r"torchtune\.models\.(llama2|llama3|llama3_1|llama3_2|llama3_3|mistral|qwen2|qwen2_5|qwen3|gemma|gemma2)"
    r"\.(?P<kind>lora_|qlora_)?\w+$"
)
_NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "bitsandbytes.optim.PagedAdamW": "adamw",
    "bitsandbytes.optim.AdamW": "adamw",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw8bit",
}
_LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")
# Data sets whose builders name them (torchtune/datasets/_alpaca.py).
_NAMED = {"alpaca_cleaned_dataset": "yahma/alpaca-cleaned", "alpaca_dataset": "tatsu-lab/alpaca"}
_TEXT = "torchtune.datasets.text_completion_dataset"


def method(draft: Draft) -> None:
    """Cross-entropy over one model; a teacher or a preference loss is another kind of training."""
    loss = str(draft.get("loss._component_"))
    if loss.rpartition(".")[2] not in _LOSSES:
        draft.block("loss._component_", f"{loss}: the recipe has the cross-entropy of the next token")
    draft.ignore("loss._component_", "cross-entropy of the next token")
    for key in ("teacher_model._component_", "ref_checkpointer._component_", "quantizer._component_", "tasks"):
        if draft.get(key):
            draft.block(key, "distillation, preferences, quantisation or evaluation; the recipe fine-tunes one model")
    draft.ignore("quantizer", "off")


def the_model(draft: Draft) -> None:
    """The checkpoint's folder, and LoRA from the model's builder."""
    folder = draft.get("checkpointer.checkpoint_dir")
    component = str(draft.get("model._component_"))
    if not folder:
        draft.block("checkpointer.checkpoint_dir", "no model; name one on this command line: model.path=...")
        draft.ignore("model._component_", "this file names no folder")
        return
    draft.carry("checkpointer.checkpoint_dir", "model.path", str(folder))
    if "HF" not in str(draft.get("checkpointer._component_")):
        draft.unsupported(
            "checkpointer._component_", "weights in Meta's or torchtune's format; the recipe reads transformers'"
        )
    draft.ignore("checkpointer._component_", "weights in the Hugging Face format, as in the recipe")
    found = _FAMILIES.match(component)
    kind = found["kind"] if found else "lora_" if ".lora_" in component or ".qlora_" in component else None
    if found is None:
        draft.differs(
            "model._component_", f"{component}: equal if the folder holds this model, with these names of weights"
        )
    draft.ignore("model._component_", "the folder's config says which model it is")
    if kind is None:
        return
    _lora(draft, quantised=kind == "qlora_")


def _lora(draft: Draft, quantised: bool) -> None:
    draft.set("adapter.method", "lora", "model._component_")
    if quantised:
        draft.set("adapter.method", "qlora", "model._component_")
        draft.differs(
            "model._component_", "torchtune trains the adapter in bfloat16 over a 4-bit base; the recipe in float32"
        )
    elif draft.active("model.use_dora"):
        draft.carry("model.use_dora", "adapter.method", "dora")
    draft.ignore("model.use_dora", "off")
    draft.carry("model.lora_rank", "adapter.r", draft.whole("model.lora_rank"))
    alpha = draft.number("model.lora_alpha")
    draft.carry("model.lora_alpha", "adapter.alpha", int(alpha) if alpha == int(alpha) else alpha)
    draft.carry("model.lora_dropout", "adapter.dropout", draft.number("model.lora_dropout"))
    wanted = [_NAMES.get(str(name), str(name)) for name in draft.get("model.lora_attn_modules") or []]
    if draft.active("model.apply_lora_to_mlp"):
        wanted += ["gate_proj", "down_proj", "up_proj"]
        draft.carry("model.apply_lora_to_mlp", "adapter.target_modules", wanted)
    if draft.active("model.apply_lora_to_output"):
        wanted.append("lm_head")
        draft.carry("model.apply_lora_to_output", "adapter.target_modules", wanted)
    draft.carry("model.lora_attn_modules", "adapter.target_modules", wanted, "the names of transformers' modules")
    for key in ("model.apply_lora_to_mlp", "model.apply_lora_to_output"):
        draft.ignore(key, "off")


def data(draft: Draft) -> None:
    """One data set of plain text; torchtune's other builders write a text of their own around the columns."""
    component = draft.get("dataset._component_")
    if component is None:
        if "data.train" not in draft.answers:
            draft.block("dataset", "no data set of one builder; name the data: data.train=... data.format=...")
        for key in ("tokenizer._component_", "tokenizer.max_seq_len"):
            draft.ignore(key, "the folder's own tokenizer; set data.max_length")
        return
    _trained(draft, str(component))
    _length(draft)
    _window(draft)
    packed = draft.active("dataset.packed")
    if packed:
        draft.carry("dataset.packed", "data.packing", True)
        draft.differs("dataset.packed", "both keep samples apart; rows, and so the samples of a step, are others")
        if draft.get("dataset.split_across_pack", component == _TEXT):
            draft.differs("dataset.split_across_pack", "on: a text may be cut and continue in the next row")
    for key in ("dataset.packed", "dataset.split_across_pack"):
        draft.ignore(key, "off, as in the recipe")
    shuffle = draft.get("shuffle")
    draft.carry("shuffle", "data.shuffle", bool(shuffle))


def _trained(draft: Draft, component: str) -> None:
    path = str(draft.get("dataset.source") or _NAMED.get(component.rpartition(".")[2], ""))
    name = draft.get("dataset.name") or draft.get("dataset.subset")
    files, split = draft.get("dataset.data_files"), draft.get("dataset.split")
    where = source(path, files=files, name=name, split=split) if path else None
    if where is None and "data.train" not in draft.answers:
        draft.block("dataset._component_", f"{component}: a data set of its own; name the data: data.train=...")
    elif where is not None:
        key = "dataset.source" if draft.get("dataset.source") else "dataset._component_"
        draft.carry(key, "data.train", where if isinstance(where, str) else [where])
    for key in ("dataset.data_files", "dataset.name", "dataset.subset", "dataset.split", "dataset.source"):
        draft.ignore(key, "part of data.train")
    if component != _TEXT:
        draft.set("data.format", "messages", "not certain: see above")
        builder = component.rpartition(".")[2]
        why = f"{builder}: a text of torchtune's own around the columns; the recipe uses the tokenizer's chat template"
        draft.unsupported("dataset._component_", why)
        draft.ignore("tokenizer._component_", "the folder's own tokenizer")
        return
    draft.set("data.format", "text", "dataset._component_")
    column = str(draft.get("dataset.column") or "text")
    if column != "text":
        draft.carry("dataset.column", "data.fields", {"text": column})
    if draft.get("dataset.add_eos") is False:
        draft.differs("dataset.add_eos", "off: texts without end-of-sequence; the recipe adds it")
    for key in ("dataset._component_", "dataset.column", "dataset.add_eos"):
        draft.ignore(key, "plain text, as in the recipe")
    tokenizer = str(draft.get("tokenizer._component_")).rpartition(".")[2]
    why = f"{tokenizer}: equal if the folder's own tokenizer gives the same ids, beginning-of-sequence first"
    draft.differs("tokenizer._component_", why)


def _length(draft: Draft) -> None:
    most = draft.get("tokenizer.max_seq_len")
    if most is not None:
        length = draft.whole("tokenizer.max_seq_len") - (draft.values.get("data.format") == "text")
        draft.carry("tokenizer.max_seq_len", "data.max_length", length, "texts are cut one token shorter")
        return
    trained = draft.values.get("data.train")
    field = (draft.values.get("data.fields") or {}).get("text", "text")
    longest = longest_text(trained, field) if isinstance(trained, str) and first_row(trained) else None
    if longest is not None:
        draft.carry("tokenizer.max_seq_len", "data.max_length", max(2, longest), "no limit: longer than every text")
    else:
        draft.differs("tokenizer.max_seq_len", "no limit; the recipe has one, 1024 unless data.max_length is set")


def _window(draft: Draft) -> None:
    """torchtune drops the last batches of an epoch that do not fill a step."""
    trained = draft.values.get("data.train")
    rows = row_count(trained) if isinstance(trained, str) else None
    window = draft.whole("batch_size") * draft.whole("gradient_accumulation_steps")
    if rows is None or rows % window:
        why = "samples at the end of an epoch that do not fill a step are dropped; the recipe trains on them"
        draft.differs("batch_size", why)


def numbers(draft: Draft) -> None:
    """Batch, length, optimizer, schedule."""
    if not draft.get("optimizer._component_"):
        draft.block("optimizer._component_", "no optimizer: this file does not train")
        draft.ignore("batch_size", "this file does not train")
        return
    draft.carry("batch_size", "batch.micro_size", draft.whole("batch_size"))
    draft.carry("gradient_accumulation_steps", "batch.accumulation", draft.whole("gradient_accumulation_steps"))
    epochs, most = draft.whole("epochs"), draft.get("max_steps_per_epoch")
    if most is None:
        draft.carry("epochs", "run.epochs", epochs)
        draft.ignore("max_steps_per_epoch", "no limit")
    else:
        draft.carry("max_steps_per_epoch", "run.max_steps", draft.whole("max_steps_per_epoch") * epochs)
        draft.differs("max_steps_per_epoch", "equal for one epoch that has as many steps")
        draft.ignore("epochs", "max_steps_per_epoch decides")
    _optimizer(draft)
    scheduler = draft.get("lr_scheduler._component_")
    if scheduler is None:
        draft.set("schedule.name", "constant", f"default of {draft.version}: no lr_scheduler")
    elif str(scheduler).endswith("get_cosine_schedule_with_warmup"):
        draft.carry("lr_scheduler._component_", "schedule.name", "cosine")
        draft.carry(
            "lr_scheduler.num_warmup_steps", "schedule.warmup_steps", draft.whole("lr_scheduler.num_warmup_steps")
        )
    else:
        draft.unsupported("lr_scheduler._component_", f"torchtune's cosine is carried over, not {scheduler}")


def _optimizer(draft: Draft) -> None:
    component = str(draft.get("optimizer._component_"))
    name = _OPTIMIZERS.get(component)
    if name is None:
        draft.unsupported(
            "optimizer._component_", f"torchtune's AdamW and 8-bit AdamW are carried over, not {component}"
        )
    else:
        draft.carry("optimizer._component_", "optimizer.name", name, NOT_PAGED if "Paged" in component else "")
        if name == "adamw8bit":
            draft.differs(
                "optimizer._component_", "the toolkit's own 8-bit AdamW; bitsandbytes keeps small weights in 32 bits"
            )
    draft.carry("optimizer.lr", "optimizer.lr", draft.number("optimizer.lr"))
    draft.carry("optimizer.weight_decay", "optimizer.weight_decay", draft.number("optimizer.weight_decay"))
    draft.set("optimizer.decay", "all", f"{component} decays every weight")
    betas = draft.get("optimizer.betas")
    draft.carry("optimizer.betas", "optimizer.betas", [float(beta) for beta in betas])
    draft.carry("optimizer.eps", "optimizer.eps", draft.number("optimizer.eps"))
    clip = draft.get("clip_grad_norm")
    draft.carry(
        "clip_grad_norm", "optimizer.max_grad_norm", None if clip in (None, "inf") else draft.number("clip_grad_norm")
    )


def running(draft: Draft) -> None:
    """Precision, recomputation, seed and folder."""
    dtype = str(draft.get("dtype"))
    if dtype in ("bf16", "fp32"):
        draft.carry("dtype", "precision", "bf16-pure" if dtype == "bf16" else "fp32")
    else:
        draft.unsupported("dtype", f"{dtype}: the recipe has fp32, bf16, fp16 and bf16-pure")
    on = draft.active("enable_activation_checkpointing")
    draft.carry("enable_activation_checkpointing", "activation_checkpointing", "full" if on else "none")
    if draft.get("seed") is not None:
        draft.carry("seed", "run.seed", draft.whole("seed"))
    draft.ignore("seed", "null: drawn at each start")
    draft.carry("output_dir", "run.output_dir", str(draft.get("output_dir")))
    draft.carry("log_every_n_steps", "run.log_every", draft.whole("log_every_n_steps", 1))
    if draft.get("save_every_n_steps"):
        draft.carry("save_every_n_steps", "run.save_every", draft.whole("save_every_n_steps"))
    if draft.get("device") == "cpu":
        draft.carry("device", "machine.device", "cpu")
    draft.ignore("device", "the recipe chooses a device itself")
    if draft.active("compile"):
        draft.carry("compile", "compile", True)
    draft.ignore("compile", "off, as in the recipe")


TORCHTUNE = Table(
    id="torchtune",
    name="torchtune",
    version="torchtune bd2a0fc7c314",
    source="https://github.com/pytorch/torchtune/tree/bd2a0fc7c314",
    loop="",
    own_rules=RULES,
    # recipes/*.py, torch.optim.AdamW, torchtune/models/*/_model_builders.py
    defaults={
        "batch_size": 1, "gradient_accumulation_steps": 1, "epochs": 1, "optimizer.weight_decay": 0.01,
        "optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8, "lr_scheduler.num_warmup_steps": 0,
        "clip_grad_norm": None, "dtype": "bf16", "output_dir": "runs/run", "log_every_n_steps": 1, "shuffle": True,
        "model.lora_rank": 8, "model.lora_alpha": 16, "model.lora_dropout": 0.0, "dataset.split": "train",
        "loss._component_": "torchtune.modules.loss.LinearCrossEntropyLoss",
    },
    parts=(method, the_model, data, numbers, running),
)  # fmt: skip
