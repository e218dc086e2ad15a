"""Traps that public files and the packages' own limits show: found, and judged by the packages themselves.

Each has a file that fails and one that passes. ``refused``: the packages raise at the failing file.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from cases import every_case
from tests.lint import real_packages as real
from tests.lint.folder import Trap, put
from tests.lint.test_traps import accept
from toolkit.linting.engine import lint
from toolkit.linting.examples import acc, args, ds, fsdp1, fsdp2, lora, multi_gpu, shell, zero
from toolkit.linting.model import Files

_GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
_SAVE = "zero3_save_16bit_model: true"


def zero_with(stage: int = 2, **keys: Any) -> Files:
    return ds(stage, zero=keys | (_GATHER if stage == 3 else {}))


def adam(**params: Any) -> Files:
    return ds(optimizer={"type": "AdamW", "params": params})


def schedule(kind: str, **params: Any) -> Files:
    return ds(scheduler={"type": kind, "params": params})


def oft(**keys: Any) -> Files:
    return {"adapter_config.json": json.dumps({"peft_type": "OFT", **keys}, indent=2) + "\n"}


def trl(*lines: str) -> Files:
    return {"sft.yaml": "\n".join(("model_name_or_path: m", "dataset_name: d", "output_dir: out", *lines)) + "\n"}


def parallel(*lines: str, top: tuple[str, ...] = ()) -> Files:
    return fsdp2(top=("parallelism_config:", *(f"  parallelism_config_{line}" for line in lines), *top))


# ---- what the packages say ---------------------------------------------------------------------------


def json_alone(files: Files) -> Any:
    return real.deepspeed_alone(json.loads(files["ds.json"]))


def optimizer_made(files: Files) -> Any:
    import torch

    section = json.loads(files["ds.json"])["optimizer"]
    params = {key: value for key, value in section["params"].items() if key not in ("torch_adam", "adam_w_mode")}
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], **params)
    weight.sum().backward()
    optimizer.step()


def schedule_made(files: Files) -> Any:
    import torch
    from deepspeed.runtime import lr_schedules

    section = json.loads(files["ds.json"])["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    made = getattr(lr_schedules, section["type"])(optimizer, **section["params"])
    for _ in range(3):
        made.step()


def plugin(files: Files) -> Any:
    config = real.deepspeed_plugin(real.launch_environment(put(files)[0]))
    return real.deepspeed_alone(config | {"train_batch_size": 2, "gradient_clipping": 1.0})


def launch(files: Files) -> Any:
    return real.launch_environment(put(files)[0])


def dynamo(files: Files) -> Any:
    import os
    from unittest.mock import patch

    import torch
    from accelerate.utils import TorchDynamoPlugin

    with patch.dict(os.environ, launch(files)):
        made = TorchDynamoPlugin()
    torch.compile(torch.nn.Linear(1, 1), backend="inductor", mode=made.mode)


def sizes(files: Files) -> Any:
    import os
    from unittest.mock import patch

    from accelerate.parallelism_config import ParallelismConfig

    with patch.dict(os.environ, launch(files)):
        return ParallelismConfig()


def sizes_under(files: Files) -> Any:
    """accelerate's own check of the sizes for the strategy of the file."""
    from types import SimpleNamespace

    from accelerate.utils import DistributedType

    written = yaml.safe_load(files["accelerate.yaml"])
    made, two = sizes(files), written.get("fsdp_config", {}).get("fsdp_version") == 2
    kind = DistributedType[written["distributed_type"]]
    made._validate_accelerator(
        SimpleNamespace(
            is_fsdp2=two,
            multi_device=kind == DistributedType.MULTI_GPU,
            distributed_type=kind,
            num_processes=written["num_processes"],
            is_main_process=True,
        )
    )
    return made


@pytest.mark.upstream
def test_sizes_are_taken_where_nothing_is_sharded() -> None:
    """LT519: under MULTI_GPU accelerate says nothing, and prepares DDP."""
    files = multi_gpu("parallelism_config:", "  parallelism_config_dp_shard_size: 2")
    assert [found.code for found in lint(put(files)).findings if found.severity == "error"] == ["LT519"]
    assert sizes_under(files).dp_shard_size == 2


