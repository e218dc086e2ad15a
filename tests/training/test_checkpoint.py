"""Resumed equals uninterrupted, across strategies too; what is saved is whole, and loads without the toolkit."""

from __future__ import annotations

import json
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import Run, resolved_from, train_job, worst
from nights import nightly_but
from tiny import LLAMA, recipe_dict
from toolkit.checkpoint_export.state import export_state
from toolkit.disk import file_sha256
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.training import manifest as manifests
from toolkit.training.export import export
from toolkit.training.export_check import trained_model
from toolkit.training.finding import newest
from toolkit.training.manifest import read_manifest, write_manifest
from toolkit.training.tensor_folder import read_index

SPREAD = ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"]


def recipe_for(strategy: str, root: Path, **sections: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"adapter": {"r": 4, "dropout": 0.2}, "run": {"max_steps": 6, "eval_every": None}}
    return recipe_dict(root, strategy={"name": strategy}, **(defaults | sections))


def halves(group: WorkerGroup, first: dict[str, Any], second: dict[str, Any], folder: Path) -> Run:
    group.run(train_job, resolved_from(first), 3, str(folder), None, 6)
    return group.run(train_job, resolved_from(second), 3, None, str(newest(folder)), 6)[0]


@pytest.mark.parametrize("precision", nightly_but(["fp32", "bf16"], "bf16"))
@pytest.mark.parametrize("strategy", nightly_but(SPREAD, "zero1", "zero3", "fsdp1", "fsdp2"))
def test_resumed_equals_uninterrupted_bit_for_bit(
    strategy: str, precision: str, tiny_root: Path, group: WorkerGroup, tmp_path: Path
) -> None:
    recipe = recipe_for(strategy, tiny_root, precision=precision)
    whole: Run = group.run(train_job, resolved_from(recipe), 6, None, None, 6)[0]
    resumed = halves(group, recipe, recipe, tmp_path)
    assert resumed.losses == whole.losses[3:]
    assert resumed.tokens == whole.tokens[3:]
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    for name, moment in whole.moments.items():
        assert torch.equal(resumed.moments[name], moment), name


@pytest.mark.parametrize(
    ("saved", "resumed"),
    nightly_but(
        [("zero3", "fsdp2"), ("fsdp2", "zero2"), ("fsdp1", "ddp"), ("ddp", "zero1"), ("zero2", "fsdp1")],
        ("zero3", "fsdp2"),
        ("fsdp1", "ddp"),
        ("zero2", "fsdp1"),
    ),
)
def test_any_strategy_resumes_any_other(
    saved: str, resumed: str, tiny_root: Path, group: WorkerGroup, tmp_path: Path
) -> None:
    full = {"adapter": None}
    whole: Run = group.run(train_job, resolved_from(recipe_for("ddp", tiny_root, **full)), 6, None, None, 6)[0]
    run = halves(group, recipe_for(saved, tiny_root, **full), recipe_for(resumed, tiny_root, **full), tmp_path)
    assert run.losses == pytest.approx(whole.losses[3:], rel=1e-6)
    assert worst(run.weights, whole.weights)[0] < 1e-6
    assert worst(run.moments, whole.moments)[0] < 1e-5


def test_resumes_with_another_number_of_processes(tiny_root: Path, group: WorkerGroup, tmp_path: Path) -> None:
    spread = recipe_for("zero3", tiny_root, adapter=None)
    alone = recipe_for("single", tiny_root, adapter=None, machine={"processes": 1}, batch={"accumulation": 4})
    whole: Run = group.run(train_job, resolved_from(spread), 6, None, None, 6)[0]
    group.run(train_job, resolved_from(spread), 3, str(tmp_path), None, 6)
    run = train_job(resolved_from(alone), 3, None, str(newest(tmp_path)), 6)
    assert run is not None
    assert run.losses == pytest.approx(whole.losses[3:], rel=1e-6)
    assert worst(run.weights, whole.weights)[0] < 1e-6


@pytest.fixture(scope="module")
def saved(tiny_root: Path, group: WorkerGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    group.run(train_job, resolved_from(recipe_for("zero3", tiny_root)), 3, str(folder), None, 6)
    return newest(folder)  # type: ignore[return-value]


def test_only_the_adapter_is_saved_and_none_of_it_empty(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert manifest["step"] == 3
    weights, _ = read_index(saved, manifest)
    assert weights
    assert all(".lora_A." in name or ".lora_B." in name for name in weights)
    model = trained_model(resolved_from(json.loads((saved / "recipe.json").read_text())), saved)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            assert parameter.norm() > 0, name


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "swap", "no manifest"])
def test_a_damaged_checkpoint_is_said_and_passed_over(saved: Path, tmp_path: Path, harm: str) -> None:
    good, bad = tmp_path / "step-00000002", tmp_path / "step-00000003"
    shutil.copytree(saved, good)
    write_manifest(good, read_manifest(good) | {"step": 2})
    shutil.copytree(saved, bad)
    weights, moments = bad / "weights-00000-00001.safetensors", bad / "moments-00000-00001.safetensors"
    match harm:
        case "flip":
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
        case "truncate":
            weights.write_bytes(weights.read_bytes()[:-8])
        case "remove":
            moments.unlink()
        case "swap":
            held = weights.read_bytes()
            weights.write_bytes(moments.read_bytes())
            moments.write_bytes(held)
        case _:
            (bad / "manifest.json").unlink()
    messages: list[str] = []
    assert newest(tmp_path, messages.append) == good
    assert str(bad) in messages[0]
    with pytest.raises(InputError):
        export(bad, tmp_path / "out")


