"""The toolkit's checkpoints, continued by DeepSpeed and by torch's FSDP as the real packages load them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_writers import (
    DECAY,
    LR,
    MODEL,
    Plan,
    _launched_for,
    make_model,
    make_optimizer,
    make_schedule,
    rows,
    zero_config,
)
from test_import_checkpoint import VOCAB, imported, recipe
from typer.testing import CliRunner

from jobs import resolved_from, train_job
from nights import nightly_but
from toolkit.api import export
from toolkit.cli import app
from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.training.finding import newest
from toolkit.verification.checkpoints.find import places, read

STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Loaded:
    """What the other package has after loading, and what one step of it makes."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=lambda: {key: {} for key in MOMENTS})
    steps: set[float] = field(default_factory=set)
    settings: list[tuple[float, float]] = field(default_factory=list)
    """Learning rate and weight decay of each group."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    position: tuple[int, int] = (0, 0)


def other_model(plan: Plan) -> Any:
    """Weights that are not those of the checkpoint."""
    model = make_model(plan)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def zero_job(folder: Path, stage: int) -> Loaded:
    """`deepspeed.initialize` and ``load_checkpoint`` with ``load_universal``, then a step."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

    _launched_for("DEEPSPEED")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plan = Plan(vocab=VOCAB, constant=True)
    model = other_model(plan)
    optimizer = make_optimizer(model, plan)
    schedule = make_schedule(optimizer, plan)
    config = zero_config(stage, plan) | {"checkpoint": {"load_universal": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    found = Loaded(position=(engine.global_steps, schedule.last_epoch))
    named = dict(engine.module.named_parameters())
    for name, parameter in named.items():
        found.weights[name] = safe_get_full_fp32_param(parameter).clone()
        for key in MOMENTS:
            found.moments[key][name] = safe_get_full_optimizer_state(parameter, key).clone()
    inner = engine.optimizer.optimizer
    for state in inner.state.values() if stage == 3 else ():  # docs/checkpoints.md
        state["step"] = torch.tensor(float(state["step"]))
    found.steps = {float(state["step"]) for state in inner.state.values()}
    found.settings = [(group["lr"], group["weight_decay"]) for group in inner.param_groups]
    ids = rows(STEPS, dist.get_rank())
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    found.gradients = {name: safe_get_full_grad(parameter).clone() for name, parameter in named.items()}
    engine.step()
    found.after = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named.items()}
    dist.barrier()
    return found


def fsdp_job(folder: Path, flat: bool) -> Loaded:
    """``fully_shard``, ``dcp.load`` and ``set_state_dict``, then a step. ``flat``: the optimizer's state is, too, and
    has other groups than the toolkit's."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    _launched_for("FSDP")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plan = Plan(vocab=VOCAB)
    model = other_model(plan)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model, plan)
    if flat:
        last = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [last], "weight_decay": 0.5})
    else:
        embedding = model.get_input_embeddings().weight
        first = optimizer.param_groups[0]
        others = [p for p in first["params"] if p is not embedding]
        groups = [{"params": [embedding]}, {"params": others}, {"params": optimizer.param_groups[1]["params"]}]
        optimizer = torch.optim.AdamW(groups, lr=0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    found = Loaded()
    for name, parameter in model.named_parameters():
        found.weights[name] = parameter.full_tensor().detach().clone()
        for key in MOMENTS:
            found.moments[key][name] = optimizer.state[parameter][key].full_tensor().clone()
        found.steps.add(float(optimizer.state[parameter]["step"]))
    found.settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    ids = rows(STEPS, dist.get_rank())
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        found.gradients[name] = parameter.grad.full_tensor().clone()
        found.after[name] = parameter.full_tensor().detach().clone()
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def trained(group: WorkerGroup, tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps under fsdp2, whose checkpoint is in pieces."""
    folder = tmp_path_factory.mktemp("trained")
    values = recipe(tiny_root, folder, "fsdp2")
    group.run(train_job, resolved_from(values), STEPS, str(folder / "checkpoints"), None, 20)
    return folder


def next_step(found: Loaded) -> dict[str, torch.Tensor]:
    """What torch's AdamW on whole tensors makes of the loaded state and the gradient of the step."""
    parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in found.weights.items()}
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": DECAY},
         {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0}], lr=LR,
    )  # fmt: skip
    for name, parameter in parameters.items():
        parameter.grad = found.gradients[name]
        state = {key: found.moments[key][name].clone() for key in MOMENTS}
        optimizer.state[parameter] = state | {"step": torch.tensor(float(STEPS))}
    optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def check(found: Loaded, checkpoint: Path) -> None:
    """Weights and moments are the checkpoint's, bit by bit; so is the next step that of torch."""
    ours = read(places(str(checkpoint))[-1])
    assert set(found.weights) == set(ours.weights)
    for name, weight in ours.weights.items():
        assert torch.equal(found.weights[name], weight.read()), name
        for key in MOMENTS:
            assert torch.equal(found.moments[key][name], ours.moments[key][name].read()), (name, key)
    assert found.steps == {STEPS}
    right = next_step(found)
    for name, weight in right.items():
        assert torch.equal(found.after[name], weight), name
        assert not torch.equal(weight, found.weights[name]), name


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("stage", nightly_but([1, 2, 3], 3))
def test_deepspeed_continues(stage: int, trained: Path, group: WorkerGroup, tmp_path: Path) -> None:
    done = export(trained, tmp_path / "out", format="deepspeed-universal")
    assert done.kind == "DeepSpeed universal checkpoint"
    found = group.run(zero_job, tmp_path / "out", stage)[0]
    assert found.position == (STEPS, STEPS)
    assert found.settings == [(LR, DECAY), (LR, 0.0)], "under ZeRO-3, too"
    check(found, trained)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("flat", [False, True])
