"""Without a private name of another package the toolkit starts, `doctor` says it, and what needs it steps aside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_common

from cases import every_case
from signalled import TOOLKIT, write_recipe
from tiny import LLAMA
from toolkit.doctor import devices
from toolkit.errors import InputError, RunFailed
from toolkit.model import adapter_sources, by_part, checkpointing, compiling, drawing, empty, unreached
from toolkit.model.sources import NotByPart
from toolkit.strategies.engines.fsdp1 import Fsdp1Engine
from toolkit.strategies.engines.zero import ZeroEngine
from toolkit.upstream import deepspeed, replacement, replacements, torch_fsdp, transformers
from toolkit.upstream import torch as upstream
from toolkit.verification.scripts import calls

ROOT = Path(__file__).parents[2]
ASIDE = {"ProcessGroupGloo.__init__"} if Version(Version(torch.__version__).base_version) >= Version("2.14") else set()
"""What is left as it is by this torch, which gives the threads of gloo's groups names of their own."""
Hide = Callable[[pytest.MonkeyPatch], None]


def gone(owner: Any, *names: str) -> Hide:
    """Takes attributes away."""

    def hide(patch: pytest.MonkeyPatch) -> None:
        for name in names:
            patch.delattr(owner, name)

    return hide


def unwritten(*names: str) -> Hide:
    """Takes names out of the source that is read."""

    def hide(patch: pytest.MonkeyPatch) -> None:
        right = replacement.source_of

        def source_of(package: str, file: str) -> str | None:
            text = right(package, file) or ""
            for name in names:
                text = text.replace(name, "")
            return text

        patch.setattr(replacement, "source_of", source_of)

    return hide


def no_modes(patch: pytest.MonkeyPatch) -> None:
    gone(torch.utils._python_dispatch, "TorchDispatchMode")(patch)
    for module in (upstream, drawing, adapter_sources, checkpointing, empty):
        patch.setattr(module, "DispatchMode", upstream._Blind)


def no_counters(patch: pytest.MonkeyPatch) -> None:
    for module in (upstream, calls):  # torch's class is its library's, which lets nothing be taken away
        patch.setattr(module, "notices_changes", lambda: False)


def no_counts(patch: pytest.MonkeyPatch) -> None:
    gone(sys.modules["torch._dynamo.utils"], "counters")(patch)


def no_part(patch: pytest.MonkeyPatch) -> None:
    unwritten("_load_pretrained_model")(patch)
    gone(sys.modules["transformers"].PreTrainedModel, "_load_pretrained_model")(patch)


def no_operators(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.ops, "aten", SimpleNamespace())


# ---------------------------------------------------------------------- what is done without each


def block_is_recomputed_whole() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    checkpointing.checkpoint_blocks([("0", block)], "selective")
    block(torch.ones(1, 4)).sum().backward()
    assert checkpointing.recomputed_calls([("0", block)]) == [2]
    assert block[0].weight.grad is not None
    with pytest.raises(NotByPart), drawing.drawn(torch.float32):
        pass


def gradients_are_copied() -> None:
    one, gradient = SimpleNamespace(gradient=None), torch.ones(3)
    calls._arrived(one, [], gradient)
    gradient.zero_()
    assert one.gradient.tolist() == [1, 1, 1]


def weights_are_reached_with_values() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    recipe = SimpleNamespace(model=SimpleNamespace(task="causal-lm"), adapter=None)
    resolved: Any = SimpleNamespace(recipe=recipe)
    assert unreached.unreached(model, resolved) == []


def blocks_run_uncompiled() -> None:
    block = nn.Linear(2, 2)
    compiling.compile_blocks([("0", block)])
    assert block(torch.ones(1, 2)).shape == (1, 2)
    assert compiling.compilation().fell_back == compiling._NO_COMPILER


def groups_keep_their_limits() -> None:
    upstream.allow(timedelta(hours=1))
    assert upstream.shared_store() is None


def models_are_drawn_whole() -> None:
    with pytest.raises(NotByPart), drawing.drawn(torch.float32):
        pass


def product_is_the_same() -> None:
    values = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.5)
    found = upstream.float8_product(values, values.t(), scale, scale, torch.bfloat16, False)
    assert found.tolist() == [[4.0] * 16] * 16


def files_are_read_whole() -> None:
    with pytest.raises(NotByPart), by_part.recorded():
        pass


def engine_refuses(kind: type, stage: int = 0, *, names: str) -> None:
    engine: Any = object.__new__(kind)
    engine.resolved = SimpleNamespace(source="r.yaml", settings=SimpleNamespace(stage=stage))
    with pytest.raises(InputError, match=names):
        engine.engage(SimpleNamespace(model=None))