def adapter(files: Files) -> Any:
    import torch
    from peft import PeftConfig, get_peft_model

    content = {key: value for key, value in json.loads(files["adapter_config.json"]).items() if key != "auto_mapping"}
    config = PeftConfig.from_peft_type(**content)
    if "task_type" in content:
        return config  # its model class needs more of a model
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    config.target_modules = ["0"]
    model = get_peft_model(model, config)
    model(torch.ones(1, 4)).sum().backward()
    return config


def trl_parser(files: Files) -> Any:
    import os
    from unittest.mock import patch

    from trl import GRPOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    (name,) = (name for name in files if name.endswith(".yaml"))
    text = yaml.safe_load(files[name])
    config = GRPOConfig if "num_generations" in text or name == "grpo.yaml" else SFTConfig
    put(files)
    with patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"}):
        arguments = ["--config", name, "--use_cpu", "true", "--bf16", "false"]
        return TrlParser((ScriptArguments, config, ModelConfig)).parse_args_and_config(arguments)


def grpo(*lines: str) -> Files:
    made = trl("num_generations: 4", *lines) if not any("num_generations" in line for line in lines) else trl(*lines)
    return {"grpo.yaml": made["sft.yaml"]}


TRAPS = [
    # Limits of DeepSpeed's own models.
    Trap("DS221", "ds.json:6", zero_with(reduce_bucket_size=0), zero_with(reduce_bucket_size=1000000), json_alone),
    Trap("DS221", "ds.json:6", zero_with(allgather_bucket_size=-1), zero_with(allgather_bucket_size=1000000),
         json_alone),
    Trap("DS221", "ds.json:6", zero_with(3, sub_group_size=-1), zero_with(3, sub_group_size=1000000), json_alone),
    Trap("DS221", "ds.json:6", zero_with(3, stage3_prefetch_bucket_size=-5), zero_with(3), json_alone),
    Trap("DS221", "ds.json:6", zero_with(3, max_live_parameters=-1), zero_with(3), json_alone),
    Trap("DS221", "ds.json:8", zero_with(3, offload_optimizer={"device": "cpu", "ratio": 2}),
         zero_with(3, offload_optimizer={"device": "cpu", "ratio": 0.5}), json_alone),
    Trap("DS221", "ds.json:8", zero_with(3, offload_param={"device": "cpu", "buffer_count": -1}),
         zero_with(3, offload_param={"device": "cpu", "buffer_count": 5}), json_alone),
    # Accepted, and a feature is off.
    Trap("DS222", "ds.json:6", zero_with(3, stage3_max_live_parameters=0), zero_with(3), json_alone, refused=False),
    Trap("DS222", "ds.json:6", zero_with(3, max_live_parameters=0), zero_with(3), json_alone, refused=False),
    Trap("DS222", "ds.json:6", zero_with(3, sub_group_size=0), zero_with(3), json_alone, refused=False),
    # Text where a number is read, and parameters that a constructor does not take.
    Trap("DS223", "ds.json:10", adam(lr="1e-4"), adam(lr=1e-4), optimizer_made),
    Trap("DS223", "ds.json:10", adam(weight_decay="0.1"), adam(weight_decay=0.1), optimizer_made),
    Trap("DS223", "ds.json:10", adam(eps="1e-8"), adam(eps=1e-8), optimizer_made),
    Trap("DS223", "ds.json:10", schedule("WarmupLR", warmup_max_lr="1e-4"), schedule("WarmupLR", warmup_max_lr=1e-4),
         schedule_made),
    Trap("DS223", "ds.json:10", schedule("WarmupDecayLR", total_num_steps="100"),
         schedule("WarmupDecayLR", total_num_steps=100), schedule_made),
    Trap("DS224", "ds.json:10", adam(learning_rate=1e-4), adam(lr=1e-4), optimizer_made),
    Trap("DS224", "ds.json:10", adam(momentum=0.9), adam(betas=[0.9, 0.999]), optimizer_made),
    Trap("DS225", "ds.json:7", schedule("WarmupDecayLR", warmup_num_steps=5),
         schedule("WarmupDecayLR", total_num_steps=9, warmup_num_steps=5), schedule_made),
    # deepspeed_config of accelerate.
    Trap("AC116", "accelerate.yaml:5", zero("zero_stage: 2.0"), zero("zero_stage: 2"), plugin),
    Trap("AC116", "accelerate.yaml:5", zero("zero_stage: auto"), zero("zero_stage: '2'"), plugin),
    Trap("AC116", "accelerate.yaml:6", zero("zero_stage: 2", "gradient_clipping: one"),
         zero("zero_stage: 2", "gradient_clipping: '1e-1'"), plugin),
    Trap("AC116", "accelerate.yaml:6", zero("zero_stage: 2", "gradient_accumulation_steps: 4.0"),
         zero("zero_stage: 2", "gradient_accumulation_steps: 1"), plugin),
    Trap("AC118", "accelerate.yaml:6", zero("zero_stage: 2", "offload_param_device: cpu"), zero("zero_stage: 2"),
         plugin, refused=False),
    Trap("AC119", "accelerate.yaml:6", zero("zero_stage: 2", "offload_optimizer_device: gpu"),
         zero("zero_stage: 2", "offload_optimizer_device: cpu"), plugin),
    Trap("AC119", "accelerate.yaml:6", zero("zero_stage: 3", "offload_param_device: disk", _SAVE),
         zero("zero_stage: 3", "offload_param_device: cpu", _SAVE), plugin),
    Trap("AC120", "accelerate.yaml:6", zero("zero_stage: 3", "zero3_init_flag: maybe", _SAVE),
         zero("zero_stage: 3", "zero3_init_flag: true", _SAVE), plugin),
    Trap("AC120", "accelerate.yaml:6", zero("zero_stage: 3", "zero3_save_16bit_model: 1"), zero("zero_stage: 3", _SAVE),
         plugin, refused=False),
    Trap("AC121", "accelerate.yaml:5", multi_gpu("dynamo_config:", "  dynamo_backend: inductr"),
         multi_gpu("dynamo_config:", "  dynamo_backend: inductor"), launch),
    Trap("AC121", "accelerate.yaml:6",
         multi_gpu("dynamo_config:", "  dynamo_backend: INDUCTOR", "  dynamo_mode: fastest"),
         multi_gpu("dynamo_config:", "  dynamo_backend: INDUCTOR", "  dynamo_mode: reduce-overhead"), dynamo),
    Trap("AC121", "accelerate.yaml:6",
         multi_gpu("dynamo_config:", "  dynamo_backend: INDUCTOR", "  dynamo_use_fullgraph: maybe"),
         multi_gpu("dynamo_config:", "  dynamo_backend: INDUCTOR", "  dynamo_use_fullgraph: true"), dynamo),
    # parallelism_config.
    Trap("LT515", "accelerate.yaml:5", parallel("dp_shard_size: 0"), parallel("dp_shard_size: 2"), sizes),
    Trap("LT515", "accelerate.yaml:6", parallel("dp_shard_size: 2", "tp_size: two"),
         parallel("dp_shard_size: 2", "tp_size: 1"), sizes),
    Trap("LT516", "accelerate.yaml:5", parallel("cp_size: 2", "sp_size: 2"), parallel("cp_size: 2"), sizes),
    Trap("LT517", "accelerate.yaml:6", parallel("dp_replicate_size: 2", "tp_size: 2"), parallel("dp_shard_size: 2"),
         sizes),
    Trap("LT518", "accelerate.yaml:6", parallel("cp_size: 2", "cp_backend: nccl"),
         parallel("cp_size: 2", "cp_backend: torch"), sizes),
    Trap("LT519", "accelerate.yaml:5", fsdp1(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 2")),
         parallel("dp_shard_size: 2"), sizes_under),
    # Adapter configs by method.
    Trap("LR812", "adapter_config.json:2", lora(peft_type="LORAA"), lora(peft_type="LORA"), adapter),
    Trap("LR813", "adapter_config.json:6", lora(bias="lora"), lora(bias="none"), adapter),
    Trap("LR814", "adapter_config.json:6", lora(task_type="CAUSAL"), lora(task_type="CAUSAL_LM"), adapter),
    Trap("LR815", "adapter_config.json:3", lora(r="16"), lora(r=16), adapter),
    Trap("LR815", "adapter_config.json:4", lora(lora_alpha="32"), lora(lora_alpha=32), adapter),
    Trap("LR815", "adapter_config.json:6", lora(lora_dropout="0.1"), lora(lora_dropout=0.1), adapter),
    Trap("LR816", "adapter_config.json:3", oft(r=8, oft_block_size=32), oft(oft_block_size=2), adapter),
    # TRL's arguments.
    Trap("TR101", "sft.yaml:4", trl("torch_dtype: bfloat16"), trl("dtype: bfloat16"), trl_parser),
    Trap("TR101", "sft.yaml:4", trl("max_seq_length: 1024"), trl("max_length: 1024"), trl_parser),
    Trap("TR101", "sft.yaml:4", trl("use_liger: true"), trl("packing: false"), trl_parser),
    Trap("TR101", "grpo.yaml:5", grpo("max_prompt_length: 512", "per_device_train_batch_size: 4"),
         grpo("per_device_train_batch_size: 4"), trl_parser),
    Trap("TR102", "sft.yaml:4", trl("assistant_only_los: true"), trl("assistant_only_loss: true"), trl_parser),
    Trap("TR103", "grpo.yaml:5", grpo("per_device_train_batch_size: 2", "num_generations: 8"),
         grpo("per_device_train_batch_size: 4", "num_generations: 4"), trl_parser),
    Trap("TR103", "grpo.yaml:5", grpo("generation_batch_size: 6", "per_device_train_batch_size: 4"),
         grpo("generation_batch_size: 8", "per_device_train_batch_size: 4"), trl_parser),
    Trap("TR104", "grpo.yaml:5", grpo("generation_batch_size: 8", "steps_per_generation: 2"),
         grpo("generation_batch_size: 8"), trl_parser),
    Trap("TR105", "grpo.yaml:4", grpo("num_generations: 1"), grpo("num_generations: 2"), trl_parser),
    Trap("TR106", "grpo.yaml:5", grpo("auto_find_batch_size: true"), grpo("auto_find_batch_size: false"), trl_parser),
    # Removed training arguments.
    *(
        Trap("TA102", "args.json:3", args(**{key: value}), args(max_steps=1), accept)
        for key, value in (
            ("adafactor", True),
            ("group_by_length", True),
            ("save_safetensors", True),
            ("split_batches", True),
            ("dispatch_batches", False),
            ("use_ipex", False),
            ("torchdynamo", "inductor"),
            ("fp16_opt_level", "O1"),
        )
    ),
]  # fmt: skip
_RAISES = (
    ValueError,
    TypeError,
    AssertionError,
    KeyError,
    AttributeError,
    RuntimeError,
    ZeroDivisionError,
    ImportError,
    NotImplementedError,
    SystemExit,
)


def test_there_are_forty() -> None:
    assert len(TRAPS) >= 40


@every_case("trap", TRAPS, ids=lambda trap: trap.id)
def test_found_in_the_right_line(trap: Trap) -> None:
    found = [
        (f.code, f"{f.place.file}:{f.place.line}", f.severity)
        for f in lint(put(trap.fails), reader=trap.reader).findings
    ]
    assert [place for code, place, severity in found if code == trap.code and severity != "note"] == [trap.place], found


@every_case("trap", TRAPS, ids=lambda trap: trap.id)
def test_the_passing_file_is_clean(trap: Trap) -> None:
    assert [
        (f.code, f.message) for f in lint(put(trap.passes), reader=trap.reader).findings if f.severity != "note"
    ] == []


@pytest.mark.upstream
@every_case("trap", [trap for trap in TRAPS if trap.judge], ids=lambda trap: trap.id)
def test_the_packages_agree(trap: Trap) -> None:
    trap.agreed(_RAISES)


def test_a_json_that_the_yaml_does_not_name_is_not_read() -> None:
    files = zero("zero_stage: 2") | ds(3, zero=_GATHER)
    found = {(f.code, str(f.place.file)) for f in lint(put(files)).findings if f.severity != "note"}
    assert ("XL218", "ds.json") in found
    config = real.deepspeed_plugin(real.launch_environment("accelerate.yaml"))
    assert config["zero_optimization"]["stage"] == 2
    named = acc(
        "distributed_type: DEEPSPEED", "num_processes: 2", "deepspeed_config:", "  deepspeed_config_file: ds.json"
    )
    assert "XL218" not in {f.code for f in lint(put(named | ds())).findings}
    other = shell("accelerate launch --config_file accelerate.yaml --deepspeed_config_file ds.json train.py")
    assert "XL218" not in {f.code for f in lint(put(zero("zero_stage: 2") | ds() | other)).findings}
    assert "XL218" not in {
        f.code for f in lint(put(multi_gpu() | ds() | args(deepspeed="ds.json", bf16=True))).findings
    }


@pytest.mark.upstream
def test_deepspeed_takes_the_beginning_of_a_flag() -> None:
    """LT512: where no other flag begins like it. accelerate launch takes none."""
    from deepspeed.launcher.runner import parse_args

    assert parse_args(["--num_gpu", "2", "train.py"]).num_gpus == 2
    with pytest.raises(SystemExit):
        parse_args(["--num", "2", "train.py"])
    for command, wrong in (
        ("deepspeed --num_gpu 2", False),
        ("deepspeed --num 2", True),
        ("accelerate launch --num_proc 2", True),
    ):
        codes = {f.code for f in lint(put(shell(f"{command} train.py"))).findings}
        assert ("LT512" in codes) == wrong, command


@pytest.mark.upstream
def test_1_is_not_true_for_saving() -> None:
    """AC120: the plugin compares the text with true."""
    for value, saves in (("1", False), ("'on'", False), ("true", True), ("yes", True)):
        put(zero("zero_stage: 3", f"zero3_save_16bit_model: {value}"))
        config = real.deepspeed_plugin(real.launch_environment("accelerate.yaml"))
        assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is saves, value
        assert ("AC120" in {f.code for f in lint(["accelerate.yaml"]).findings}) != saves, value


def test_autotp_gathers_its_weights_under_every_stage() -> None:
    """DS219: accelerate's get_state_dict asks for the switch of ZeRO-3 where AutoTP has divided the model."""
    divided = ds(2, zero=_GATHER, tensor_parallel={"autotp_size": 2})
    assert "DS219" not in {f.code for f in lint(put(divided)).findings}
    assert "DS219" in {f.code for f in lint(put(ds(2, zero=_GATHER))).findings}


def test_what_a_profiler_costs_and_what_stage_0_does_with_offload() -> None:
    (found,) = (f for f in lint(put(ds(memory_breakdown=True))).findings if f.code == "MM604")
    assert found.message.startswith("memory_breakdown collects Python's garbage")
    offload = {"offload_optimizer": {"device": "cpu"}}
    (found,) = (f for f in lint(put(ds(0, zero=offload))).findings if f.code == "DS218")
    assert found.message.endswith("DeepSpeed's CPU optimizer rejects weights on the GPU")


@pytest.mark.upstream
def test_max_grad_norm_among_the_optimizers_parameters_is_refused() -> None:
    """DeepSpeedEngine._configure_basic_optimizer raises before it makes the optimizer."""
    import inspect

    from deepspeed.runtime.engine import DeepSpeedEngine

    assert "'max_grad_norm' is not supported" in inspect.getsource(DeepSpeedEngine._configure_basic_optimizer)
    (found,) = (f for f in lint(put(adam(lr=1e-4, max_grad_norm=0.5))).findings if f.code == "DS209")
    assert found.severity == "error"
