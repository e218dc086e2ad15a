"""Traps of parallelism_config and AutoTP: found, and judged by accelerate, DeepSpeed and the Trainer themselves."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from cases import every_case
from tests.lint import real_packages as real
from tests.lint.folder import Trap, put
from toolkit.linting.engine import lint
from toolkit.linting.examples import acc, args, ds, fsdp1, fsdp2, lora, multi_gpu, shell, zero
from toolkit.linting.model import Files


def section(*lines: str) -> tuple[str, ...]:
    return ("parallelism_config:", *(f"  parallelism_config_{line}" for line in lines))


def of(files: Files, processes: int) -> Files:
    return {name: text.replace("num_processes: 2", f"num_processes: {processes}") for name, text in files.items()}


def two(*lines: str, processes: int = 2) -> Files:
    return of(fsdp2(top=section(*lines)), processes)


def deep(*lines: str, stage: int = 3, processes: int = 2) -> Files:
    top = ("mixed_precision: bf16", *section(*lines))
    return of(zero(f"zero_stage: {stage}", "zero3_save_16bit_model: true", top=top), processes)


def tensor(**keys: Any) -> Files:
    return ds(2, bf16={"enabled": True}, tensor_parallel={"vocab_parallel_lm_head": False, **keys})


def named(processes: int) -> Files:
    section = ("deepspeed_config:", "  deepspeed_config_file: ds.json")
    return acc("distributed_type: DEEPSPEED", f"num_processes: {processes}", *section)


# ---- what the packages say ---------------------------------------------------------------------------


def parallelism(*flags: str) -> Any:
    """The ParallelismConfig of a process that `accelerate launch` starts with accelerate.yaml; None without one."""
    env = real.launch_environment("accelerate.yaml", *flags)
    if env.get("ACCELERATE_USE_PARALLELISM_CONFIG") != "true":
        return None
    from accelerate.parallelism_config import ParallelismConfig

    with patch.dict(os.environ, env):
        return ParallelismConfig()


def validated(files: Files) -> Any:
    """accelerate's own check of the sizes, for the strategy of the file."""
    from accelerate.utils import DistributedType

    written, made = yaml.safe_load(files["accelerate.yaml"]), parallelism()
    kind = DistributedType[written["distributed_type"]]
    accelerator = SimpleNamespace(
        is_fsdp2=written.get("fsdp_config", {}).get("fsdp_version") == 2,
        multi_device=kind == DistributedType.MULTI_GPU,
        distributed_type=kind,
        num_processes=written["num_processes"],
        is_main_process=True,
    )
    made._validate_accelerator(accelerator)
    return made


def batch(files: Files, world: int | None = None) -> Any:
    """DeepSpeed's own batch arithmetic among the file's processes, without groups of AutoTP: as initialize makes it."""
    from deepspeed.runtime import config

    count = world or yaml.safe_load(files["accelerate.yaml"])["num_processes"]
    content = json.loads(files["ds.json"])
    with patch.object(config.dist, "get_rank", lambda: 0), patch.object(config.dist, "get_world_size", lambda: count):
        return config.DeepSpeedConfig(content)


