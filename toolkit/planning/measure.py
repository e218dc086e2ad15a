"""Runs two optimizer steps of a recipe on random tokens, and measures memory and time: the reference for a plan."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.data.collate import bounds_of, drawn_features
from toolkit.data.formats import filler
from toolkit.model.head_loss import multiplied_by
from toolkit.model.loss_terms import LossTerms
from toolkit.optimizers import optimizer_kind
from toolkit.planning.images import Images
from toolkit.planning.live import LiveBytes
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.pooling import pooled_token
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of
from toolkit.strategies.engines.connect import make_accelerator
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED, Labels
from toolkit.training.average import evaluation_weights
from toolkit.training.loss import loss_sum
from toolkit.training.pipeline import run_window
from toolkit.training.preparation import prepare_model
from toolkit.training.session import divide


@dataclass
class Measured:
    """Peaks in bytes above what was alive before the model was made, by phase; ``seconds`` of each step."""

    peaks: dict[str, int] = field(default_factory=dict)
    resting: dict[str, int] = field(default_factory=dict)
    """Bytes alive when a phase had ended."""
    seconds: list[float] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The highest of the second step, when every buffer and moment is there."""
        return max(self.peaks[name] for name in self.peaks if name.startswith("step2."))


def measure(resolved: Resolved, length: int, steps: int = 2, track: bool = True) -> Measured:
    """Train ``steps`` steps of full rows of ``length`` tokens; every rank calls it.

    ``track``: count every storage, which slows each operation; without it only the time is meaningful.
    """
    accelerator = make_accelerator(resolved)
    found = Measured()
    linear = torch.nn.functional.linear
    try:
        _tracked(resolved, accelerator, length, steps, found, track)
    finally:
        # DeepSpeed 0.19.8 puts its own in this place for ZeRO-3, and leaves it there for whatever trains next.
        torch.nn.functional.linear = linear
    gc.collect()
    return found


def _tracked(resolved: Resolved, accelerator: Any, length: int, steps: int, found: Measured, track: bool) -> None:
    if track:
        with LiveBytes() as tracker:
            _train(resolved, accelerator, length, steps, found, tracker)
    else:
        _train(resolved, accelerator, length, steps, found, None)


def _train(
    resolved: Resolved, accelerator: Any, length: int, steps: int, found: Measured, tracker: LiveBytes | None
) -> None:
    def close(phase: str) -> None:
        if tracker is None:
            return
        gc.collect()
        found.resting[phase] = tracker.live
        found.peaks[phase] = tracker.reset_peak()

    prepared = prepare_model(resolved, pad_token_id=0)
    divide(prepared)
    close("load")
    engine = strategy_of(resolved).engine_for(resolved)(prepared, accelerator)
    del prepared
    close("engage")
    tensors = random_batch(engine.config, resolved, length, engine.device)
    terms, part = LossTerms.of(resolved.recipe), resolved.row_part(accelerator.process_index)
    task, bounds = resolved.recipe.model.task, bounds_of(tensors)
    weight = torch.full((), 1.0 / (resolved.micro_size * length), device=engine.device)
    for step in range(1, steps + 1):
        begun = time.perf_counter()
        if engine.pipeline is not None:
            _staged_window(engine, tensors, weight, resolved, terms)
            close(f"step{step}.window")
        for micro in range(resolved.accumulation if engine.pipeline is None else 0):
            last = micro == resolved.accumulation - 1
            with engine.accumulating(last):
                with engine.autocast(), multiplied_by(weight):
                    loss = loss_sum(engine.model, engine.config, tensors, task, terms, part, bounds)
                close(f"step{step}.forward{micro}")
                engine.backward(loss * weight, last)
            del loss
            close(f"step{step}.backward{micro}")
        engine.unscale()
        engine.step(resolved.lr)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        close(f"step{step}.step")
        if resolved.recipe.eval_interval and optimizer_kind(resolved.recipe.optimizer.name).averages:
            _evaluate(engine, tensors, resolved, terms, part)
            close(f"step{step}.evaluate")
        found.seconds.append(time.perf_counter() - begun)


def _staged_window(engine: Any, tensors: Any, weight: torch.Tensor, resolved: Resolved, terms: LossTerms) -> None:
    """The micro-batches of a step through the pipeline stages, as in `toolkit.training.loop.train`."""
    numbers = iter(range(resolved.accumulation))

    def forward(micro: Any) -> torch.Tensor:
        with engine.autocast(), multiplied_by(weight):
            return loss_sum(engine.model, engine.config, tensors, resolved.recipe.model.task, terms, None)

    def backward(loss: torch.Tensor, micro: Any) -> None:
        engine.backward(loss * weight, next(numbers) == resolved.accumulation - 1)

    run_window(engine.pipeline, itertools.repeat(tensors), resolved.accumulation, forward, backward)
    engine.pipeline.link.settle()


@torch.no_grad()
def _evaluate(engine: Any, tensors: Any, resolved: Resolved, terms: LossTerms, part: Any) -> None:
    """As `toolkit.training.loop.evaluate`, of one micro-batch."""
    engine.model.eval()
    with evaluation_weights(engine), engine.autocast():
        task = resolved.recipe.model.task
        loss_sum(engine.model, engine.config, tensors, task, terms, part, bounds_of(tensors))
    engine.model.train()


def random_batch(config: Any, resolved: Resolved, length: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Full rows of random tokens as the loss takes them: int64 (micro, length); packed, of several samples each; with
    an image each for models that see."""
    task = task_of(resolved.recipe.model.task)
    if task.media is not None and not task.media.tokens:
        tensors = drawn_features(task, config.to_dict(), resolved.micro_size, 0)
        most = config.num_labels if task.classes else int(config.vocab_size)
        size = (resolved.micro_size,) if task.labels is Labels.SAMPLE else (resolved.micro_size, length)
        tensors["labels"] = torch.randint(0, most, size)
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(text.vocab_size)
    shape = (resolved.micro_size, length)
    tensors = {
        "input_ids": torch.randint(0, vocabulary, shape, device=device),
        "attention_mask": torch.ones(shape, dtype=torch.int64, device=device),
    }
    if (images := Images.of(resolved, None, None)) is not None:
        seen = images.batch(config, task.name, resolved.micro_size, length)
        tensors |= {name: tensor.to(device) for name, tensor in seen.items()}
    most = config.num_labels if task.classes else vocabulary
    if (pooled := pooled_token(resolved.recipe, ModelFacts(config.to_dict(), resolved.facts.folder))) is not None:
        ids = tensors["input_ids"]
        ids[ids == pooled] = filler(pooled)
        ids[:, -1] = pooled
    size = shape[:1] if task.labels is Labels.SAMPLE else shape
    tensors["labels"] = torch.randint(0, most, size, device=device)
    if resolved.recipe.data.packing:
        begins = [0, length // 8, length // 4, length // 2]
        parts = [torch.arange(end - begin) for begin, end in zip(begins, [*begins[1:], length], strict=True)]
        tensors["position_ids"] = torch.cat(parts).repeat(resolved.micro_size, 1).to(device)
        tensors["labels"][:, begins] = IGNORED
        del tensors["attention_mask"]
    return tensors
