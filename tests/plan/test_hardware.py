"""The device table: what it has, and what a plan makes of a device without bfloat16 or without rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cases import every_case
from plan.cells import LLAMA
from toolkit.benchmark.cells import device_rate
from toolkit.planning.command import Request, make_plan
from toolkit.planning.hardware import device_named, devices


def test_each_device_has_its_source_and_believable_numbers() -> None:
    for name, device in devices().items():
        assert device.source, name
        assert 7 < device.memory < 300, name
        assert 250 < device.bandwidth <= 8000, name
        assert 16 <= device.pcie <= 450, name
        assert device.rate("float32") > 0, name
        # Tensor cores multiply 16 bits faster than the other cores 32: twice on GeForce, 15 times on an H100.
        assert 1.9 <= device.rate("float16") / device.rate("float32") < 33, name


@every_case(
    ("name", "memory", "dtype", "rate"),
    [
        ("t4", 14.56, "float16", 65), ("t4", 14.56, "bfloat16", 0), ("v100-32gb", 31.74, "float16", 125),
        ("a10g", 21.9, "bfloat16", 70), ("l4", 22.0, "float32", 30.3), ("l40s", 44.4, "float16", 362),
        ("rtxa6000", 47.4, "bfloat16", 155), ("rtx3060", 11.76, "bfloat16", 25.5), ("rtx4080", 15.65, "float32", 48.7),
        ("rtx5080", 15.65, "bfloat16", 112.6), ("gh200", 95.0, "bfloat16", 989), ("mi300x", 191.9, "bfloat16", 1307),
        ("b300", 268.0, "float32", 75), ("h100", 79.1, "float32", 67),
    ],
)  # fmt: skip
def test_a_rate_is_of_a_dtype(name: str, memory: float, dtype: str, rate: float) -> None:
    device = device_named(name, None)
    assert device.memory == pytest.approx(memory)
    assert device.rate(dtype) == rate


@every_case(
    ("name", "rate"),
    [("Tesla T4", 65), ("Tesla V100-SXM2-32GB", 125), ("NVIDIA A10G", 70), ("NVIDIA A10", 125), ("NVIDIA L40S", 362),
     ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2), ("NVIDIA GeForce RTX 3060", 25.5), ("NVIDIA B300", 2250),
     ("NVIDIA GH200 480GB", 989), ("NVIDIA H200", 989), ("AMD Instinct MI300X", 1307)],
)  # fmt: skip
def test_a_device_is_known_by_the_name_that_its_driver_gives(name: str, rate: float) -> None:
    assert device_rate(name) == pytest.approx(rate * 1e12)


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return str(file)


def test_a_device_without_bfloat16_is_planned_in_fp16(config: str) -> None:
    found = make_plan(Request(config, gpu="t4", length=64))
    assert found.search.asked.recipe.precision == "fp16"
    assert any("planned with precision: fp16" in note for note in found.search.notes())
    assert found.candidates[0].seconds is not None
    asked = make_plan(Request(config, ("precision=bf16",), gpu="t4", length=64))
    assert asked.candidates[0].seconds is None
    assert any("t4 computes nothing in bfloat16" in one for one in asked.to_json()["assumptions"])
    [smallest] = make_plan(Request(config, fit=("gpu",), length=64)).to_json()["fit"]
    assert smallest["answer"] not in ("t4", "v100-16gb", "v100-32gb")


def test_float32_is_not_as_fast_as_with_tf32(config: str) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 4096}
    overrides = [f"model.config.{key}={value}" for key, value in sizes.items()]

    def seconds(precision: str, gpu: str) -> float:
        found = make_plan(Request(config, (f"precision={precision}", *overrides), gpu=gpu, length=2048, micro=4))
        assert found.candidates[0].seconds is not None
        return found.candidates[0].seconds.compute

    assert seconds("fp32", "h100") > 4 * seconds("bf16", "h100")


def test_a_table_may_have_rates_by_dtype(tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    row = {"memory": 12, "bf16": 50, "bandwidth": 400, "link": 8, "pcie": 8}
    file.write_text(yaml.safe_dump({"mine": row | {"fp32": 5, "fp16": 100}, "plain": row}))
    table = devices(str(file))
    assert [table["mine"].rate(dtype) for dtype in ("bfloat16", "float16", "float32")] == [50, 100, 5]
    assert [table["plain"].rate(dtype) for dtype in ("bfloat16", "float16", "float32")] == [50, 50, 25]
