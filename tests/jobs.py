"""What the tests run on the ranks of a process group, and the plain loop that it is held against."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.data.collate import MicroBatch
from toolkit.data.loader import TrainLoader, open_data
from toolkit.launch.group import WorkerGroup
from toolkit.model.processor import load_tokenizer
from toolkit.optim.schedule import learning_rate
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.reference.loop import PlainLoop
from toolkit.strategies import resolve
from toolkit.training import checkpoint
from toolkit.training.loop import Progress, counted_once, evaluate, sum_over_ranks, train
from toolkit.training.metrics import Pending
from toolkit.training.preparation import prepare_model
from toolkit.training.session import open_session, seed_micro_batch
from toolkit.verification.cases.case import compute_of


@dataclass
class Run:
    """What a run did, as far as tests ask."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    first_gradient: dict[str, torch.Tensor | None] = field(default_factory=dict)
    claims: list[tuple[str, bool]] = field(default_factory=list)
    frozen_dtypes: set[str] = field(default_factory=set)
    eval_loss: float | None = None


def resolved_from(recipe: dict[str, Any]) -> Resolved:
    return resolve(Recipe.model_validate(recipe), "recipe.yaml")


def assert_weights(run: Run, right: Run, atol: float = 1e-5, about: Any = "") -> None:
    """Both have the same weights by name, within 1e-5 and ``atol``."""
    assert run.weights.keys() == right.weights.keys(), about
    for name, weight in right.weights.items():
        assert torch.allclose(run.weights[name], weight, rtol=1e-5, atol=atol), (about, name)


def assert_goes_on(
    group: WorkerGroup, first: dict[str, Any], then: dict[str, Any], folder: Path, straight: Run | None = None
) -> None:
    """Two steps of recipe ``first``, which ``then`` resumes for two more, are the four of a run without interruption:
    ``straight``, or one of ``first``."""
    straight = straight or group.run(train_job, resolved_from(first), 4, None, None, 4)[0]
    group.run(train_job, resolved_from(first), 2, str(folder), None, 4)
    after = group.run(train_job, resolved_from(then), 2, None, str(next(folder.iterdir())), 4)[0]
    about = first["strategy"], then["strategy"]
    assert after.losses == pytest.approx(straight.losses[2:], rel=1e-5), about
    assert_weights(after, straight, 1e-6, about)


def loader_for(resolved: Resolved, rank: int, start: int = 0) -> TrainLoader:
    tokenizer = load_tokenizer(resolved.recipe)
    samples = open_data(resolved.recipe, "train", tokenizer)
    return TrainLoader.of(resolved, samples, rank, start)


def train_job(
    resolved: Resolved,
    steps: int,
    save_to: str | None = None,
    load_from: str | None = None,
    total: int | None = None,
    only: str = "",
) -> Run | None:
    """Train ``steps`` optimizer steps of a run of ``total``; rank 0 answers, with the whole tensors that have ``only``
    in their names."""
    session = open_session(resolved)
    engine = session.engine
    progress = checkpoint.load(session, Path(load_from)) if load_from else Progress()
    until = progress.step + steps
    run = Run(claims=[(claim.claim, claim.ok) for claim in session.claims])
    names = [name for name in engine.shapes if only in name]
    original = engine.step

    def step_after_reading(lr: float) -> Any:
        if not run.first_gradient:
            run.first_gradient = {name: engine.full_gradient(name) for name in names}
        return original(lr)

    engine.step = step_after_reading  # type: ignore[method-assign]

    def after(pending: Pending) -> None:
        loss = counted_once(sum_over_ranks(pending.loss_sum.double()), resolved)
        run.losses.append((loss / pending.tokens).item())
        run.norms.append(float(pending.grad_norm))
        run.skipped.append(pending.skipped)
        run.tokens.append(int(pending.tokens))
        if pending.step == until:
            raise StopIteration

    windows = iter(loader_for(resolved, session.accelerator.process_index, progress.step))
    with contextlib.suppress(StopIteration):
        train(session, windows, total or until, progress, after)
    if save_to:
        checkpoint.save(session, Path(save_to), progress)
    run.weights = {name: engine.full_weight(name) for name in names}
    for name in names:
        state = engine.full_state(name)
        if state:
            run.moments |= {f"{name}.{key}": moment for key, moment in state.moments.items()}
    return run if session.accelerator.is_main_process else None


def eval_job(resolved: Resolved, batches: list[list[MicroBatch]]) -> float:
    session = open_session(resolved)
    return evaluate(session, batches[session.accelerator.process_index]).loss


