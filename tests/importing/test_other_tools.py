"""Imported recipes train as Axolotl, LLaMA-Factory, ms-swift and torchtune themselves do: the same loss at each step.

Each tool pins packages of its own, so it runs in a Python of its own. Name that Python to run its tests:

    TOOLKIT_TEST_LLAMAFACTORY=/venvs/lf/bin/python pytest tests/importing/test_other_tools.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from importing.inputs import make_inputs
from jobs import resolved_from, train_job
from toolkit import import_config
from toolkit.launch.group import WorkerGroup

FP32 = 1e-6
"""Two orders of the same sums in fp32; measured: 4.8e-08 to 1.6e-07 (docs/measurements/imported.md)."""

_HF = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 5.0, "use_cpu": True,
       "report_to": "none", "save_strategy": "no", "learning_rate": 5e-3}  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Human: ' + m['content'] + '</s>' + '\nAssistant:' }}"
    "{% else %}{% generation %}{{ m['content'] + '</s>' + '\n' }}{% endgeneration %}{% endif %}{% endfor %}"
)
_LLAMAFACTORY: dict[str, dict[str, Any]] = {
    "cosine, warm-up": {"finetuning_type": "full", "lr_scheduler_type": "cosine", "warmup_steps": 1},
    "LoRA, decay, clipping": {
        "finetuning_type": "lora", "lora_rank": 4, "lora_dropout": 0.0, "learning_rate": 2e-2, "weight_decay": 0.1,
        "max_grad_norm": 0.3, "lr_scheduler_type": "linear",
    },
    "LoRA by the root of its rank, LoRA+, decay": {
        "finetuning_type": "lora", "lora_rank": 4, "lora_dropout": 0.0, "learning_rate": 5e-3, "weight_decay": 0.1,
        "use_rslora": True, "loraplus_lr_ratio": 4.0,
    },
    "constant, Adam's beta, no recomputation": {
        "finetuning_type": "full", "lr_scheduler_type": "constant", "adam_beta2": 0.95, "seed": 3,
        "disable_gradient_checkpointing": True,
    },
}  # fmt: skip
_SWIFT = {
    "full, cosine, warm-up": "--tuner_type full --weight_decay 0 --warmup_steps 1 --learning_rate 5e-3",
    "LoRA, its own decay": "--tuner_type lora --lora_rank 4 --lora_dropout 0 --warmup_steps 1 --learning_rate 2e-2",
    "full, constant, clipping": (
        "--tuner_type full --weight_decay 0 --lr_scheduler_type constant --max_grad_norm 0.3 "
        "--gradient_checkpointing false --learning_rate 5e-3"
    ),
}
_AXOLOTL: dict[str, dict[str, Any]] = {
    "cosine, warm-up": {"optimizer": "adamw_torch", "lr_scheduler": "cosine", "warmup_steps": 2},
    "LoRA, decay": {
        "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_linear": True,
        "weight_decay": 0.1, "learning_rate": 2e-2, "warmup_steps": 0, "lora_mlp_kernel": False,
        "lora_qkv_kernel": False, "lora_o_kernel": False, "lora_embedding_kernel": False,
    },
    "LoRA+, decay that is not handed on": {
        "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_linear": True,
        "loraplus_lr_ratio": 8, "weight_decay": 0.5, "learning_rate": 5e-3, "warmup_steps": 0,
        "lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False, "lora_embedding_kernel": False,
    },
    "constant, clipping, recomputation": {
        "lr_scheduler": "constant", "max_grad_norm": 0.3, "adam_beta1": 0.9, "adam_beta2": 0.95,
        "adam_epsilon": 1e-8, "gradient_checkpointing": True,
    },
}  # fmt: skip
_COSINE = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 1}
_TORCHTUNE: dict[str, dict[str, Any]] = {
    "decay of every weight": {},
    "clipping, Adam's numbers, recomputation": {
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 5e-3, "betas": [0.8, 0.95], "eps": 1e-7},
        "clip_grad_norm": 0.5, "enable_activation_checkpointing": True,
    },
    "cosine, warm-up": {"lr_scheduler": _COSINE},
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_inputs(tmp_path_factory.mktemp("import"))
    rows = [json.loads(line) for line in (root / "pairs.jsonl").read_text().splitlines()]
    turns = [[{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["completion"].strip()}]
             for r in rows]  # fmt: skip
    (root / "chat.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info = {
        "chat": {"file_name": "chat.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    }
    (root / "dataset_info.json").write_text(json.dumps(info))
    (root / "default.jinja").write_text(_TEMPLATE)
    _save_adapter(root)
    return root


def _save_adapter(root: Path) -> None:
    """An adapter to start from: Axolotl has drawn other random numbers when it makes its own."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(root / "adapter")


@pytest.fixture(scope="module")
def one() -> Any:
    with WorkerGroup(1) as group:
        yield group


def theirs(tool: str, file: Path) -> list[float]:
    """The losses of the tool's own run; skips where the tool is not installed."""
    variable = f"TOOLKIT_TEST_{tool.upper()}"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python in which {tool} is installed")
    command = [os.environ[variable], str(Path(__file__).parent / "other_tools.py"), tool, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=file.parent)
    found = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    assert found, (done.stdout + done.stderr)[-2000:]
    return json.loads(found[0].removeprefix("LOSSES "))


