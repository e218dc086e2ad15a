"""AC11x: values of deepspeed_config and dynamo_config that the plugin or DeepSpeed rejects, or that have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext, true
from toolkit.linting.edits import remove, set_value
from toolkit.linting.examples import multi_gpu, zero
from toolkit.linting.model import Diagnostic, Severity
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_PLUGIN = "accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.__post_init__"
_DEVICES = ("none", "cpu", "nvme")
_TRUTHS = {"true", "false", "yes", "no", "1", "0", "y", "n", "t", "f", "on", "off"}
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@rule(
    "AC118",
    "warning",
    source="deepspeed 0.19.8 runtime/zero/config.py (offload_param: «Valid only with stage 3»)",
    fails=zero("zero_stage: 2", "offload_param_device: cpu"),
    passes=zero("zero_stage: 2", "offload_optimizer_device: cpu"),
)
def parameters_stay(context: LintContext) -> Iterator[Diagnostic]:
    """offload_param_device below ZeRO-3: the parameters stay on the GPU."""
    setting, stage = context.acc("deepspeed_config.offload_param_device"), context.zero_stage
    if setting is not None and str(setting.value).lower() in ("cpu", "nvme") and stage in (0, 1, 2):
        message = f"offload_param_device has no effect with ZeRO stage {stage}: only stage 3 offloads parameters"
        yield Diagnostic(setting, message, remove(setting))


@rule(
    "AC119",
    "error",
    source="deepspeed 0.19.8 runtime/zero/offload_config.py:OffloadDeviceEnum (ValidationError)",
    fails=zero("zero_stage: 2", "offload_optimizer_device: gpu"),
    passes=zero("zero_stage: 2", "offload_optimizer_device: cpu"),
)
def no_such_device(context: LintContext) -> Iterator[Diagnostic]:
    """An offload device that does not exist: none, cpu and nvme do."""
    for part in ("optimizer", "param"):
        setting = context.acc(f"deepspeed_config.offload_{part}_device")
        if setting is not None and str(setting.value).lower() not in _DEVICES:
            near = nearest(str(setting.value), _DEVICES, 0.6)
            yield Diagnostic(setting, f"{setting.value!r} is not none, cpu or nvme{meant(near)}: DeepSpeed rejects it")


@rule(
    "AC120",
    "error",
    source=_PLUGIN + " (str_to_bool: ValueError)",
    fails=zero("zero_stage: 2", "zero3_init_flag: maybe"),
    passes=zero("zero_stage: 2", "zero3_init_flag: false"),
)
def not_a_switch(context: LintContext) -> Iterator[Diagnostic]:
    """A switch of deepspeed_config that is neither true nor false.

    zero3_init_flag takes yes, on and 1 too. zero3_save_16bit_model is compared with true: any other word is false.
    """
    for key in ("zero3_init_flag", "zero3_save_16bit_model"):
        setting = context.acc(f"deepspeed_config.{key}")
        if setting is None or setting.value is None:
            continue
        text, saves = str(setting.value).lower(), key == "zero3_save_16bit_model"
        if saves and text != "true" and true(text):
            yield Diagnostic(
                setting,
                f"{setting.value!r} counts as false: only true is true here",
                set_value(setting, True),
                "warning",
            )
        elif text not in _TRUTHS:
            severity: Severity | None = "warning" if saves else None
            yield Diagnostic(setting, f"{setting.value!r} is neither true nor false", severity=severity)


@rule(
    "AC121",
    "error",
    source="accelerate 1.15.0 utils/launch.py (DynamoBackend: ValueError); utils/dataclasses.py:TorchDynamoPlugin "
    "(str_to_bool); torch 2.13.0 __init__.py:compile (list_mode_options)",
    fails=multi_gpu("dynamo_config:", "  dynamo_backend: inductr"),
    passes=multi_gpu("dynamo_config:", "  dynamo_backend: inductor"),
)
def dynamo_value(context: LintContext) -> Iterator[Diagnostic]:
    """A value of dynamo_config that accelerate or torch.compile rejects."""
    backends = keys.section("accelerate", "dynamo_config")["dynamo_backend"].choices
    for name in ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation"):
        setting = context.acc(f"dynamo_config.dynamo_{name}") or context.acc(f"dynamo_config.{name}")
        if setting is None or setting.value is None or isinstance(setting.value, dict | list):
            continue
        value = str(setting.value)
        if name == "backend" and value.upper() not in backends and setting.value is not False:
            near = nearest(value, backends, 0.6)
            fix = set_value(setting, near.lower()) if near else None
            yield Diagnostic(
                setting, f"{value!r} is no backend of torch.compile that accelerate knows{meant(near)}", fix
            )
        elif name == "mode" and value not in _MODES:
            yield Diagnostic(setting, f"{value!r} is not {', '.join(_MODES)}{meant(nearest(value, _MODES, 0.6))}")
        elif name.startswith("use_") and value.lower() not in _TRUTHS:
            yield Diagnostic(setting, f"{setting.value!r} is neither true nor false")