def batch_of_rows(files: Files) -> Any:
    """What accelerate writes as train_batch_size with sp_size, held against DeepSpeed's assertion."""
    made, count = validated(files), yaml.safe_load(files["accelerate.yaml"])["num_processes"]
    if count % made.sp_size:
        raise RuntimeError("not divisible")  # parallel_state_sp.py:initialize_sequence_parallel
    content = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2 * made.data_parallel_size}
    return batch({"ds.json": json.dumps(content)}, count // made.sp_size)


def tensor_section(files: Files) -> Any:
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    return TPTrainingConfig(**json.loads(files["ds.json"])["tensor_parallel"])


def rank_of_mesh(files: Files) -> Any:
    """DeepSpeed's groups for the last rank, with torch's process group that exchanges nothing."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world, count = yaml.safe_load(files["accelerate.yaml"])["num_processes"], tensor_section(files).autotp_size
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    try:
        names = ("data_parallel", "tensor_parallel")
        return init_device_mesh("cpu", (world // count, count), mesh_dim_names=names).get_group("tensor_parallel")
    finally:
        dist.destroy_process_group()


def total_batch(files: Files) -> Any:
    """The Trainer's own number of samples of a step."""
    from transformers import Trainer

    config = SimpleNamespace(config=json.loads(files["ds.json"]))
    me = SimpleNamespace(model=None, is_deepspeed_enabled=True, args=SimpleNamespace(hf_deepspeed_config=config))
    me._train_batch_size, me.get_cp_size, me.get_sp_size = 2, lambda: 1, lambda: 1
    me.get_tp_size = lambda: Trainer.get_tp_size(me)  # type: ignore[arg-type]
    return Trainer.get_total_train_batch_size(me, SimpleNamespace(world_size=4, gradient_accumulation_steps=1))  # type: ignore[arg-type]


def experts(files: Files) -> Any:
    """DeepSpeed's own check of AutoTP beside AutoEP, on four processes."""
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_folding import build_folding_spec, validate_folding_global

    content = json.loads(files["ds.json"])
    made, layers = parse_autoep_config(content["expert_parallel"]), tensor_section(files)
    spec = build_folding_spec(world_size=4, pp_size=1, tp_size=layers.autotp_size, ep_size=made.autoep_size)
    validate_folding_global(
        spec, autoep_enabled=made.enabled, tp_preset=layers.preset_model, ep_preset=made.preset_model,
        deepcompile_enabled=content.get("compile", {}).get("deepcompile", False),
        zero_offload_optimizer="offload_optimizer" in content["zero_optimization"],
    )  # fmt: skip


def split(ep: dict[str, Any], zero: dict[str, Any] | None = None, **more: Any) -> Files:
    tp = {"autotp_size": 2, "vocab_parallel_lm_head": False, "preset_model": "mixtral"}
    return ds(2, zero=zero or {}, tensor_parallel=tp, expert_parallel={"enabled": True} | ep, **more)


def handler(files: Files) -> Any:
    made = parallelism()
    with patch.dict(os.environ, real.launch_environment("accelerate.yaml")):
        from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig

        return (TorchContextParallelConfig if made.cp_size > 1 else DeepSpeedSequenceParallelConfig)()


def launched(files: Files) -> Any:
    words = files["launch.sh"].split()
    return parallelism(*(word for word in words[2:-1] if word not in ("--config_file", "accelerate.yaml")))


_CP = ("dp_shard_size: 1", "cp_size: 2")
_FILE = "accelerate launch --config_file accelerate.yaml --num_processes 4"
_FOUR = two("dp_shard_size: 4", processes=4)
TRAPS = [
    Trap("LT519", "accelerate.yaml:5", fsdp1(top=section("tp_size: 2")), two("dp_shard_size: 2"), validated),
    Trap("LT519", "accelerate.yaml:6", fsdp1(top=section(*_CP)), two(*_CP), validated),
    Trap("LT520", "accelerate.yaml:6", two("cp_size: 2", "cp_comm_strategy: ring"),
         two("cp_size: 2", "cp_comm_strategy: alltoall"), handler),
    Trap("LT520", "accelerate.yaml:6", deep("sp_size: 2", "sp_attn_implementation: eager"),
         deep("sp_size: 2", "sp_attn_implementation: flash_attention_2"), handler),
    Trap("LT522", "launch.sh:1", _FOUR | shell(f"{_FILE} --use_parallelism_config train.py"),
         _FOUR | shell(f"{_FILE} train.py"), launched),
    Trap("LT526", "accelerate.yaml:5", deep("sp_size: 2", processes=8),
         deep("sp_size: 2", "dp_shard_size: 4", processes=8), batch_of_rows),
    Trap("LT526", "accelerate.yaml:5", deep("sp_size: 2", processes=3),
         deep("sp_size: 2", "dp_replicate_size: 2", processes=4), batch_of_rows),
    Trap("DS227", "ds.json:12", named(3) | tensor(autotp_size=2), named(4) | tensor(autotp_size=2), rank_of_mesh),
    Trap("DS230", "ds.json:12", tensor(dtype="bf16"), tensor(), tensor_section),
    Trap("DS102", "ds.json:14", tensor(autotp_size=2, tp={"size": 2}), tensor(autotp_size=2, tp={"tp_size": 2}),
         tensor_section),
    Trap("DS232", "ds.json:12", tensor(autotp_size=0), tensor(autotp_size=1), total_batch, "trainer"),
    Trap("DS235", "ds.json:13", split({}), split({"autoep_size": 2}), experts),
    Trap("DS235", "ds.json:7", split({"autoep_size": 2}, {"offload_optimizer": {"device": "cpu", "pin_memory": True}}),
         split({"autoep_size": 2}), experts),
    Trap("DS235", "ds.json:15", split({"autoep_size": 2, "preset_model": "qwen3_moe"}),
         split({"autoep_size": 2, "preset_model": "mixtral"}), experts),
    Trap("DS235", "ds.json:17", split({"autoep_size": 2}, compile={"deepcompile": True}),
         split({"autoep_size": 2}), experts),
    Trap("LT501", "ds.json:10",
         named(4) | ds(bf16={"enabled": True}, train_batch_size=4, gradient_accumulation_steps=1,
                       tensor_parallel={"autotp_size": 2, "vocab_parallel_lm_head": False}),
         named(4) | ds(bf16={"enabled": True}, train_batch_size=8, gradient_accumulation_steps=1,
                       tensor_parallel={"autotp_size": 2, "vocab_parallel_lm_head": False}), batch),
    Trap("LT501", "ds.json:10",
         named(4) | ds(bf16={"enabled": True}, train_batch_size=8, gradient_accumulation_steps=1,
                       sequence_parallel_size=2),
         named(4) | ds(bf16={"enabled": True}, train_batch_size=4, gradient_accumulation_steps=1,
                       sequence_parallel_size=2), batch),
]  # fmt: skip
_RAISES = (ValueError, AssertionError, KeyError, IndexError, RuntimeError, ZeroDivisionError)


@every_case("trap", TRAPS, ids=lambda trap: trap.id)
def test_found_in_the_right_line(trap: Trap) -> None:
    findings = lint(put(trap.fails), reader=trap.reader).findings
    found = [(f.code, f"{f.place.file}:{f.place.line}", f.message) for f in findings]
    assert [place for code, place, _ in found if code == trap.code] == [trap.place], found
    findings = lint(put(trap.passes), reader=trap.reader).findings
    assert [(f.code, f.message) for f in findings if f.code == trap.code or f.severity == "error"] == []


@pytest.mark.upstream
@every_case("trap", TRAPS, ids=lambda trap: trap.id)
def test_the_packages_agree(trap: Trap) -> None:
    trap.agreed(_RAISES)


# ---- accepted in silence -----------------------------------------------------------------------------


def codes(files: Files) -> set[str]:
    return {found.code for found in lint(put(files)).findings if found.severity != "note"}


def test_a_launch_type_in_the_command_leaves_the_section_unread() -> None:
    files = _FOUR | shell(f"{_FILE} --use_fsdp --fsdp_version 2 train.py")
    assert "LT521" in codes(files)
    assert launched(files) is None
    files = _FOUR | shell(f"{_FILE} --use_fsdp --fsdp_version 2 --use_parallelism_config train.py")
    assert "LT521" not in codes(files)
    assert launched(files).dp_shard_size == 4
    assert "LT521" not in codes(_FOUR | shell(f"{_FILE} train.py"))
    assert parallelism().dp_shard_size == 4
    bare = fsdp2() | shell("accelerate launch --config_file accelerate.yaml --parallelism_config_dp_shard_size 2 t.py")
    assert "LT521" in codes(bare)


def test_deepspeed_reads_neither_tensor_nor_context() -> None:
    """LT524: accelerate accepts the sizes; ranks of tp get the same samples, those of cp their own."""
    for axis in ("tp", "cp"):
        files = deep(f"{axis}_size: 2")
        assert "LT524" in codes(files)
        assert validated(files)._sizes[axis] == 2
    assert codes(named(2) | ds(bf16={"enabled": True}, tensor_parallel={"autotp_size": 2})) == set()
    assert [first_batch(rank, "tp") for rank in (0, 1)] == [[0, 1], [0, 1]]
    assert [first_batch(rank, "cp") for rank in (0, 1)] == [[0, 1], [2, 3]]


def first_batch(rank: int, axis: str) -> list[int]:
    """Samples of a rank of two, of accelerate's loader under DeepSpeed."""
    import torch
    from accelerate import PartialState, data_loader
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    state = SimpleNamespace(num_processes=2, process_index=rank, distributed_type=DistributedType.DEEPSPEED)

    class Mesh(dict):
        mesh_dim_names = (axis,)

    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)  # type: ignore[arg-type]
    mesh: Any = Mesh({axis: torch.empty(2)})
    mesh[axis].size = lambda: 2  # type: ignore[method-assign]
    with patch.object(data_loader, "PartialState", lambda: state):
        made = data_loader.prepare_data_loader(loader, torch_device_mesh=mesh)
    return list(next(iter(made.batch_sampler)))