def overflow_job(resolved: Resolved) -> dict[str, Any] | None:
    """Two fp16 steps, the first with a loss scale that no gradient survives."""
    session = open_session(resolved)
    engine = session.engine
    assert engine.scaler is not None
    engine.scaler._init_scale = 2.0**40  # no float16 gradient survives this
    name = next(iter(engine.shapes))
    weights, skipped = [engine.full_weight(name)], []
    before = 2.0**40
    scales = []

    def after(pending: Pending) -> None:
        skipped.append(pending.skipped)
        weights.append(engine.full_weight(name))
        scales.append(engine.loss_scale)
        if len(skipped) == 1:
            engine.scaler.update(1024.0)

    progress = Progress()
    train(session, loader_for(resolved, session.accelerator.process_index), 2, progress, after)
    moved = [not a.equal(b) for a, b in pairwise(weights)]
    answer = {"skipped": skipped, "updates": progress.updates, "moved": moved, "halved": scales[0] < before}
    return answer if session.accelerator.is_main_process else None


def moved_whole_job(resolved: Resolved) -> list[int]:
    """Elements of the modules that are moved to the device as a whole while a session opens, and of the model."""
    from torch import nn

    moved: list[int] = []
    right = nn.Module.to

    def to(self: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        if torch._C._nn._parse_to(*arguments, **options)[0] is not None:  # a device, not only a dtype
            moved.append(sum(p.numel() for p in self.parameters()))
        return right(self, *arguments, **options)

    nn.Module.to = to  # type: ignore[method-assign]
    try:
        session = open_session(resolved)
    finally:
        nn.Module.to = right  # type: ignore[method-assign]
    return [max(moved, default=0), session.weights]


def flat_gradient_job(resolved: Resolved) -> tuple[int, int, int]:
    """After one FSDP1 backward: elements with a gradient and elements that train, of both ranks; all elements."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    session = open_session(resolved)
    engine = session.engine
    found: list[int] = []

    def count(lr: float) -> Any:
        units = FullyShardedDataParallel.fsdp_modules(engine.model)
        flat = [unit._handle.flat_param for unit in units if unit._handle is not None]
        # After the reduction a flat parameter's own gradient is the sharded one that its original parameters view.
        kept = sum(p._saved_grad_shard.numel() for p in flat if getattr(p, "_saved_grad_shard", None) is not None)
        kept = kept or sum(p.grad.numel() for p in flat if p.grad is not None)
        found.append(int(sum_over_ranks(torch.tensor(float(kept))).item()))
        raise StopIteration

    engine.step = count  # type: ignore[method-assign]
    with contextlib.suppress(StopIteration):
        train(session, loader_for(resolved, session.accelerator.process_index), 1, Progress(), lambda pending: None)
    trained = sum(math.prod(shape) for shape in engine.shapes.values())
    return found[0], trained, session.weights


def linear_job(resolved: Resolved) -> bool:
    """Whether torch's own linear is in place once a session is open."""
    open_session(resolved)
    return torch.nn.functional.linear.__module__ != "deepspeed.runtime.zero.linear"


def plain_run(resolved: Resolved, steps: int, total: int | None = None, *, as_strategy: bool = False) -> Run:
    """The same windows, all ranks' micro-batches one after another, through the plain loop: under autocast in 16 bits,
    or ``as_strategy``, which may compute with a 16-bit copy of the weights."""
    prepared = prepare_model(resolved, load_tokenizer(resolved.recipe).pad_token_id)

    def seed(step: int, micro: int, rank: int) -> None:
        seed_micro_batch(resolved.recipe.run.seed, step, micro, rank)

    computing = compute_of(resolved) if as_strategy else "autocast" if resolved.precision.mixed else "plain"
    loop = PlainLoop(prepared.model, resolved, prepared.decayed, seed, computing)
    apart = resolved.mesh.stage_size // resolved.data_size
    loaders = [iter(loader_for(resolved, part * apart)) for part in range(resolved.data_size)]
    run = Run()
    total = total or steps
    for step in range(steps):
        ranks = [next(loader) for loader in loaders]
        window = [(rank, micro) for rank, micros in enumerate(ranks) for micro in micros]
        tokens = sum(micro.supervised for _, micro in window)
        run.losses.append(sum(loop.backward(step, window)) / max(1, tokens))
        run.tokens.append(tokens)
        if not step:
            run.first_gradient = {name: loop.gradients.get(name) for name in loop.weights}
        recipe = resolved.recipe
        loop.update(learning_rate(recipe.schedule, recipe.optimizer.lr, step, resolved.warmup(total), total))
        run.norms.append(float(loop.norm))
    run.weights = {name: p.detach().clone() for name, p in loop.weights.items()}
    return run


def worst(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """The largest relative error of any one tensor, in the 2-norm, and whose it is."""
    assert found.keys() == expected.keys()
    errors = {}
    for name, want in expected.items():
        scale = want.double().norm().item()
        difference = (found[name].double() - want.double()).norm().item()
        errors[name] = difference / scale if scale else difference
    name = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    return errors[name], name
