"""On a rank: runs steps of the toolkit's own training loop, timed around the loop's calls."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.benchmark.rows import Rows, full_rows
from toolkit.data.collate import MicroBatch
from toolkit.data.loader import TrainLoader, open_data
from toolkit.model.processor import load_processor, pad_token_of
from toolkit.planning.live import LiveBytes
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.strategies.engines.connect import make_accelerator
from toolkit.strategies.engines.process_group import take_device
from toolkit.training import loop
from toolkit.training.loop import Progress
from toolkit.training.metrics import Pending
from toolkit.training.session import Session, engage

PHASES = ("loader", "forward", "backward", "optimizer", "host")
"""``optimizer``: clipping, AdamW and the strategy's work on it. ``host``: the loop itself, and the rest."""


@dataclass
class Turn:
    """Measurements of one rank in one turn of a cell.

    ``seconds``: of each timed step; ``phases``: of all of them together, measured on the host (on a GPU: host time, not
    device time).
    """

    seconds: list[float] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    row_tokens: list[int] = field(default_factory=list)
    rows: Rows = field(default_factory=Rows)
    flops: list[float | None] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    out_of_memory: str | None = None
    profile: dict[str, Any] | None = None


@dataclass(frozen=True)
class Order:
    """What a turn shall do. ``steps`` are timed, after ``warmup`` that are not. ``full``: rows of max_length random
    tokens instead of the recipe's data. ``counted``: count the bytes of every storage, which slows each operation."""

    recipe: dict[str, Any]
    source: str
    device: str
    steps: int
    warmup: int
    full: bool = False
    counted: bool = False
    limit: int | None = None
    """Bytes over which memory counts as exhausted. On a GPU it is so in earnest; elsewhere with ``counted``."""
    trace: str | None = None
    """Where rank 0 writes a Perfetto trace of two more steps."""


