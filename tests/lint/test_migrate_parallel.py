"""`toolkit migrate` and parallelism_config, AutoTP and rows in parts: carried over, noted or refused by name."""

from __future__ import annotations

import pytest
import yaml

from cases import every_case
from tests.lint.folder import put
from toolkit.errors import InputError, RunFailed
from toolkit.linting.examples import ds, fsdp1, fsdp2, shell, zero
from toolkit.linting.model import Files
from toolkit.migration.run import Migrated, migrate

_GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


def section(*lines: str) -> tuple[str, ...]:
    return ("parallelism_config:", *(f"  parallelism_config_{line}" for line in lines))


def of(files: Files, processes: int) -> Files:
    return {name: text.replace("num_processes: 2", f"num_processes: {processes}") for name, text in files.items()}


def deep(*lines: str, processes: int = 2) -> Files:
    return of(zero("zero_stage: 2", top=("mixed_precision: bf16", *section(*lines))), processes)


def written(made: Migrated) -> dict:
    return dict(yaml.safe_load(made.files["accelerate.yaml"]))


@every_case(
    ("files", "to", "reasons"),
    [
        (of(fsdp2(top=section("dp_shard_size: 2", "tp_size: 2")), 4), "zero3", ["accelerate.yaml:6", "autotp_size"]),
        (of(fsdp2(top=section("dp_shard_size: 2", "cp_size: 2")), 4), "zero3", ["accelerate.yaml:6", "sp_size"]),
        (of(fsdp2(top=section("dp_shard_size: 2", "sp_size: 2")), 4), "zero3", ["accelerate.yaml:6", "nothing reads"]),
        (of(fsdp2(top=section("dp_replicate_size: 2", "dp_shard_size: 2")), 4), "zero3", ["hpZ", "keep FSDP2"]),
        (of(fsdp2(top=section("dp_shard_size: 2")), 4), "zero3", ["multiply to 2", "num_processes is 4"]),
        (fsdp2(top=section("dp_shard_size: two")), "zero3", ["accelerate.yaml:5", "not a whole number"]),
        (fsdp2(top=section("dp_shards: 2")), "zero3", ["accelerate.yaml:5", "no such key"]),
        (fsdp1(top=section("dp_shard_size: 2")), "fsdp2", ["accelerate.yaml:5", "under FSDP1"]),
        (deep("sp_size: 2"), "fsdp2", ["accelerate.yaml:5", "cp_size", "keep DeepSpeed"]),
        (deep("tp_size: 2"), "fsdp2", ["accelerate.yaml:5", "LT524"]),
        (ds(2, tensor_parallel={"autotp_size": 2}), "fsdp2", ["ds.json:7", "autotp_size 2", "LT530"]),
        (ds(2, sequence_parallel_size=2), "fsdp2", ["ds.json:7", "sequence_parallel_size 2"]),
    ],
)  # fmt: skip
def test_refused_by_name(files: Files, to: str, reasons: list[str]) -> None:
    with pytest.raises(RunFailed) as caught:
        migrate(put(files), to)
    for reason in reasons:
        assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("files", "to", "note"),
    [
        (deep("dp_shard_size: 2"), "fsdp2", "shards over all processes"),
        (ds(2, tensor_parallel={"autotp_size": 1}), "fsdp2", "AutoTP is off"),
        (ds(2, sequence_parallel_size=1), "fsdp2", "rows are whole"),
        (fsdp2(top=section("dp_shard_size: 2", "cp_comm_strategy: alltoall")), "zero2", "while cp_size is 1"),
    ],
)
def test_noted(files: Files, to: str, note: str) -> None:
    made = migrate(put(files), to)
    assert any(note in line for line in made.notes), made.notes
    assert "parallelism_config" not in written(made)


def test_shards_over_all_processes_are_what_zero_does() -> None:
    assert "parallelism_config" not in written(migrate(put(of(fsdp2(top=section("dp_shard_size: 4")), 4)), "zero3"))


def test_a_section_that_the_launch_does_not_read_is_noted() -> None:
    files = of(fsdp2(top=section("dp_shard_size: 2", "tp_size: 2")), 4)
    command = "accelerate launch --config_file accelerate.yaml --use_fsdp --num_processes 4 train.py"
    made = migrate(put(files | shell(command)), "zero2")
    assert sum("LT521" in note for note in made.notes) == 2


def test_hybrid_sharding_with_the_processes_of_the_command() -> None:
    files = fsdp1("fsdp_sharding_strategy: HYBRID_SHARD", top=("num_machines: 2", "machine_rank: 0"))
    files |= shell("accelerate launch --config_file accelerate.yaml --num_processes 8 --main_process_ip h train.py")
    files["accelerate.yaml"] = files["accelerate.yaml"].replace("num_processes: 2\n", "") + "main_process_ip: h\n"
    made = written(migrate(put(files), "fsdp2"))["parallelism_config"]
    assert made == {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}


@pytest.mark.parametrize(("stage", "to", "message"), [(3, "zero2", "2 times those of zero3"), (2, "zero3", "1/2 of")])
def test_another_stage_with_rows_in_parts(stage: int, to: str, message: str) -> None:
    files = zero("deepspeed_config_file: ds.json", top=section("sp_size: 2"))
    with pytest.raises(InputError, match=rf"accelerate.yaml:4:3: sp_size: .*{message}"):
        migrate(put(files | ds(stage, zero=_GATHER if stage == 3 else {})), to)
