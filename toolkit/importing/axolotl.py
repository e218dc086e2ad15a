"""Axolotl's `train` (commit 067b021c8b87: src/axolotl/utils/schemas, core/builders, loaders)."""

from __future__ import annotations

from toolkit.errors import InputError
from toolkit.importing import trainer_parts as trainer
from toolkit.importing.adapters import lora
from toolkit.importing.axolotl_data import data
from toolkit.importing.axolotl_rules import RULES
from toolkit.importing.beside_lora import early_stopping, given, initial, lora_plus, new_tokens, switch
from toolkit.importing.draft import Draft
from toolkit.importing.kernels import carry_liger
from toolkit.importing.model_part import model
from toolkit.importing.precision import amp_of, precision
from toolkit.importing.table import Table
from toolkit.importing.training_arguments import TRAINING_DEFAULTS

# Attention by the switches of earlier versions, and by attn_implementation.
_SWITCHES = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
             "flex_attention": "flex_attention"}  # fmt: skip
# Plugins that replace kernels, by the last part of their names.
# Axolotl's names of PEFT's options whose values are PEFT's.
_OPTIONS = {"lora_target_parameters": "target_parameters", "lora_exclude_modules": "exclude_modules",
            "lora_rank_pattern": "rank_pattern", "lora_alpha_pattern": "alpha_pattern",
            "peft_layers_to_transform": "layers_to_transform", "peft_layers_pattern": "layers_pattern"}  # fmt: skip