@pytest.mark.parametrize("form", ["transformers", "torch"])
def test_an_export_of_a_run_takes_the_checkpoint_before_a_damaged_one(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """The damage shows while tensors are read: nothing of them is left."""
    run, whole = tmp_path / "run" / "checkpoints", tmp_path / "whole" / "checkpoints"
    for at in (run / "step-00000002", run / "step-00000003", whole / "step-00000002"):
        shutil.copytree(saved, at)
        content = read_manifest(at)
        write_manifest(at, content | {"step": int(at.name[-1])}, content["files"])
    weights = run / "step-00000003" / "weights-00001-00001.safetensors"
    held = bytearray(weights.read_bytes())
    held[-1] ^= 1
    weights.write_bytes(held)
    for source, out in ((run, "out"), (whole, "expected")):
        if form == "torch":
            export_state(source.parent, tmp_path / out, form)
        else:
            export(source.parent, tmp_path / out)
    assert f"skipping an invalid checkpoint: {weights}: damaged: checksum mismatch in MiB 0" in capsys.readouterr().out
    kept = {path.name: file_sha256(path) for path in (tmp_path / "out").glob("*") if path.suffix in _TENSORS}
    assert kept == {p.name: file_sha256(p) for p in (tmp_path / "expected").glob("*") if p.suffix in _TENSORS}
    assert kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out", "run", "whole"]


_TENSORS = (".safetensors", ".distcp")


def test_what_was_hashed_is_not_hashed_again_until_it_changes(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run looks for its newest whole checkpoint and then loads it: its files were read three times."""
    folder = tmp_path / saved.name
    shutil.copytree(saved, folder)
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(manifests, "file_sha256", counted)
    read_manifest(folder)
    every = len(hashed)
    read_manifest(folder)
    assert len(hashed) == 2 * every, "files that are this new may change again unseen"
    monkeypatch.setattr(manifests, "_SETTLED_S", -10.0)
    read_manifest(folder)
    read_manifest(folder)
    assert len(hashed) == 3 * every
    read_manifest(folder, share=(0, 2))
    assert 3 * every < len(hashed) < 4 * every, "another part of the files is another question"
    weights = folder / "weights-00000-00001.safetensors"
    was = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(was.st_atime_ns, was.st_mtime_ns))
    with pytest.raises(InputError, match="checksum mismatch"):
        read_manifest(folder)


def test_another_recipe_is_refused_and_the_difference_named(saved: Path, tiny_root: Path) -> None:
    other = recipe_for("single", tiny_root, adapter={"r": 8}, machine={"processes": 1}, batch={"accumulation": 4})
    with pytest.raises(InputError, match=r"adapter\.r \(checkpoint: 4, recipe: 8\)"):
        train_job(resolved_from(other), 1, None, str(saved), 6)


@pytest.mark.parametrize(
    ("kind", "tied"),
    nightly_but(
        product(["adapter", "merged", "full", "modules_to_save"], [False, True]),
        ("adapter", False),
        ("merged", False),
        ("full", True),
        ("modules_to_save", True),
    ),
)
def test_export_loads_without_the_toolkit(
    kind: str, tied: bool, tiny_root: Path, group: WorkerGroup, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from toolkit.model.load import load_base

    adapter: dict[str, Any] | None = {"r": 4}
    if kind == "full":
        adapter = None
    if kind == "modules_to_save":
        adapter = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens"]}
    sections = {"adapter": adapter, "model": {"config": LLAMA | {"tie_word_embeddings": tied}}}
    recipe = recipe_for("fsdp2" if tied else "zero3", tiny_root, **sections)
    group.run(train_job, resolved_from(recipe), 3, str(tmp_path / "run" / "checkpoints"), None, 6)
    export(tmp_path / "run", tmp_path / "out", merged=kind == "merged")
    folder = newest(tmp_path / "run" / "checkpoints")
    assert folder is not None
    alone = resolved_from(recipe | {"strategy": {"name": "single"}, "machine": {"device": "cpu"}, "batch": {}})
    live = trained_model(alone, folder, pad_token_id=0)
    ids = torch.arange(3, 23)[None]
    if kind in ("adapter", "modules_to_save"):
        loaded = PeftModel.from_pretrained(load_base(alone, pad_token_id=0), str(tmp_path / "out"))
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        base = load_base(alone, pad_token_id=0).eval()(input_ids=ids).logits
        expected, found = live(input_ids=ids).logits, loaded.eval()(input_ids=ids).logits
    assert not torch.allclose(base, expected, atol=1e-4), "training must have changed something"
    # merged weights are added up in float32: one rounding per weight more than the live adapter
    assert torch.allclose(found, expected, atol=1e-5 if kind == "merged" else 0.0, rtol=0)
