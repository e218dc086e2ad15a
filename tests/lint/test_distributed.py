"""transformers' DistributedConfig: what lint says of it is what transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from tests.lint.folder import put
from toolkit.linting.engine import lint
from toolkit.linting.examples import args, distributed, multi_gpu, shell
from toolkit.linting.model import Files


def codes(files: Files) -> list[str]:
    return [finding.code for finding in lint(put(files)).findings]


SIZES: dict[str, dict[str, Any]] = {
    "sharded": {"fsdp_size": 4},
    "copies": {"fsdp_size": 2, "dp_replicate_size": 2},
    "layers": {"tp_size": 2},
    "both": {"fsdp_size": 2, "tp_size": 2},
    "experts": {"fsdp_size": 4, "ep_size": 2},
    "experts in layers": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    "no divisor": {"fsdp_size": 4, "ep_size": 3},
    "experts over more than there are": {"fsdp_size": 2, "ep_size": 4},
    "no multiple": {"fsdp_size": 4, "tp_size": 4, "ep_size": 2},
    "zero": {"fsdp_size": 0, "tp_size": 2},
    "below": {"ep_size": -1, "fsdp_size": 2},
    "stages of shards": {"fsdp_size": 2, "pp_size": 2},
    "stages of copies": {"dp_replicate_size": 2, "pp_size": 2, "fsdp_size": 1},
    "stages alone": {"pp_size": 2, "fsdp_size": 1},
}


@pytest.mark.upstream
@every_case("name", SIZES)
def test_a_size_is_rejected_by_both_or_by_neither(name: str) -> None:
    from transformers.distributed import DistributedConfig

    sizes = SIZES[name]
    try:
        DistributedConfig(**sizes)
        rejected = False
    except ValueError:
        rejected = True
    assert ("DC102" in codes(distributed(**sizes))) == rejected


@pytest.mark.upstream
def test_what_transformers_writes_is_clean_and_a_key_that_it_drops_is_found(tmp_path: Path) -> None:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=2)
    config.to_json_file("distributed_config.json")
    assert lint(["distributed_config.json"]).findings == []
    misspelt = json.loads(Path("distributed_config.json").read_text()) | {"fsdp_mixed_precison": True}
    assert DistributedConfig.from_dict(misspelt) == config
    assert codes(distributed(**misspelt)) == ["DC101"]


def test_the_number_of_processes_is_that_of_all_machines() -> None:
    split = distributed(fsdp_size=2, dp_replicate_size=2)
    assert codes(split | multi_gpu("num_machines: 1")) == ["DC103"]
    torchrun = "torchrun --nnodes {} --nproc_per_node 2 train.py --distributed distributed_config.json"
    assert "DC103" in codes(split | shell(torchrun.format(1)))
    assert "DC103" not in codes(split | shell(torchrun.format(2)))
    assert "DC103" not in codes(distributed(fsdp_size=2, tp_plan="auto") | shell(torchrun.format(4)))


def test_saving_is_judged_for_the_trainer_alone() -> None:
    split = distributed(fsdp_size=2, fsdp_mixed_precision=True)
    assert codes(split) == []
    assert codes(split | args(max_steps=3)) == ["DC105"], "save_strategy is steps by default"
    assert codes(split | args(save_strategy="no")) == []
    assert codes(distributed(fsdp_size=1) | args(save_strategy="steps")) == [], "nothing is split"
