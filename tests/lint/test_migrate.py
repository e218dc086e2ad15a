"""Migrated files say the same: the real packages read from them what they read from the old ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cases import every_case
from tests.lint import real_packages as real
from tests.lint.app import app
from tests.lint.folder import put
from toolkit.errors import InputError, RunFailed
from toolkit.linting.engine import lint
from toolkit.linting.examples import args, ds, fsdp, fsdp1, fsdp2, multi_gpu, zero
from toolkit.linting.model import Files
from toolkit.migration.run import migrate

_FILE = ("deepspeed_config_file: ds.json",)
_GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


def config(files: Files) -> dict:
    return yaml.safe_load(files["accelerate.yaml"])


@every_case(
    ("files", "to", "reshard"),
    [
        (zero("zero_stage: 1"), "fsdp2", False),
        (zero("zero_stage: 2", "gradient_accumulation_steps: 4", "gradient_clipping: 0.5"), "fsdp2", False),
        (zero("zero_stage: 3", "zero3_save_16bit_model: true"), "fsdp2", True),
        (zero(*_FILE, top=()) | ds(3, zero=_GATHER, bf16={"enabled": True}), "fsdp2", True),
        (fsdp1("fsdp_sharding_strategy: SHARD_GRAD_OP"), "fsdp2", False),
        (fsdp1("fsdp_sharding_strategy: 1"), "fsdp2", True),
    ],
)
def test_to_fsdp2(files: Files, to: str, reshard: bool) -> None:
    made = migrate(put(files), to)
    put(made.files)
    plugin = real.fsdp_plugin(real.launch_environment("accelerate.yaml"))
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is reshard
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert config(made.files)["mixed_precision"] == "bf16"
    assert not lint(list(made.files)).failed


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_to_zero(stage: int) -> None:
    made = migrate(put(fsdp2() | args(bf16=True, gradient_accumulation_steps=4, max_grad_norm=0.3)), f"zero{stage}")
    put(made.files)
    env = real.launch_environment("accelerate.yaml")
    values = json.loads(made.files["training_args.json"])
    values.pop("output_dir")
    stored = real.trainer_deepspeed(env, **values)
    assert stored.mismatches == []
    assert stored.config["zero_optimization"]["stage"] == stage
    assert stored.config["gradient_clipping"] == 0.3
    assert stored.config["gradient_accumulation_steps"] == 4
    assert stored.config["bf16"]["enabled"] is True
    assert stored.config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is (stage == 3)


def test_numbers_of_the_json_move_into_the_training_arguments() -> None:
    json_file = ds(
        2,
        gradient_accumulation_steps=4,
        gradient_clipping=None,
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": "auto"}},
        scheduler={
            "type": "WarmupDecayLR",
            "params": {"warmup_type": "linear", "warmup_num_steps": 10, "total_num_steps": 90},
        },
    )
    made = migrate(put(zero(*_FILE, top=()) | json_file), "fsdp2")
    assert json.loads(made.files["training_args.json"]) == {
        "max_grad_norm": 1.0,  # DeepSpeed's default, written down
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "optim": "adamw_torch",
        "learning_rate": 1e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "linear",
        "warmup_steps": 10,
        "max_steps": 90,
    }


@pytest.mark.parametrize(("strategy", "reshard"), [("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False)])
def test_hybrid_sharding_is_kept(strategy: str, reshard: bool) -> None:
    text = fsdp1(
        f"fsdp_sharding_strategy: {strategy}", top=("num_machines: 2", "machine_rank: 0", "main_process_ip: h")
    )
    text["accelerate.yaml"] = text["accelerate.yaml"].replace("num_processes: 2", "num_processes: 16")
    made = config(migrate(put(text), "fsdp2").files)
    assert made["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert made["parallelism_config"]["parallelism_config_dp_shard_size"] == 8
    assert made["fsdp_config"]["fsdp_reshard_after_forward"] is reshard


@every_case(
    ("files", "to", "reason"),
    [
        (fsdp1("fsdp_sharding_strategy: NO_SHARD"), "fsdp2", "plain data parallel"),
        (fsdp("fsdp_version: 1", "fsdp_state_dict_type: LOCAL_STATE_DICT"), "fsdp2", "only in FSDP1"),
        (zero("zero_stage: 2", "offload_optimizer_device: cpu"), "fsdp2", "together"),
        (zero(*_FILE, top=()) | ds(3, zero={"offload_param": {"device": "nvme", "nvme_path": "/x"}}), "fsdp2",
         "host only"),
        (zero(*_FILE, top=()) | ds(2, optimizer={"type": "Lion", "params": {}}), "fsdp2", "Lion"),
        (zero(*_FILE, top=()) | ds(2, scheduler={"type": "OneCycle", "params": {}}), "fsdp2", "OneCycle"),
        (zero(*_FILE, top=()) | ds(2, tensor_parallel={"autotp_size": 2}), "fsdp2", "tensor_parallel"),
        (zero(*_FILE, top=()) | ds(2, bf16={"enabled": True, "bf16_master_weights_and_grads": True}), "fsdp2",
         "fp32"),
        (zero(*_FILE, top=()) | ds(2, fp16={"enabled": True, "loss_scale": 128}), "fsdp2", "dynamic"),
        (zero(*_FILE, top=()) | ds(3, zero={"zero_quantized_weights": True}), "fsdp2", "zero_quantized_weights"),
        (fsdp2("fsdp_offload_params: true"), "zero2", "zero3 can"),
        (fsdp2("fsdp_ignored_modules: x.*"), "zero3", "ignored_modules"),
        (fsdp2(top=("parallelism_config:", "  parallelism_config_dp_replicate_size: 2")), "zero3", "MiCS"),
        (fsdp2(top=("parallelism_config:", "  parallelism_config_cp_size: 2")), "zero3", "cp_size"),
        (fsdp2(top=("fp8_config:", "  fp8_backend: te")), "zero3", "fp8_config"),
    ],
)  # fmt: skip
def test_what_has_no_equal_is_refused(files: Files, to: str, reason: str) -> None:
    with pytest.raises(RunFailed) as caught:
        migrate(put(files), to)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("files", "to"), [(fsdp2(), "fsdp2"), (fsdp2(), "ddp"), (multi_gpu(), "fsdp2"), (zero("zero_stage: 2"), "zero3")]
)
def test_what_cannot_be_asked(files: Files, to: str) -> None:
    with pytest.raises(InputError):
        migrate(put(files), to)


def test_there_and_back() -> None:
    old = fsdp2("fsdp_offload_params: true") | args(bf16=True)
    there = migrate(put(old), "zero3")
    Path("there").mkdir()
    for name, text in there.files.items():
        (Path("there") / name).write_text(text)
    back = migrate([f"there/{name}" for name in there.files], "fsdp2")
    for key in ("fsdp_offload_params", "fsdp_state_dict_type", "fsdp_auto_wrap_policy", "fsdp_version"):
        assert config(back.files)["fsdp_config"][key] == config(old)["fsdp_config"][key]


def test_command(tmp_path: Path) -> None:
    names = put(zero("zero_stage: 3", "zero3_save_16bit_model: true"))
    result = CliRunner().invoke(app, ["migrate", *names, "--to", "fsdp2", "-o", "new"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new" / "accelerate.yaml").is_file()
    put(fsdp1("fsdp_sharding_strategy: NO_SHARD"))
    refused = CliRunner().invoke(app, ["migrate", "accelerate.yaml", "--to", "fsdp2"])
    assert refused.exit_code == 1
    assert "Traceback" not in refused.output


def test_another_name_of_a_tuning_key_is_a_note_too() -> None:
    for key in ("stage3_max_live_parameters", "max_live_parameters", "prefetch_bucket_size", "max_reuse_distance"):
        made = migrate(put(ds(3, zero=_GATHER | {key: 1000000000}, bf16={"enabled": True})), "fsdp2")
        assert any(key in note for note in made.notes)


def test_a_value_that_is_the_default_is_no_reason_to_refuse() -> None:
    made = migrate(put(ds(2, prescale_gradients=False, gradient_predivide_factor=1.0)), "fsdp2")
    assert any("prescale_gradients" in note for note in made.notes)
    with pytest.raises(RunFailed, match="prescale_gradients"):
        migrate(put(ds(2, prescale_gradients=True)), "fsdp2")


def test_another_stage_names_what_else_changes() -> None:
    with pytest.raises(InputError) as caught:
        migrate(put(ds(3, zero={"offload_param": {"device": "cpu"}, "stage3_max_reuse_distance": 1})), "zero2")
    assert "ds.json:6:5: offload_param" in str(caught.value)
    assert "stage3_max_reuse_distance" in str(caught.value)
    yaml_file = zero("zero_stage: 3", "zero3_init_flag: true", "zero3_save_16bit_model: true")
    with pytest.raises(InputError, match=r"accelerate.yaml:6:3: zero3_init_flag(.|\n)*accelerate.yaml:7:3: zero3_save"):
        migrate(put(yaml_file), "zero1")
    with pytest.raises(InputError, match="zero3_save_16bit_model"):
        migrate(put(zero("zero_stage: 2")), "zero3")


def test_a_file_of_another_tool_is_refused() -> None:
    put({"config.yaml": "base_model: m\nsequence_len: 1\nmicro_batch_size: 1\nnum_epochs: 1\n"})
    with pytest.raises(InputError, match=r"config.yaml is a file of Axolotl"):
        migrate(["config.yaml", *put(zero("zero_stage: 2"))], "fsdp2")


@pytest.mark.parametrize(
    "files",
    [zero("zero_stage: 1", "gradient_accumulation_steps: 1"), zero("zero_stage: 2", "gradient_clipping: 0.5")],
    ids=["accumulation", "clipping"],
)
def test_a_single_argument_is_still_one(files: Files) -> None:
    made = migrate(put(files), "fsdp2")
    assert len(json.loads(made.files["training_args.json"])) == 1
    Path("new").mkdir()
    for name, text in made.files.items():
        (Path("new") / name).write_text(text)
    assert not lint([f"new/{name}" for name in made.files]).failed
