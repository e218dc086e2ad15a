"""Adapters, merged or not, and models with frozen weights are written one tensor after another: the same files as of
the whole model, to the bit."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from test_batch_norm import resolved, statistics_job
from test_streaming import MODELS, content

from jobs import resolved_from, train_job
from nights import nightly_but
from peft_methods import rows
from tiny import LLAMA, recipe_dict
from toolkit.checkpoint_export.command import Request, export_command
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.launch.identity import saved_recipe
from toolkit.model.sources import NotByPart
from toolkit.recipe.adapter_methods import METHODS
from toolkit.strategies import resolve
from toolkit.training import export as exporting
from toolkit.training.export_check import Compared, trained_model
from toolkit.training.finding import newest, whole_manifest
from toolkit.training.streamed import Job, write_in_turn

TIED = {"config": LLAMA | {"tie_word_embeddings": True}}
QUICK: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"method": "lora", "r": 4}},
    "rslora, bf16": {"adapter": {"method": "lora", "r": 4, "options": {"use_rslora": True}}, "precision": "bf16"},
    "dora, bf16": {"adapter": {"method": "dora", "r": 4}, "precision": "bf16"},
    "trained copies": {"adapter": {"method": "lora", "r": 4, "modules_to_save": ["embed_tokens", "lm_head"]}},
    "trained copies, tied": {"adapter": {"method": "lora", "r": 4, "modules_to_save": ["embed_tokens"]}, "model": TIED},
    "embeddings": {"adapter": {"method": "lora", "r": 4, "target_modules": ["embed_tokens", "q_proj"]}},
    "fused experts": {
        "adapter": {
            "method": "lora", "r": 4, "target_modules": ["q_proj"],
            "options": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        },
        "model": {"config": MODELS["experts"]},
    },
    "vera": {"adapter": {"method": "vera"}},
    "averages": {"adapter": {"method": "lora", "r": 4}, "run": {"ema": {"decay": 0.5}}},
    "frozen": {"adapter": None, "model": {"freeze": ["layers.0", "embed_tokens"]}, "precision": "bf16"},
    "frozen, experts": {
        "adapter": None, "model": {"config": MODELS["experts"], "freeze": ["experts"]},
    },
}  # fmt: skip
ELECTRA = {
    "model_type": "electra", "hidden_size": 32, "embedding_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip
WHOLE = {"delora", "frod", "osf", "supertuning", "tinylora", "trainable-tokens", "lora, PiSSA", "lora, OLoRA",
         "lora, MiCA", "lora, new tokens", "psoft", "qlora"}  # fmt: skip
"""Methods whose adapters are computed from values of the base; packed bases."""


def train(root: Path, folder: Path, from_folder: bool, **sections: Any) -> None:
    if from_folder:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = dict(sections.pop("model", {}))
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.pop("config", LLAMA)))
        base.save_pretrained(folder / "base")
        sections["model"] = model | {"path": str(folder / "base"), "config": None}
    defaults: dict[str, Any] = {
        "strategy": {"name": "single"}, "machine": {"processes": 1}, "optimizer": {"lr": 0.05},
        "schedule": {"name": "constant", "warmup_steps": 0},
    }  # fmt: skip
    recipe = recipe_dict(root, **defaults | sections)
    train_job(resolved_from(recipe), 2, str(folder / "run/checkpoints"), None, 4)


def refuse(job: Job) -> str:
    raise NotByPart("as a test")


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str | None:
    """Both exports, file by file; returns why the model was built whole."""
    for name in ("turn", "whole"):
        shutil.rmtree(folder / name, ignore_errors=True)
    turned = exporting.export(folder / "run", folder / "turn", **options)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "write_in_turn", refuse)
        built = exporting.export(folder / "run", folder / "whole", **options)
    assert built.kind == turned.kind
    assert isinstance(built.compared, Compared)
    (turn, _), (whole, _) = content(folder / "turn"), content(folder / "whole")
    assert turn.keys() == whole.keys()
    for name, tensor in whole.items():
        assert turn[name].dtype == tensor.dtype, name
        assert torch.equal(turn[name], tensor), name
    files = [sorted(path.name for path in (folder / name).iterdir()) for name in ("turn", "whole")]
    assert files[0] == files[1]
    for name in files[0]:
        if not name.endswith(".safetensors"):
            assert (folder / "turn" / name).read_bytes() == (folder / "whole" / name).read_bytes(), name
    return turned.built_whole


@pytest.mark.parametrize(
    ("name", "from_folder"),
    nightly_but(
        product(QUICK, [False, True]), *((name, True) for name in list(QUICK)[::2]), (next(iter(QUICK)), False)
    ),
)
def test_the_files_are_those_of_the_whole_model(
    name: str, from_folder: bool, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_root, tmp_path, from_folder, **QUICK[name])
    weights = {"weights_of": "ema"} if name == "averages" else {}
    assert compare(tmp_path, monkeypatch, **weights) is None
    if QUICK[name]["adapter"]:
        assert compare(tmp_path, monkeypatch, merged=True, **weights) is None


def test_a_trained_head_of_several_layers_is_merged(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's merge of every method but LoRA ended in an AttributeError: such a head has no weight of its own."""
    head = {"task": "sequence-classification", "num_labels": 3, "config": ELECTRA}
    labelled = tmp_path / "labelled.jsonl"
    labelled.write_text("".join(f'{{"text": "the cat sat", "label": {n % 3}}}\n' for n in range(8)))
    train(tiny_root, tmp_path, False, adapter={"method": "hra", "r": 2}, model=head, data={"train": str(labelled)})
    assert compare(tmp_path, monkeypatch, merged=True) is None


