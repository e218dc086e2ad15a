"""Norms by group are those of whole tensors under every strategy, and runs that do not ask for them have none."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import loader_for, resolved_from
from tiny import LLAMA, recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.launch.identity import identity
from toolkit.recipe.resolve import Resolved
from toolkit.training.loop import Progress, sum_over_ranks, train
from toolkit.training.metrics import MetricsLog, Pending
from toolkit.training.session import open_session

GROUPS = [{"match": "embed", "lr": 5e-3}, {"match": r"layers\.1\.", "weight_decay": 0.3}]


def recipe(root: Path, name: str, offload: str = "none", mesh: Any = None, **sections: Any) -> Resolved:
    strategy = {"name": name, "offload": offload, "mesh": mesh}
    made = recipe_dict(root, strategy=strategy, machine={"processes": 2}, **sections)
    made["optimizer"] |= {"groups": GROUPS}
    made["schedule"] = {"name": "constant", "warmup_steps": 0}
    made["run"] |= {"group_norms": True}
    return resolved_from(made)


def squares_job(resolved: Resolved, steps: int, folder: str) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """For each step the sums of squares by group out of whole tensors, and what was logged."""
    session = open_session(resolved)
    engine, rank = session.engine, session.accelerator.process_index
    right: list[torch.Tensor] = []
    step = engine.step
    group = {name: 0 if "embed" in name else 1 if "layers.1." in name else 2 for name in engine.shapes}

    def wrapped(lr: float) -> Any:
        before = {name: engine.full_weight(name).double() for name in engine.shapes}
        gradients = {name: engine.full_gradient(name) for name in engine.shapes}
        taken = step(lr)
        sums = torch.zeros(3, 3, dtype=torch.float64)
        for name, weight in before.items():
            if (gradient := gradients[name]) is not None:
                sums[0, group[name]] += gradient.double().norm().square()
            sums[1, group[name]] += (engine.full_weight(name).double() - weight).norm().square()
            sums[2, group[name]] += weight.norm().square()
        right.append(sums.sqrt())
        return taken

    engine.step = wrapped  # type: ignore[method-assign]
    path = Path(folder) / f"metrics-{rank}.jsonl"
    log = MetricsLog(path, sum_over_ranks)
    train(session, islice(loader_for(resolved, rank), steps), steps, Progress(), log.add)
    log.flush()
    log.close()
    return right, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        pytest.param("ddp", {}, marks=pytest.mark.nightly),
        ("ddp", {"mesh": {"pipeline": 2}, "model": {"config": LLAMA | {"tie_word_embeddings": True}}}),
        pytest.param("zero1", {"precision": "bf16"}, marks=pytest.mark.nightly),
        ("zero2", {"precision": "bf16"}),
        pytest.param("zero3", {"precision": "bf16"}, marks=pytest.mark.nightly),
        ("fsdp1", {"precision": "bf16"}),
        pytest.param("fsdp2", {"precision": "bf16"}, marks=pytest.mark.nightly),
        pytest.param("zero2", {}, marks=pytest.mark.nightly),
        pytest.param("zero3", {"offload": "all"}, marks=pytest.mark.nightly),
        pytest.param("zero1", {"precision": "bf16-pure"}, marks=pytest.mark.nightly),
    ],
)
def test_they_are_those_of_whole_tensors(
    strategy: str, sections: Any, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    resolved = recipe(tiny_root, strategy, **sections)
    right, lines = group.run(squares_job, resolved, 3, str(tmp_path))[0]
    assert len(lines) == 3
    for norms, line in zip(right, lines, strict=True):
        seen = torch.tensor([line[f"group_{kind}_norms"] for kind in ("grad", "update", "weight")], dtype=torch.float64)
        assert (norms > 0).all()
        # Both sum float32 squares, in other orders; an update is a difference of weights a thousand times larger.
        torch.testing.assert_close(seen, norms, rtol=1e-5, atol=0)
        assert line["group_lrs"] == pytest.approx([5e-3, resolved.recipe.optimizer.lr]), "of other stages too"
        assert line["grad_norm"] == pytest.approx(norms[0].norm().item(), rel=1e-4)


def test_norms_are_logged_where_they_are_asked_for(tmp_path: Path, tiny_root: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", lambda tensor: tensor)
    squares = torch.tensor([[4.0, float("inf")], [1.0, 0.0], [9.0, 16.0]])
    for found in (None, squares):
        one = torch.tensor(1.0)
        log.add(Pending(1, one, one, one, 0.1, False, None, found))
        [record] = log.flush()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not [key for key in lines[0] if key.startswith("group_")]
    assert lines[1]["group_grad_norms"] == [2.0, None]
    assert lines[1]["group_weight_norms"] == [3.0, 4.0]
    assert record.group_values()["update_norm_group_0"] == 1.0
    plain = recipe_dict(tiny_root, strategy={"name": "ddp"}, machine={"processes": 2})
    asked = resolved_from(plain | {"run": plain["run"] | {"group_norms": True}})
    same = identity(resolved_from(plain).recipe.model_dump(mode="json"))
    assert identity(asked.recipe.model_dump(mode="json")) == same, "a run may be resumed with them"