def turn_job(order: Order) -> Turn:
    """Train ``order.warmup + order.steps`` steps; every rank calls it. Out of memory is an answer, not an error."""
    linear = torch.nn.functional.linear
    try:
        return _Run(order).turn()
    finally:
        # DeepSpeed 0.19.8 puts its own in this place for ZeRO-3, and leaves it there for whatever trains next.
        torch.nn.functional.linear = linear
        gc.collect()
        if order.device == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _limited(device: torch.device, limit: int | None) -> Iterator[None]:
    """Give this process ``limit`` bytes of its GPU's memory, and all of it again to the next cell."""
    if limit is None:
        yield
        return
    share = limit / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class _Run:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.resolved = resolve(Recipe.model_validate(order.recipe), order.source, device=order.device)
        self.found = Turn()
        self.timed = order.warmup == 0
        self.done = 0
        self.inside = 0.0  # seconds of this step spent in a named phase

    def turn(self) -> Turn:
        order = self.order
        cuda = order.device == "cuda"
        device = take_device(order.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        counter = LiveBytes(limit=order.limit) if order.counted and not cuda else None
        try:
            with counter or contextlib.nullcontext(), _limited(device, order.limit if cuda else None):
                self._train()
        except torch.OutOfMemoryError as error:
            self.found.out_of_memory = str(error).splitlines()[0]
        if cuda:
            self.found.peak_allocated = torch.cuda.max_memory_allocated(device)
            self.found.peak_reserved = torch.cuda.max_memory_reserved(device)
        elif counter is not None:
            self.found.peak_allocated = counter.peak
        return self.found

    def _train(self) -> None:
        order, resolved = self.order, self.resolved
        tokenizer = None if order.full else load_processor(resolved.recipe)
        pad = None if tokenizer is None else pad_token_of(tokenizer)
        session = engage(resolved, make_accelerator(resolved), tokenizer, 0 if order.full else pad)
        windows = self._watched_windows(self._windows(session), session)
        progress, total = Progress(), order.warmup + order.steps
        with self._watching(session):
            self.begun = time.perf_counter()
            loop.train(session, windows, total, progress, self._after)
            if order.trace is not None:
                from toolkit.benchmark.profile import profiled

                train = lambda: loop.train(session, windows, total + 2, progress, self._after)  # noqa: E731
                self.found.profile = profiled(train, session, Path(order.trace))

    def _windows(self, session: Session) -> Iterable[list[MicroBatch]]:
        resolved = self.resolved
        if self.order.full:
            return full_rows(resolved, session.engine.config, session.rank)
        return TrainLoader.of(resolved, open_data(resolved.recipe, "train", session.tokenizer), session.rank)

    def _watched_windows(self, windows: Iterable[list[MicroBatch]], session: Session) -> Iterator[list[MicroBatch]]:
        source = iter(windows)
        first, last = self.order.warmup, self.order.warmup + self.order.steps
        for at in itertools.count():
            # On a GPU a step's window is read while the step before it is still being timed.
            with self._phase("loader"):
                window = next(source)
            if first <= at < last:
                rows = Rows.of(window)
                self.found.rows += rows
                self.found.supervised.append(sum(micro.supervised for micro in window))
                self.found.row_tokens.append(sum(micro.row_tokens for micro in window))
                flops = model_flops(session, self.resolved, rows)
                # Of those that compute the same rows each counts its share.
                sharing = self.resolved.mesh.context * self.resolved.ranks_per_part
                self.found.flops.append(None if flops is None else flops / sharing)
            yield window

    def _after(self, pending: Pending) -> None:
        self._wait()
        if self.timed:
            now = time.perf_counter()
            self.found.seconds.append(now - self.begun)
            self.found.phases["host"] += now - self.begun - self.inside
            tokens = pending.tokens.item()
            self.found.losses.append(pending.loss_sum.item() / tokens if tokens else None)
        self.done += 1
        self.timed = self.order.warmup <= self.done < self.order.warmup + self.order.steps
        self.begun, self.inside = time.perf_counter(), 0.0

    def _wait(self) -> None:
        if self.order.device == "cuda":
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with torch.profiler.record_function(f"toolkit {name}"):
            yield
        if self.timed:
            spent = time.perf_counter() - started
            self.found.phases[name] += spent
            self.inside += spent

    @contextlib.contextmanager
    def _watching(self, session: Session) -> Iterator[None]:
        engine: Any = session.engine
        right_loss = loop.loss_sum

        def phase(call: Callable[..., Any], name: str) -> Callable[..., Any]:
            def watched(*args: Any) -> Any:
                with self._phase(name):
                    return call(*args)

            return watched

        loop.loss_sum = phase(right_loss, "forward")
        engine.backward = phase(engine.backward, "backward")
        engine.step = phase(engine.step, "optimizer")
        try:
            yield
        finally:
            loop.loss_sum = right_loss
            del engine.backward, engine.step


def model_flops(session: Session, resolved: Resolved, rows: Rows) -> float | None:
    """Floating point operations that a step's tokens need, without padding and without recomputation.

    Two for each weight and token forward (the input embedding is looked up, not multiplied), as many for the gradient
    of what goes in, and as many for the gradient of each weight that trains (Kaplan et al., arXiv:2001.08361, section
    2.1). Attention: four for each pair of tokens and channel, and twice that backward; only pairs that may attend.
    None if the weights that a token meets are not all (mixtures of experts) or a config does not say.
    """
    config: Any = session.engine.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    width, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    heads = getattr(text, "num_attention_heads", None)
    if width is None or layers is None or heads is None or getattr(config, "is_encoder_decoder", False):
        return None
    embedding = 0 if getattr(text, "tie_word_embeddings", False) else text.vocab_size * width
    weights = session.weights - embedding
    trained = sum(math.prod(shape) for shape in session.engine.shapes.values())
    channels = heads * (getattr(text, "head_dim", None) or width // heads)
    return rows.tokens * (4.0 * weights + 2.0 * min(trained, weights)) + 3 * 4.0 * rows.pairs * channels * layers