def test_sequence_parallelism_makes_no_mesh() -> None:
    """LT525: with sp_size no size has an effect on FSDP2."""
    files = two("dp_shard_size: 2", "sp_size: 2")
    assert "LT525" in codes(files)
    assert validated(files).build_device_mesh("cpu") is None


@pytest.mark.upstream
def test_transformers_has_no_replicateparallel() -> None:
    """LT530: when transformers has it again, or accelerate does without, the rule has to go."""
    import accelerate.accelerator
    import transformers.integrations.tensor_parallel as module

    source = inspect.getsource(accelerate.accelerator.Accelerator._prepare_tp)
    assert "from transformers.integrations.tensor_parallel import ReplicateParallel" in source
    assert "we skip the TP preparation" in source
    assert not hasattr(module, "ReplicateParallel")
    found = lint(put(two("dp_shard_size: 2", "tp_size: 2", processes=4))).findings
    assert "LT530" in {note.code for note in found}


def test_plain_ddp_with_tensor_is_not_wrapped() -> None:
    files = of(multi_gpu(*section("dp_shard_size: 2", "tp_size: 2")), 4)
    (found,) = (f for f in lint(put(files)).findings if f.code == "LT519")
    assert "leaves DDP out" in found.message
    assert validated(files).tp_enabled


