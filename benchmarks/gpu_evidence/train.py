"""A few steps of the toolkit's own training loop on full rows of random tokens, in a worker: memory and time."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_evidence.cells import Setting
from benchmarks.gpu_evidence.meter import Meter, metered, release
from benchmarks.gpu_evidence.profile import top_kernels
from benchmarks.gpu_evidence.shapes import Values
from toolkit.data.collate import MicroBatch
from toolkit.model.sources import NotByPart
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.strategies.engines.connect import make_accelerator
from toolkit.training import loop, preparation
from toolkit.training.loop import Progress
from toolkit.training.metrics import Pending
from toolkit.training.session import Session, engage

WARM = 2
"""Steps that are not timed: kernels load, buffers and moments are made."""
_LEFT = 64 * 2**20
"""Bytes that a process may hold between cells (cuBLAS keeps 32 MiB)."""


def train_here(
    setting: Setting, resolved: Resolved, steps: int, *, by_phase: bool = False, profile: bool = False
) -> dict[str, Any]:
    """Train ``steps`` steps of a recipe in the one process; returns what it took.

    A GPU that runs out of memory is an answer (``out_of_memory``: the phase that it ran out after), not an error.
    Raises JobFailed for all else.
    """
    values = resolved.recipe.model_dump(mode="json", exclude_unset=True)
    group = setting.workers.one
    [found] = group.run(train_job, values, resolved.device, steps, by_phase, profile, timeout=setting.seconds)
    if found["out_of_memory"] is not None or found["left_bytes"] > _LEFT:
        group.close()  # the next cell starts on an empty device
    return found


def train_job(values: Values, device: str, steps: int, by_phase: bool, profile: bool) -> dict[str, Any]:
    """On the worker: see ``train_here``."""
    resolved = resolve(Recipe.model_validate(values), "recipe", device=device)
    with own_linear(), cheap_weights(), metered(device, by_phase) as meter:
        found = _Run(resolved, meter, by_phase, profile).train(steps)
    return found | meter.to_json() | {"left_bytes": release(device)}


class _Run:
    """One call of the loop, watched from around the calls that it makes itself."""

    def __init__(self, resolved: Resolved, meter: Meter, by_phase: bool, profile: bool) -> None:
        self.resolved, self.meter, self.profile = resolved, meter, profile
        self.by_phase = by_phase
        self.phase = "start"
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.kernels: list[dict[str, Any]] = []

    def train(self, steps: int) -> dict[str, Any]:
        ran_out = None
        try:
            self._train(steps)
        except torch.OutOfMemoryError:
            ran_out = self.phase
        tokens = self.resolved.global_size * (self.resolved.recipe.data.max_length - 1)
        seconds = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        timed = seconds[WARM - 1 :] if len(seconds) >= WARM else []
        median = statistics.median(timed) if timed else None
        return {
            "out_of_memory": ran_out,
            "losses": self.losses,
            "supervised_tokens_per_step": tokens,
            "seconds_by_step": seconds,
            "seconds_per_step": median,
            "tokens_per_second": tokens / median if median else None,
            "kernels": self.kernels,
        }

    def _train(self, steps: int) -> None:
        resolved = self.resolved
        session = engage(resolved, make_accelerator(resolved), None, 0)
        self._close("load")
        progress = Progress()
        with self._watched(session):
            # The step that is profiled comes last, so that it slows none of those that are timed.
            loop.train(session, full_rows(resolved, steps), steps, progress, self._after)
            if self.profile:
                rows = full_rows(resolved, 1)
                train = lambda: loop.train(session, rows, steps + 1, progress, lambda pending: None)  # noqa: E731
                self.kernels = top_kernels(train, resolved.device)

    def _close(self, phase: str) -> None:
        self.phase = phase
        if self.by_phase:
            self.meter.close(phase)

    def _after(self, pending: Pending) -> None:
        self.losses.append((pending.loss_sum / pending.tokens).item())  # waits for the step
        self.ends.append(time.perf_counter())

    @contextlib.contextmanager
    def _watched(self, session: Session) -> Iterator[None]:
        engine: Any = session.engine
        right_loss = loop.loss_sum

        def closing(call: Callable[..., Any], phase: str) -> Callable[..., Any]:
            def closed(*args: Any) -> Any:
                result = call(*args)
                self._close(phase)
                return result

            return closed

        loop.loss_sum = closing(right_loss, "forward")
        engine.backward = closing(engine.backward, "backward")
        engine.step = closing(engine.step, "step")
        try:
            yield
        finally:
            loop.loss_sum = right_loss
            del engine.backward, engine.step


def full_rows(resolved: Resolved, steps: int) -> Iterator[list[MicroBatch]]:
    """Windows whose rows all have ``max_length`` random tokens: the most that a micro-batch can take."""
    config = resolved.facts.config or {}
    length, micro_size = resolved.recipe.data.max_length, resolved.micro_size
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        window = []
        for micro in range(resolved.accumulation):
            ids = torch.randint(3, config["vocab_size"], (micro_size, length), generator=draw)
            tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
            numbers = list(range(micro_size))
            window.append(
                MicroBatch(tensors, numbers, micro_size * (length - 1), 0, step, micro, resolved.accumulation)
            )
        yield window


@contextlib.contextmanager
def own_linear() -> Iterator[None]:
    """DeepSpeed 0.19.8 puts its own linear in torch's place for ZeRO-3 and leaves it there for whatever trains next."""
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


@contextlib.contextmanager
def cheap_weights() -> Iterator[None]:
    """Models whose weights are one small table of random numbers over and over: drawing 8 billion of them takes
    minutes on one core, and neither memory nor time depends on which they are."""
    from transformers.initialization import no_init_weights

    right = preparation.load_base

    def load(
        resolved: Resolved, pad_token_id: int | None = None, *, empty: bool = False, by_part: bool = False
    ) -> torch.nn.Module:
        if by_part:
            raise NotByPart("its weights are a table of random numbers")
        with no_init_weights():
            model = right(resolved, pad_token_id, empty=empty)
        model.tie_weights()  # type: ignore[operator]  # left out with the initialisation
        _fill(model)
        return model

    preparation.load_base = load
    try:
        yield
    finally:
        preparation.load_base = right


@torch.no_grad()
def _fill(model: torch.nn.Module) -> None:
    table = torch.randn(2**12, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        if "norm" in name:
            flat.fill_(1.0)
            continue
        cast = table.to(flat.dtype)
        whole = flat.numel() // cast.numel()
        flat[: whole * cast.numel()].view(whole, cast.numel()).copy_(cast.expand(whole, -1))
        flat[whole * cast.numel() :].copy_(cast[: flat.numel() - whole * cast.numel()])