def test_fsdp_continues(flat: bool, trained: Path, group: WorkerGroup, tmp_path: Path) -> None:
    export(trained, tmp_path / "out", format="torch")
    found = group.run(fsdp_job, tmp_path / "out", flat)[0]
    assert found.settings == [(LR, DECAY), *([(LR, 0.0), (LR, DECAY)] if flat else [(LR, DECAY), (LR, 0.0)])]
    check(found, trained)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("form", ["deepspeed-universal", "torch"])
def test_there_and_back(form: str, trained: Path, tiny_root: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "out", format=form)
    made = imported(tmp_path / "out", recipe(tiny_root, tmp_path / "run"))
    assert made.step == STEPS
    assert made.differences == ()
    before, after = read(places(str(trained))[-1]), read(places(str(made.folder))[-1])
    assert before.weights.keys() == after.weights.keys()
    for name in before.weights:
        assert torch.equal(before.weights[name].read(), after.weights[name].read())
        for key in MOMENTS:
            assert torch.equal(before.moments[key][name].read(), after.moments[key][name].read())


@pytest.mark.usefixtures("launches")
def test_an_adapter_there_and_back(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    adapter = {"method": "lora", "r": 4, "target_modules": ["q_proj"]}
    values = recipe(tiny_root, tmp_path / "run", "zero2", adapter=adapter, optimizer={"groups": []})
    group.run(train_job, resolved_from(values), STEPS, str(tmp_path / "run/checkpoints"), None, 20)
    for form in ("deepspeed-universal", "torch"):
        export(tmp_path / "run", tmp_path / form, format=form)
        again = values | {"run": values["run"] | {"output_dir": str(tmp_path / f"again {form}")}}
        made = imported(tmp_path / form, again)
        before, after = read(places(str(tmp_path / "run"))[-1]), read(places(str(made.folder))[-1])
        assert all(torch.equal(before.weights[name].read(), after.weights[name].read()) for name in before.weights)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("form", ["deepspeed-universal", "torch"])
def test_no_room_is_one_line_and_leaves_nothing(form: str, trained: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    try:
        with pytest.raises(RunFailed, match=r"out: cannot be written: File too large; free space there"):
            export(trained, tmp_path / "out", format=form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("launches")
def test_the_command_and_what_it_refuses(trained: Path, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    words = ["export", str(trained), "-o", str(tmp_path / "out"), "--format"]
    done = CliRunner().invoke(app, [*words, "torch"])
    assert done.exit_code == 0, done.output
    assert f"wrote {tmp_path / 'out'}: torch.distributed.checkpoint, step 3: weights and moments" in done.output
    with pytest.raises(InputError, match="already exists; choose a new folder"):
        CliRunner().invoke(app, [*words, "torch"], catch_exceptions=False)
    with pytest.raises(InputError, match="--format pickle: not known; use transformers, deepspeed-universal, torch"):
        export(trained, tmp_path / "new", format="pickle")
    with pytest.raises(InputError, match="--ema: not with --format torch"):
        export(trained, tmp_path / "new", format="torch", ema=True)
    values = recipe(tiny_root, tmp_path / "lion", "ddp", optimizer={"name": "lion"})
    group.run(train_job, resolved_from(values), 1, str(tmp_path / "lion/checkpoints"), None, 20)
    with pytest.raises(InputError, match=r"optimizer\.name: lion: only the moments of adamw can be exported"):
        export(tmp_path / "lion", tmp_path / "new", format="torch")
    assert not (tmp_path / "new").exists()
    assert newest(trained / "checkpoints") is not None


_PEAK = """
import json, sys
from pathlib import Path
from toolkit.api import export
import torch.distributed.checkpoint, transformers, accelerate
import toolkit.checkpoint_export.dcp as dcp
dcp.FILE_BYTES = 2**20  # a small part of a tensor here, as of the large ones of a large model
export(sys.argv[1], sys.argv[3] + "/tiny", format=sys.argv[4])  # everything is imported

def peak():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

before = peak()
export(sys.argv[2], sys.argv[3] + "/large", format=sys.argv[4])
print(json.dumps(peak() - before))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["deepspeed-universal", "torch"])
def test_memory_is_that_of_one_tensor(form: str, trained: Path, tiny_root: Path, tmp_path: Path) -> None:
    """Five weights of 16 MiB, each with two moments."""
    large = MODEL | {"vocab_size": 65_536, "hidden_size": 64, "intermediate_size": 65_536, "num_hidden_layers": 1}
    values = recipe(tiny_root, tmp_path / "run", model={"config": large}, data={"max_length": 16})
    train_job(resolved_from(values), 1, str(tmp_path / "run/checkpoints"), None, 20)
    (tmp_path / "out").mkdir()
    words = [str(trained), str(tmp_path / "run"), str(tmp_path / "out"), form]
    # glibc keeps freed blocks of less than 32 MiB; those of a large model it gives back, and here these, too.
    kept = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", _PEAK, *words], capture_output=True, text=True, check=False, env=kept)
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout.splitlines()[-1]) / (4 * 65_536 * 64)
    assert 0.5 < held < 2.5, held  # a tensor, and the one before
    written = sum(path.stat().st_size for path in (tmp_path / "out/large").rglob("*") if path.is_file())
    assert written / (4 * 65_536 * 64) == pytest.approx(15, rel=0.03)