@pytest.mark.upstream
def test_presets_are_deepspeeds() -> None:
    """DS231: an unknown preset is ignored."""
    from deepspeed.module_inject.autotp_config import AutoTPConfig, AutoTPPresets, TPLayerSpec

    from toolkit.linting.rules import deepspeed_tensor as rules

    for name in rules._PRESETS:
        assert AutoTPPresets.get_preset(name) is not None
    assert f'"{rules._PRESETS[-1]}": ' in inspect.getsource(AutoTPPresets.get_preset)
    assert inspect.getsource(AutoTPPresets.get_preset).count("AutoTPPresets.") == len(rules._PRESETS)
    assert AutoTPPresets.get_preset("qwen3") is None
    assert set(rules._PARTITION) == set(inspect.signature(AutoTPConfig).parameters)
    assert set(rules._LAYER) == set(inspect.signature(TPLayerSpec).parameters)
    files = tensor(autotp_size=2, partition_config={"layer_spec": []})
    assert codes(files) == {"DS231"}
    assert tensor_section(files).get_partition_config_object().layer_specs == []


def test_tp_size_alone_divides_nothing() -> None:
    """DS229: autotp_size stays 0."""
    files = tensor(tp={"tp_size": 2})
    assert codes(files) == {"DS229"}
    assert tensor_section(files).autotp_size == 0


def test_rows_are_packed_under_sdpa() -> None:
    assert "LT528" in codes(deep("sp_size: 2") | args(packing=True, bf16=True))
    flash = deep("sp_size: 2", "sp_attn_implementation: flash_attention_2")
    assert "LT528" not in codes(flash | args(packing=True, bf16=True))


def test_the_trainer_compares_all_processes() -> None:
    """XL206: ranks that divide layers count."""
    arguments = args(per_device_train_batch_size=2, bf16=True)
    for total, expected in ((4, True), (8, False)):
        config = ds(train_batch_size=total, bf16={"enabled": True}, tensor_parallel={"autotp_size": 2})
        assert ("XL206" in codes(named(4) | config | arguments)) is expected
    from transformers.integrations import deepspeed

    assert "args.world_size * args.per_device_train_batch_size" in inspect.getsource(deepspeed)


def test_a_script_of_deepspeeds_may_give_it_groups() -> None:
    for total, found in ((4, False), (8, False), (6, True)):
        config = ds(train_batch_size=total, gradient_accumulation_steps=1, tensor_parallel={"autotp_size": 2})
        command = shell("deepspeed --num_gpus 4 train.py --deepspeed_config ds.json")
        assert ("LT501" in codes(config | command)) is found


def test_layers_over_machines() -> None:
    machines = ("num_machines: 2", "machine_rank: 0", "main_process_ip: 10.0.0.1", "main_process_port: 29500")
    for count, found in ((4, True), (2, False)):
        files = of(zero("deepspeed_config_file: ds.json", top=machines), 4) | tensor(autotp_size=count)
        assert ("LT523" in codes(files)) is found


def test_adapters() -> None:
    for stage, words in ((0, "nothing of the model trains"), (3, "the engine fails")):
        gather = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
        config = ds(stage, zero=gather, bf16={"enabled": True}, tensor_parallel={"autotp_size": 2})
        (found,) = (f for f in lint(put(named(2) | config | lora())).findings if f.code == "DS228")
        assert words in found.message


@pytest.mark.upstream
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("stage", "expected"), [(0, "held 2, adapters of the model 0"), (1, "KeyError"), (3, "AttributeError")]
)
def test_autotp_drops_adapters(stage: int, expected: str) -> None:
    """DS228: when DeepSpeed keeps PEFT's layers, the rule has to go."""
    script = Path(__file__).with_name("autotp_lora.py")
    done = subprocess.run(
        [sys.executable, script, str(stage)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert f"RESULT {expected}" in done.stdout, done.stderr[-2000:]


def test_a_mapping_among_the_training_arguments() -> None:
    """TA117: the Trainer hands it to the Accelerator as it is."""
    from accelerate import Accelerator

    sizes = {"dp_shard_size": 2}
    assert "TA117" in codes(args(parallelism_config=sizes, bf16=True))
    assert real.training_arguments({}, parallelism_config=sizes).parallelism_config == sizes
    with pytest.raises(AttributeError, match="'dict' object"):
        Accelerator(cpu=True, parallelism_config=sizes)  # type: ignore[arg-type]