_KERNELS = ("CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "SwanLabPlugin")


def method(draft: Draft) -> None:
    """Supervised fine-tuning of all weights, or of LoRA."""
    for key in ("rl", "reward_model", "process_reward_model"):
        if draft.get(key):
            draft.block(key, "learning from preferences or rewards; the recipe has supervised fine-tuning")
        draft.ignore(key, "off")
    if draft.get("adapter") not in (None, "", "lora", "qlora"):
        draft.block("adapter", f"{draft.get('adapter')}: the recipe has lora, dora and qlora")
    plugins = draft.names("plugins")
    other = [str(name) for name in plugins if str(name).rpartition(".")[2] not in _KERNELS]
    if other:
        draft.unsupported("plugins", f"{', '.join(other)}: what a plugin does is not in this file")
    draft.ignore("plugins", "kernels: speed and rounding")


def the_model(draft: Draft) -> None:
    """Model, attention, tokenizer and adapter."""
    model(draft, path="base_model", revision="revision_of_model", attention="attn_implementation")
    for key, name in _SWITCHES.items():
        if draft.active(key) and "model.attention" not in draft.values:
            draft.carry(key, "model.attention", name)
        draft.ignore(key, "off, or attn_implementation decides")
    if draft.get("tokenizer_config"):
        draft.carry("tokenizer_config", "tokenizer.path", str(draft.get("tokenizer_config")))
    if draft.get("adapter") not in ("lora", "qlora"):
        for key in ("adapter", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear",
                    "lora_modules_to_save", "peft_use_dora", "lora_model_dir", "load_in_4bit", "load_in_8bit",
                    "peft_use_rslora", "peft_init_lora_weights", *_OPTIONS):  # fmt: skip
            draft.ignore(key, "no adapter: every weight trains")
        return
    _adapter(draft)


def _adapter(draft: Draft) -> None:
    lora(draft, r="lora_r", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target_modules",
         saved="lora_modules_to_save", dora="peft_use_dora", every=draft.active("lora_target_linear"))  # fmt: skip
    if draft.active("lora_target_linear"):
        draft.carry("lora_target_linear", "adapter.target_modules", "all-linear")
    draft.ignore("lora_target_linear", "off")
    if draft.active("load_in_4bit"):
        draft.carry("load_in_4bit", "adapter.method", "qlora")
    if draft.active("load_in_8bit"):
        draft.unsupported("load_in_8bit", "the recipe's base is in 4 bits (nf4) or not quantised")
    draft.carry("adapter", "adapter.method", draft.values["adapter.method"])
    if draft.get("lora_model_dir"):
        draft.carry("lora_model_dir", "adapter.path", str(draft.get("lora_model_dir")))
    for key in ("load_in_4bit", "load_in_8bit", "lora_model_dir"):
        draft.ignore(key, "off")
    switch(draft, "peft_use_rslora", "use_rslora")
    initial(draft, "peft_init_lora_weights")
    for key, name in _OPTIONS.items():
        if name.startswith("layers_") and draft.get(key) and draft.active("lora_target_linear"):
            draft.unsupported(key, "needs names of modules: set adapter.target_modules, and this in adapter.options")
        else:
            given(draft, key, name)


def tokens(draft: Draft) -> None:
    """Tokens that the tokenizer gets (loaders/tokenizer.py). Read after the adapter."""
    trained = (
        "with an adapter Axolotl trains the embeddings that lora_modules_to_save names, and else none of their rows"
    )
    new_tokens(draft, "tokens", draft.names("tokens"), special=False, beside_adapter=trained)
    _special_tokens(draft, trained)


def _special_tokens(draft: Draft, trained: str) -> None:
    tokens = draft.get("special_tokens") or {}
    if not isinstance(tokens, dict):
        raise InputError.at(draft.place("special_tokens"), "special_tokens", "expected a mapping")
    added = tokens.get("additional_special_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, str) for token in added):
        raise InputError.at(draft.place("special_tokens"), "special_tokens.additional_special_tokens", "expected names")
    if added:
        new_tokens(draft, "special_tokens", added, special=True, beside_adapter=trained)
    other = [key for key in tokens if key not in ("pad_token", "additional_special_tokens")]
    if other:
        draft.unsupported("special_tokens", f"{', '.join(other)}: the recipe takes the tokenizer's own")
    draft.ignore("special_tokens", "padding is hidden by the attention mask")


def batch(draft: Draft) -> None:
    """Accumulation, also as the quotient of ``batch_size``."""
    if not draft.get("gradient_accumulation_steps") and draft.get("batch_size"):
        steps = draft.whole("batch_size") // draft.whole("micro_batch_size")
        draft.carry("batch_size", "batch.accumulation", steps, "batch_size / micro_batch_size")
        draft.carry("micro_batch_size", "batch.micro_size", draft.whole("micro_batch_size"))
        return
    trainer.batch(draft)
    draft.ignore("batch_size", "gradient_accumulation_steps decides")


def weights_of_tokens(draft: Draft) -> None:
    """AxolotlTrainer sets ``model_accepts_loss_kwargs`` to false for models whose forward names no
    ``num_items_in_batch`` (core/trainers/base.py): each micro-batch's mean then has the same weight."""
    several = draft.values.get("batch.accumulation", 1) > 1 or draft.values.get("machine.processes", 1) > 1
    if several:
        why = "Axolotl averages the means of micro-batches; in the recipe every token of a step has the same weight"
        draft.differs("gradient_accumulation_steps", why)


def schedule(draft: Draft) -> None:
    """Axolotl's own warm-up: 3 % and at most 100 steps by default, rounded down, and 2 steps instead of 1."""
    steps = draft.get("warmup_steps")
    total = draft.values.get("run.max_steps")
    if steps is None and str(draft.get("lr_scheduler")) != "constant":
        written = draft.get("warmup_ratio")
        ratio = draft.number("warmup_ratio", 0.03)
        if total is not None and ratio:
            exact = int(ratio * total) if written is not None else min(int(ratio * total), 100)
            draft.defaults = {**draft.defaults, "warmup_steps": exact}
            why = f"{exact} warm-up steps of {total}; fewer in Axolotl if the epochs have fewer steps than max_steps"
            draft.differs("warmup_ratio", why)
        elif ratio:
            draft.defaults = {**draft.defaults, "warmup_ratio": ratio}
            most = ", and at most 100 steps" if written is None else ""
            draft.differs("warmup_ratio", f"Axolotl rounds the fraction of steps down, the recipe up: one step{most}")
    trainer.schedule(draft)
    if draft.values.get("schedule.warmup_steps") == 1:
        draft.set("schedule.warmup_steps", 2, "Axolotl makes 2 of 1 warm-up step")


def mixed_precision(draft: Draft) -> None:
    """The model is loaded in the dtype of bf16 or fp16 (utils/config: resolve_dtype)."""
    bf16 = draft.get("bf16")
    if bf16 == "auto" and not draft.active("fp16"):
        draft.notes.append("bf16: auto is bfloat16 on the GPUs that have it, and is written as such")
    half = "bfloat16" if bf16 in ("auto", "full") or draft.active("bf16") or draft.active("bfloat16") else None
    weights = half or ("float16" if draft.active("fp16") or draft.active("float16") else "float32")
    amp = None if bf16 == "full" else ("bf16" if half else amp_of(draft))
    key = "fp16" if weights == "float16" else "bf16"
    precision(draft, key, amp, weights)
    if draft.values.get("precision") == "bf16-pure" and amp is not None:
        draft.differs(key, "Axolotl keeps embeddings and norms in float32 and trains the other weights in bfloat16")
    for name in ("bf16", "fp16", "bfloat16", "float16", "float32"):
        draft.ignore(name, f"{key} decides")


def optimizer(draft: Draft) -> None:
    """The Trainer's, and LoRA+ (core/trainers/mixins/optimizer.py: OptimizerMixin.create_optimizer)."""
    trainer.optimizer(draft)
    lora_plus(draft, "loraplus_lr_ratio", decays=False)


def evaluation(draft: Draft) -> None:
    """Evaluations every so many steps, which ``eval_steps`` alone turns on (core/builders/base.py), and the callback
    that ends a run by them (core/builders/causal.py)."""
    every = draft.get("eval_steps")
    if isinstance(every, int) and every >= 1 and trainer.holds_out(draft):
        draft.carry("eval_steps", "run.eval_every", every)
    trainer.evaluation(draft)
    early_stopping(draft, "early_stopping_patience")


def saving(draft: Draft) -> None:
    """Axolotl counts checkpoints per epoch, which the recipe does not."""
    for key in ("saves_per_epoch", "evals_per_epoch", "save_strategy", "eval_strategy", "eval_steps"):
        draft.ignore(key, "the recipe counts steps: set run.save_every, run.eval_every")
    trainer.running(draft)


def kernels(draft: Draft) -> None:
    """Liger's, each by a switch of its own, where its plugin is on (integrations/liger)."""
    switches = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
    on = any(str(name).endswith("LigerPlugin") for name in draft.names("plugins"))
    whole = on and all(draft.active(key) for key in switches)
    for key in switches:
        carry_liger(draft, key, whole, loss=False)
    carry_liger(draft, "liger_fused_linear_cross_entropy", whole=False, loss=on)


AXOLOTL = Table(
    id="axolotl",
    name="Axolotl",
    version="Axolotl 067b021c8b87",
    source="https://github.com/axolotl-ai-cloud/axolotl/tree/067b021c8b87",
    own_rules=RULES,
    defaults={
        **{key: TRAINING_DEFAULTS[key] for key in ("max_steps", "adam_beta1", "adam_beta2", "adam_epsilon",
                                                   "max_grad_norm", "logging_steps", "seed")},
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1.0,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "weight_decay": 0.0,
        "bf16": "auto",
        "sequence_len": 512,
        "lora_dropout": 0.0,
        "val_set_size": 0.0,
        "output_dir": "./model-out",
        "gradient_checkpointing": False,
    },
    parts=(
        method, the_model, tokens, data, batch, weights_of_tokens, trainer.length, trainer.distribution,
        mixed_precision, optimizer, schedule, trainer.checkpointing, evaluation, saving,
        kernels,
    ),
    own_names={"per_device_train_batch_size": "micro_batch_size", "num_train_epochs": "num_epochs",
               "optim": "optimizer", "lr_scheduler_type": "lr_scheduler"},
    former={"evaluation_strategy": "eval_strategy", "adam_eps": "adam_epsilon"},
)  # fmt: skip
