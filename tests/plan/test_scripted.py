"""`toolkit plan --script`: what is read of a training script's text, and what is asked for instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from plan.cells import LLAMA
from toolkit.__main__ import main
from toolkit.errors import InputError
from toolkit.planning.command import Request, make_plan
from toolkit.planning.scripted import Scripted, read_script

SCRIPTS = Path(__file__).with_name("scripts")
EXAMPLES = Path(__file__).parents[2] / "examples"


def read(name: str, *answers: str) -> Scripted:
    return read_script(str(SCRIPTS / f"{name}.py"), answers, (), 1)


def lines_of(scripted: Scripted) -> dict[str, int | None]:
    return {setting.key: setting.place.line for setting in scripted.read}


def line(name: str, text: str) -> int:
    """Of the first line of a script that contains ``text``."""
    return next(n for n, row in enumerate((SCRIPTS / f"{name}.py").read_text().splitlines(), 1) if text in row)


def test_arguments_of_the_trainer_are_read_with_their_lines() -> None:
    scripted = read("trainer_full")
    values = scripted.values
    assert scripted.loop == "trainer"
    assert scripted.habits == ("reentrant=true",)
    assert values["model"] == {"path": "HuggingFaceTB/SmolLM2-135M", "attention": "sdpa", "task": "causal-lm"}
    assert values["batch"] == {"micro_size": 4, "accumulation": 8}
    assert values["data"]["max_length"] == 512
    assert (values["precision"], values["activation_checkpointing"]) == ("bf16", "full")
    assert values["optimizer"] == {"name": "adamw", "kernel": "foreach"}
    assert values["run"] == {"max_steps": 100}
    assert "adapter" not in values
    places = lines_of(scripted)
    assert places["batch.micro_size"] == line("trainer_full", "per_device_train_batch_size=")
    assert places["--loop-set reentrant"] == line("trainer_full", "use_reentrant")
    assumed = " ".join(scripted.assumed)
    assert "per_device_train_batch_size 4: the default of --batch-size" in assumed


def test_a_qlora_of_trl_has_its_dtypes_and_its_quantisation() -> None:
    scripted = read("sft_qlora")
    values = scripted.values
    assert scripted.loop == "trl"
    assert set(scripted.habits) == {"double_quant=false", "prepare_for_kbit=true"}
    assert values["adapter"] == {"method": "qlora", "r": 32, "alpha": 64, "dropout": 0.05,
                                 "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}  # fmt: skip
    assert values["batch"] == {"micro_size": 2, "accumulation": 8}, "of a dictionary, one of them computed"
    assert (values["optimizer"]["name"], values["data"]["max_length"]) == ("adamw8bit", 2048)
    assert (values["precision"], values["activation_checkpointing"]) == ("bf16", "full")
    assert values["run"] == {"epochs": 3}


def test_a_loop_with_accelerate_is_read_from_its_calls() -> None:
    scripted = read("accelerate_lora")
    values = scripted.values
    assert scripted.loop == "accelerate"
    assert set(scripted.habits) == {"kernel=fused", "float32_base=true", "eval_micro=16"}
    assert values["model"]["path"] == "Qwen/Qwen2.5-0.5B", "of a dataclass's field"
    assert values["batch"] == {"micro_size": 4, "accumulation": 4}, "the loader that trains"
    assert (values["adapter"]["r"], values["adapter"]["target_modules"]) == (16, "all-linear")
    assert values["precision"] == "bf16"


def test_a_loop_of_ones_own_is_read_from_its_calls() -> None:
    scripted = read("bare_loop")
    assert scripted.loop == "bare"
    assert set(scripted.habits) == {"kernel=foreach", "held_outputs=false"}
    assert scripted.values["batch"] == {"micro_size": 2, "accumulation": 2}
    assert scripted.values["data"]["max_length"] == 384, "of the tokenizer"
    assert scripted.values["optimizer"] == {"name": "sgd", "momentum": 0.9}
    assert scripted.values["precision"] == "fp16"


@every_case(
    ("name", "loop", "loop_set", "sections"),
    [
        (
            "sft_qlora",
            "trl",
            ("double_quant=false", "prepare_for_kbit=true"),
            {
                "adapter": {"method": "qlora", "r": 32, "alpha": 64.0, "dropout": 0.05,
                            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
                "data": {"train": "x", "max_length": 2048},
                "batch": {"micro_size": 2, "accumulation": 8},
                "optimizer": {"name": "adamw8bit"},
            },
        ),
        (
            "accelerate_lora",
            "accelerate",
            ("kernel=fused", "float32_base=true", "eval_micro=16"),
            {
                "adapter": {"method": "lora", "r": 16, "alpha": 32.0, "target_modules": "all-linear"},
                "data": {"train": "x", "max_length": 256},
                "batch": {"micro_size": 4, "accumulation": 4},
            },
        ),
    ],
)  # fmt: skip
def test_the_plan_of_a_script_is_that_of_its_recipe(
    name: str, loop: str, loop_set: tuple[str, ...], sections: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA | {"max_position_embeddings": 4096}))
    recipe = tmp_path / "recipe.yaml"
    written = {"model": {"config": json.loads(config.read_text())}, "precision": "bf16", "machine": {"device": "cuda"},
               "activation_checkpointing": "full", "strategy": {"name": "single"}, "run": {"max_steps": 1}}  # fmt: skip
    recipe.write_text(json.dumps(written | sections))
    by_hand = make_plan(Request(str(recipe), gpu="rtx4090", loop=loop, loop_set=loop_set, cache=False))
    scripted = make_plan(Request(str(config), gpu="rtx4090", script=str(SCRIPTS / f"{name}.py"), cache=False))
    assert scripted.candidates[0].memory.phases == by_hand.candidates[0].memory.phases
    assert scripted.to_json()["script"]["loop"] == loop
    assert any(f"batch.micro_size {sections['batch']['micro_size']}" in note for note in scripted.search.notes())


def test_options_of_the_command_line_win(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    request = Request(
        str(config), ("batch.accumulation=2", "optimizer.name=lion"), gpu="rtx4090", micro=1, length=64,
        script=str(SCRIPTS / "sft_qlora.py"), loop_set=("double_quant=true",), lora=4, cache=False,
    )  # fmt: skip
    plan = make_plan(request)
    recipe = plan.candidates[0].resolved.recipe
    assert (recipe.batch.micro_size, recipe.batch.accumulation, recipe.data.max_length) == (1, 2, 64)
    assert recipe.optimizer.name == "lion"
    assert recipe.adapter is not None
    assert (recipe.adapter.method, recipe.adapter.r) == ("lora", 4)
    assert plan.to_json()["loop"].split()[0] == "trl"
    assert "double_quant=true" in plan.to_json()["loop"]
    assert "double_quant=false" not in plan.to_json()["loop"]
    read_keys = {row["key"] for row in plan.to_json()["script"]["read"]}
    assert not read_keys & {"batch.micro_size", "data.max_length", "model.path", "adapter.r"}
    with pytest.raises(InputError, match=r"beside a model or alone; recipe\.yaml is a recipe"):
        make_plan(Request("recipe.yaml", gpu="rtx4090", script=str(SCRIPTS / "sft_qlora.py")))


HEAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments
from peft import LoraConfig, VeraConfig, get_peft_model
tokenizer = AutoTokenizer.from_pretrained("m")
"""
MODEL = 'model = AutoModelForCausalLM.from_pretrained("m", dtype=torch.bfloat16)\n'
ROWS = "rows = tokenizer(texts, truncation=True, max_length=128)\n"
ARGUMENTS = 'arguments = TrainingArguments("out", per_device_train_batch_size=2, bf16=True)\n'
TRAIN = "Trainer(model, arguments, train_dataset=rows).train()\n"