def compare(tool: str, one: Any, file: Path, *overrides: str, may_differ: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    expected = theirs(tool, file)
    made = import_config([file], overrides)
    assert {key.key for key in made.lost} <= may_differ, [key.line() for key in made.lost]
    assert made.recipe is not None
    recipe = made.recipe.model_dump(mode="json", exclude_unset=True)
    recipe.setdefault("machine", {})["device"] = "cpu"
    [run] = one.run(train_job, resolved_from(recipe), 5, None, None, 5)
    worst = max(abs(a - b) / a for a, b in zip(expected, run.losses, strict=True))
    print(f"losses {expected[0]:.6f} to {expected[-1]:.6f}, worst relative difference {worst:.1e}")
    assert run.losses == pytest.approx(expected, rel=FP32)
    assert abs(expected[-1] - expected[0]) > 0.01 * expected[0], "the steps must change the loss"


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", _LLAMAFACTORY)
def test_llamafactory(case: str, inputs: Path, one: Any, tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    config = _HF | {
        "model_name_or_path": str(inputs / "model"), "stage": "sft", "do_train": True, "dataset": "chat",
        "dataset_dir": str(inputs), "template": "default", "cutoff_len": 512, "output_dir": str(tmp_path / "run"),
    } | _LLAMAFACTORY[case]  # fmt: skip
    file.write_text(yaml.safe_dump(config))
    compare("llamafactory", one, file, f"data.chat_template={inputs / 'default.jinja'}")


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", _SWIFT)
def test_swift(case: str, inputs: Path, one: Any, tmp_path: Path) -> None:
    file = tmp_path / "pt.sh"
    shared = " ".join(f"--{key} {str(value).lower()}" for key, value in _HF.items() if key != "learning_rate")
    file.write_text(
        f"swift pt --model {inputs / 'model'} --model_type llama --template llama --dataset {inputs / 'text.jsonl'} "
        f"--torch_dtype float32 --fp16 false --bf16 false --max_length 512 --use_hf true --logging_steps 1 "
        f"--dataloader_num_workers 0 --output_dir {tmp_path / 'run'} {shared} {_SWIFT[case]}\n"
    )
    compare("swift", one, file)


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", _AXOLOTL)
def test_axolotl(case: str, inputs: Path, one: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    config = {
        "base_model": str(inputs / "model"), "sequence_len": 512, "micro_batch_size": 12, "num_epochs": 5,
        "datasets": [{"path": str(inputs / "text.jsonl"), "ds_type": "json", "type": "completion"}],
        "gradient_accumulation_steps": 1, "max_steps": 5, "learning_rate": 5e-3, "bf16": False, "fp16": False,
        "tf32": False, "float32": True, "output_dir": str(tmp_path / "run"), "val_set_size": 0, "logging_steps": 1,
        "dataset_prepared_path": str(tmp_path / "prepared"), "save_strategy": "no", "sdp_attention": True,
    } | _AXOLOTL[case]  # fmt: skip
    if "adapter" in config:
        config["lora_model_dir"] = str(inputs / "adapter")
    file.write_text(yaml.safe_dump(config))
    compare("axolotl", one, file)


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", _TORCHTUNE)
def test_torchtune(case: str, inputs: Path, one: Any, tmp_path: Path) -> None:
    file, run = tmp_path / "config.yaml", str(tmp_path / "run")
    config = {
        "output_dir": run, "seed": 0, "shuffle": True, "batch_size": 12, "gradient_accumulation_steps": 1, "epochs": 5,
        "model": {
            "_component_": "torchtune.models.llama2.llama2", "vocab_size": 300, "num_layers": 2, "num_heads": 4,
            "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 2048, "intermediate_dim": 64, "norm_eps": 1e-6,
        },
        "tokenizer": {"_component_": "importing.tune_tokenizer.FolderTokenizer", "path": str(inputs / "model"),
                      "max_seq_len": None},
        "dataset": {"_component_": "torchtune.datasets.text_completion_dataset", "source": "json", "split": "train",
                    "data_files": str(inputs / "text.jsonl"), "packed": False},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "output_dir": run,
                         "checkpoint_dir": str(inputs / "model"), "checkpoint_files": ["model.safetensors"],
                         "model_type": "LLAMA2"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 5e-3, "weight_decay": 0.1},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}, "device": "cpu", "dtype": "fp32",
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": f"{run}/logs"},
        "optimizer_in_bwd": False, "clip_grad_norm": None, "compile": False, "max_steps_per_epoch": None,
        "resume_from_checkpoint": False, "enable_activation_checkpointing": False, "log_every_n_steps": 1,
        "enable_activation_offloading": False, "log_peak_memory_stats": False,
    } | _TORCHTUNE[case]  # fmt: skip
    file.write_text(yaml.safe_dump(config))
    compare("torchtune", one, file, may_differ={"tokenizer._component_"})
