"""The traps that people fall into: found with the right code and line; mended, clean and accepted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from cases import every_case
from tests.lint import real_packages as real
from tests.lint.folder import put
from toolkit.linting.engine import lint
from toolkit.linting.examples import args, ds, fsdp, fsdp1, fsdp2, lora, multi_gpu, zero
from toolkit.linting.files.load import load
from toolkit.linting.fix import plan, write
from toolkit.linting.model import Files, Reader

_FILE = ("deepspeed_config_file: ds.json",)
_GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
_REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
_PLAIN = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}


@dataclass
class Trap:
    name: str
    code: str
    place: str  # file:line
    files: Files
    mended: Files
    reader: Reader | None = None


TRAPS = [
    Trap("top-level typo", "DS101", "ds.json:7", ds(gradient_cliping=0.5), ds(gradient_clipping=0.5)),
    Trap("bf16 auto alone", "AU301", "ds.json:8", ds(bf16={"enabled": "auto"}), ds(bf16={"enabled": True}),
         "deepspeed"),
    Trap("bucket auto alone", "AU301", "ds.json:6", ds(zero={"reduce_bucket_size": "auto"}), ds(), "deepspeed"),
    Trap("batch auto alone", "AU302", "ds.json:7", ds(train_batch_size="auto"), ds(train_batch_size=2), "deepspeed"),
    Trap("clipping auto alone", "AU303", "ds.json:3", ds(gradient_clipping="auto"), ds(gradient_clipping=1.0),
         "deepspeed"),
    Trap("nested typo", "AC102", "accelerate.yaml:5", zero("zero_stge: 3"),
         zero("zero_stage: 3", "zero3_save_16bit_model: true")),
    Trap("accumulation of two layers", "XL204", "accelerate.yaml:6",
         zero("zero_stage: 2", "gradient_accumulation_steps: 1") | args(gradient_accumulation_steps=4, bf16=True),
         zero("zero_stage: 2", "gradient_accumulation_steps: 4") | args(gradient_accumulation_steps=4, bf16=True)),
    Trap("bf16 false loses", "XL201", "args.json:3", multi_gpu() | args(bf16=False), multi_gpu() | args(bf16=True)),
    Trap("fp16 YAML loses", "XL201", "args.json:3",
         {"accelerate.yaml": multi_gpu()["accelerate.yaml"].replace("bf16", "fp16")} | args(bf16=True),
         multi_gpu() | args(bf16=True)),
    Trap("beside the config file", "XL213", "accelerate.yaml:5", zero(*_FILE, "zero_stage: 2", top=()) | ds(),
         zero(*_FILE, top=()) | ds()),
    Trap("precision beside the config file", "XL213", "accelerate.yaml:3", zero(*_FILE) | ds(bf16={"enabled": True}),
         zero(*_FILE, top=()) | ds(bf16={"enabled": True})),
    Trap("no wrap policy", "FS401", "accelerate.yaml:4",
         fsdp("fsdp_version: 2", "fsdp_state_dict_type: FULL_STATE_DICT"), fsdp2()),
    Trap("class of another model", "FS413", "accelerate.yaml:8",
         fsdp2("fsdp_transformer_layer_cls_to_wrap: LamaDecoderLayer"),
         fsdp2("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer")),
    Trap("no version", "FS402", "accelerate.yaml:4",
         fsdp("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type: FULL_STATE_DICT"), fsdp2()),
    Trap("no state-dict type", "FS403", "accelerate.yaml:4",
         fsdp("fsdp_version: 2", "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"), fsdp2()),
    Trap("hybrid under 2", "FS404", "accelerate.yaml:8", fsdp2("fsdp_sharding_strategy: HYBRID_SHARD"),
         fsdp2(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 2"))),
    Trap("no shard under 2", "FS404", "accelerate.yaml:8", fsdp2("fsdp_sharding_strategy: NO_SHARD"), fsdp2()),
    Trap("hybrid text under 2", "FS404", "accelerate.yaml:8", fsdp2("fsdp_reshard_after_forward: HYBRID_SHARD"),
         fsdp2("fsdp_reshard_after_forward: true")),
    Trap("weights stay sharded (JSON)", "SV701", "ds.json:4", ds(3), ds(3, zero=_GATHER)),
    Trap("weights stay sharded (YAML)", "SV701", "accelerate.yaml:4", zero("zero_stage: 3"),
         zero("zero_stage: 3", "zero3_save_16bit_model: true")),
    Trap("overlap with large buckets", "MM601", "ds.json:7",
         ds(zero={"overlap_comm": True, "reduce_bucket_size": 5e8}),
         ds(zero={"overlap_comm": True, "reduce_bucket_size": 5e7})),
    Trap("use_orig_params with LoRA", "FS408", "accelerate.yaml:8", fsdp1("fsdp_use_orig_params: false") | lora(),
         fsdp1("fsdp_use_orig_params: true") | lora()),
    Trap("two dtypes in a unit", "FS409", "args.json:3", fsdp1() | lora() | args(torch_dtype="bfloat16"),
         fsdp2() | lora() | args(torch_dtype="bfloat16"), "accelerator"),
    Trap("reentrant over a frozen base", "LR801", "args.json:5", lora() | args(**_REENTRANT),
         lora() | args(**_PLAIN), "accelerator"),
    Trap("non-reentrant under ZeRO-3", "LR802", "args.json:5",
         zero("zero_stage: 3", "zero3_save_16bit_model: true") | lora() | args(**_PLAIN, bf16=True),
         zero("zero_stage: 3", "zero3_save_16bit_model: true") | lora() | args(**_REENTRANT, bf16=True)),
    Trap("clipping only in the arguments", "XL208", "args.json:3",
         zero(*_FILE, top=()) | ds(gradient_clipping=None) | args(max_grad_norm=0.3, per_device_train_batch_size=2),
         zero(*_FILE, top=()) | ds(gradient_clipping="auto") | args(max_grad_norm=0.3, per_device_train_batch_size=2)),
    Trap("clipping only in the YAML", "XL207", "accelerate.yaml:6",
         zero("zero_stage: 2", "gradient_clipping: 0.3") | args(bf16=True),
         zero("zero_stage: 2", "gradient_clipping: 0.3") | args(bf16=True, max_grad_norm=0.3)),
    Trap("checkpointing and dropout", "FS410", "accelerate.yaml:8",
         fsdp2("fsdp_activation_checkpointing: true") | lora(lora_dropout=0.1),
         fsdp2("fsdp_activation_checkpointing: true") | lora(lora_dropout=0.0)),
    Trap("loading without sync", "FS407", "accelerate.yaml:9",
         fsdp1("fsdp_cpu_ram_efficient_loading: true", "fsdp_sync_module_states: false"),
         fsdp1("fsdp_cpu_ram_efficient_loading: true", "fsdp_sync_module_states: true")),
]  # fmt: skip


@every_case("trap", TRAPS, ids=lambda trap: trap.name)
def test_found_with_the_right_code_in_the_right_line(trap: Trap) -> None:
    report = lint(put(trap.files), reader=trap.reader)
    places = [f"{f.place.file}:{f.place.line}" for f in report.findings if f.code == trap.code and f.severity != "note"]
    assert trap.place in places, [(f.code, str(f.place)) for f in report.findings]


@every_case("trap", TRAPS, ids=lambda trap: trap.name)
def test_mended_is_clean(trap: Trap) -> None:
    report = lint(put(trap.mended), reader=trap.reader)
    assert not report.failed, [(f.code, f.message) for f in report.findings if f.severity != "note"]


@pytest.mark.upstream
@every_case("trap", TRAPS, ids=lambda trap: trap.name)
def test_mended_is_accepted(trap: Trap) -> None:
    put(trap.mended)
    accept(trap.mended)


@every_case("trap", TRAPS, ids=lambda trap: trap.name)
def test_fixed_by_machine_is_accepted(trap: Trap) -> None:
    fixed = plan(load(put(trap.files)), reader=trap.reader)
    assert fixed.report is not None
    if not fixed.changed or fixed.report.failed:
        return  # it needs a decision that only a person can take
    write(fixed)
    assert not lint(list(trap.files), reader=trap.reader).failed
    accept(fixed.after)


def accept(files: Files) -> None:
    """Let the real packages read the files; whatever they refuse is raised."""
    values: dict[str, Any] = json.loads(files["args.json"]) if "args.json" in files else {}
    values = {key: value for key, value in values.items() if key not in ("output_dir", "torch_dtype")}
    if "accelerate.yaml" not in files:
        if "ds.json" in files:
            real.deepspeed_alone(json.loads(files["ds.json"]))
        if values:
            real.training_arguments({}, **values)
        return
    env = real.launch_environment("accelerate.yaml")
    if env.get("ACCELERATE_USE_DEEPSPEED"):
        if values:
            assert real.trainer_deepspeed(env, **values).mismatches == []
        real.deepspeed_plugin(env)
    elif env.get("ACCELERATE_USE_FSDP"):
        real.fsdp_plugin(env)
    elif values:
        real.training_arguments(env, **values)
