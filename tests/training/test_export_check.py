"""Every export is compared with what was trained before it is there: a folder that answers otherwise leaves nothing."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_streamed_adapters import TIED, train

from cases import every_case
from families import EVERY_FAMILY
from nights import nightly_but
from tiny import LLAMA
from toolkit.checkpoint_export.command import Request, export_command
from toolkit.errors import InputError, RunFailed
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.training import export as exporting
from toolkit.training import export_check
from toolkit.training.export_check import Compared

LORA: dict[str, Any] = {"method": "lora", "r": 4}
ADDED = {"add_tokens": ["<new>", "<newer>"]}
T5 = EVERY_FAMILY["t5"]["config"] | {"vocab_size": 300}


def labelled(folder: Path) -> str:
    file = folder / "labelled.jsonl"
    file.write_text("".join(f'{{"text": "the cat sat", "label": {n % 3}}}\n' for n in range(8)))
    return str(file)


CASES: dict[str, tuple[dict[str, Any], bool, list[dict[str, Any]]]] = {
    "lora": ({"adapter": LORA}, False, [{}, {"merged": True}]),
    "lora, from a folder, bf16": (
        {"adapter": LORA, "precision": "bf16"}, True, [{}, {"merged": True}, {"merged": True, "dtype": "bf16"}]
    ),
    "tied, modules_to_save": (
        {"adapter": LORA | {"modules_to_save": ["embed_tokens"]}, "model": TIED}, True, [{}, {"merged": True}]
    ),
    "untied, on embedding and head": (
        {"adapter": LORA | {"target_modules": ["embed_tokens", "lm_head"]}}, True, [{}, {"merged": True}]
    ),
    "new tokens": ({"adapter": LORA, "tokenizer": ADDED}, True, [{}, {"merged": True}]),
    "new tokens, tied": ({"adapter": LORA, "tokenizer": ADDED, "model": TIED}, True, [{}, {"merged": True}]),
    "quantised base": ({"adapter": {"method": "qlora", "r": 4}}, True, [{}, {"merged": True, "dequantise": True}]),
    "experts by their projections' names": (
        {"adapter": LORA | {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
         "model": {"config": EVERY_FAMILY["qwen3_moe"]["config"] | {"vocab_size": 300}}}, True, [{}, {"merged": True}],
    ),
    "full": ({"adapter": None}, True, [{}, {"dtype": "bf16"}]),
    "full, tied": ({"adapter": None, "model": TIED, "precision": "bf16-pure"}, True, [{}]),
    "frozen": (
        {"adapter": None, "model": {"freeze": ["layers.0"]}, "precision": "bf16"}, False, [{}, {"dtype": "fp16"}]
    ),
    "averages": ({"adapter": LORA, "run": {"ema": {"decay": 0.5}}}, False, [{"weights_of": "ema"}]),
    "prompt": ({"adapter": {"method": "prompt-tuning", "options": {"num_virtual_tokens": 4}}}, False, [{}]),
}  # fmt: skip


QUICK = ("lora, from a folder, bf16", "new tokens, tied", "full")


@pytest.mark.parametrize("name", nightly_but(list(CASES), *QUICK))
def test_what_is_written_answers_as_what_was_trained(name: str, tiny_root: Path, tmp_path: Path) -> None:
    sections, from_folder, exports = CASES[name]
    train(tiny_root, tmp_path, from_folder, **sections)
    for number, options in enumerate(exports):
        done = exporting.export(tmp_path / "run", tmp_path / f"out{number}", **options)
        assert isinstance(done.compared, Compared), done.compared
        assert done.compared.rows == "2 rows of data.train"
        assert 0 <= done.compared.error <= done.compared.tolerance < 0.1
        assert ("rounding" in done.compared.why) == (options.get("dtype") in ("bf16", "fp16")), (name, options)


@pytest.mark.nightly
@every_case("task", ["sequence-classification", "seq2seq-lm"])
def test_other_tasks_too(task: str, tiny_root: Path, tmp_path: Path) -> None:
    model = {"task": task, "config": T5} if task == "seq2seq-lm" else {"task": task, "num_labels": 3, "config": LLAMA}
    train(tiny_root, tmp_path, False, adapter=LORA, model=model,
          data={"train": labelled(tmp_path)} if task != "seq2seq-lm" else _pairs(tmp_path))  # fmt: skip
    for options in ({}, {"merged": True}):
        done = exporting.export(tmp_path / "run", tmp_path / f"out{len(options)}", **options)  # type: ignore[arg-type]
        assert isinstance(done.compared, Compared), done.compared


def _pairs(folder: Path) -> dict[str, Any]:
    (folder / "pairs.jsonl").write_text('{"prompt": "the model of", "completion": "a rank"}\n' * 8)
    return {"train": str(folder / "pairs.jsonl"), "format": "prompt-completion"}


def of_tensors(file: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return spoil


def of_json(file: str, **values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        given = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(given | values))

    return spoil


def _scale(end: str, factor: float | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if name.endswith(end)]
        assert names, list(tensors)
        for name in names:
            tensors[name] = tensors[name] * factor if factor else tensors[name].flip(0)

    return change


def _leave_out(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]


ADAPTER, MODEL, QUERY = "adapter_model.safetensors", "model.safetensors", "layers.1.self_attn.q_proj.lora_B.weight"
ROTARY = {"rope_theta": 500.0, "rope_type": "default"}
SPOILT: dict[str, tuple[str, dict[str, Any], Callable[[Path], None]]] = {
    "one layer's adapter is gone": ("lora", {}, of_tensors(ADAPTER, _scale(QUERY, 1e-9))),
    "another alpha": ("lora", {}, of_json("adapter_config.json", lora_alpha=33)),
    "fewer layers": ("lora", {}, of_json("adapter_config.json", target_modules=["q_proj"])),
    "a merged layer off by 1 %": (
        "lora", {"merged": True}, of_tensors(MODEL, _scale("layers.1.mlp.up_proj.weight", 1.01))
    ),
    "the head of a merged model that is untied is left out": (
        "tied, modules_to_save", {"merged": True}, of_json("config.json", tie_word_embeddings=False)
    ),
    "another rotary base": ("full", {}, of_json("config.json", rope_parameters=ROTARY)),
    "a trained copy is not the checkpoint's": (
        "tied, modules_to_save", {}, of_tensors(ADAPTER, _scale("lm_head.weight", None))
    ),
    "rows of new tokens": ("new tokens", {}, of_tensors(ADAPTER, _scale("trainable_tokens_delta", 1.5))),
    "a tensor is missing": ("full", {}, of_tensors(MODEL, _leave_out)),
}  # fmt: skip


FEW = ("one layer's adapter is gone", "another rotary base", "a merged layer off by 1 %")


@pytest.mark.parametrize("name", nightly_but(list(SPOILT), *FEW))
def test_a_folder_that_answers_otherwise_is_not_written(
    name: str, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, options, spoil = SPOILT[name]
    sections, from_folder, _ = CASES[case]
    train(tiny_root, tmp_path, from_folder, **sections)
    right = export_check.compare_export

    def compare(job: Any, *rest: Any) -> Any:
        spoil(job.writing)
        return right(job, *rest)

    monkeypatch.setattr(exporting, "compare_export", compare)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(RunFailed, match="is not what was trained: logits of 2 rows of data") as refused:
        exporting.export(tmp_path / "run", tmp_path / "out", **options)
    assert refused.value.exit_code == 1
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing is left"


def test_one_model_at_a_time_and_never_in_silence(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_root, tmp_path, True, adapter=LORA)
    alive: list[weakref.ref[Any]] = []
    trained, exported = export_check.trained_model, export_check._exported

    def watched(*given: Any, **options: Any) -> Any:
        model = trained(*given, **options)
        alive.append(weakref.ref(model))
        return model

    def after(*given: Any) -> Any:
        assert alive, "the trained model comes first"
        assert alive[0]() is None, "and is gone before the export is loaded"
        return exported(*given)

    monkeypatch.setattr(export_check, "trained_model", watched)
    monkeypatch.setattr(export_check, "_exported", after)
    export_command(Request(str(tmp_path / "run"), str(tmp_path / "out"), json_target=str(tmp_path / "result.json")))
    assert "compared: logits of 2 rows of data.train are the trained model's within" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["not_compared"] is None
    weights = sum(tensor.numel() for tensor in load_file(tmp_path / "base/model.safetensors").values())
    assert 4 * weights < result["compared"]["memory_bytes"] < 5.1 * weights
    monkeypatch.setattr(export_check, "available_bytes", lambda: (1000, 1000))
    export_command(Request(str(tmp_path / "run"), str(tmp_path / "small"), json_target=str(tmp_path / "result.json")))
    assert "note: not compared with the trained model, which takes 0.0 GiB of memory" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["compared"] is None
    assert result["not_compared"].startswith("not compared with the trained model")
    assert (tmp_path / "small/adapter_config.json").exists()


def test_without_the_data_random_rows_are_compared(tiny_root: Path, tmp_path: Path) -> None:
    data = labelled(tmp_path)
    train(tiny_root, tmp_path, False, adapter=LORA, data={"train": data})
    Path(data).unlink()
    done = exporting.export(tmp_path / "run", tmp_path / "out")
    assert isinstance(done.compared, Compared)
    assert done.compared.rows.startswith("2 random rows (no data to read: data.train: ")
    assert "does not exist" in done.compared.rows


# ------------------------------------------------------------------- shared weights


@every_case(
    ("model", "targets", "named"),
    [
        (
            {"config": T5 | {"tie_word_embeddings": True}, "task": "seq2seq-lm"},
            ["encoder.embed_tokens"],
            "embed_tokens",
        ),
        ({"config": EVERY_FAMILY["gpt2"]["config"] | {"vocab_size": 300}}, ["c_attn", "wte"], "wte"),
        (TIED, ["model.embed_tokens"], "embed_tokens"),
    ],
)
def test_modules_that_share_a_weight_are_found_by_it(
    model: dict[str, Any], targets: list[str], named: str, tiny_root: Path, tmp_path: Path
) -> None:
    data = _pairs(tmp_path) if model.get("task") else {}
    train(tiny_root, tmp_path, False, adapter=LORA | {"target_modules": targets}, model=model, data=data)
    with pytest.raises(InputError, match=rf"share one weight in this model, and the adapter changes {named} apart"):
        exporting.export(tmp_path / "run", tmp_path / "out", merged=True)


# ------------------------------------------------------------------- dtypes


@every_case(
    ("base", "precision", "asked", "written"),
    [("float32", "bf16", None, "float32"), ("bfloat16", "fp32", None, "bfloat16"),
     ("float32", "fp32", "bf16", "bfloat16"), ("bfloat16", "bf16", "float32", "float32"),
     ("float16", "bf16", None, "float16")],
)  # fmt: skip
def test_merged_weights_have_the_base_s_dtype_unless_another_is_asked_for(
    base: str, precision: str, asked: str | None, written: str, tiny_root: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).to(getattr(torch, base))
    made.save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "config": None}
    train(tiny_root, tmp_path, False, adapter=LORA, precision=precision, model=model)
    done = exporting.export(tmp_path / "run", tmp_path / "out", merged=True, dtype=asked)
    assert isinstance(done.compared, Compared)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, written)}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == written
    with pytest.raises(InputError, match="--dtype: an adapter is written as it trains"):
        exporting.export(tmp_path / "run", tmp_path / "adapter", dtype="bf16")
    with pytest.raises(InputError, match="--dtype: 'int8' is none of fp32, bf16, fp16"):
        exporting.export(tmp_path / "run", tmp_path / "adapter", merged=True, dtype="int8")


# ------------------------------------------------------------------- card, one process


def test_the_card_has_the_recipe_that_was_trained(tiny_root: Path, tmp_path: Path) -> None:
    mixture = [{"path": str(tiny_root / "train.jsonl"), "weight": 2.0}, {"path": str(tiny_root / "train.jsonl")}]
    train(
        tiny_root, tmp_path, True, adapter=LORA, data={"train": mixture}, batch={"micro_size": 3, "accumulation": 2},
        model={"attention": "eager"}, run={"seed": 5},
    )  # fmt: skip
    exporting.export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    text = card.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "recipe.yaml").write_text(text)
    printed = load_recipe(str(tmp_path / "recipe.yaml"))
    assert (printed.batch.micro_size, printed.batch.accumulation) == (3, 2)
    assert printed.strategy.name == "single"
    assert printed.machine.processes == 1
    assert [one.path for one in printed.data.train] == ["train.jsonl", "train.jsonl"]  # type: ignore[union-attr]
    assert printed.model.path == "base"
    assert str(tmp_path) not in text, "no folder of this machine"
    assert str(tiny_root) not in text


def test_what_a_run_needed_a_gpu_for_is_exported_without() -> None:
    model = {"config": LLAMA, "kernels": "liger", "attention": "flash_attention_2"}
    recipe = Recipe.model_validate({
        "model": model, "tokenizer": {"path": "none"}, "data": {"train": "x"}, "run": {"max_steps": 1},
        "strategy": {"name": "fsdp2"}, "machine": {"device": "cuda", "processes": 8},
    })  # fmt: skip
    resolved = resolve(exporting.alone(recipe), "recipe", device="cpu")
    assert (resolved.recipe.model.kernels, resolved.recipe.model.attention) == ("torch", "eager")
    assert resolved.world_size == 1
