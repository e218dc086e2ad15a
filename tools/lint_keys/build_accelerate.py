"""Keys of an accelerate config file: what `accelerate launch` takes from it, and what it drops silently."""

from __future__ import annotations

import contextlib
from typing import Any

from tools.lint_keys.build import Table, facts, from_dataclass
from tools.lint_keys.spy import SpyNamespace

# The nested sections of the file, and the prefix that `_validate_launch_command` puts before their keys.
SECTIONS = {
    "deepspeed_config": "",
    "fsdp_config": "fsdp_",
    "fp8_config": "fp8_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "",
    "megatron_lm_config": "",
    "mpirun_config": "",
}


def read() -> Table:
    """Top level from ClusterConfig, sections and flags from the launcher's own parser.

    A key has ``read: false`` where `accelerate launch` accepts it and then never looks at it.
    """
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY
    from accelerate.utils.dataclasses import DistributedType, DynamoBackend, PrecisionType

    parser = launch_command_parser()
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help",)}
    read_keys = _read_by_the_launcher()
    top = from_dataclass(ClusterConfig)
    for key, entry in top.items():
        # `_validate_launch_command` copies a top-level value only where the flag's own default is None.
        shadowed = key in actions and actions[key].default is not None
        if shadowed and key not in (
            "debug",
            "mixed_precision",
            "tpu_use_cluster",
        ):  # copied by code of their own
            entry["read"] = False
    top["distributed_type"]["choices"] = sorted(member.value for member in DistributedType)
    top["mixed_precision"] = {"types": ["NoneType", "str"], "choices": sorted(PrecisionType.list())}
    top["fp16"] = {"types": ["bool"], "moved": "mixed_precision"}  # BaseConfig.process_config converts both
    top["dynamo_backend"] = {"types": ["str"], "moved": "dynamo_config.dynamo_backend"}
    sections: Table = {"": top, "sagemaker": from_dataclass(SageMakerConfig), "flags": {}}
    for dest, action in actions.items():
        for option in action.option_strings:
            sections["flags"][option.lstrip("-")] = {"dest": dest, "takes": 0 if action.nargs == 0 else 1}
    for name in SECTIONS:
        members = {dest: action for dest, action in actions.items() if _section_of(dest, action, parser) == name}
        keys = {dest: _flag_facts(action) for dest, action in members.items()}
        for key in read_keys - set(actions):  # read with getattr, without a flag
            if key.startswith("fsdp_") and name == "fsdp_config":
                keys[key] = {"types": ["str"]}
        for key, entry in keys.items():
            if key not in read_keys:
                entry["read"] = False
        sections[name] = keys
    sections["fsdp_config"]["fsdp_auto_wrap_policy"]["choices"] = list(FSDP_AUTO_WRAP_POLICY)
    sections["fsdp_config"]["fsdp_sharding_strategy"]["choices"] = list(FSDP_SHARDING_STRATEGY)
    sections["dynamo_config"]["dynamo_backend"]["choices"] = sorted(DynamoBackend.list())
    for name in ("deepspeed_config", "fsdp_config"):
        sections[name] = {k: v for k, v in sections[name].items() if k not in ("use_deepspeed", "use_fsdp")}
    return sections


def _section_of(dest: str, action: Any, parser: Any) -> str | None:
    for group in parser._action_groups:
        if action in group._group_actions:
            titles = {
                "DeepSpeed Arguments": "deepspeed_config",
                "FSDP Arguments": "fsdp_config",
                "FP8 Arguments": "fp8_config",
                "ParallelismConfig Arguments": "parallelism_config",
                "Megatron-LM Arguments": "megatron_lm_config",
                "MPI Arguments": "mpirun_config",
            }
            if dest.startswith("dynamo_"):
                return "dynamo_config"
            return titles.get(group.title)
    return None


def _flag_facts(action: Any) -> dict[str, Any]:
    kind = action.type if isinstance(action.type, type) else (bool if action.nargs == 0 else str)
    entry = facts(kind, action.default)
    if entry.get("default") in ("true", "false") or kind is bool:
        entry["types"] = ["bool", "str"]
    if action.choices:
        entry["choices"] = sorted(str(choice) for choice in action.choices)
    return entry


def _read_by_the_launcher() -> set[str]:
    """Every attribute that the environment builders read from the parsed arguments."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import launch

    asked: set[str] = {"mpirun_hostfile"}
    base = vars(launch_command_parser().parse_args(["script.py"]))
    for builder, changes in (
        (launch.prepare_deepspeed_cmd_env, {"num_machines": 1}),
        (launch.prepare_deepspeed_cmd_env, {"num_machines": 2, "main_process_ip": "127.0.0.1"}),
        (
            launch.prepare_deepspeed_cmd_env,
            {"num_machines": 2, "main_process_ip": "127.0.0.1", "deepspeed_exclusion_filter": "x"},
        ),
        (launch.prepare_multi_gpu_env, {"use_fsdp": True, "use_megatron_lm": True, "num_machines": 1}),
    ):
        spy = SpyNamespace(
            {
                **base,
                "mixed_precision": "no",
                "dynamo_backend": "no",
                "num_processes": 2,
                "main_process_port": 0,
                "use_parallelism_config": True,
                "parallelism_config_cp_size": 2,
                "parallelism_config_sp_size": 2,
                "deepspeed_fields_from_accelerate_config": "",
                "num_cpu_threads_per_process": 1,
                "machine_rank": 0,
                **changes,
            }
        )
        with contextlib.suppress(ConnectionError):
            builder(spy)
        asked |= spy.asked
    # `setup_fp8_env` walks vars(args): every fp8_ flag is read where mixed_precision is fp8.
    asked |= {name for name in base if name.startswith("fp8_")}
    return asked
