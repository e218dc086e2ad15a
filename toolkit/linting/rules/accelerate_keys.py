"""AC1xx: keys of the accelerate config that are rejected, dropped or never read."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext, true
from toolkit.linting.edits import remove, rename
from toolkit.linting.examples import acc, fsdp2, multi_gpu, shell, zero
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_LAUNCH = "accelerate 1.15.0 commands/launch.py:_validate_launch_command"
_SECTIONS = (
    "deepspeed_config",
    "fsdp_config",
    "fp8_config",
    "dynamo_config",
    "megatron_lm_config",
    "mpirun_config",
)
_PREFIX = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
_OWNER = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
# Names of the Trainer's fsdp_config that the launcher knows under another name, and does not read.
_TRAINER_NAMES = {"cpu_offload": "fsdp_offload_params", "fsdp_cpu_offload": "fsdp_offload_params"}


@rule(
    "AC101",
    "error",
    source="accelerate 1.15.0 commands/config/config_args.py:BaseConfig.from_yaml_file (ValueError)",
    fails=multi_gpu("num_machine: 1"),
    passes=multi_gpu("num_machines: 1"),
)
def unknown_top_level(context: LintContext) -> Iterator[Diagnostic]:
    """Unknown top-level key: `accelerate launch` rejects the file."""
    known = keys.section("accelerate", "" if context.local else "sagemaker")
    for key, entry in context.accelerate.section("").items():
        if key not in known:
            near = nearest(key, known)
            setting = Setting(context.accelerate, key, entry)
            fix = rename(setting, near) if near else None
            yield Diagnostic(setting, f'unknown key "{key}"{meant(near)}; accelerate launch rejects the file', fix)


@rule(
    "AC102",
    "error",
    source=f"{_LAUNCH} (setattr on the arguments; nothing checks that anyone reads them)",
    fails=zero("zero_stge: 3"),
    passes=zero("zero_stage: 3", "zero3_save_16bit_model: true"),
)
def unknown_nested(context: LintContext) -> Iterator[Diagnostic]:
    """A key inside a section that nothing reads.

    The launcher copies the contents of deepspeed_config, fsdp_config and their like, and reads the names
    it knows: with `zero_stge: 3` the plugin falls back to ZeRO-2.
    """
    for section in _SECTIONS:
        known, prefix = keys.section("accelerate", section), _PREFIX.get(section, "")
        for key, entry in context.accelerate.section(section).items():
            full = key if not prefix or key.startswith(prefix.rstrip("_")) else prefix + key
            if full in known or key in _TRAINER_NAMES:
                continue
            setting = Setting(context.accelerate, f"{section}.{key}", entry)
            near = nearest(full, known)
            message = f'unknown key "{key}"{meant(near)}; accelerate accepts it silently and nothing reads it'
            yield Diagnostic(setting, message, rename(setting, near) if near else None, "error" if near else "warning")


@rule(
    "AC104",
    "warning",
    source=f"{_LAUNCH} (a top-level value is copied only where the flag's own default is None)",
    fails=multi_gpu("enable_cpu_affinity: true"),
    passes=shell("accelerate launch --config_file accelerate.yaml --enable_cpu_affinity train.py") | multi_gpu(),
)
def never_copied(context: LintContext) -> Iterator[Diagnostic]:
    """A top-level key that accelerate accepts and never uses.

    The launcher takes a value from the file only where its flag has no default of its own. These flags have
    one (false, or static), so the file's value is dropped: give the flag on the command line.
    """
    for key in ("enable_cpu_affinity", "rdzv_backend", "downcast_bf16", "tpu_use_sudo"):
        setting = LintContext._in(context.accelerate, key)
        if setting is None or keys.section("accelerate", "").get(key) is None or context.launch.has(key):
            continue
        asks = str(setting.value) not in ("static", "None") if key == "rdzv_backend" else true(setting.value)
        if asks:
            flag = f"--{key} {setting.value}" if key == "rdzv_backend" else f"--{key}"
            yield Diagnostic(
                setting, f"accelerate launch does not read {key} from the file; pass {flag} on the command line"
            )


@rule(
    "AC105",
    "error",
    source="accelerate 1.15.0 utils/launch.py:prepare_deepspeed_cmd_env (sets no *_NVME_PATH variable)",
    fails=zero(
        "zero_stage: 3",
        "offload_param_device: nvme",
        "offload_param_nvme_path: /nvme",
        "zero3_save_16bit_model: true",
    ),
    passes=zero("zero_stage: 3", "offload_param_device: cpu", "zero3_save_16bit_model: true"),
)
def nvme_path_is_lost(context: LintContext) -> Iterator[Diagnostic]:
    """The NVMe path of the accelerate config never reaches DeepSpeed.

    The launcher does not pass it on, and the plugin uses a folder named "none" in the working directory.
    Put the offload section into a DeepSpeed JSON and name it with deepspeed_config_file.
    """
    for part in ("optimizer", "param"):
        device = context.acc(f"deepspeed_config.offload_{part}_device")
        if device is not None and str(device.value).lower() == "nvme":
            path = context.acc(f"deepspeed_config.offload_{part}_nvme_path")
            yield Diagnostic(
                path or device,
                f"offload_{part}_nvme_path is dropped by accelerate launch: DeepSpeed gets the path 'none'",
            )


@rule(
    "AC106",
    "error",
    source=f"{_LAUNCH}: adds a prefix for fsdp_config, fp8_config and dynamo_config, not for parallelism_config",
    fails=fsdp2(top=("parallelism_config:", "  dp_shard_size: 2")),
    passes=fsdp2(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 2")),
)
def parallelism_prefix(context: LintContext) -> Iterator[Diagnostic]:
    """A key of parallelism_config without its long prefix: it is ignored and its size stays 1."""
    known = keys.section("accelerate", "parallelism_config")
    for key, entry in context.accelerate.section("parallelism_config").items():
        if key in known:
            continue
        setting = Setting(context.accelerate, f"parallelism_config.{key}", entry)
        full = f"parallelism_config_{key}"
        near = full if full in known else nearest(key, known)
        fix = rename(setting, near) if near else None
        yield Diagnostic(setting, f'unknown key "{key}"{meant(near)}; nothing reads it, so the default applies', fix)


@rule(
    "AC107",
    "error",
    source="accelerate 1.15.0 commands/launch.py (flag --fsdp_offload_params); "
    "transformers 5.23.0 training_args.py:_process_fsdp_args",
    fails=fsdp2("fsdp_cpu_offload: true"),
    passes=fsdp2("fsdp_offload_params: true"),
)
def trainer_name_for_offload(context: LintContext) -> Iterator[Diagnostic]:
    """FSDP's CPU offload under the Trainer's name.

    In the training arguments it is cpu_offload, in the accelerate config fsdp_offload_params. Under the wrong
    name it is ignored and the parameters stay on the GPU.
    """
    for key, new in _TRAINER_NAMES.items():
        setting = LintContext._in(context.accelerate, f"fsdp_config.{key}")
        if setting is not None:
            yield Diagnostic(
                setting,
                f'nothing reads "{key}" in an accelerate config; the key is {new}',
                rename(setting, new),
            )


@rule(
    "AC112",
    "warning",
    source="accelerate 1.15.0 utils/launch.py (each section is read for its own distributed_type)",
    fails=multi_gpu("fsdp_config:", "  fsdp_version: 2"),
    passes=fsdp2(),
)
def section_of_another_type(context: LintContext) -> Iterator[Diagnostic]:
    """A section that this distributed_type does not read."""
    for section, owner in _OWNER.items():
        setting = LintContext._in(context.accelerate, section)
        if setting and setting.value and context.distributed_type not in (None, owner):
            yield Diagnostic(
                setting, f"{section} is not read: distributed_type is {context.distributed_type}, not {owner}"
            )


@rule(
    "AC113",
    "note",
    source="accelerate 1.15.0 commands/config/config_args.py:process_config («Convert the config to the new format»)",
    fails=acc("distributed_type: MULTI_GPU", "fp16: true", "num_processes: 2"),
    passes=acc("distributed_type: MULTI_GPU", "mixed_precision: fp16", "num_processes: 2"),
)
def moved_key(context: LintContext) -> Iterator[Diagnostic]:
    """A key of an old format that accelerate still converts."""
    for key, new in (("fp16", "mixed_precision: fp16"), ("dynamo_backend", "dynamo_config.dynamo_backend")):
        setting = LintContext._in(context.accelerate, key)
        if setting is None:
            continue
        fix = None
        if key == "fp16" and context.accelerate.has("mixed_precision"):
            fix = remove(setting)
        yield Diagnostic(setting, f"{key} is deprecated: use {new}", fix)
