"""``model.kernels: liger`` with a stand-in for liger_kernel: what is refused, replaced, counted and left as it was."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import every_case
from families import EVERY_FAMILY
from jobs import resolved_from, train_job
from media import SEEING
from tiny import LLAMA, recipe_dict
from toolkit import import_config
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.launch.job import check_machine
from toolkit.launch.training_args import training_args
from toolkit.options.liger import spec
from toolkit.options.liger.apply import Replaced, replaced
from toolkit.options.liger.evidence import kernel_claim
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.training.preparation import prepare_model
from toolkit.verification.compare.arithmetic import why_measured
from toolkit.verification.run import verify

OPERATORS = """
import torch

calls = {"norms": 0, "mlps": 0, "rotations": 0}

def count(name, x):
    calls[name] += not hasattr(x, "fake_mode")  # a forward without values comes before training

class LigerRMSNorm:
    def forward(self, x):
        count("norms", x)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

class LigerSwiGLUMLP:
    def forward(self, x):
        count("mlps", x)
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

def rotate(q, k, cos, sin, unsqueeze_dim=1):
    count("rotations", q)
    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
    return turned(q), turned(k)
"""
MONKEY_PATCH = """
def apply_liger_kernel_to_llama(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True,
                                swiglu=True, model=None):
    from transformers.models.llama import modeling_llama
    from liger_kernel.operators import LigerRMSNorm, LigerSwiGLUMLP, rotate
    assert not cross_entropy and not fused_linear_cross_entropy and rope and rms_norm and swiglu
    modeling_llama.apply_rotary_pos_emb = rotate
    modeling_llama.LlamaRMSNorm = LigerRMSNorm
    modeling_llama.LlamaMLP = LigerSwiGLUMLP
    for module in model.modules():
        own = {"RMSNorm": LigerRMSNorm, "MLP": LigerSwiGLUMLP}.get(type(module).__name__.removeprefix("Llama"))
        if own is not None:
            module.forward = own.forward.__get__(module)

def apply_liger_kernel_to_nemotron(relu_squared=True, model=None):
    raise AssertionError

def apply_liger_kernel_to_mistral(rope=True, rms_norm=True, swiglu=True, model=None):
    pass

MODEL_TYPE_TO_APPLY_LIGER_FN = {
    "llama": apply_liger_kernel_to_llama,
    "mistral": apply_liger_kernel_to_mistral,
    "nemotron": apply_liger_kernel_to_nemotron,
}
"""
EVERYTHING = Replaced(norms=5, mlps=2, rotations=2)


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package by the name of liger_kernel, with torch's operators for Llama."""
    files = {
        "liger_kernel/__init__.py": "",
        "liger_kernel/operators.py": OPERATORS,
        "liger_kernel/transformers/__init__.py": "",
        "liger_kernel/transformers/monkey_patch.py": MONKEY_PATCH,
        "liger_kernel-0.0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0.0.1\n",
    }
    for name, text in files.items():
        (tmp_path / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "packages" / name).write_text(text, encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    spec.liger_arguments.cache_clear()
    yield
    spec.liger_arguments.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def resolved(root: Path, kernels: str = "liger", device: str = "cuda", **sections: Any) -> Resolved:
    own = {"strategy": {"name": "single"}, "machine": {"device": "auto", "processes": 1}}
    values = recipe_dict(root, **(own | sections))
    values["model"]["kernels"] = kernels
    return resolve(Recipe.model_validate(values), "r", device=device)


def gradients(model: Any) -> list[torch.Tensor]:
    ids = torch.randint(3, 200, (2, 11), generator=torch.Generator().manual_seed(2))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@every_case(
    ("sections", "reason"),
    [
        ({"compile": True}, "compiled blocks fuse themselves; set torch, or compile: false"),
        ({"activation_checkpointing": "selective"}, "would rotate them twice; set activation_checkpointing: full"),
        ({"strategy": {"name": "ddp", "mesh": {"context": 2}}, "machine": {"processes": 2}}, "beside strategy.mesh"),
        ({"model": {"config": EVERY_FAMILY["gpt2"]["config"]}}, "model type gpt2 in liger-kernel 0.0.1; set torch"),
        ({"model": {"config": {"model_type": "nemotron"}}}, "no kernels for model type nemotron in liger-kernel 0.0.1"),
        ({"model": {"config": LLAMA | {"hidden_act": "gelu"}}}, "computes silu in MLPs, but this model's activation"),
    ],
)
def test_refused_at_once(sections: dict[str, Any], reason: str, tmp_path: Path, liger: None) -> None:
    with pytest.raises(InputError, match=rf"^r: model\.kernels: liger .*{reason}"):
        resolved(tmp_path, **sections)


def test_models_of_images_are_refused(tmp_path: Path, liger: None) -> None:
    model = {"config": SEEING["qwen3_vl"], "task": "image-text-to-text"}
    with pytest.raises(InputError, match="torch's own LayerNorm for models of images"):
        resolved(tmp_path, model=model, data={"format": "messages"})


def test_the_package_that_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "_package", lambda: None)
    spec.liger_arguments.cache_clear()
    asked = resolved(tmp_path)  # plans and launch files need no package
    message = "r: model.kernels: liger: liger-kernel is not installed; pip install liger-kernel, or set torch"
    with pytest.raises(InputError, match=message):
        check_machine(asked)
    with pytest.raises(InputError, match=message):
        prepare_model(asked)
    spec.liger_arguments.cache_clear()


