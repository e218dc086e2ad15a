"""`toolkit import`: what a recipe gets from each tool's file, what is listed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cases import every_case
from toolkit import InputError, import_config, load_recipe
from toolkit.cli import app
from toolkit.importing.run import TABLES
from toolkit.recipe.optimizer_names import NOT_PAGED

TRL = {"model_name_or_path": "org/model", "dataset_name": "org/data", "packing": False}
AXOLOTL = {
    "base_model": "org/model", "sequence_len": 2048, "micro_batch_size": 2, "num_epochs": 2, "learning_rate": 1e-4,
    "datasets": [{"path": "org/data", "type": "completion"}],
}  # fmt: skip
LLAMAFACTORY = {"model_name_or_path": "org/model", "stage": "pt", "finetuning_type": "lora", "cutoff_len": 128}
TORCHTUNE = {
    "model": {"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b",
              "lora_attn_modules": ["q_proj", "output_proj"],
              "apply_lora_to_mlp": True, "lora_rank": 4, "lora_alpha": 8},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "folder"},
    "tokenizer": {"_component_": "x.Tokenizer", "max_seq_len": 512},
    "dataset": {"_component_": "torchtune.datasets.text_completion_dataset", "source": "org/data", "packed": False},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": "3e-4"}, "epochs": 1, "batch_size": 4, "dtype": "bf16",
}  # fmt: skip
SWIFT = "swift pt --model org/model --tuner_type full --dataset data.jsonl --torch_dtype bfloat16 --max_length 2048"


def of(tmp_path: Path, config: dict[str, Any] | str, *overrides: str, **more: Any) -> Any:
    """The import of a YAML mapping, or of a script."""
    script = isinstance(config, str)
    file = tmp_path / ("run.sh" if script else "config.yaml")
    file.write_text(config if isinstance(config, str) else yaml.safe_dump(config | more, sort_keys=False))
    return import_config([file], overrides)


def recipe(made: Any) -> dict[str, Any]:
    assert made.recipe is not None, made.blocks
    return made.recipe.model_dump(mode="json", exclude_unset=True)


def outcome(made: Any, key: str) -> str:
    return next(found.outcome for found in made.keys if found.key == key)


def test_trl_defaults_are_those_of_trl(tmp_path: Path) -> None:
    made = of(tmp_path, TRL, "data.format=text")
    assert made.exit_code == 0, [key.line() for key in made.lost]
    got = recipe(made)
    assert got["optimizer"] == {
        "name": "adamw", "lr": 2e-5, "eps": 1e-8, "betas": [0.9, 0.999], "max_grad_norm": 1.0, "weight_decay": 0.0,
    }  # fmt: skip
    assert got["schedule"] == {"name": "linear", "warmup_steps": 0}
    assert (got["precision"], got["activation_checkpointing"]) == ("bf16", "full")
    assert got["batch"] == {"micro_size": 8, "accumulation": 1}
    assert (got["run"]["epochs"], got["run"]["seed"], got["data"]["max_length"]) == (3, 42, 1024)


def test_trl_names_what_it_cannot_know_and_what_differs(tmp_path: Path) -> None:
    assert outcome(of(tmp_path, TRL), "dataset_name") == "differs"
    assert outcome(of(tmp_path, TRL, "data.format=messages"), "assistant_only_loss") == "differs"
    made = of(tmp_path, TRL, "data.format=text", weight_decay=0.1, neftune_noise_alpha=5, made_up=1, dtype="auto")
    assert {key.key: key.outcome for key in made.lost} == {
        "weight_decay": "differs", "neftune_noise_alpha": "unsupported", "made_up": "unknown", "bf16": "differs",
    }  # fmt: skip
    assert made.exit_code == 1
    assert made.text is not None
    assert "Not the same training" in made.text


def test_trl_with_lora_and_launch_files(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\nmixed_precision: bf16\n"
        "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\n"
    )
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(TRL | {
        "use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj"], "max_steps": 7, "warmup_ratio": 0.1,
        "lr_scheduler_type": "constant_with_warmup", "optim": "paged_adamw_32bit",
    }))  # fmt: skip
    made = import_config([tmp_path / "sft.yaml", tmp_path / "accelerate.yaml"], ["data.format=text"])
    got = recipe(made)
    assert made.exit_code == 0, [key.line() for key in made.lost]
    assert got["strategy"] == {"name": "fsdp2", "reshard_after_forward": False}
    assert next(key for key in made.keys if key.key == "optim").reason == NOT_PAGED
    assert f"name: adamw  # {tmp_path}/sft.yaml" in made.text
    assert NOT_PAGED in made.text
    assert got["machine"] == {"processes": 4, "nodes": 2}
    assert got["adapter"] == {
        "method": "lora", "r": 8, "alpha": 32, "dropout": 0.05, "target_modules": ["q_proj"],
    }  # fmt: skip
    assert got["schedule"] == {"name": "constant", "warmup_ratio": 0.1}
    assert got["run"]["max_steps"] == 7


def test_other_optimizers_and_schedules_of_the_trainer(tmp_path: Path) -> None:
    made = of(tmp_path, TRL, "data.format=text", optim="lion_32bit", adam_beta2=0.98,
              lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1})  # fmt: skip
    assert made.exit_code == 0, [key.line() for key in made.lost]
    assert recipe(made)["optimizer"]["name"] == "lion"
    assert recipe(made)["optimizer"]["betas"] == [0.9, 0.98]
    assert recipe(made)["schedule"] == {"name": "cosine", "warmup_steps": 0, "min_ratio": 0.1}
    made = of(tmp_path, TRL, "data.format=text", optim="sgd", optim_args="momentum=0.8,nesterov=true",
              lr_scheduler_type="warmup_stable_decay",
              lr_scheduler_kwargs='{"num_decay_steps": 5, "decay_type": "1-sqrt"}')  # fmt: skip
    assert made.exit_code == 0, [key.line() for key in made.lost]
    assert recipe(made)["optimizer"].items() >= {"name": "sgd", "momentum": 0.8, "nesterov": True}.items()
    assert recipe(made)["schedule"].items() >= {"name": "wsd", "decay_steps": 5, "decay_shape": "1-sqrt"}.items()
    made = of(tmp_path, TRL, "data.format=text", optim="schedule_free_adamw", lr_scheduler_type="constant",
              warmup_steps=5)  # fmt: skip
    assert {key.key: key.outcome for key in made.lost} == {"warmup_steps": "differs"}
    assert recipe(made)["optimizer"]["name"] == "schedule-free"
    assert recipe(made)["schedule"] == {"name": "constant", "warmup_steps": 5}
    made = of(tmp_path, TRL, "data.format=text", optim="schedule_free_adamw", warmup_steps=0.1)
    assert {key.key: key.outcome for key in made.lost} == dict.fromkeys(
        ("lr_scheduler_type", "warmup_steps"), "unsupported"
    )
    assert recipe(made)["schedule"]["name"] == "constant"
    lost = {key.key: key.outcome for key in of(tmp_path, TRL, "data.format=text", optim="adafactor",
            lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0, "odd": 1}).lost}  # fmt: skip
    assert lost == {"optim": "unsupported", "lr_scheduler_kwargs": "unsupported"}


def test_other_trainers_give_no_recipe(tmp_path: Path) -> None:
    for config, key in (
        (TRL | {"beta": 0.1, "max_prompt_length": 5}, "beta"),
        (AXOLOTL | {"rl": "dpo"}, "rl"),
        (LLAMAFACTORY | {"stage": "dpo"}, "stage"),
        (TORCHTUNE | {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "loss._component_"),
        ("swift rlhf --rlhf_type dpo --model m --dataset d", "rlhf_type"),
    ):
        made = of(tmp_path, config)
        assert made.text is None
        assert made.exit_code == 1
        assert any(block.startswith(key) for block in made.blocks), made.blocks


def test_a_script_around_the_trainer(tmp_path: Path) -> None:
    script = (
        "torchrun --nproc_per_node 2 run_text.py --model_name_or_path org/model --train_file train.jsonl "
        "--max_seq_length 256 --learning_rate 1e-4 --bf16 --per_device_train_batch_size 2 --num_train_epochs 2 "
        "--output_dir out"
    )
    unstated = of(tmp_path, script)
    assert outcome(unstated, "train_file") == "differs"
    made = of(tmp_path, script, "data.format=text")
    assert [key.key for key in made.lost] == ["bf16"], "the checkpoint's dtype is not known"
    got = recipe(made)
    assert got["strategy"]["name"] == "ddp"
    assert got["machine"]["processes"] == 2
    assert got["data"] == {"max_length": 256, "train": "train.jsonl", "format": "text", "workers": 0}


def test_llamafactory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").write_text('{"text": "a"}\n')
    info = {"mine": {"file_name": "rows.jsonl", "columns": {"prompt": "text"}}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    made = of(tmp_path, LLAMAFACTORY, dataset="mine", packing=False, bf16=True, learning_rate="1e-4")
    got = recipe(made)
    assert got["data"]["train"] == str(tmp_path / "data/rows.jsonl")
    assert got["adapter"] == {"alpha": 16, "method": "lora", "r": 8, "dropout": 0.0, "target_modules": "all-linear"}
    assert got["optimizer"]["lr"] == 1e-4
    assert (got["precision"], got["activation_checkpointing"]) == ("bf16", "full")
    packed = of(tmp_path, LLAMAFACTORY, dataset="mine")
    assert any("attend" in key.reason for key in packed.lost), "texts are joined by default"
    chat = of(tmp_path, LLAMAFACTORY, dataset="mine", stage="sft", template="qwen", mask_history=True)
    assert outcome(chat, "template") == "differs"
    assert recipe(chat)["data"]["turns"] == "last"


def test_axolotl(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"body": "a"}\n')
    rows = [{"path": str(tmp_path / "rows.jsonl"), "ds_type": "json", "type": "completion", "field": "body"}]
    plain = {"datasets": rows, "bf16": False, "lr_scheduler": "cosine", "optimizer": "adamw_torch", "max_steps": 100}
    made = of(tmp_path, AXOLOTL | plain, warmup_steps=1)
    got = recipe(made)
    assert made.exit_code == 0, [key.line() for key in made.lost]
    assert got["data"]["fields"] == {"text": "body"}
    assert got["schedule"] == {"name": "cosine", "warmup_steps": 2}, "Axolotl makes 2 of 1"
    assert got["precision"] == "fp32"
    unset = of(tmp_path, AXOLOTL | plain)
    assert recipe(unset)["schedule"]["warmup_steps"] == 3, "3 % of the steps, rounded down"
    assert [key.key for key in unset.lost] == ["warmup_ratio"]
    lora = of(tmp_path, AXOLOTL, datasets=rows, adapter="qlora", load_in_4bit=True, lora_r=8, lora_alpha=16,
              lora_target_linear=True, gradient_accumulation_steps=4)  # fmt: skip
    assert recipe(lora)["adapter"]["method"] == "qlora"
    assert {key.key for key in lora.lost} == {"gradient_accumulation_steps", "warmup_ratio"}
    alpaca = of(tmp_path, AXOLOTL, datasets=[{"path": "org/data", "type": "alpaca"}], val_set_size=0.1)
    assert {"datasets", "val_set_size"} <= {key.key for key in alpaca.lost}


@every_case(
    ("config", "key", "overrides"),
    [
        (AXOLOTL | {"val_set_size": 0.05, "eval_steps": 20}, "val_set_size", ()),
        (LLAMAFACTORY | {"val_size": 0.05, "eval_strategy": "steps", "eval_steps": 20}, "val_size",
         ("data.train=org/data",)),
        (f"{SWIFT} --split_dataset_ratio 0.05 --eval_strategy steps --eval_steps 20", "split_dataset_ratio", ()),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value and " " not in value else None,
)  # fmt: skip
def test_a_share_that_is_held_out_is_carried_over(
    config: Any, key: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    made = of(tmp_path, config, *overrides)
    got = recipe(made)
    assert (got["data"]["eval_fraction"], got["run"]["eval_every"]) == (0.05, 20)
    assert outcome(made, key) == "differs", "which rows are held out"
    with_a_file = of(tmp_path, config, *overrides, "data.eval=org/held-out")
    assert "eval_fraction" not in recipe(with_a_file)["data"]
    rows = config.replace("0.05", "100") if isinstance(config, str) else config | {key: 100}
    assert outcome(of(tmp_path, rows, *overrides), key) == "unsupported"
    assert "eval_fraction" not in recipe(of(tmp_path, rows, *overrides))["data"]


BESIDE_LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}


def test_what_axolotl_has_beside_plain_lora(tmp_path: Path) -> None:
    made = of(tmp_path, AXOLOTL | BESIDE_LORA, "data.eval=org/held-out", peft_use_rslora=True, loraplus_lr_ratio=16,
              peft_init_lora_weights="pissa", weight_decay=0.1, tokens=["<a>"], eval_steps=10,
              special_tokens={"pad_token": "<p>", "additional_special_tokens": ["<b>"]},
              early_stopping_patience=3)  # fmt: skip
    got = recipe(made)
    assert got["adapter"]["options"] == {"use_rslora": True, "init_lora_weights": "pissa"}
    assert got["optimizer"]["groups"] == [{"match": "lora_B", "lr": pytest.approx(1.6e-3)}]
    assert got["optimizer"]["weight_decay"] == 0.0, "Axolotl gives PEFT's optimizer of LoRA+ none"
    assert got["tokenizer"] == {"add_tokens": ["<a>"], "add_special_tokens": ["<b>"]}
    assert got["run"]["early_stopping"] == {"patience": 3, "min_delta": 0.0}
    assert got["run"]["eval_every"] == 10
    lost = {key.key for key in made.lost}
    assert {"tokens", "special_tokens"} <= lost, "Axolotl does not train their rows"
    assert not lost & {"peft_use_rslora", "loraplus_lr_ratio", "peft_init_lora_weights", "early_stopping_patience"}
    layers = of(tmp_path, AXOLOTL | BESIDE_LORA, peft_layers_to_transform=[0], early_stopping_patience=3)
    assert outcome(layers, "peft_layers_to_transform") == "unsupported", "PEFT wants names of modules there"
    assert outcome(layers, "early_stopping_patience") == "unsupported", "there is no data to evaluate"
    named = {"lora_target_linear": False, "lora_target_modules": ["q_proj"], "lora_rank_pattern": {"q_proj": 4}}
    options = recipe(of(tmp_path, AXOLOTL | BESIDE_LORA | named, peft_layers_to_transform=[0]))["adapter"]["options"]
    assert options == {"layers_to_transform": [0], "rank_pattern": {"q_proj": 4}}


def test_what_llamafactory_and_swift_have_beside_plain_lora(tmp_path: Path) -> None:
    made = of(tmp_path, LLAMAFACTORY, "data.train=org/data", use_rslora=True, pissa_init=True, add_tokens="<a>, <b>",
              loraplus_lr_ratio=4, learning_rate=1e-4, weight_decay=0.1, use_dora=True)  # fmt: skip
    got = recipe(made)
    assert got["adapter"]["options"] == {"use_rslora": True, "init_lora_weights": "pissa_niter_16"}
    assert got["tokenizer"]["add_tokens"] == ["<a>", "<b>"]
    assert got["optimizer"]["groups"] == [{"match": "lora_B|lora_magnitude_vector", "lr": pytest.approx(4e-4)}]
    assert got["optimizer"]["weight_decay"] == 0.1
    full = of(tmp_path, LLAMAFACTORY, "data.train=org/data", finetuning_type="full", use_rslora=True, add_tokens="<a>")
    assert "adapter" not in recipe(full)
    assert outcome(full, "use_rslora") == "no-effect"
    script = SWIFT.replace("pt --", "sft --").replace("full", "lora") + " --use_rslora true --init_weights olora"
    got = recipe(of(tmp_path, script + " --new_special_tokens '<a>' '<b>'"))
    assert got["adapter"]["options"] == {"use_rslora": True, "init_lora_weights": "olora"}
    assert got["tokenizer"] == {"add_special_tokens": ["<a>", "<b>"]}
    unsupported = of(tmp_path, script.replace("olora", "lora-ga") + " --new_special_tokens tokens.txt")
    assert {outcome(unsupported, key) for key in ("init_weights", "new_special_tokens")} == {"unsupported"}


@pytest.mark.upstream
def test_lora_plus_has_the_rates_of_pefts_own_optimizer() -> None:
    """``optimizer.groups`` as they are imported give every parameter the rate that create_loraplus_optimizer gives."""
    import re

    import torch
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = get_peft_model(
        LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), LoraConfig(target_modules="all-linear", use_dora=True)
    )
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=4, weight_decay=0.1)
    rates = {id(p): group["lr"] for group in theirs.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        ours = 4e-3 if re.search("lora_B|lora_magnitude_vector", name) else 1e-3
        assert rates[id(parameter)] == pytest.approx(ours), name
    assert {group["weight_decay"] for group in theirs.param_groups} == {0.0}, "PEFT takes loraplus_weight_decay alone"


def test_swift(tmp_path: Path) -> None:
    made = of(tmp_path, SWIFT)
    got = recipe(made)
    assert got["optimizer"]["lr"] == 1e-5, "1e-4 for adapters"
    assert got["optimizer"]["betas"] == [0.9, 0.95]
    assert got["batch"] == {"micro_size": 1, "accumulation": 16}
    assert (got["data"]["format"], got["precision"]) == ("text", "bf16-pure")
    assert outcome(made, "weight_decay") == "differs", "0.1 by default, of embeddings too"
    lora = of(tmp_path, SWIFT.replace("pt --", "sft --").replace("full", "lora") + " --deepspeed zero3 --lora_rank 4")
    assert recipe(lora)["optimizer"]["lr"] == 1e-4
    assert recipe(lora)["strategy"]["name"] == "zero3"
    assert recipe(lora)["adapter"] | {} == {
        "method": "lora", "r": 4, "alpha": 32, "dropout": 0.05, "target_modules": "all-linear",
    }  # fmt: skip


def test_torchtune(tmp_path: Path) -> None:
    made = of(tmp_path, TORCHTUNE, clip_grad_norm=None, metric_logger={"log_dir": "x"}, made={"up": 1})
    got = recipe(made)
    assert got["adapter"]["target_modules"] == ["q_proj", "o_proj", "gate_proj", "down_proj", "up_proj"]
    assert got["optimizer"] == {
        "name": "adamw", "lr": 3e-4, "weight_decay": 0.01, "decay": "all", "betas": [0.9, 0.999], "eps": 1e-8,
        "max_grad_norm": None,
    }  # fmt: skip
    assert (got["precision"], got["schedule"], got["data"]["max_length"]) == ("bf16-pure", {"name": "constant"}, 511)
    assert outcome(made, "made.up") == "unknown"
    assert outcome(made, "metric_logger.log_dir") == "no-effect"


_PROCESSES = {"nproc_per_node", "nnodes", "num_processes", "num_machines", "num_gpus", "num_nodes"}
CASES: dict[str, dict[str, Any] | str] = {
    "trl": TRL, "axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY, "torchtune": TORCHTUNE, "swift": SWIFT,
}  # fmt: skip


@every_case("tool", CASES)
def test_every_key_has_an_outcome_and_its_place(tool: str, tmp_path: Path) -> None:
    made = of(tmp_path, CASES[tool])
    config = CASES[tool]
    lines = (tmp_path / ("run.sh" if isinstance(config, str) else "config.yaml")).read_text().splitlines()
    listed = [key for key in made.keys if key.place is not None]
    for key in listed:
        assert key.place is not None
        assert key.key.rpartition(".")[2] in lines[(key.place.line or 0) - 1]
    assert all(key.reason or key.outcome == "carried" for key in made.keys)
    expected = (
        set(config) if isinstance(config, dict) else {"model", "tuner_type", "dataset", "torch_dtype", "max_length"}
    )
    assert expected <= {key.key.partition(".")[0] for key in listed}


@every_case("table", TABLES.values(), ids=lambda table: table.id)
def test_every_default_is_a_key_of_the_tool(table: Any) -> None:
    assert set(table.defaults) <= set(table.rules), set(table.defaults) - set(table.rules)
    assert set(table.former.values()) <= set(table.rules)


def test_arguments_of_trl_and_the_trainer_are_all_classified() -> None:
    from toolkit.linting import keys

    known = set(keys.section("transformers", "")) | set().union(
        *(keys.section("trl", name) for name in ("sft", "model", "script"))
    )
    known -= set(keys.gone("trl", "sft"))
    assert len(known) > 150
    assert known <= set(TABLES["trl"].rules) | set(TABLES["trl"].former), known - set(TABLES["trl"].rules)


@every_case("content", ["", "- a\n- b\n", "a: 1\n", "{", "\x00\x01"])
def test_what_is_no_training_configuration(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(InputError):
        import_config([tmp_path / "x.yaml"])


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a folder; expected a training configuration"):
        import_config([tmp_path])
    with pytest.raises(InputError, match="no file to import"):
        import_config([])
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}')
    with pytest.raises(InputError, match=r"it is: deepspeed"):
        import_config([tmp_path / "ds.json"])
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(TRL))
    (tmp_path / "b.yaml").write_text(yaml.safe_dump(AXOLOTL))
    with pytest.raises(InputError, match="expected one training configuration"):
        import_config([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    (tmp_path / "two.sh").write_text(f"{SWIFT}\n{SWIFT}\n")
    with pytest.raises(InputError, match="2 training commands"):
        import_config([tmp_path / "two.sh"])
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(TRL | {"learning_rate": "fast"}))
    with pytest.raises(InputError, match=r"c\.yaml:.*learning_rate: 'fast' is not a number"):
        import_config([tmp_path / "c.yaml"])


@every_case(
    ("key", "value"),
    [
        ("datasets", 5),
        ("lora_r", [1]),
        ("lora_target_modules", 5),
        ("learning_rate", float("nan")),
        ("plugins", {"a": 1}),
        ("special_tokens", "x"),
    ],
)
def test_values_of_another_shape_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    lora = AXOLOTL | {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj"]}
    with pytest.raises(InputError, match=key):
        of(tmp_path, lora | {key: value})


def test_the_command_writes_a_recipe_that_loads(tmp_path: Path) -> None:
    source, target = tmp_path / "sft.yaml", tmp_path / "recipe.yaml"
    source.write_text(yaml.safe_dump(TRL, sort_keys=False))
    run = CliRunner().invoke
    words = ["import", str(source), "data.format=text", "-o", str(target)]
    first = run(app, words)
    assert first.exit_code == 0, first.output
    assert load_recipe(target).optimizer.lr == 2e-5
    text = target.read_text()
    assert f"# {source}:1 model_name_or_path" in text
    assert "# default of TRL 1.16.0: learning_rate" in text
    assert run(app, words).exit_code == 2
    assert run(app, [*words, "--force"]).exit_code == 0
    assert run(app, ["import", str(source), "-o", str(target), "--force"]).exit_code == 1


def test_json_has_every_key(tmp_path: Path) -> None:
    source = tmp_path / "sft.yaml"
    source.write_text(yaml.safe_dump(TRL, sort_keys=False))
    for words in (["--json", "-"], ["--format", "json"]):
        done = CliRunner().invoke(app, ["import", str(source), *words])
        document = json.loads(done.stdout)
        assert document["schema"] == "toolkit.import/1"
        assert document["same"] is False
        assert document["tool"] == "TRL"
        assert {"file", "line", "key", "value", "outcome", "recipe", "reason"} == set(document["keys"][0])
        assert document["keys"][0]["key"] == "model_name_or_path"
        assert document["recipe"].startswith("# Imported from")


def test_a_folder_with_files_is_noted(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert of(tmp_path, TRL, output_dir=str(tmp_path / "out")).notes[-1].startswith("checked without the model")
    (tmp_path / "out/model.bin").touch()
    assert any("run.output_dir=NEW" in note for note in of(tmp_path, TRL, output_dir=str(tmp_path / "out")).notes)


@every_case(
    ("config", "more", "options"),
    [
        pytest.param(TRL, {}, "--loop trl", id="trl"),
        pytest.param(AXOLOTL, {"gradient_checkpointing": True}, "--loop trainer", id="axolotl"),
        pytest.param(
            AXOLOTL,
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "--loop trainer --loop-set reentrant=true",
            id="axolotl, reentrant",
        ),
        pytest.param(LLAMAFACTORY, {}, "--loop trainer --loop-set reentrant=true", id="llamafactory"),
        pytest.param(LLAMAFACTORY, {"use_reentrant_gc": False}, "--loop trainer", id="llamafactory, not reentrant"),
        pytest.param(
            LLAMAFACTORY,
            {"quantization_bit": 4, "double_quantization": False},
            "--loop trainer --loop-set reentrant=true --loop-set double_quant=false",
            id="llamafactory, one quantisation",
        ),
        pytest.param(SWIFT, {}, "--loop trainer", id="swift"),
    ],
)
def test_a_recipe_says_how_to_plan_it_as_its_tool_trains(
    tmp_path: Path, config: dict[str, Any] | str, more: dict[str, Any], options: str
) -> None:
    from toolkit.planning.loops import loop_named

    made = of(tmp_path, config, "data.train=org/data", "data.format=text", **more)
    (note,) = (note for note in made.notes if "toolkit plan" in note)
    assert note == f"memory and time as {made.tool} trains: toolkit plan RECIPE {options}"
    assert made.text is None or f"# Note: {note}" in made.text
    assert loop_named(options.replace("--loop-set ", "").removeprefix("--loop ")).title


def test_values_keep_their_type_in_the_recipe() -> None:
    from toolkit.recipe.positions import parse
    from toolkit.recipe.yaml_text import scalar

    for value in ("1e5", "no", "on", "a: b", "", None, 1e-5, 5, [1, "x"], {"path": "a#b"}, "0o7", "#x"):
        assert parse(f"key: {scalar(value)}  # comment", "x").value["key"] == value


def test_every_key_of_the_tools_own_examples_is_classified() -> None:
    """The names of the keys in the files that the tools ship, at the commits of docs/lint-public-configs.md."""
    from toolkit.importing.launching import _WHERE
    from toolkit.importing.table import _of_section
    from toolkit.importing.trl import keys_of_other_trainers

    listed = json.loads((Path(__file__).parent / "example_keys.json").read_text())
    by_name = {table.name: table for table in TABLES.values()}
    assert set(listed["known"]) == {"Axolotl", "LLaMA-Factory", "TRL", "ms-swift", "torchtune"}
    for name, texts in listed["known"].items():
        table = by_name[name]
        for key in " ".join(texts).split():
            at_launch = key in _WHERE or key in _PROCESSES or (name == "TRL" and key in keys_of_other_trainers())
            known = key in table.rules or key in table.former or _of_section(key, table) is not None
            assert known or at_launch, f"{name}: {key}"
    unknown = {key for texts in listed["unknown"].values() for key in " ".join(texts).split()}
    assert len(unknown) < 30, "misspelt keys, and keys of code that the examples load"
