"""A plan and launch files are for any machine: what only a run needs may be missing here."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from cases import every_case
from nights import nightly_but
from plan.test_command import planned
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.command import ConfigRequest, TrainOptions, config_command
from toolkit.launch.job import train
from toolkit.model.processor import load_tokenizer
from toolkit.options.nf4.apply import Nf4Linear, packed_nf4, sized_nf4
from toolkit.planning.command import Request, plan_command
from toolkit.recipe.load import load_recipe
from toolkit.verification.run import resolve_recipe

QLORA = {"method": "qlora", "r": 4, "alpha": 8.0}


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A recipe of a model by its config, with a 4-bit base and no tokenizer."""
    recipe = recipe_dict(tmp_path, adapter=QLORA, precision="bf16")
    del recipe["tokenizer"]
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return str(file)


@pytest.mark.parametrize("strategy", nightly_but(["zero2", "zero3", "fsdp2"], "fsdp2"))
def test_neither_a_tokenizer_nor_bitsandbytes_is_needed_to_plan(
    strategy: str, bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (f"strategy.name={strategy}",)
    found = []
    for installed in (True, False):
        if not installed:
            monkeypatch.setitem(sys.modules, "bitsandbytes", None)
        status, result = planned(tmp_path, bare, gpu="h100", length=64, overrides=overrides)
        assert status == 0
        found.append([c["phases"] | {"seconds": c["seconds_per_step"]} for c in result["candidates"]])
    assert found[0] == found[1]


def test_calibration_runs_here_and_needs_it(bare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(InputError, match="pip install 'bitsandbytes"):
        plan_command(Request(bare, calibrate=True))


@every_case(
    ("shape", "storage"),
    product([(64, 32), (48, 64), (9, 40), (700, 128)], [torch.uint8, torch.bfloat16, torch.float32]),
)
def test_sizes_are_those_of_bitsandbytes(shape: tuple[int, int], storage: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    linear = nn.Linear(shape[1], shape[0], dtype=torch.bfloat16)
    real = Nf4Linear(linear, *packed_nf4(linear.weight.detach(), storage))
    there = nn.Linear(shape[1], shape[0], dtype=torch.bfloat16, device="meta")
    sized = Nf4Linear(there, *sized_nf4(there.weight.detach(), storage))
    assert sized.weight.is_meta
    assert (sized.weight.shape, sized.weight.dtype) == (real.weight.shape, real.weight.dtype)
    assert sized.statistics_bytes() == real.statistics_bytes()
    for dtype in (torch.bfloat16, torch.float32):
        ours, theirs = sized.dequantised(dtype), real.dequantised(dtype)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_files_are_written_without_a_tokenizer_and_say_what_training_needs(
    bare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_command(ConfigRequest(bare, output=str(tmp_path / "out"), explain=True))
    assert (tmp_path / "out" / "launch.sh").exists()
    output = capsys.readouterr().out
    assert "before training: tokenizer.path: a model from model.config has no tokenizer; set one" in output


def test_a_run_is_refused_without_them(bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = (lambda *words: train(TrainOptions(bare, words)), lambda *words: resolve_recipe(bare, words))
    for start in starts:
        with pytest.raises(InputError, match=r"r\.yaml: tokenizer\.path: a model from model\.config has no tokenizer"):
            start()
    with pytest.raises(InputError, match=r"tokenizer\.path: a model from model\.config has no tokenizer"):
        load_tokenizer(load_recipe(bare))  # `accelerate launch -m toolkit.train`
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for start in starts:
        with pytest.raises(InputError, match="pip install 'bitsandbytes"):
            start("tokenizer.path=anything")
    assert not (tmp_path / "run").exists()


def test_a_recipe_around_a_config_names_no_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    planned(tmp_path, str(tmp_path / "config.json"), gpu="h100", output=str(tmp_path / "r.yaml"))
    written: dict[str, Any] = yaml.safe_load((tmp_path / "r.yaml").read_text())
    assert "tokenizer" not in written
