"""XL21x: one feature configured in two layers."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, same
from toolkit.linting.edits import remove
from toolkit.linting.examples import acc, args, ds, fsdp2, multi_gpu, zero
from toolkit.linting.model import Diagnostic
from toolkit.linting.registry import rule

_PLUGIN_CHECK = "accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin._deepspeed_config_checks (ValueError)"
_FILE = ("deepspeed_config_file: ds.json",)
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_REFUSED = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
}  # fmt: skip


@rule(
    "XL213",
    "error",
    source=_PLUGIN_CHECK,
    fails=zero(*_FILE, "zero_stage: 2", top=()) | ds(),
    passes=zero(*_FILE, top=()) | ds(),
)
def beside_the_config_file(context: LintContext) -> Iterator[Diagnostic]:
    """deepspeed_config_file is set together with settings that belong in that file.

    accelerate raises a ValueError at launch where stage, accumulation, clipping, offload, 16-bit saving or
    mixed_precision are in the accelerate config too. They are removed here only where the JSON says the
    same.
    """
    if LintContext._in(context.accelerate, "deepspeed_config.deepspeed_config_file") is None:
        return
    pairs = {
        "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
        "deepspeed_config.gradient_clipping": "gradient_clipping",
        "deepspeed_config.zero_stage": "zero_optimization.stage",
        "deepspeed_config.offload_optimizer_device": "zero_optimization.offload_optimizer.device",
        "deepspeed_config.offload_param_device": "zero_optimization.offload_param.device",
        "deepspeed_config.offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
        "deepspeed_config.offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
        "deepspeed_config.zero3_save_16bit_model": f"zero_optimization.{_GATHER}",
        "mixed_precision": "",
    }
    for key, twin in pairs.items():
        setting = LintContext._in(context.accelerate, key)
        if setting is None or (key == "mixed_precision" and setting.value is None):
            continue
        theirs = context.deepspeed.get(twin, "none" if key.endswith("_device") else None) if twin else None
        agreed = same(theirs, setting.value)
        if key == "mixed_precision":
            agreed = context.deepspeed.get(f"{setting.value}.enabled") is True
        fix = remove(setting) if agreed else None
        yield Diagnostic(
            setting,
            f"{setting.name} must not be set with deepspeed_config_file: accelerate rejects the file at launch",
            fix,
        )


@rule(
    "XL214",
    "error",
    source=_PLUGIN_CHECK + "; transformers 5.23.0 training_args.py:__post_init__ (step 12)",
    fails=zero("zero_stage: 3", "zero3_save_16bit_model: true")
    | args(deepspeed="ds.json", per_device_train_batch_size=2)
    | ds(3, zero={"stage3_gather_16bit_weights_on_model_save": True}),
    passes=multi_gpu()
    | args(deepspeed="ds.json", per_device_train_batch_size=2, bf16=True)
    | ds(3, zero={"stage3_gather_16bit_weights_on_model_save": True}),
)
def deepspeed_twice(context: LintContext) -> Iterator[Diagnostic]:
    """DeepSpeed is configured in the accelerate config and in the training arguments.

    The Trainer builds the plugin from its own file, and accelerate rejects it because the accelerate config
    sets DeepSpeed keys too.
    """
    setting = context.arg("deepspeed")
    if setting is None or not context.arg_true("deepspeed") or context.distributed_type != "DEEPSPEED":
        return
    written = [key for key in context.accelerate.section("deepspeed_config") if key in _REFUSED]
    written += ["mixed_precision"] if context.accelerate.get("mixed_precision") is not None else []
    if written:
        listed = ", ".join(written)
        message = f"accelerate rejects a DeepSpeed config from here together with {listed} in {context.accelerate.path}"
        yield Diagnostic(setting, message)


@rule(
    "XL215",
    "error",
    source="transformers 5.23.0 trainer.py:create_accelerator_and_postprocess (plugin from the arguments alone)",
    fails=fsdp2() | args(fsdp=True, fsdp_config={"version": 1}),
    passes=fsdp2() | args(fsdp=True, fsdp_config={"version": 2}),
)
def fsdp_twice(context: LintContext) -> Iterator[Diagnostic]:
    """FSDP is configured in the accelerate config and, otherwise, in the training arguments.

    With `fsdp` set the Trainer builds the plugin from the training arguments: what they set wins.
    """
    if not context.trainer_fsdp or context.distributed_type != "FSDP":
        return
    for name, yaml_name, default in (
        ("version", "version", 2),
        ("reshard_after_forward", "reshard_after_forward", True),
        ("cpu_offload", "offload_params", False),
        ("state_dict_type", "state_dict_type", "FULL_STATE_DICT"),
    ):
        theirs = context.acc(f"fsdp_config.fsdp_{yaml_name}")
        mine = context.fsdp(name)
        value = mine.value if mine is not None else default
        if theirs is not None and str(theirs.value).lower() != str(value).lower():
            yield Diagnostic(
                theirs,
                f"{theirs.value} here has no effect: the Trainer uses {value} from the training arguments",
            )


@rule(
    "XL216",
    "error",
    source="transformers 5.23.0 trainer.py (ValueError: «--fsdp xxx together with --deepspeed»)",
    fails=zero("zero_stage: 2") | args(fsdp=True),
    passes=acc("distributed_type: FSDP", "num_processes: 2") | args(fsdp=True),
)
def fsdp_and_deepspeed(context: LintContext) -> Iterator[Diagnostic]:
    """FSDP in the training arguments together with DeepSpeed: the Trainer rejects this."""
    setting = context.arg("fsdp")
    if setting and context.trainer_fsdp and (context.distributed_type == "DEEPSPEED" or context.arg_true("deepspeed")):
        yield Diagnostic(setting, "fsdp is set while DeepSpeed is on: the Trainer rejects this")
