"""Files in the shapes of public repositories: other tools' files are not the Trainer's, true ones are clean."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cases import every_case
from tests.lint.app import app
from tests.lint.folder import put
from toolkit.linting.engine import lint
from toolkit.linting.examples import args, ds, fsdp1, lora, zero
from toolkit.linting.files.load import load, read_sources
from toolkit.linting.fix import plan
from toolkit.linting.model import Files, Reader

run = CliRunner()

AXOLOTL = """base_model: my/model
sequence_len: 2048
sample_packing: true
micro_batch_size: 1
num_epochs: 1
gradient_accumulation_steps: 4
learning_rate: 2e-5
warmup_ratio: 0.1
optimizer: adamw_torch_fused
bf16: auto
gradient_checkpointing: offload
output_dir: ./out
lora_r: 0
fsdp:
  - full_shard
fsdp_config:
  fsdp_offload_params: true
  fsdp_limit_all_gathers: true
"""
LLAMAFACTORY = """model_name_or_path: my/model
stage: sft
finetuning_type: lora
template: llama3
cutoff_len: 2048
overwrite_output_dir: true
output_dir: saves
learning_rate: 1e-4
warmup_ratio: 0.1
bf16: true
"""
OPEN_INSTRUCT = """model_name_or_path: my/model
dataset_mixer:
  a/b: 1.0
use_slow_tokenizer: true
with_tracking: true
checkpointing_steps: epoch
per_device_train_batch_size: 1
warmup_ratio: 0.03
learning_rate: 5e-06
output_dir: out
"""
SWIFT = """model: my/model
tuner_type: lora
split_dataset_ratio: 0.01
learning_rate: 1e-4
warmup_ratio: 0.05
output_dir: out
"""
TORCHTUNE = """output_dir: /tmp/out
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
model:
  _component_: torchtune.models.llama3.lora
  lora_alpha: 16
optimizer:
  _component_: torch.optim.AdamW
  lr: 3e-4
fsdp:
  cpu_offload: false
