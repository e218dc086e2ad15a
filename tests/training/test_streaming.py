"""A model that was trained whole is exported one tensor after another, as ``save_pretrained`` writes it, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jobs import resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.training import export as exporting
from toolkit.training import streamed, streaming

MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"tie_word_embeddings": False},
    "tied": LLAMA | {"tie_word_embeddings": True},
    "experts": {
        "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "num_local_experts": 4,
    },
}  # fmt: skip


def content(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors, {file.name: json.loads(file.read_text()) for file in folder.glob("*config.json")}


@pytest.mark.parametrize("from_folder", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_the_files_are_those_of_save_pretrained(
    name: str, from_folder: bool, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: dict[str, Any] = {"config": MODELS[name]}
    if from_folder:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name])).save_pretrained(tmp_path / "base")
        model = {"path": str(tmp_path / "base"), "config": None}
    sections: dict[str, Any] = {"strategy": {"name": "single"}, "machine": {"processes": 1}, "adapter": None}
    recipe = recipe_dict(tiny_root, model=model, **sections)
    train_job(resolved_from(recipe), 1, str(tmp_path / "run/checkpoints"), None, 4)
    written: list[str] = []
    write = streamed.write_model
    monkeypatch.setattr(streamed, "write_model", lambda *args: (written.append("model"), write(*args)))
    assert exporting.export(tmp_path / "run", tmp_path / "out").built_whole is None
    assert written == ["model"], "not one tensor after another"
    monkeypatch.setattr(streamed, "sources", lambda model: None)
    assert exporting.export(tmp_path / "run", tmp_path / "whole").built_whole is not None
    found, expected = content(tmp_path / "out"), content(tmp_path / "whole")
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    assert all(torch.equal(found[0][key], tensor) for key, tensor in expected[0].items())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}
    # In several files, with an index.
    monkeypatch.undo()
    monkeypatch.setattr(streaming, "FILE_BYTES", 20_000)
    exporting.export(tmp_path / "run", tmp_path / "split")
    assert len(list((tmp_path / "split").glob("model-*-of-*.safetensors"))) > 2
    split = AutoModelForCausalLM.from_pretrained(tmp_path / "split").state_dict()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(split[key], tensor) for key, tensor in whole.items())


VOCABULARY, WIDTH = 65_536, 256
ONE = 4 * VOCABULARY * WIDTH
"""Bytes of the embedding, and of the head."""

_PEAK = """
import json, sys, torch
from pathlib import Path
from toolkit.training import export as exporting
from toolkit.model.sources import NotByPart
from toolkit.model.silence import silence_libraries
silence_libraries()
merged = sys.argv[4] == "merged"
import peft, transformers, accelerate  # the empty process
from transformers import AutoModelForCausalLM, AutoTokenizer
exporting.export(Path(sys.argv[1]), Path(sys.argv[3]) / "tiny", merged=merged)  # all is imported

exporting.compare_export = lambda *given: "measured"  # what it takes is measured by itself

def whole(job):
    raise NotByPart("measured")

def peak():  # of this program alone: a process's ru_maxrss begins with that of the one that started it
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

before = peak()
exporting.export(Path(sys.argv[2]), Path(sys.argv[3]) / "streamed", merged=merged)
streamed = peak()
exporting.write_in_turn = whole
exporting.export(Path(sys.argv[2]), Path(sys.argv[3]) / "whole", merged=merged)
print(json.dumps({"streamed": streamed - before, "whole": peak() - before}))
"""


LORA: dict[str, Any] = {"method": "lora", "r": 2, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
HELD: dict[str, tuple[dict[str, Any], float, float]] = {
    "full": ({"adapter": None}, 2.2, 4),
    "frozen": ({"adapter": None, "model": {"freeze": ["mlp"]}}, 2.2, 4),
    "merged": ({"adapter": LORA}, 3.2, 4.8),
    "merged dora": ({"adapter": LORA | {"method": "dora", "target_modules": ["gate_proj", "up_proj"]}}, 5.2, 5.2),
    "adapter, trained copies": ({"adapter": LORA | {"modules_to_save": ["embed_tokens", "lm_head"]}}, 2.2, 4.8),
}
"""What is exported; weights of 64 MiB that are held at most, and that the whole model takes at least. PEFT's merge of
LoRA has a weight, the product and the scaled product.
DoRA in layers with 65,536 inputs would make PEFT multiply with a unit matrix of 16 GiB."""


@pytest.mark.parametrize(
    "what", [what if what == "merged" else pytest.param(what, marks=pytest.mark.nightly) for what in HELD]
)
@pytest.mark.usefixtures("launches")
def test_memory_is_that_of_two_tensors(what: str, tiny_root: Path, tmp_path: Path) -> None:
    """A model of five tensors of 64 MiB; the whole one would take all of them."""
    sections, most, whole = HELD[what]
    large = LLAMA | {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": VOCABULARY, "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }  # fmt: skip
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, config in {"tiny": LLAMA, "large": large}.items():
        model = {"path": str(tmp_path / f"{name} base"), "config": None}
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(model["path"])
        recipe = recipe_dict(
            tiny_root, strategy={"name": "single"}, machine={"processes": 1}, optimizer={"name": "sgd"},
            data={"max_length": 16}, **sections | {"model": model | sections.get("model", {})},
        )  # fmt: skip
        train_job(resolved_from(recipe), 0, str(tmp_path / name / "checkpoints"), None, 4)
    arguments = [str(tmp_path / "tiny"), str(tmp_path / "large"), str(tmp_path / "out"), what.split(" ", maxsplit=1)[0]]
    (tmp_path / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", _PEAK, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = {how: peak / ONE for how, peak in json.loads(done.stdout.splitlines()[-1]).items()}
    assert peaks["streamed"] < most, peaks  # and the allocator's pages
    assert peaks["whole"] > whole, peaks
    written = sum(path.stat().st_size for path in (tmp_path / "out/streamed").glob("*.safetensors"))
    assert written / ONE == pytest.approx(2 if what.startswith("adapter") else 5, rel=0.03)


def test_what_a_run_did_on_gpus_is_exported_without(tiny_root: Path) -> None:
    """Activations that went to the host ended in an error: they need checkpointing, which an export has not."""
    recipe = recipe_dict(
        tiny_root, strategy={"name": "zero3", "offload": "all"}, machine={"device": "cuda", "processes": 8},
        activation_checkpointing="full", activation_offload=True, compile=True, precision="fp16",
    )  # fmt: skip
    resolved = resolve(exporting.alone(Recipe.model_validate(recipe)), "recipe.json", device="cpu")
    assert (resolved.recipe.activation_offload, resolved.recipe.compile, resolved.world_size) == (False, False, 1)
