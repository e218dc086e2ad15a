"""LR8xx: LoRA and quantised base models."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext, number, true
from toolkit.linting.edits import rename, set_value
from toolkit.linting.examples import args, ds, fsdp1, fsdp2, lora
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_PEFT = "peft 0.21.2"


@rule(
    "LR801",
    "warning",
    reader="accelerator",
    source="torch.utils.checkpoint (reentrant: no input requires a gradient); transformers "
    "modeling_utils.py:enable_input_require_grads",
    fails=lora() | args(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True}),
    passes=lora() | args(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False}),
)
def reentrant_and_frozen_base(context: LintContext) -> Iterator[Diagnostic]:
    """Reentrant checkpointing over a frozen base: no gradient reaches the adapters.

    A reentrant checkpoint passes gradients only where an input of the block requires one, and the
    embeddings are frozen. transformers 5.23 calls enable_input_require_grads automatically if a model's main
    input is input_ids, so a Trainer's run is not affected; checkpoints of other makers do not. use_reentrant: false
    needs no workaround (but see LR802 for ZeRO-3).
    """
    setting = context.reentrant
    if context.reader == "trainer":
        return
    if setting and true(setting.value) and context.checkpointing and context.lora and context.zero_stage != 3:
        yield Diagnostic(
            setting,
            "reentrant checkpointing of a frozen base passes no gradient to the adapters",
            set_value(setting, False),
        )


@rule(
    "LR802",
    "warning",
    source="measured: peft 0.21.2, deepspeed 0.19.8 stage 3, "
    "torch.utils.checkpoint.CheckpointError at the first backward",
    fails=lora()
    | ds(3, zero={"stage3_gather_16bit_weights_on_model_save": True})
    | args(per_device_train_batch_size=2, activation_checkpointing=True),
    passes=lora() | ds(2) | args(per_device_train_batch_size=2, activation_checkpointing=True),
)
def checkpoints_under_zero_3(context: LintContext) -> Iterator[Diagnostic]:
    """Non-reentrant checkpointing, PEFT and ZeRO-3 together can fail at the first backward pass.

    The recomputed tensors are partitioned again and may have other shapes than the saved ones: CheckpointError.
    Seen with some loops and not with others (a plain one over two processes gets through). The default of
    transformers 5 is non-reentrant; use_reentrant: true works, with enable_input_require_grads.
    """
    if not (context.checkpointing and context.lora and context.zero_stage == 3):
        return
    setting = context.reentrant
    if setting is None or not true(setting.value):
        yield Diagnostic(
            setting or context.checkpointing,
            "non-reentrant checkpointing with PEFT under ZeRO-3 may raise a CheckpointError; use_reentrant: true works",
        )


@rule(
    "LR803",
    "error",
    source="transformers 5.23.0 trainer_utils.py:validate_quantization_for_training (ValueError)",
    fails=args(load_in_4bit=True, use_peft=False),
    passes=args(load_in_4bit=True, use_peft=True),
)
def quantised_without_adapters(context: LintContext) -> Iterator[Diagnostic]:
    """A quantised base without adapters cannot be trained."""
    if context.four_bit and not context.lora and context.args.get("use_peft") is False:
        yield Diagnostic(context.four_bit, "a purely quantized model cannot be fine-tuned: attach adapters")


@rule(
    "LR804",
    "warning",
    source="accelerate 1.15.0 utils/fsdp_utils.py:fsdp2_prepare_model (excluded from "
    "sharding); bitsandbytes FSDP-QLoRA",
    fails=fsdp2() | args(load_in_4bit=True, use_peft=True),
    passes=fsdp2() | args(load_in_4bit=True, use_peft=True, bnb_4bit_quant_storage="bfloat16"),
)
def storage_type_under_fsdp(context: LintContext) -> Iterator[Diagnostic]:
    """4-bit weights under FSDP without a floating storage type.

    The default storage, uint8, cannot be sharded: FSDP2 leaves the quantised weights whole on every GPU,
    FSDP1 cannot flatten them. bnb_4bit_quant_storage must be the compute type, usually bfloat16.
    """
    if context.uses != "fsdp" or context.four_bit is None:
        return
    storage = context.arg("bnb_4bit_quant_storage") or context.arg("quantization_config.bnb_4bit_quant_storage")
    if storage is None or str(storage.value) in ("uint8", "torch.uint8"):
        what = "cannot be flattened" if context.fsdp_version == 1 else "are not sharded"
        yield Diagnostic(
            storage or context.four_bit,
            f"uint8-stored 4-bit weights {what}: set bnb_4bit_quant_storage to the compute type",
        )


@rule(
    "LR805",
    "error",
    source="transformers 5.23.0 utils/quantization_config.py:BitsAndBytesConfig (ValueError)",
    fails=args(load_in_4bit=True, load_in_8bit=True, use_peft=True),
    passes=args(load_in_4bit=True, use_peft=True),
)
def four_and_eight_bits(context: LintContext) -> Iterator[Diagnostic]:
    """4-bit and 8-bit loading are both on."""
    eight = context.arg("load_in_8bit") or context.arg("quantization_config.load_in_8bit")
    if context.four_bit and eight and true(eight.value):
        yield Diagnostic(eight, "load_in_4bit and load_in_8bit are both on: only one is allowed")


@rule(
    "LR806",
    "error",
    source=f"{_PEFT} tuners/tuners_utils.py:_maybe_include_all_linear_layers (only the bare text is special)",
    fails=lora(target_modules=["all-linear"]),
    passes=lora(target_modules="all-linear"),
)
def all_linear_in_a_list(context: LintContext) -> Iterator[Diagnostic]:
    """all-linear inside a list is read as a module name, which no model has."""
    for setting in (context.lora_key("target_modules"), context.arg("lora_target_modules")):
        if (
            setting
            and isinstance(setting.value, list)
            and "all-linear" in setting.value
            and setting.source.kind == "peft"
        ):
            yield Diagnostic(setting, 'as a list "all-linear" is a module\'s name; write it as bare text')


@rule(
    "LR807",
    "warning",
    source=f"{_PEFT} config.py:_get_config_kwargs («these are ignored»)",
    fails=lora(lora_droput=0.1),
    passes=lora(lora_dropout=0.1),
)
def unknown_peft_key(context: LintContext) -> Iterator[Diagnostic]:
    """A key that the config of this method does not have: PEFT ignores it with a warning.

    The method is peft_type; each has a config of its own (LoraConfig, OFTConfig, ...).
    """
    method = str(context.peft.get("peft_type", "LORA"))
    known = keys.section("peft", "" if method == "LORA" else method)
    for key, entry in context.peft.section("").items() if known else ():
        if key not in known and not key.startswith(("_", "//")) and key not in ("peft_type", "auto_mapping"):
            setting = Setting(context.peft, key, entry)
            near = nearest(key, known)
            config = "LoraConfig" if method == "LORA" else f"the config of {method}"
            fix = rename(setting, near) if near else None
            yield Diagnostic(setting, f'{config} has no "{key}"{meant(near)}; PEFT ignores it', fix)


@rule(
    "LR808",
    "error",
    source=f"{_PEFT} tuners/lora/layer.py:update_layer (ValueError)",
    fails=lora(r=0),
    passes=lora(r=8),
)
def rank_of_zero(context: LintContext) -> Iterator[Diagnostic]:
    """A LoRA rank of zero or less. (Other adapters may take 0: OFT then goes by its oft_block_size.)"""
    setting = context.lora_key("r") or context.arg("lora_r")
    if str(context.peft.get("peft_type", "LORA")).upper() != "LORA":
        return
    if setting and number(setting.value) and setting.value <= 0:
        yield Diagnostic(setting, "the rank must be a positive integer")


@rule(
    "LR809",
    "warning",
    source=f"{_PEFT} tuners/tuners_utils.py (inference_mode freezes the adapter)",
    fails=lora(inference_mode=True) | args(per_device_train_batch_size=2),
    passes=lora(inference_mode=False) | args(per_device_train_batch_size=2),
)
def adapter_for_inference(context: LintContext) -> Iterator[Diagnostic]:
    """An adapter config for inference next to training arguments.

    PEFT writes inference_mode: true when it saves an adapter. Loaded again, that adapter is frozen.
    """
    setting = context.lora_key("inference_mode")
    if setting and true(setting.value) and "args" in context.kinds:
        yield Diagnostic(setting, "inference_mode freezes the adapter: nothing is trained", set_value(setting, False))


@rule(
    "LR810",
    "note",
    source=f"{_PEFT} tuners/lora/config.py (bias)",
    fails=lora(bias="all"),
    passes=lora(bias="none"),
)
def trained_biases(context: LintContext) -> Iterator[Diagnostic]:
    """Biases of the base are trained: disabling the adapter no longer restores the base model."""
    setting = context.lora_key("bias")
    if setting and setting.value not in (None, "none"):
        yield Diagnostic(
            setting,
            f"bias {setting.value}: the base model is trained too, so disabling the adapter does not restore it",
        )


@rule(
    "LR811",
    "note",
    source="transformers docs/source/en/quantization/bitsandbytes.md, «FSDP-QLoRA»; torch FSDP1 flattens per unit",
    fails=fsdp1() | args(load_in_4bit=True, use_peft=True, bnb_4bit_quant_storage="bfloat16"),
    passes=fsdp2() | args(load_in_4bit=True, use_peft=True, bnb_4bit_quant_storage="bfloat16"),
)
def qlora_under_fsdp1(context: LintContext) -> Iterator[Diagnostic]:
    """QLoRA under FSDP1 needs every tensor of a unit in one type: FSDP2 does not."""
    if context.uses == "fsdp" and context.fsdp_version == 1 and context.four_bit:
        yield Diagnostic(
            context.four_bit,
            "under FSDP1 the adapters, norms and quantised storage of a unit must share one dtype",
        )
