"""FS4xx: FSDP values that fail, or change what is trained."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, true
from toolkit.linting.edits import remove, set_value
from toolkit.linting.examples import args, fsdp1, fsdp2, lora
from toolkit.linting.model import Diagnostic
from toolkit.linting.registry import rule

_PLUGIN = "accelerate 1.15.0 utils/dataclasses.py:FullyShardedDataParallelPlugin.__post_init__"


@rule(
    "FS407",
    "error",
    source="accelerate 1.15.0 utils/launch.py:prepare_multi_gpu_env (ValueError)",
    fails=fsdp1("fsdp_cpu_ram_efficient_loading: true", "fsdp_sync_module_states: false"),
    passes=fsdp1("fsdp_cpu_ram_efficient_loading: true", "fsdp_sync_module_states: true"),
)
def loading_without_sync(context: LintContext) -> Iterator[Diagnostic]:
    """cpu_ram_efficient_loading without sync_module_states.

    Only rank 0 loads the weights then, and the others train from garbage unless the states are synchronised.
    accelerate launch rejects the pair (cpu_ram_efficient_loading is true by default); plugins made in code or
    through quoted text are switched to true with a warning.
    """
    sync, loading = context.fsdp("sync_module_states"), context.fsdp("cpu_ram_efficient_loading")
    if sync is None or true(sync.value) or context.uses != "fsdp":
        return
    loads = true(loading.value) if loading is not None else not context.trainer_fsdp
    if loads and not (context.trainer_fsdp and context.fsdp_version == 2):
        fix = set_value(sync, True) if context.fsdp_version == 1 else remove(sync)
        loaded = "is true" if loading is not None else "is true by default"
        yield Diagnostic(
            sync,
            f"sync_module_states is false while cpu_ram_efficient_loading {loaded}: only rank 0 would have the weights",
            fix,
        )


@rule(
    "FS408",
    "error",
    reader="accelerator",
    source="torch distributed/fsdp/_flat_param.py («Must flatten tensors with uniform dtype/requires_grad»)",
    fails=fsdp1("fsdp_use_orig_params: false") | lora(),
    passes=fsdp1("fsdp_use_orig_params: true") | lora(),
)
def orig_params_and_lora(context: LintContext) -> Iterator[Diagnostic]:
    """use_orig_params: false with LoRA under FSDP1.

    A unit that mixes frozen and trained weights cannot be flattened uniformly: it is rejected, or frozen
    weights get gradients. PEFT's own wrap policy gives each trained layer a unit of its own, and then false works: the
    Trainer installs it (update_fsdp_plugin_peft), a script of your own must. A warning where the reader is not known.
    """
    setting = context.fsdp("use_orig_params")
    if context.reader == "trainer":
        return
    known = context.reader == "accelerator"
    if setting and not true(setting.value) and context.fsdp_version == 1 and context.uses == "fsdp":
        if context.lora:
            yield Diagnostic(
                setting,
                "use_orig_params false with LoRA: frozen and trained weights cannot share a unit",
                set_value(setting, True) if known else None,
                None if known else "warning",
            )
        else:
            yield Diagnostic(
                setting,
                "use_orig_params false: with LoRA or frozen weights FSDP1 rejects its units",
                severity="note",
            )


@rule(
    "FS409",
    "error",
    reader="accelerator",
    source="torch distributed/fsdp/_flat_param.py:_validate_tensors_to_flatten («uniform "
    "dtype»); peft autocast_adapter_dtype",
    fails=fsdp1() | lora() | args(torch_dtype="bfloat16", bf16=True),
    passes=fsdp2() | lora() | args(torch_dtype="bfloat16", bf16=True),
)
def adapters_in_fp32(context: LintContext) -> Iterator[Diagnostic]:
    """16-bit base weights and fp32 adapters in one FSDP1 unit.

    PEFT keeps the adapters of a 16-bit model in fp32 (autocast_adapter_dtype), and FSDP1 flattens a unit only
    where all its tensors have one dtype. FSDP2 shards each tensor on its own. The Trainer wraps each adapter in a unit
    of its own (update_fsdp_plugin_peft), and nothing is reported there.
    """
    if context.reader == "trainer" or context.fsdp_version != 1 or context.uses != "fsdp" or not context.lora:
        return
    for key in ("torch_dtype", "dtype", "model_dtype"):
        setting = context.arg(key)
        if setting and str(setting.value) in ("bfloat16", "float16", "bf16", "fp16"):
            yield Diagnostic(
                setting,
                f"{setting.value} base weights and fp32 adapters cannot share an FSDP1 unit; "
                "use FSDP2 or load the base in float32",
            )


@rule(
    "FS410",
    "error",
    source="accelerate 1.15.0 utils/fsdp_utils.py:722 (checkpoint_wrapper with preserve_rng_state=False)",
    fails=fsdp2("fsdp_activation_checkpointing: true") | lora(lora_dropout=0.1),
    passes=fsdp2("fsdp_activation_checkpointing: true") | lora(lora_dropout=0.0),
)
def checkpointing_and_dropout(context: LintContext) -> Iterator[Diagnostic]:
    """FSDP2's activation checkpointing with dropout: the gradients are wrong.

    accelerate 1.15 recomputes without restoring the random state, so the second pass draws other dropout
    masks: gradients are about 43 % off while the loss agrees to six digits. A note where no dropout is in
    sight.
    """
    setting = context.fsdp("activation_checkpointing")
    if setting is None or not true(setting.value) or context.fsdp_version != 2 or context.uses != "fsdp":
        return
    dropout = context.lora_dropout
    for key in ("attention_dropout", "dropout", "hidden_dropout"):
        found = context.arg(key)
        dropout = dropout or (found if found and isinstance(found.value, float) and found.value > 0 else None)
    if dropout is not None:
        yield Diagnostic(
            setting,
            f"recomputation draws new dropout masks: with {dropout.name} {dropout.value} the gradients are wrong",
        )
    elif context.lora_key("lora_dropout") is None and context.arg("lora_dropout") is None:
        yield Diagnostic(
            setting, "correct only without dropout: recomputation draws new dropout masks", severity="note"
        )


@rule(
    "FS411",
    "error",
    source=_PLUGIN + " (ValueError)",
    fails=fsdp2("fsdp_activation_checkpointing_offload: true"),
    passes=fsdp2("fsdp_activation_checkpointing_offload: true", "fsdp_activation_checkpointing: true"),
)
def offload_of_no_checkpoints(context: LintContext) -> Iterator[Diagnostic]:
    """Offloaded activation checkpoints without checkpointing, or under FSDP1."""
    setting = context.acc("fsdp_config.fsdp_activation_checkpointing_offload")
    if setting is None or not true(setting.value) or not context.fsdp_from_yaml:
        return
    checkpointing = context.acc("fsdp_config.fsdp_activation_checkpointing")
    if checkpointing is None or not true(checkpointing.value):
        yield Diagnostic(setting, "activation_checkpointing_offload requires activation_checkpointing")
    elif context.fsdp_version != 2:
        yield Diagnostic(setting, "activation_checkpointing_offload requires fsdp_version 2")