"""
OTHERS = {"axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY, "open-instruct": OPEN_INSTRUCT, "swift": SWIFT,
          "torchtune": TORCHTUNE}  # fmt: skip


def found(files: Files, reader: Reader | None = None, severity: str = "") -> set[str]:
    return {f.code for f in lint(put(files), reader=reader).findings if severity in ("", f.severity)}


@every_case("tool", OTHERS)
def test_another_tools_file_is_known_and_not_judged_as_the_trainers(tool: str) -> None:
    (path,) = put({"config.yaml": OTHERS[tool]})
    (source,) = read_sources(path)
    assert (source.kind, source.tool) == ("tool", tool)
    assert lint([path]).findings == []
    assert plan(load([path])).changed == []


SCRIPTS = {
    "DeepSpeed-Chat": "deepspeed main.py --data_path a/b --per_device_train_batch_size 4 --zero_stage 3 "
    "--num_warmup_steps 0 --per_device_training_batch_size 1 --output_dir out --deepspeed",
    "open-instruct": "accelerate launch --mixed_precision bf16 --use_deepspeed --num_processes 8 "
    "open_instruct/finetune.py --output_dir out --warmup_ratio 0.03 --per_device_train_batch_size 1",
    "OpenRLHF": "deepspeed --module openrlhf.cli.train_sft --save_path out --pretrain m --micro_train_batch_size 2",
    "Axolotl": "accelerate launch -m axolotl.cli.train examples/a.yml --warmup_ratio 0.1",
    "LLaMA-Factory": "torchrun --nproc_per_node 4 src/train.py --stage sft --finetuning_type lora --warmup_ratio 0.1 "
    "--output_dir out --overwrite_output_dir",
    "ms-swift": "swift sft --model m --warmup_ratio 0.05 --output_dir out --overwrite_output_dir",
    "torchtune": "tune run --nproc_per_node 2 lora_finetune_distributed --config llama3/8B_lora warmup_ratio=1",
    "no_trainer": "accelerate launch run_clm_no_trainer.py --output_dir out --num_train_epochs 1 --with_tracking "
    "--per_device_train_batch_size 1",
}


@every_case("tool", SCRIPTS)
def test_arguments_of_other_programs_are_not_the_trainers(tool: str) -> None:
    assert found({"run.sh": SCRIPTS[tool] + "\n"}, severity="error") == set()


def test_arguments_of_an_example_script_are_the_trainers() -> None:
    line = "torchrun --nproc_per_node 2 run_clm.py --model_name_or_path m --output_dir o --evaluation_strategy no\n"
    assert "TA102" in found({"run.sh": line}, severity="error")


def test_a_file_that_is_not_certain_is_not_fixed() -> None:
    own = json.loads(args(evaluation_strategy="steps", learning_rate="2e-4", max_steps=5)["args.json"])
    known, unknown = {"a.json": json.dumps(own)}, {"a.json": json.dumps(own | {"my_own_path": "x"})}
    assert {"TA102", "TA104"} <= found(known, severity="error")
    assert plan(load(put(known))).changed == ["a.json"]
    assert {"TA102", "TA104"} <= found(unknown, severity="warning")
    assert plan(load(put(unknown))).changed == []


def test_text_that_is_a_number_is_one_to_trl() -> None:
    plain = "output_dir: o\nmax_steps: 5\nlearning_rate: 2e-5\n"
    assert "KY103" in found({"a.yaml": plain}, severity="warning")
    assert "TA104" not in found({"a.yaml": plain})
    assert found({"a.yaml": plain + "dataset_train_split: train\npacking: true\n"}) == set()
    wrong = plain.replace("2e-5", "high") + "dataset_train_split: train\npacking: true\n"
    assert "TA104" in found({"a.yaml": wrong}, severity="error")


def test_a_key_with_the_same_value_twice_is_a_warning() -> None:
    once = "distributed_type: MULTI_GPU\nnum_processes: 2\ndebug: false\n"
    assert found({"a.yaml": once + "debug: false\n"}, severity="warning") == {"KY101"}
    assert found({"a.yaml": once + "debug: true\n"}, severity="error") == {"KY101"}


def test_the_trainer_wraps_adapters_in_units_of_their_own() -> None:
    files = fsdp1("fsdp_use_orig_params: false") | lora() | args(torch_dtype="bfloat16", bf16=True)
    assert {"FS408", "FS409"} & found(files) == set()
    assert {"FS408", "FS409"} <= found(files, reader="accelerator", severity="error")


def test_the_trainer_makes_inputs_require_gradients() -> None:
    reentrant = {"use_reentrant": True}
    files = lora() | args(activation_checkpointing=True, activation_checkpointing_kwargs=reentrant)
    assert "LR801" not in found(files)
    assert "LR801" in found(files, reader="accelerator")


def test_a_rank_of_zero_is_the_block_sizes_in_oft() -> None:
    assert "LR808" not in found(lora(peft_type="OFT", r=0, oft_block_size=32))


@pytest.mark.parametrize(("stage", "gigabytes"), [(2, "2.0 GB"), (1, "4.0 GB")])
def test_overlapping_takes_two_buckets(stage: int, gigabytes: str) -> None:
    put(ds(stage, zero={"overlap_comm": True, "reduce_bucket_size": 500000000}))
    (message,) = (f.message for f in lint(["ds.json"]).findings if f.code == "MM601")
    assert gigabytes in message
    assert "MM601" not in found(ds(3, zero={"overlap_comm": True}))


def test_what_becomes_of_weights_that_are_not_gathered() -> None:
    for reader, words in (("trainer", "zero_to_fp32.py"), ("accelerator", "get_state_dict fails")):
        put(ds(3))
        (message,) = (f.message for f in lint(["ds.json"], reader=reader).findings if f.code == "SV701")  # type: ignore[arg-type]
        assert words in message


def test_values_of_auto_in_a_script_of_the_trainer() -> None:
    config = ds(2, train_micro_batch_size_per_gpu="auto", bf16={"enabled": "auto"}, gradient_clipping="auto")
    script = {"run.sh": "deepspeed --num_gpus 2 my_train.py --mine $X --deepspeed ds.json\n"}
    assert {c for c in found(config | script) if c.startswith("AU")} == set()
    alone = {"run.sh": "deepspeed --num_gpus 2 my_train.py --deepspeed --deepspeed_config ds.json\n"}
    assert {"AU301", "AU302", "AU303"} <= found(config | alone, severity="error")


def test_a_file_that_cannot_be_read_does_not_end_the_run() -> None:
    put(ds(gradient_cliping=0.5) | {"broken.json": "{", "notes.yaml": "a: 1\n"})
    result = run.invoke(app, ["lint", "broken.json", "ds.json", "gone.yaml", "--json", "out.json"])
    assert result.exit_code == 2
    made = json.loads(Path("out.json").read_text())
    assert [f["code"] for f in made["findings"]] == ["DS101"]
    assert [line.split(":")[0] for line in made["unread"]] == ["broken.json", "gone.yaml"]
    for name in ("DS101", "broken.json:1", "gone.yaml"):
        assert name in result.output


def test_a_folder() -> None:
    put(
        {
            "one/ds.json": ds(gradient_cliping=0.5)["ds.json"],
            "two/accelerate.yaml": zero("zero_stge: 3")["accelerate.yaml"],
        }
        | {
            "README.md": "x",
            "two/ci.yaml": "on: push\n",
            "two/bad.json": "{",
            "two/ds_bad.json": '{"zero_optimization"',
        }
        | {".git/ds.json": ds(gradient_cliping=0.5)["ds.json"], "setup.sh": "pip install deepspeed\n"}
    )
    result = run.invoke(app, ["lint", "."])
    assert result.exit_code == 2
    assert "one/ds.json" in result.output
    assert "two/accelerate.yaml" in result.output
    assert "two/ds_bad.json" in result.output
    for skipped in ("ci.yaml", "two/bad.json", ".git", "setup.sh"):
        assert skipped not in result.output


TRL = "model_name_or_path: my/model\ndataset_name: a/b\nlr_scheduler_type: cosine\n"


def test_defaults_of_trl_are_its_own() -> None:
    """bf16 is on unless fp16 is; learning_rate has a default of each config."""
    optimizer = {"type": "AdamW", "params": {"lr": 2e-5}}
    assert "XL217" not in found(zero("zero_stage: 2") | {"sft.yaml": TRL})
    (Path("accelerate.yaml")).unlink()
    json_file = ds(bf16={"enabled": True}, optimizer=optimizer, train_micro_batch_size_per_gpu=8)
    assert {"XL203", "XL209"} & found(json_file | {"sft.yaml": TRL}) == set()
    assert {"XL203", "XL209"} <= found(json_file | {"sft.yaml": TRL + "fp16: true\nlearning_rate: 1.0e-4\n"})


TOOL_FILES = {
    "llamafactory": LLAMAFACTORY.replace("bf16: true\n", "") + "deepspeed: ds.json\nper_device_train_batch_size: 2\n",
    "axolotl": AXOLOTL[: AXOLOTL.index("fsdp:")].replace("micro_batch_size: 1", "micro_batch_size: 2")
    + "deepspeed: ds.json\n",
    "swift": SWIFT + "deepspeed: ds.json\nper_device_train_batch_size: 2\n",
}


@pytest.mark.parametrize("tool", TOOL_FILES)
def test_settings_of_another_tool_are_compared_with_the_launch_files_that_they_lead_to(tool: str) -> None:
    steps = "gradient_accumulation_steps: 4\n"
    config = {"config.yaml": TOOL_FILES[tool].replace(steps, "") + steps}
    auto = ds(2, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", gradient_clipping="auto")
    assert found(config | auto) <= {"MM602"}
    other = ds(2, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2, gradient_clipping="auto")
    put(config | other)
    places = {f.code: (f.severity, str(f.place.file), f.fix) for f in lint(["config.yaml"]).findings}
    assert places["XL204"] == places["XL205"] == ("warning", "ds.json", None)


def test_what_another_tool_leaves_out_is_its_own_default() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}}
    file = ds(2, train_micro_batch_size_per_gpu=7, optimizer=optimizer, bf16={"enabled": True}, gradient_clipping=0.5)
    for tool, codes in (("llamafactory", {"XL203", "XL205", "XL207", "XL209"}), ("axolotl", set()), ("swift", set())):
        text = TOOL_FILES[tool]
        for line in (
            "micro_batch_size: 2",
            "learning_rate: 2e-5",
            "learning_rate: 1e-4",
            "per_device_train_batch_size: 2",
        ):
            text = text.replace(f"\n{line}\n", "\n")
        put({"config.yaml": text} | file)
        assert {f.code for f in lint(["config.yaml"]).findings if f.code.startswith("XL2")} == codes, tool


def test_a_fragment_is_not_made_a_config() -> None:
    """Templates that a program completes hold the ZeRO section alone."""
    put({"zero.json": json.dumps({"zero_optimization": {"stage": 2}})})
    assert {f.severity for f in lint(["zero.json"]).findings} <= {"note"}
    assert plan(load(["zero.json"])).changed == []


def test_the_cost_grows_with_the_number_of_files_and_no_faster() -> None:
    shapes = [OTHERS[tool] for tool in OTHERS] + [
        zero("zero_stage: 3")["accelerate.yaml"],
        TRL,
        "\n".join(f"{line}" for line in SCRIPTS.values()) + "\n",
    ]
    for number in range(440):
        suffix = "sh" if number % len(shapes) == len(shapes) - 1 else "yaml"
        folder = "few" if number < 40 else "many"
        put({f"{folder}/{number // 20}/{number}.{suffix}": shapes[number % len(shapes)]})

    def seconds_of(folder: str, files: int) -> float:
        started = time.process_time()
        assert len({source.path for source in lint([folder]).sources}) == files
        return time.process_time() - started

    # Ten times as many files: squared, the cost would grow by a hundred.
    assert seconds_of("many", 400) < 40 * min(seconds_of("few", 40) for _ in range(2))