def refused(call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(InputError):
        call(*args)


def a_step_is_dropped_by_itself() -> None:
    bf16 = SimpleNamespace(clear_hp_grads=None)  # it has a method for it
    assert deepspeed.overflowing(bf16, "found", "dropped") == {"step": "dropped"}
    with pytest.raises(RunFailed, match="does not drop a step"):
        deepspeed.overflowing(SimpleNamespace(), "found", "dropped")


def nothing_is_said_of_a_model() -> None:
    model = nn.Linear(1, 1)
    assert transformers.not_quantised(model) is None
    assert transformers.loaded_in_float32(model, torch.bfloat16) == []
    assert transformers.not_saved(model) == set()


def attention_is_not_known() -> None:
    assert transformers.attention_of(SimpleNamespace()) is None


def nothing_is_dropped() -> None:
    transformers.drop_conversions(nn.Linear(1, 1), lambda one: True)


def no_limits(patch: pytest.MonkeyPatch) -> None:
    gone(distributed_c10d, "_set_pg_timeout", "_get_default_store")(patch)
    patch.delattr(torch.distributed, "set_timeout", raising=False)  # of torch 2.14


TABLE: list[tuple[str, Hide, Callable[[], None]]] = [
    ("TorchDispatchMode", no_modes, block_is_recomputed_whole),
    ("Tensor._version", no_counters, gradients_are_copied),
    ("FakeTensorMode", gone(torch._subclasses.fake_tensor, "FakeTensorMode"), weights_are_reached_with_values),
    ("torch._dynamo and torch._inductor", no_counts, blocks_run_uncompiled),
    ("timeouts and store of groups", no_limits, groups_keep_their_limits),
    ("torch.nn.init._no_grad_trunc_normal_", gone(nn.init, "_no_grad_trunc_normal_"), models_are_drawn_whole),
    ("torch._scaled_mm", gone(torch, "_scaled_mm"), product_is_the_same),
    ("a GPU's operators of attention", no_operators, partial(refused, upstream.gpu_attention, "flash_attention")),
    ("FSDP1's flat parameters", unwritten("_shard_param_infos"),
     partial(engine_refuses, Fsdp1Engine, names="use fsdp2")),
    ("ShardPlacementResult", gone(_fsdp_common, "ShardPlacementResult"),
     partial(refused, torch_fsdp.placed_on, SimpleNamespace(ndim=1))),
    ("fragments of ZeRO 1 and 2", unwritten("_hp_mapping"), partial(engine_refuses, ZeroEngine, 2, names="use zero3")),
    ("overflow of a step", unwritten("_overflow_check_and_loss_scale_update"), a_step_is_dropped_by_itself),
    ("groups of hpZ", unwritten("_ZERO_PARAM_INTRA_PARALLEL_GROUP"), deepspeed.forget_second_copies),
    ("PreTrainedModel._load_pretrained_model", no_part, files_are_read_whole),
    ("marks of a model's class", unwritten("_keys_to_ignore_on_save"), nothing_is_said_of_a_model),
    ("the attention that a model runs", unwritten("_attn_implementation"), attention_is_not_known),
    ("conversions that a model was loaded with", unwritten("_weight_conversions"), nothing_is_dropped),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _loaded() -> Iterator[None]:
    """What is taken away is there before, so that it comes back."""
    from transformers import PreTrainedModel

    assert upstream.compiler() is not None
    assert PreTrainedModel._load_pretrained_model
    yield
    compiling._NOW = compiling.Compilation()


def test_every_entry_is_needed_here_and_says_what_else_was_tried() -> None:
    found = replacements()
    assert {one.what for one in found} == {"ProcessGroupGloo.__init__"} | {what for what, *_ in TABLE}
    assert {one.what for one in found if one.absent()} == ASIDE
    table = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    rows = [f"| {one.package} | {one.what} | {one.why} | {one.public} | {one.without} |" for one in found]
    assert [row for row in rows if row not in table] == []
    assert all((one.why, one.seen, one.public, one.without) for one in found)


@every_case(("what", "hide", "unit"), TABLE, ids=[what for what, *_ in TABLE])
def test_without_a_name_doctor_says_so_and_the_rest_works(
    what: str, hide: Hide, unit: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [one for one in devices.replacements() if one.found.startswith(f"{what}: ")]
    hide(monkeypatch)
    [told] = [one for one in devices.replacements() if one.found.startswith(f"{what}: ")]
    assert told.status == "note"
    unit()


HIDDEN = """
import importlib.abc, json, os, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "toolkit.upstream.torch":
            from toolkit.upstream import replacement
            right, away = replacement.named, json.loads(os.environ["HIDDEN"])
            source = replacement.source_of
            hides = lambda path: any(one in path for one in away)
            replacement.named = lambda path: None if hides(path) else right(path)
            replacement.source_of = lambda *where: "".join(one for one in source(*where).split("\\n") if not hides(one))
        return None

sys.meta_path.insert(0, Hidden())
"""
WITHOUT = ("_python_dispatch", "distributed_c10d", "_inductor", "fake_tensor", "_load_pretrained_model", "_fsdp_common")


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """An environment in which those names are not there, in every process that is started."""
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "sitecustomize.py").write_text(HIDDEN, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path / "away"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "HIDDEN": json.dumps(WITHOUT), "OMP_NUM_THREADS": "1"}


IMPORTS = """
import importlib, pkgutil, toolkit
from toolkit.doctor import devices
for one in pkgutil.walk_packages(toolkit.__path__, "toolkit."):
    if not one.name.endswith("__main__"):
        importlib.import_module(one.name)
print(*(one.found for one in devices.replacements()), sep="\\n")
"""


def test_without_them_every_module_is_imported(hidden: dict[str, str], launches: None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=hidden, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(WITHOUT) + len(ASIDE), done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_without_them_a_strategy_is_proven(
    strategy: str, hidden: dict[str, str], tmp_path: Path, tiny_root: Path, launches: None
) -> None:
    write_recipe(tmp_path, tiny_root, strategy={"name": strategy}, activation_checkpointing="selective")
    command = [*TOOLKIT, "verify", "r.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=hidden, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equivalent" in done.stdout