@pytest.mark.usefixtures("launches")
def test_a_cpu_trains_without_and_verifies_with_torchs_operators(tiny_root: Path, liger: None) -> None:
    model = {"kernels": "liger", "attention": "flash_attention_2"}
    asked = resolved_from(recipe_dict(tiny_root, strategy={"name": "single"}, machine={"processes": 1}, model=model))
    message = r"model\.kernels: liger: its kernels are for GPUs alone.*; set machine\.device: cuda, or set torch"
    with pytest.raises(InputError, match=message):
        check_machine(asked)
    with pytest.raises(InputError, match=r"r.*: model\.attention: flash_attention_2 cannot be used: .*; or set sdpa"):
        prepare_model(asked)
    with pytest.raises(InputError, match=message):
        prepare_model(resolved_from(recipe_dict(tiny_root, model={"kernels": "liger"})))
    with WorkerGroup(1) as group:
        outcome = verify(asked, group=group, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure)
    assert [note.partition(": verified with")[0] for note in outcome.notes] == [
        "model.kernels: liger",
        "model.attention: flash_attention_2",
    ]
    assert (outcome.resolved.recipe.model.kernels, outcome.twin.recipe.model.kernels) == ("liger", "torch")


def test_this_model_alone_is_changed(tmp_path: Path, liger: None) -> None:
    from transformers.models.llama import modeling_llama

    names = dict(vars(modeling_llama))
    right = gradients(prepare_model(resolved(tmp_path, "torch")).model)
    prepared = prepare_model(resolved(tmp_path))
    assert prepared.options["liger"] == EVERYTHING
    found = gradients(prepared.model)
    from liger_kernel.operators import calls  # type: ignore[import-not-found]

    assert calls == dataclasses.asdict(EVERYTHING)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert vars(modeling_llama) == names
    again = prepare_model(resolved(tmp_path, "torch")).model
    assert replaced(again) == Replaced()
    gradients(again)
    assert calls == dataclasses.asdict(EVERYTHING)


def test_recomputed_blocks_and_adapters_run_them(tmp_path: Path, liger: None) -> None:
    adapter = {"method": "lora", "r": 4, "modules_to_save": ["norm"]}
    prepared = prepare_model(resolved(tmp_path, adapter=adapter, activation_checkpointing="full"))
    gradients(prepared.model)
    from liger_kernel.operators import calls

    assert calls == {"norms": 4 * 2 + 1, "mlps": 2 * 2, "rotations": 2 * 2}
    assert kernel_claim(prepared.model, EVERYTHING).ok
    saved = prepared.model.get_submodule("base_model.model.model.norm.modules_to_save.default")
    assert saved.weight.grad is not None


def test_what_is_not_in_the_model_that_trains_fails_the_claim(tmp_path: Path, liger: None) -> None:
    model: Any = prepare_model(resolved(tmp_path)).model
    del model.model.layers[1].self_attn.forward
    claim = kernel_claim(model, EVERYTHING)
    assert (claim.ok, claim.seen) == (False, "5 norms, 2 MLPs, 1 rotary embeddings")
    assert not kernel_claim(model, Replaced()).ok


def test_a_model_of_which_nothing_is_replaced_is_refused(tmp_path: Path, liger: None) -> None:
    with pytest.raises(InputError, match=r"liger: liger-kernel 0\.0\.1 replaces nothing in mistral; set torch"):
        prepare_model(resolved(tmp_path, model={"config": LLAMA | {"model_type": "mistral"}}))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
