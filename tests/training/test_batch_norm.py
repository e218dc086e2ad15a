"""Batch normalisation over data-parallel ranks: its numbers, its running statistics, what a checkpoint keeps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases import every_case
from media import RESNET
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.model.checkpointing import checkpoint_blocks
from toolkit.model.load import cast_parameters
from toolkit.model.running_statistics import counting, from_first_rank, statistics
from toolkit.options.batch_norm.apply import BatchNorm, convert
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.strategies.engines.connect import make_accelerator
from toolkit.training import checkpoint
from toolkit.training.finding import whole_manifest
from toolkit.training.loop import Progress
from toolkit.training.preparation import prepare_model
from toolkit.training.session import engage
from toolkit.training.tensor_folder import read_index

FLOAT32 = 2e-6
"""Sums over the same values in another order, and torch's own fused formula."""

TIME_LIMIT = 600.0
"""Of a job, most of it the packages' import where other work has the machine."""


def resolved(strategy: str, **model: Any) -> Resolved:
    values = recipe_dict(
        Path("nowhere"),
        model={"config": RESNET, "task": "image-classification", "num_labels": 3, **model},
        data={"format": "image"},
        strategy={"name": strategy},
    )
    return resolve(Recipe.model_validate(values), "recipe.yaml", device="cpu")


def layer(mode: str = "synchronised") -> BatchNorm:
    torch.manual_seed(0)
    one = nn.BatchNorm2d(5)
    nn.init.normal_(one.weight)
    return BatchNorm(one, mode)


def rows(rank: int) -> torch.Tensor:
    """Another number of rows on each rank, far from mean 0 and variance 1."""
    draw = torch.Generator().manual_seed(10 + rank)
    return torch.randn(3 - rank, 5, 4, 4, generator=draw) * (rank + 1) + rank


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Not the sum of squares: that of normalised rows is a constant, and its gradient nothing but roundings."""
    return y.pow(3).sum()


def layer_job(mode: str, dummy: int | None = None) -> dict[str, torch.Tensor]:
    """A forward and a backward of this rank's rows; ``dummy``: the rank whose rows are none."""
    rank = int(os.environ["RANK"])
    make_accelerator(resolved("ddp"))
    one, x = layer(mode), rows(rank).requires_grad_()
    with counting(rank != dummy):
        y = one(x)
        (loss_of(y) * (rank != dummy) + 0.0 * y.sum()).backward()
    assert one.weight.grad is not None
    grads = torch.stack([one.weight.grad, one.bias.grad])
    dist.all_reduce(grads)
    return {"y": y.detach(), "dx": x.grad, "grads": grads, **statistics({"": one})}