@pytest.mark.nightly
@pytest.mark.parametrize(
    "row", [row for row in rows() if not METHODS[row.adapter["method"]].why_not], ids=lambda row: row.name
)
def test_every_method(row: Any, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that cannot be written in turn are built whole, and say so."""
    adapter = row.adapter | {"options": dict(row.adapter.get("options", {}))}
    method = METHODS[adapter["method"]]
    for key, most in method.twin.items() if row.name not in ("boft", "oft") else ():  # their own values fit
        (adapter if key in method.keys else adapter["options"])[key] = most
    model = row.model | {"config": row.model["config"] | {"vocab_size": 300}}
    train(tiny_root, tmp_path, False, adapter=adapter, model=model, precision="bf16", **row.sections)
    assert (compare(tmp_path, monkeypatch) is not None) == (row.name in WHOLE)
    if method.merges and row.name != "lora, bias":  # which has no bias to merge into
        more = {"dequantise": True} if row.name == "qlora" else {}
        reason = compare(tmp_path, monkeypatch, merged=True, **more)
        assert (reason is not None) == (row.name in WHOLE | {"ln-tuning"})


def test_running_statistics_are_the_checkpoints(tmp_path: Path, group: WorkerGroup) -> None:
    """Buffers are the checkpoint's, frozen weights the base's."""
    asked = resolved("ddp", batch_norm="local", freeze=["embedder"])
    group.run(statistics_job, asked, str(tmp_path), True)
    folder = newest(tmp_path)
    assert folder is not None
    manifest = whole_manifest(folder)
    alone = resolve(exporting.alone(saved_recipe(folder, manifest)), "recipe", device="cpu")
    assert write_in_turn(Job(alone, folder, manifest, None, tmp_path / "turn")) == "full model"
    exporting.write_model(trained_model(alone, folder), alone.recipe, tmp_path / "whole", merged=False)
    (turn, configs), (whole, expected) = content(tmp_path / "turn"), content(tmp_path / "whole")
    assert configs == expected
    assert turn.keys() == whole.keys()
    assert any("running_mean" in name for name in turn)
    assert all(torch.equal(turn[name], tensor) for name, tensor in whole.items())


def test_what_peft_cannot_merge_leaves_nothing(tiny_root: Path, tmp_path: Path) -> None:
    train(tiny_root, tmp_path, False, adapter={"method": "lora", "r": 4, "options": {"lora_bias": True}})
    with pytest.raises(InputError, match="PEFT cannot merge this adapter: Impossible to merge LoRA with `lora_bias"):
        exporting.export(tmp_path / "run", tmp_path / "out", merged=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_reason_is_shown_and_is_in_the_result(
    tiny_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_root, tmp_path, False, adapter={"method": "lora", "r": 4, "options": {"init_lora_weights": "pissa"}})
    export_command(Request(str(tmp_path / "run"), str(tmp_path / "out"), json_target=str(tmp_path / "result.json")))
    message = "note: the whole model was built in memory, not one tensor after another: its adapter starts from values"
    assert message in capsys.readouterr().out
    assert '"built_whole": "its adapter starts from values' in (tmp_path / "result.json").read_text()
