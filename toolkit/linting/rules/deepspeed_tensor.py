"""DS227 to DS235: AutoTP, DeepSpeed's tensor parallelism (the section tensor_parallel)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.linting.context import LintContext
from toolkit.linting.edits import remove, rename, set_value
from toolkit.linting.examples import acc, args, ds, lora
from toolkit.linting.model import Diagnostic, Files, Setting
from toolkit.linting.near import meant, nearest
from toolkit.linting.parallel import autotp
from toolkit.linting.registry import rule

_ENGINE = "deepspeed 0.19.8 runtime/engine.py:_apply_autotp_partitioning"
_PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")
_PARTITION = (
    "tp_size", "layer_specs", "embedding_partition_dim", "lm_head_patterns", "use_default_specs", "strict_mode",
)  # fmt: skip
_LAYER = ("patterns", "partition_type", "gather_output", "grad_allreduce", "shape", "partition_dim", "model_types")


def _with(stage: int = 2, **keys: Any) -> Files:
    return ds(stage, bf16={"enabled": True}, tensor_parallel=keys)


def _processes(count: int) -> Files:
    return acc(
        "distributed_type: DEEPSPEED",
        f"num_processes: {count}",
        "deepspeed_config:",
        "  deepspeed_config_file: ds.json",
    )


@rule(
    "DS227",
    "error",
    source="deepspeed 0.19.8 utils/groups.py:_init_tp_mesh_device (world size // autotp_size; ranks outside of the "
    "mesh have no group: IndexError)",
    fails=_processes(3) | _with(autotp_size=2),
    passes=_processes(4) | _with(autotp_size=2),
)
def ranks_without_a_layer(context: LintContext) -> Iterator[Diagnostic]:
    """autotp_size does not divide the number of processes.

    DeepSpeed rounds the number of groups down; the ranks that remain are in none of them and fail.
    """
    processes, count = context.processes, autotp(context)
    if processes is not None and processes.value % count:
        message = f"{processes.value} processes cannot be divided into groups of {count}"
        yield Diagnostic(context.ds("tensor_parallel.autotp_size"), message)


@rule(
    "DS228",
    "error",
    source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py:_create_param_mapping (KeyError), runtime/zero/stage3.py "
    "(AttributeError: partition_numel); measured with peft 0.21.2",
    fails=_with(autotp_size=2) | lora(),
    passes=_with(autotp_size=1) | lora(),
)
def adapters_that_vanish(context: LintContext) -> Iterator[Diagnostic]:
    """AutoTP with LoRA: DeepSpeed replaces the adapted layers by their base weights.

    PEFT's layer counts as a linear one, and its adapters are gone from the model. ZeRO 1 and 2 end in a KeyError and
    ZeRO-3 in an AttributeError, since the optimizer's parameters are not the model's. Stage 0 says nothing and trains
    weights that are no part of the model.
    """
    if context.lora and autotp(context) > 1:
        what = {0: "nothing of the model trains", None: "the engine fails"}.get(context.zero_stage, "the engine fails")
        message = f"AutoTP replaces layers that have adapters by their base weights: {what}"
        yield Diagnostic(context.ds("tensor_parallel.autotp_size"), message)


@rule(
    "DS229",
    "error",
    source=_ENGINE + " (ValueError); deepspeed/__init__.py:initialize (autotp_size alone turns AutoTP on)",
    fails=_with(tp={"tp_size": 2}),
    passes=_with(autotp_size=2),
)
def two_sizes(context: LintContext) -> Iterator[Diagnostic]:
    """tensor_parallel.tp.tp_size without an equal autotp_size.

    autotp_size turns AutoTP on. Without it tp.tp_size is accepted and no layer is divided; where both are set and
    differ, the engine rejects them.
    """
    for name in ("tp", "tensor_parallel"):
        found = context.ds(f"tensor_parallel.{name}.tp_size")
        if found is None or not isinstance(found.value, int) or isinstance(found.value, bool) or found.value in (0, 1):
            continue
        if autotp(context) == 1:
            yield Diagnostic(
                found, f"tp_size {found.value} without autotp_size: AutoTP is off, and no layer is divided"
            )
        elif found.value != autotp(context):
            message = f"tp_size {found.value}, but autotp_size is {autotp(context)}: the engine rejects this"
            yield Diagnostic(found, message, set_value(found, autotp(context)))


@rule(
    "DS230",
    "error",
    source="deepspeed 0.19.8 runtime/tensor_parallel/config.py:TPTrainingConfig (torch.dtype; pydantic takes no text)",
    fails=_with(autotp_size=2, dtype="bf16"),
    passes=_with(autotp_size=2),
)
def dtype_in_a_file(context: LintContext) -> Iterator[Diagnostic]:
    """tensor_parallel.dtype in a file: no text is a torch.dtype, so DeepSpeed rejects every value.

    Training does not read it; bf16.enabled and fp16.enabled decide.
    """
    found = context.ds("tensor_parallel.dtype")
    if found is not None:
        yield Diagnostic(
            found, "rejected: a file cannot hold a torch.dtype, and training does not read it", remove(found)
        )


@rule(
    "DS231",
    "warning",
    source="deepspeed 0.19.8 module_inject/autotp_config.py:AutoTPPresets.get_preset (None), AutoTPConfig.from_dict "
    "(reads by name)",
    fails=_with(autotp_size=2, preset_model="qwen3"),
    passes=_with(autotp_size=2, preset_model="qwen2"),
)
def division_that_nothing_reads(context: LintContext) -> Iterator[Diagnostic]:
    """A preset_model that does not exist, or a key of partition_config that nothing reads.

    DeepSpeed then divides by the model's own plan, or by a guess from the names of its layers, without a word.
    """
    preset = context.ds("tensor_parallel.preset_model")
    if preset is not None and isinstance(preset.value, str) and preset.value.lower() not in _PRESETS:
        near = nearest(preset.value, _PRESETS, 0.9)
        message = f"{preset.value!r} is not {', '.join(_PRESETS)}: it is ignored, and the model's own plan is used"
        yield Diagnostic(preset, message, set_value(preset, near) if near else None)
    where = "tensor_parallel.partition_config"
    for key, entry in context.deepspeed.section(where).items():
        if key not in _PARTITION:
            found, near = Setting(context.deepspeed, f"{where}.{key}", entry), nearest(key, _PARTITION)
            message = f'unknown key "{key}" in partition_config{meant(near)}; nothing reads it'
            yield Diagnostic(found, message, rename(found, near) if near else None)
    specs = context.ds(f"{where}.layer_specs")
    for spec in specs.value if specs is not None and isinstance(specs.value, list) else []:
        for key in spec if isinstance(spec, dict) else ():
            if key not in _LAYER:
                near = nearest(key, _LAYER)
                yield Diagnostic(specs, f'unknown key "{key}" in a layer_spec{meant(near)}; nothing reads it')


@rule(
    "DS232",
    "error",
    source="transformers 5.23.0 trainer.py:get_tp_size, get_total_train_batch_size (ZeroDivisionError)",
    fails=_with(autotp_size=0) | args(per_device_train_batch_size=2, bf16=True),
    passes=_with(autotp_size=1) | args(per_device_train_batch_size=2, bf16=True),
)
def off_by_zero(context: LintContext) -> Iterator[Diagnostic]:
    """autotp_size: 0 under the Trainer.

    0 is DeepSpeed's value for «off». The Trainer divides the number of processes by it, and fails as training begins;
    1 is off for both.
    """
    found = context.ds("tensor_parallel.autotp_size")
    if found is not None and found.value == 0 and found.value is not False and context.reader == "trainer":
        yield Diagnostic(
            found, "the Trainer divides by it (ZeroDivisionError); 1 turns AutoTP off", set_value(found, 1)
        )


@rule(
    "DS233",
    "error",
    source=_ENGINE + " (ValueError)",
    fails=_with(autotp_size=2, vocab_parallel_lm_head=False, vocab_parallel_ce_backend="liger"),
    passes=_with(autotp_size=2, vocab_parallel_lm_head=True, vocab_parallel_ce_backend="liger"),
)
def loss_of_a_whole_head(context: LintContext) -> Iterator[Diagnostic]:
    """vocab_parallel_ce_backend: liger with a head that is not divided."""
    backend, head = context.ds("tensor_parallel.vocab_parallel_ce_backend"), "tensor_parallel.vocab_parallel_lm_head"
    whole = context.deepspeed.get(head) is False and autotp(context) > 1
    if whole and backend is not None and backend.value == "liger":
        yield Diagnostic(backend, "liger computes the loss of a divided head, but vocab_parallel_lm_head is false")


@rule(
    "DS234",
    "note",
    source=_ENGINE + " (vocab_parallel_lm_head None), sequence/cross_entropy.py:configure_vocab_parallel_loss",
    fails=_with(autotp_size=2),
    passes=_with(autotp_size=2, vocab_parallel_lm_head=False),
)
def loss_by_the_model(context: LintContext) -> Iterator[Diagnostic]:
    """autotp_size without vocab_parallel_lm_head: whether the loss is replaced depends on the model.

    Where embedding and head are one weight and transformers' plan divides the embedding by rows, DeepSpeed divides both
    by the vocabulary and replaces the model's loss by its own; logits are then parts of the vocabulary. With false the
    head stays whole, with true it is divided for every model.
    """
    found = context.ds("tensor_parallel.autotp_size")
    if autotp(context) > 1 and context.ds("tensor_parallel.vocab_parallel_lm_head") is None:
        message = "a model with tied embeddings gets DeepSpeed's loss over a divided vocabulary; "
        yield Diagnostic(found, message + "vocab_parallel_lm_head: false keeps its own")


@rule(
    "DS235",
    "error",
    source="deepspeed 0.19.8 module_inject/auto_ep_folding.py:validate_folding_global (ValueError)",
    fails=ds(2, tensor_parallel={"autotp_size": 2}, expert_parallel={"enabled": True}),
    passes=ds(
        2,
        tensor_parallel={"autotp_size": 2, "vocab_parallel_lm_head": False},
        expert_parallel={"enabled": True, "autoep_size": 2},
    ),
)
def layers_and_experts(context: LintContext) -> Iterator[Diagnostic]:
    """AutoTP with AutoEP in a way that DeepSpeed rejects.

    Beside autotp_size experts are divided too: autoep_size is 2 or more. Offload, DeepCompile and two different values
    of preset_model are rejected.
    """
    found = context.ds("expert_parallel.enabled")
    if found is None or found.value is not True or autotp(context) == 1:
        return
    if context.deepspeed.get("expert_parallel.autoep_size", 1) == 1:
        yield Diagnostic(found, "with autotp_size DeepSpeed requires expert_parallel.autoep_size above 1")
    for part in ("optimizer", "param"):
        device = context.ds(f"zero_optimization.offload_{part}.device")
        if device is not None and device.value != "none":
            yield Diagnostic(device, "offload with autotp_size and AutoEP: DeepSpeed rejects it")
    compiled = context.ds("compile.deepcompile")
    if compiled is not None and compiled.value is True:
        yield Diagnostic(compiled, "DeepCompile with autotp_size and AutoEP: DeepSpeed rejects it")
    one, other = (context.ds(f"{section}.preset_model") for section in ("tensor_parallel", "expert_parallel"))
    if one is not None and other is not None and None not in (one.value, other.value) and one.value != other.value:
        yield Diagnostic(other, f"preset_model is {other.value} here, {one.described}: DeepSpeed rejects it")