def whole(*parts: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same by torch's own layer, over all rows in one process."""
    torch.manual_seed(0)
    one = nn.BatchNorm2d(5)
    nn.init.normal_(one.weight)
    x = torch.cat(parts).requires_grad_()
    y = one(x)
    loss_of(y).backward()
    grads = torch.stack([one.weight.grad, one.bias.grad])
    return {"y": y.detach(), "dx": x.grad, "grads": grads, **{f".{n}": b for n, b in one.named_buffers()}}


def close(seen: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((seen - right).abs().max() <= FLOAT32 * right.abs().max())


def test_it_is_torchs_layer_over_the_rows_of_all_ranks(group: WorkerGroup) -> None:
    found, right = group.run(layer_job, "synchronised", timeout=TIME_LIMIT), whole(rows(0), rows(1))
    for name in ("y", "dx"):
        assert close(torch.cat([one[name] for one in found]), right[name]), name
    for one in found:
        assert close(one["grads"], right["grads"])
        for name in (".running_mean", ".running_var", ".num_batches_tracked"):
            assert close(one[name], right[name]), name
    apart = group.run(layer_job, "local", timeout=TIME_LIMIT)
    assert not close(apart[0]["y"], found[0]["y"])


def test_rows_of_a_rank_without_samples_do_not_enter(group: WorkerGroup) -> None:
    found, right = group.run(layer_job, "synchronised", 1, timeout=TIME_LIMIT), whole(rows(0))
    assert close(found[0]["y"], right["y"])
    assert close(found[0]["dx"], right["dx"])
    assert found[1]["y"].isfinite().all()
    assert not found[1]["dx"].any()
    for one in found:
        assert close(one["grads"], right["grads"])
        assert close(one[".running_var"], right[".running_var"])


def test_a_window_has_statistics_of_each_micro_batch_never_of_all() -> None:
    one, plain = layer(), nn.BatchNorm2d(5)
    for part in (rows(0), rows(1)):
        one(part), plain(part)
    assert int(one.num_batches_tracked) == 2
    assert torch.equal(one.running_mean, plain.running_mean)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(5, 5, 3), nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


@every_case("kind", ["full", "selective"])
def test_recomputation_leaves_running_statistics_alone(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    plain = nn.Sequential(Block())
    plain.load_state_dict(model.state_dict())
    convert(model, "synchronised", "recipe.yaml")
    checkpoint_blocks([("0", model[0])], kind)
    for one in (model, plain):
        one(rows(0)).sum().backward()
    assert model[0].forward.calls == 2  # it was computed again
    for name, value in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], value), name
    assert torch.equal(model[0].conv.weight.grad, plain[0].conv.weight.grad)


@every_case("dtype", [torch.bfloat16, torch.float16])
def test_statistics_stay_float32_where_a_model_is_cast(dtype: torch.dtype) -> None:
    model = nn.Sequential(layer())
    model[0].running_mean.fill_(1 / 3)
    before = model[0].running_mean.clone()
    cast_parameters(model, dtype)  # as every strategy that computes in 16 bits
    assert model[0].weight.dtype == dtype
    assert torch.equal(model[0].running_mean, before)
    assert model[0].num_batches_tracked.dtype == torch.int64
    y = model(rows(0).to(dtype))
    assert y.dtype == dtype
    assert model[0].running_mean.dtype == torch.float32


def test_frozen_statistics_train_the_affine_weights_alone() -> None:
    one = layer("frozen")
    before = one.running_mean.clone()
    one(rows(0)).sum().backward()
    assert torch.equal(one.running_mean, before)
    assert one.weight.grad is not None
    assert one.weight.grad.any()


def statistics_job(case: Resolved, folder: str, save: bool) -> dict[str, torch.Tensor]:
    """Saved: statistics that differ by rank. Loaded: what each rank then has."""
    session = engage(case, make_accelerator(case), None, 0)
    rank = session.accelerator.process_index
    if not save:
        checkpoint.load(session, Path(folder) / "step-00000000")
        return session.engine.statistics()
    torch.manual_seed(rank)
    for value in statistics(session.engine.running).values():
        value.add_(torch.randint(1, 9, value.shape) if value.dtype == torch.int64 else torch.rand(value.shape))
    before = session.engine.statistics()
    checkpoint.save(session, Path(folder), Progress())
    from_first_rank(session.engine.running)
    after = session.engine.statistics()
    saved = Path(folder) / "step-00000000"
    _, beside = read_index(saved, whole_manifest(saved))
    assert set(before) <= set(beside)
    assert rank == 0 or not torch.equal(before[next(iter(before))], after[next(iter(after))])
    return after


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.nightly)])
def test_a_checkpoint_has_rank_0s_statistics_for_every_strategy(
    strategy: str, tmp_path: Path, group: WorkerGroup
) -> None:
    saved = group.run(statistics_job, resolved("fsdp2", batch_norm="local"), str(tmp_path), True, timeout=TIME_LIMIT)
    loaded = group.run(statistics_job, resolved(strategy, batch_norm="local"), str(tmp_path), False, timeout=TIME_LIMIT)
    assert saved[0]
    assert all(value.dtype in (torch.float32, torch.int64) for value in saved[0].values())
    for one in (saved[1], *loaded):
        assert one.keys() == saved[0].keys()
        assert all(torch.equal(one[name], value) for name, value in saved[0].items())


def test_the_recipe_says_which(tmp_path: Path) -> None:
    made = {one.key: one for one in resolved("ddp").decisions}
    assert made["model.batch_norm"].value == "synchronised"
    with_adapter = recipe_dict(tmp_path, model={"config": RESNET, "task": "image-classification", "num_labels": 3},
                               data={"format": "image"}, adapter={"target_modules": ["convolution"]})  # fmt: skip
    case = resolve(Recipe.model_validate(with_adapter), "recipe.yaml", device="cpu")
    made = {one.key: one for one in case.decisions}
    assert made["model.batch_norm"].value == "frozen"
    with_adapter["model"]["batch_norm"] = "local"
    with pytest.raises(InputError, match=r"model\.batch_norm: local: an adapter is saved without"):
        resolve(Recipe.model_validate(with_adapter), "recipe.yaml", device="cpu")


def test_what_has_no_use_for_it_or_no_form_of_it_is_refused(tmp_path: Path) -> None:
    values = recipe_dict(tmp_path, model={"config": LLAMA, "batch_norm": "frozen"})
    case = resolve(Recipe.model_validate(values), "recipe.yaml", device="cpu")
    assert "model.batch_norm" not in {one.key for one in case.decisions}
    with pytest.raises(InputError, match=r"the model has no batch normalisation; remove the key"):
        prepare_model(case, 0)

    class Activated(nn.BatchNorm2d):
        pass

    with pytest.raises(InputError, match="0 is a Activated, batch normalisation of the model's own"):
        convert(nn.Sequential(Activated(3)), "synchronised", "recipe.yaml")