@every_case(
    ("text", "messages"),
    [
        (
            HEAD + MODEL + ROWS + 'arguments = TrainingArguments("out", per_device_train_batch_size=int(sys.argv[1]))\n'
            + TRAIN,
            ("train.py:8: per_device_train_batch_size: ", "give it: --micro N"),
        ),
        (HEAD + MODEL + ARGUMENTS + TRAIN, ("max_length: no call of a tokenizer", "give it: --length N")),
        (
            HEAD + "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n" + ROWS + ARGUMENTS + TRAIN,
            ("train.py:6: model_name_or_path: ", "give it: toolkit plan MODEL --script"),
        ),
        (
            HEAD + MODEL + ROWS + "import json\narguments = TrainingArguments(**json.load(open('a.json')))\n" + TRAIN,
            ("per_device_train_batch_size: ", "gradient_accumulation_steps: ", "give it: activation_checkpointing=full",
             "optim: ", "bf16: "),
        ),
        (
            HEAD + MODEL + "model = get_peft_model(model, VeraConfig())\n" + ROWS + ARGUMENTS + TRAIN,
            ("train.py:7: use_peft: VeraConfig is not read; give it: --lora R, --qlora R or --full",),
        ),
        (
            HEAD + 'model = AutoModelForCausalLM.from_pretrained("m", load_in_8bit=True)\n'
            "model = get_peft_model(model, LoraConfig())\n" + ROWS + ARGUMENTS + TRAIN,
            ("train.py:6: load_in_8bit: the recipe's base is in 4 bits or not quantised; give it: adapter.method=",),
        ),
        (
            HEAD + 'model = AutoModelForCausalLM.from_pretrained("m", load_in_4bit=True)\n' + ROWS + ARGUMENTS + TRAIN,
            ("use_peft: weights are loaded in 4 bits, and no adapter is added to them",),
        ),
        (
            HEAD + MODEL + ROWS + ARGUMENTS.replace("bf16=True", "bf16=True, optim='galore_adamw'") + TRAIN,
            ("train.py:8: optim: ", "give it: optimizer.name=adamw"),
        ),
        (
            HEAD + MODEL + ROWS + ARGUMENTS.replace("bf16=True", "bf16=torch.cuda.is_bf16_supported()") + TRAIN,
            ("train.py:8: bf16: torch.cuda.is_bf16_supported() is known only when the script runs; give it: prec",),
        ),
        (
            HEAD + MODEL.replace("bfloat16", "float16") + ROWS + ARGUMENTS.replace("bf16", "fp16") + TRAIN,
            ("train.py:8: fp16: weights that train in float16 have gradients that no GradScaler takes",),
        ),
        (
            HEAD + MODEL + 'other = AutoModelForCausalLM.from_pretrained("n")\n' + ROWS + ARGUMENTS + TRAIN,
            ("model_name_or_path: several models are loaded, lines 6, 7",),
        ),
        (HEAD + MODEL, ("train.py: no training found: neither a Trainer or SFTTrainer nor a backward() is called",)),
        ("def broken(:\n", ("train.py:1: not Python: ",)),
        (
            HEAD + MODEL + ROWS + ARGUMENTS.replace("bf16=True", "bf16=True, deepspeed='ds.json'") + TRAIN,
            ("train.py:8: deepspeed: ds.json is not here; give it: strategy.name=zero1",),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_names_the_option_that_gives_it(
    text: str, messages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(text)
    with pytest.raises(InputError) as refused:
        read_script("train.py", (), (), 1)
    for message in messages:
        assert message in str(refused.value)


def test_a_value_that_no_recipe_can_have_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(HEAD + MODEL + ROWS + ARGUMENTS.replace("size=2", "size=-2") + TRAIN)
    with pytest.raises(InputError, match=r"train\.py:8: batch\.micro_size: input should be greater"):
        make_plan(Request(None, gpu="h100", script=str(file), cache=False))


def test_an_unread_setting_that_the_command_line_gives_is_no_error() -> None:
    given = ("model", "data.max_length", "batch.micro_size", "batch.accumulation", "activation_checkpointing",
             "optimizer.name", "precision")  # fmt: skip
    scripted = read_script(str(EXAMPLES / "hf_trainer.py"), given, (), 1)
    assert scripted.loop == "trainer"
    with pytest.raises(InputError, match="--micro N") as refused:
        read_script(str(EXAMPLES / "hf_trainer.py"), (), (), 1)
    assert len(refused.value.problems) == len(given)


@every_case(
    ("dtype", "half", "adapted", "precision", "habits"),
    [
        ("bfloat16", "bf16=True", False, "bf16-pure", {"autocast=true"}),
        ("bfloat16", "bf16=True", True, "bf16", set()),
        ("float32", "bf16=True", True, "bf16", {"float32_base=true"}),
        ("float32", "", False, "fp32", set()),
        ("bfloat16", "", True, "bf16-pure", set()),
        ("float16", "", True, "fp16", {"autocast=false"}),
        ("float32", "fp16=True", False, "fp16", set()),
    ],
)
def test_precision_follows_from_the_dtype_of_the_weights_and_autocast(
    dtype: str, half: str, adapted: bool, precision: str, habits: set[str], tmp_path: Path
) -> None:
    adapter = 'model = get_peft_model(model, LoraConfig(target_modules="all-linear"))\n' if adapted else ""
    text = HEAD + MODEL.replace("bfloat16", dtype) + adapter + ROWS + ARGUMENTS.replace("bf16=True", half) + TRAIN
    file = tmp_path / "train.py"
    file.write_text(text)
    scripted = read_script(str(file), (), (), 1)
    assert scripted.values["precision"] == precision
    assert set(scripted.habits) == habits


@every_case(
    ("switch", "arguments", "habits"),
    [
        ("", "", set()),
        ("", "tf32=True", {"tf32=true"}),
        ("torch.backends.cuda.matmul.allow_tf32 = True\n", "", {"tf32=true"}),
        ("torch.backends.cuda.matmul.allow_tf32 = False\n", "", set()),
        ("torch.backends.cudnn.allow_tf32 = True\n", "", set()),
        ("torch.set_float32_matmul_precision('high')\n", "", {"tf32=true"}),
        ("torch.set_float32_matmul_precision('highest')\n", "", set()),
        ("torch.set_float32_matmul_precision(precision='medium')\n", "", {"tf32=true"}),
        ("torch.set_float32_matmul_precision('high')\n", "tf32=False", set()),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'\n", "", {"tf32=true"}),
        ("torch.backends.fp32_precision = 'tf32'\n", "", {"tf32=true"}),
        ("torch.backends.fp32_precision = 'ieee'\n", "", set()),
        ("torch.backends.cudnn.conv.fp32_precision = 'tf32'\n", "", set()),
    ],
)
def test_products_in_tf32_are_read(switch: str, arguments: str, habits: set[str], tmp_path: Path) -> None:
    model = MODEL.replace("bfloat16", "float32")
    file = tmp_path / "train.py"
    file.write_text(HEAD + switch + model + ROWS + ARGUMENTS.replace("bf16=True", arguments) + TRAIN)
    assert set(read_script(str(file), (), (), 1).habits) == habits


@every_case(
    ("arguments", "trainer", "habits"),
    [
        ("", "", set()),
        ("eval_strategy='no', per_device_eval_batch_size=16", "", set()),
        ("eval_strategy='steps', per_device_eval_batch_size=16", "", {"eval_micro=16"}),
        ("evaluation_strategy='epoch'", "", {"eval_micro=8"}),
        ("eval_strategy='epoch', eval_accumulation_steps=4", "compute_metrics=score", {"eval_micro=8", "eval_kept=4"}),
        ("eval_strategy='epoch'", "compute_metrics=None", {"eval_micro=8"}),
        ("eval_strategy='epoch', prediction_loss_only=True", "compute_metrics=score", {"eval_micro=8"}),
        ("eval_strategy='epoch', batch_eval_metrics=True", "compute_metrics=score", {"eval_micro=8", "eval_kept=1"}),
        (
            "eval_strategy='epoch'",
            "compute_metrics=score, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)",
            {"eval_micro=8"},
        ),
        ("eval_strategy='epoch'", "compute_metrics=score", None),
    ],
)
def test_an_evaluation_is_read_with_what_stays_of_it(
    arguments: str, trainer: str, habits: set[str] | None, tmp_path: Path
) -> None:
    text = (
        HEAD + MODEL.replace("bfloat16", "float32") + ROWS + ARGUMENTS.replace("bf16=True", f"bf16=True, {arguments}")
    )
    file = tmp_path / "train.py"
    file.write_text(f"{text}Trainer(model, arguments, train_dataset=rows, {trainer}).train()\n")
    if habits is not None:
        assert set(read_script(str(file), (), (), 1).habits) == habits
        return
    with pytest.raises(
        InputError, match=r"compute_metrics has the logits of all held-out .*--loop-set eval_kept=BATCHES"
    ):
        read_script(str(file), (), (), 1)
    assert "eval_micro=8" in read_script(str(file), (), ("eval_kept",), 1).habits


def test_a_deepspeed_file_and_several_processes_decide_the_strategy(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(HEAD + MODEL + ROWS + ARGUMENTS.replace("bf16=True", "bf16=True, deepspeed='ds.json'") + TRAIN)
    stage = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": stage, "bf16": {"enabled": True}}))
    scripted = read_script(str(file), (), (), 2)
    assert scripted.values["strategy"]["name"] == "zero3"
    assert scripted.values["precision"] == "bf16", "DeepSpeed keeps masters in float32"
    file.write_text(HEAD + MODEL + ROWS + ARGUMENTS + TRAIN)
    assert read_script(str(file), (), (), 2).values["strategy"] == {"name": "ddp"}
    assert "strategy" not in read_script(str(file), (), (), 1).values


def test_the_command_takes_overrides_without_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    file = tmp_path / "plan.json"
    monkeypatch.setenv("TOOLKIT_PLAN_CACHE", "off")

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["toolkit", "plan", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        told = capsys.readouterr()
        return ended.value.code, " ".join((told.out + told.err).split())

    script = str(SCRIPTS / "bare_loop.py")
    model = f"model.config={json.dumps(LLAMA)}"
    code, screen = run("--script", script, "batch.accumulation=4", model, "--gpu", "rtx4090", "--json", str(file))
    assert code == 0
    [asked] = [row for row in json.loads(file.read_text())["candidates"] if row["asked"]]
    assert asked["accumulation"] == 4
    assert f"bare_loop.py:{line('bare_loop', 'torch.autocast')}: precision fp16" in screen
    assert run("--gpu", "rtx4090") == (
        2,
        "name a recipe or a model, or a training script: --script train.py",
    )
