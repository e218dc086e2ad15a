"""`explain KEY FILE...` says what the real packages do: they are run here, and their values compared."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from tests.lint import real_packages as real
from toolkit.linting import explain
from toolkit.linting.engine import contexts
from toolkit.linting.examples import args, ds, fsdp, multi_gpu, zero
from toolkit.linting.files.load import load
from toolkit.linting.layers import Answer, answers
from toolkit.linting.model import Files

_FILE = ("deepspeed_config_file: ds.json",)


def files(folder: Path, content: Files) -> list[str]:
    for name, text in content.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(content)


def three(folder: Path, content: Files, key: str) -> tuple[Answer, Answer, Answer]:
    found = answers(contexts(load(files(folder, content)))[0], key)
    assert found is not None
    return found


def same(answer: Answer, run: Any) -> None:
    """The answer is what ``run()`` returns, or says that it raises."""
    if answer.fails:
        with pytest.raises((ValueError, TypeError, AssertionError)):
            run()
    else:
        assert run() == answer.value


DEEPSPEED = [
    zero("zero_stage: 3", "gradient_accumulation_steps: 4", "gradient_clipping: 0.5"),
    zero("zero_stage: 2"),
    zero("gradient_accumulation_steps: auto", "gradient_clipping: auto"),
    zero(*_FILE, top=()) | ds(2, gradient_accumulation_steps=3),
    zero(*_FILE, top=()) | ds(2, gradient_clipping=None),
    zero(*_FILE, top=()) | ds(3, gradient_clipping="auto", gradient_accumulation_steps="auto"),
    zero(*_FILE, top=()) | ds(1, fp16={"enabled": True}),
    zero(*_FILE, top=()) | ds(1, bf16={"enabled": False}, gradient_clipping=0.1),
]
ARGUMENTS: list[dict[str, Any]] = [
    {"per_device_train_batch_size": 2},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_grad_norm": 0.5, "bf16": True},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "fp16": True},
]


@every_case("content", DEEPSPEED, ids=range(len(DEEPSPEED)))
def test_accelerate_launch_with_deepspeed(content: Files, tmp_path: Path) -> None:
    names = files(tmp_path, content)
    env = real.launch_environment(names[0])

    def config() -> dict[str, Any]:
        return real.deepspeed_plugin(env)

    for key, read in (
        ("gradient_accumulation_steps", lambda: config()["gradient_accumulation_steps"]),
        ("gradient_clipping", lambda: config().get("gradient_clipping", 1.0)),
        ("zero_stage", lambda: config()["zero_optimization"]["stage"]),
        ("mixed_precision", lambda: _precision(config())),
    ):
        same(three(tmp_path, content, key)[0], read)


def _precision(config: dict[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16") if config[name]["enabled"] is True), "no")


@every_case(
    ("content", "values"),
    product(DEEPSPEED, ARGUMENTS),
    ids=[f"{content}-{values}" for content, values in product(range(len(DEEPSPEED)), range(len(ARGUMENTS)))],
)
def test_trainer_with_deepspeed(content: Files, values: dict[str, Any], tmp_path: Path) -> None:
    whole = content | args(**values)
    env = real.launch_environment(files(tmp_path, whole)[0])
    try:
        config = real.trainer_deepspeed(env, **values)
    except ValueError:  # refused before anything is compared: the launch and the JSON differ in precision
        assert three(tmp_path, whole, "bf16")[2].fails
        return
    refused = " ".join(config.mismatches)
    for key, ds_key in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("max_grad_norm", "gradient_clipping"),
        ("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
    ):
        answer = three(tmp_path, whole, key)[2]
        assert answer.fails == (f"ds {ds_key}=" in refused), (key, refused, answer)
        if not answer.fails:
            assert config.config.get(ds_key, 1.0) == answer.value
    answer = three(tmp_path, whole, "bf16")[2]
    assert answer.fails == ("16.enabled=" in refused), (refused, answer)
    if not answer.fails:
        assert _precision(config.config) == answer.value


@pytest.mark.parametrize(
    ("yaml", "values"), [("bf16", {"bf16": False}), ("fp16", {"bf16": True}), ("'no'", {"bf16": True}), ("bf16", {})]
)
def test_trainer_precision_without_deepspeed(yaml: str, values: dict[str, Any], tmp_path: Path) -> None:
    content = {"accelerate.yaml": f"distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: {yaml}\n"} | args(
        **values
    )
    env = real.launch_environment(files(tmp_path, content)[0])
    assert real.training_arguments(env, **values).mixed_precision == three(tmp_path, content, "bf16")[2].value


@every_case(
    "config",
    [
        {"train_batch_size": 4},
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0.25},
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
        {"train_batch_size": 4, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}},
        {"train_batch_size": 4, "bf16": {"enabled": True}},
    ],
    ids=range(5),
)
def test_deepspeed_alone(config: dict[str, Any], tmp_path: Path) -> None:
    content = {"ds.json": json.dumps(config)}
    for key, read in (
        ("gradient_clipping", lambda c: c.gradient_clipping),
        ("zero_stage", lambda c: c.zero_optimization_stage),
        ("gradient_accumulation_steps", lambda c: c.gradient_accumulation_steps),
        ("mixed_precision", lambda c: "bf16" if c.bfloat16_config.enabled else "no"),
    ):
        answer = three(tmp_path, content, key)[1]
        if "auto" in config.values():
            with pytest.raises(TypeError):
                real.deepspeed_alone(json.loads(json.dumps(config)))
            continue
        assert read(real.deepspeed_alone(json.loads(json.dumps(config)))) == answer.value


FSDP = [
    fsdp("fsdp_version: 1"),
    fsdp("fsdp_version: 2"),
    fsdp("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
    fsdp("fsdp_version: 1", "fsdp_reshard_after_forward: SHARD_GRAD_OP"),
    fsdp("fsdp_version: 2", "fsdp_reshard_after_forward: false", "fsdp_state_dict_type: FULL_STATE_DICT"),
    fsdp("version: 2", "fsdp_sharding_strategy: HYBRID_SHARD"),
]


@every_case("content", FSDP, ids=range(len(FSDP)))
def test_accelerate_launch_with_fsdp(content: Files, tmp_path: Path) -> None:
    plugin = real.fsdp_plugin(real.launch_environment(files(tmp_path, content)[0]))
    assert plugin.fsdp_version == three(tmp_path, content, "fsdp_version")[0].value
    assert plugin.state_dict_type.name == three(tmp_path, content, "fsdp_state_dict_type")[0].value
    sharding = plugin.reshard_after_forward if plugin.fsdp_version == 2 else plugin.sharding_strategy.name
    assert sharding == three(tmp_path, content, "fsdp_sharding_strategy")[0].value
    wrapped = three(tmp_path, content, "fsdp_auto_wrap_policy")[0].value != "NO_WRAP"
    assert (plugin.auto_wrap_policy is not None) == wrapped


@pytest.mark.parametrize(
    "config",
    [{}, {"version": 1, "reshard_after_forward": "shard_grad_op"}, {"reshard_after_forward": False}],
    ids=range(3),
)
def test_trainer_with_fsdp(config: dict[str, Any], tmp_path: Path) -> None:
    content = args(fsdp=True, fsdp_config=config)
    files(tmp_path, content)
    plugin = real.fsdp_plugin({}, **real.training_arguments({}, fsdp=True, fsdp_config=dict(config)).fsdp_plugin_args)
    assert plugin.fsdp_version == three(tmp_path, content, "fsdp_version")[2].value
    assert plugin.state_dict_type.name == three(tmp_path, content, "state_dict_type")[2].value
    # The strategy that Accelerator.prepare_model takes for version 1: sharding_strategy before the other.
    used = plugin.reshard_after_forward if plugin.fsdp_version == 2 else plugin.sharding_strategy.name
    assert used == three(tmp_path, content, "reshard_after_forward")[2].value


def test_text_of_an_answer(tmp_path: Path) -> None:
    text, data = explain.key("mixed_precision", files(tmp_path, multi_gpu() | args(bf16=False)))
    assert "Trainer" in text
    assert data["answers"][2]["value"] == "bf16"


def test_keys_that_the_launcher_drops(tmp_path: Path) -> None:
    answer = three(tmp_path, multi_gpu("enable_cpu_affinity: true"), "enable_cpu_affinity")[0]
    assert answer.value is None
    assert "ACCELERATE_CPU_AFFINITY" not in real.launch_environment("accelerate.yaml")