@pytest.mark.usefixtures("launches")
def test_runs_claim_it(strategy: str, tiny_root: Path, liger: None) -> None:
    """On a CPU, where the stand-in runs and Liger does not."""
    values = recipe_dict(tiny_root, strategy={"name": strategy}, model={"kernels": "liger"})
    plain = recipe_dict(tiny_root, strategy={"name": strategy})
    with WorkerGroup(2) as group:
        found, right = group.run(_job, values)[0], group.run(_job, plain)[0]
    assert ("operators of liger_kernel", True) in found.claims
    assert found.losses == pytest.approx(right.losses, rel=1e-5)


def _job(values: dict[str, Any]) -> Any:
    from toolkit.options.liger import apply

    apply.why_no_liger = lambda device: None
    return train_job(resolved_from(values), 2)


def test_a_verdicts_tolerance_is_measured(tmp_path: Path, liger: None) -> None:
    """Interpreted, on a CPU, where the plain loop's operations would else be the candidate's to the bit."""
    asked = dataclasses.replace(resolved(tmp_path), device="cpu")
    assert why_measured(asked, [], 300) == "Liger's kernels may compute in another order"
    assert why_measured(dataclasses.replace(resolved(tmp_path, "torch"), device="cpu"), [], 300) is None


def test_explained_planned_and_handed_to_the_trainer(tmp_path: Path, liger: None) -> None:
    from toolkit.planning.candidate import Candidate

    asked = resolved(tmp_path)
    [decision] = [one for one in asked.decisions if one.key == "model.kernels"]
    assert "in training_args.json as use_liger_kernel" in decision.reason
    arguments = training_args(asked)
    assert arguments["use_liger_kernel"] is True
    config = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    assert arguments["liger_kernel_config"] == config
    fused = training_args(resolved(tmp_path, loss="fused"))
    assert fused["liger_kernel_config"] == config | {"fused_linear_cross_entropy": True}
    assert "use_liger_kernel" not in training_args(resolved(tmp_path, "torch"))
    candidate = Candidate.__new__(Candidate)
    object.__setattr__(candidate, "resolved", asked)
    assert "norms, MLPs and rotary embeddings from liger_kernel" in candidate.unmeasured


@every_case(
    ("file", "kernels", "loss"),
    [
        ("trl.yaml", "liger", "fused"),
        ("trl-no-loss.yaml", "liger", "plain"),
        ("trl-cpu.yaml", "torch", "plain"),
        ("trl-gemma2.yaml", "torch", "plain"),
        ("axolotl.yaml", "liger", "fused"),
        ("axolotl-rope.yaml", "torch", "plain"),
        ("llamafactory.yaml", "liger", "fused"),
    ],
)
def test_imported(file: str, kernels: str, loss: str, tmp_path: Path, liger: None) -> None:
    model = tmp_path / "model"
    model.mkdir()
    family = "gemma2" if "gemma2" in file else "llama"
    (model / "config.json").write_text(json.dumps(EVERY_FAMILY[family]["config"]), encoding="utf-8")
    text = FILES[file.partition("-")[0].removesuffix(".yaml")].replace("MODEL", str(model)) + CHANGES.get(file, "")
    (tmp_path / file).write_text(text, encoding="utf-8")
    found = import_config([str(tmp_path / file)], ["data.train=data.jsonl", "data.format=text"])
    assert found.recipe is not None, found.blocks
    assert (found.recipe.model.kernels, found.recipe.loss) == (kernels, loss)
    assert not [key for key in found.keys if "liger" in key.key and key.lost]


FILES = {
    "trl": "model_name_or_path: MODEL\ndataset_name: data.jsonl\nmax_steps: 3\nuse_liger_kernel: true\n",
    "axolotl": "base_model: MODEL\ndatasets:\n  - path: data.jsonl\n    type: completion\nmax_steps: 3\n"
    "sequence_len: 32\nmicro_batch_size: 1\nlearning_rate: 0.001\noptimizer: adamw_torch\n"
    "lr_scheduler: cosine\nliger_rope: true\n",
    "llamafactory": "model_name_or_path: MODEL\nstage: sft\ndo_train: true\ndataset: data\ntemplate: llama3\n"
    "max_steps: 3\nenable_liger_kernel: true\n",
}
PLUGIN = "plugins:\n  - axolotl.integrations.liger.LigerPlugin\n"
CHANGES = {
    "trl-no-loss.yaml": "liger_kernel_config:\n  fused_linear_cross_entropy: false\n",
    "trl-cpu.yaml": "use_cpu: true\n",
    "axolotl.yaml": PLUGIN
    + "liger_rms_norm: true\nliger_glu_activation: true\nliger_fused_linear_cross_entropy: true\n",
    "axolotl-rope.yaml": PLUGIN,
}
