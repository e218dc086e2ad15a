"""FS41x: what FSDP's mixed precision rounds that the model keeps in float32 on purpose."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.linting.context import LintContext
from toolkit.linting.examples import args, fsdp1, fsdp2
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.registry import rule

_MODEL_KEYS = ("model_name_or_path", "model_name", "base_model", "model")
# Models of transformers 5.23.0 whose rotary embedding returns float32 whatever the weights are in.
_FLOAT32_TABLES = re.compile(r"olmo(?!e)|ernie-?4[._]5|lfm-?3", re.IGNORECASE)


def _mixed(context: LintContext) -> Setting | None:
    """The setting that asks for 16-bit mixed precision, where FSDP comes from accelerate's own config."""
    setting = context.precision
    if not context.fsdp_from_yaml or setting is None or str(setting.value).lower() not in ("bf16", "fp16"):
        return None
    return setting


@rule(
    "FS417",
    "warning",
    source="torch 2.13.0 distributed/fsdp/_fully_shard/_fsdp_api.py (cast_forward_inputs: True); accelerate 1.15.0 "
    "utils/dataclasses.py:set_mixed_precision (leaves it so)",
    fails=fsdp2() | args(model_name_or_path="allenai/OLMo-2-0425-1B"),
    passes=fsdp2() | args(model_name_or_path="meta-llama/Llama-3.2-1B"),
)
def tables_rounded_by_blocks(context: LintContext) -> Iterator[Diagnostic]:
    """FSDP2's mixed precision rounds the rotary tables of a model that keeps them in float32.

    FSDP2 casts every floating input of a wrapped block to the compute dtype. OLMo, OLMo-2, OLMo-3 and ERNIE 4.5 hand
    their blocks cosines and sines in float32 on purpose: each loses up to 2e-3 (bf16), and nothing says so. No key of
    the accelerate config changes it; in code, give the plugin a policy:
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False).
    """
    setting = _mixed(context)
    if setting is None or context.fsdp_version != 2:
        return
    for key in _MODEL_KEYS:
        model = context.arg(key)
        if model is not None and isinstance(model.value, str) and _FLOAT32_TABLES.search(model.value):
            yield Diagnostic(
                setting,
                f"FSDP2 rounds the float32 rotary tables of {model.value} to {setting.value}; give the plugin a "
                "MixedPrecisionPolicy with cast_forward_inputs=False",
            )
            return


@rule(
    "FS418",
    "note",
    source="accelerate 1.15.0 utils/dataclasses.py:set_mixed_precision (buffer_dtype is the compute dtype); measured: "
    "inv_freq of a rotary embedding is bfloat16 after the first forward",
    fails=fsdp1(),
    passes=fsdp2(),
)
def buffers_rounded(context: LintContext) -> Iterator[Diagnostic]:
    """FSDP1's mixed precision under accelerate rounds buffers too, rotary frequencies among them.

    A frequency is off by up to 2**-9 of itself in bf16 (2**-12 in fp16), and so is the angle at every position: at
    position 2000 more than half a turn for some pairs of a head's dimensions. A model without rotary positions loses
    nothing. FSDP2 keeps buffers as they are; under FSDP1, give the plugin a MixedPrecision with
    buffer_dtype=torch.float32.
    """
    setting = _mixed(context)
    if setting is not None and context.fsdp_version == 1:
        yield Diagnostic(
            setting, f"under FSDP1 {setting.value} rounds buffers too, rotary frequencies with them; FSDP2 keeps them"
        )


@rule(
    "FS419",
    "warning",
    source="torch 2.13.0 distributed/fsdp/_runtime_utils.py:_post_backward_hook (without synchronisation the unsharded "
    "gradient stays as it is); accelerate 1.15.0 accelerator.py:no_sync; transformers 5.23.0 trainer.py; measured: "
    "gradients off by 0.1 % with 2 micro-batches, 0.3 % with 8, 0.5 % with 32, against 0 under FSDP2",
    fails=fsdp1() | args(gradient_accumulation_steps=8, bf16=True),
    passes=fsdp2() | args(gradient_accumulation_steps=8, bf16=True),
)
def sums_rounded(context: LintContext) -> Iterator[Diagnostic]:
    """FSDP1's mixed precision adds up the gradients of micro-batches in 16 bits.

    The Trainer, and Accelerate's accumulate(), reduce gradients after the last micro-batch of a step alone. Until then
    FSDP1 keeps them in the compute dtype and adds each micro-batch to them there, whatever reduce_dtype says: small
    contributions are rounded away, the more the longer the window. FSDP2 adds them up in reduce_dtype. Under FSDP1
    reduce each micro-batch: accelerator_config: {"gradient_accumulation_kwargs": {"sync_each_batch": true}}.
    """
    setting = _mixed(context)
    steps = context.arg("gradient_accumulation_steps") or context.acc("gradient_accumulation_steps")
    every = context.arg("accelerator_config.gradient_accumulation_kwargs.sync_each_batch")
    if setting is None or context.fsdp_version != 1 or steps is None or not isinstance(steps.value, int):
        return
    if steps.value > 1 and (every is None or every.value is not True):
        yield Diagnostic(
            steps,
            f"FSDP1 adds up the gradients of {steps.value} micro-batches in {setting.value}; FSDP2 adds them up in "
            "float32, and sync_each_batch: true reduces each",
        )
