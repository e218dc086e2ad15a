"""The plain side of a recorded command: one process, torch and the model.

Every recorded call is made again, on the same weights, with the same inputs and random state. Its outputs are given the
gradient that reached them in the recorded run or, for `toolkit.Recorder`, that of the mean over all labels of the step.
What comes out is summed over micro-batches and ranks, and averaged as the strategy averages.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.verification.scripts.answers import answer
from toolkit.verification.scripts.cross_entropy import CallLoss, cross_entropy
from toolkit.verification.scripts.facts import SAMPLE, CallTrace, UnitTrace
from toolkit.verification.scripts.labels import labels_of, seed, supervised
from toolkit.verification.scripts.replay_device import set_generators
from toolkit.verification.scripts.sketch import sketch
from toolkit.verification.scripts.tree import named_tensors, unflatten

Tensors = dict[str, torch.Tensor]


@dataclass
class Contribution:
    """What one call adds to the gradient of a step, not yet averaged or unscaled: the sketches and 2-norms of its
    gradients, which are in the dtypes of the weights."""

    rank: int
    micro: int
    gradients: Tensors = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, float] = field(default_factory=dict)
    """By output: by how much the replayed one differs from the recorded one, relative; 0 where no bit differs."""
    loss: CallLoss | None = None
    tokens: int = 1
    """Its supervised tokens, where they are known."""


@dataclass(frozen=True)
class Summing:
    """How the gradients of a step's calls are added up. ``groups``: in parts, which are added up then: those of each
    "rank", of each "micro"-batch over the ranks, or "" for one after another. ``dtype``: in which they are rounded and
    summed, None: their own; averages of micro-batches are added up in float32. ``shuffled``: the seed of an order."""

    groups: str = "rank"
    dtype: torch.dtype | None = None
    shuffled: int | None = None


BY_RANK = Summing()


@dataclass
class StepGradient:
    """``calls``: by rank and micro-batch. ``total``: the gradient of the step, averaged and unscaled, whole, on the
    CPU."""

    calls: list[Contribution]
    total: Tensors


class Replay:
    """A rebuilt model and the calls of all ranks."""

    def __init__(self, model: nn.Module, ranks: Sequence[UnitTrace], device: torch.device, source: str) -> None:
        self.model, self.ranks, self.device, self.source = model, ranks, device, source
        facts = ranks[0].facts
        self._shaken: tuple[list[torch.Tensor], float, int] | None = None
        self._shake_losses: torch.Generator | None = None
        self._loss_by_sum = False
        self.names = ranks[0].trace.trainable
        self.dtypes = {name: weight.dtype for name, weight in ranks[0].trace.run.weights.items()}
        live = dict(model.named_parameters())
        if missing := [name for name in self.names if name not in live]:
            raise InputError(f"{source}: {missing[0]} trains, and is not a parameter of the recorded model")
        for name, parameter in live.items():
            parameter.requires_grad_(name in self.dtypes)
            if name in facts.frozen:
                parameter.data.copy_(facts.frozen[name])
            if name in facts.dtypes:
                parameter.data = parameter.data.to(getattr(torch, facts.dtypes[name]))
        self.trained = {name: live[name] for name in self.names}
        self.multiplied: dict[int, float] = {}
        """By step: what the script multiplies its gradients by after the backward passes, where it does."""
        self.averaged = max(1, facts.averaged)
        """The ranks whose gradients are averaged."""
        self.tokens = self._supervised_tokens() if facts.by_labels else None
        """By step: the supervised tokens over which the loss has to be the mean. None: it is whatever was recorded."""
        if self.tokens is not None:
            self.averaged = facts.world  # whoever averages or adds: its mean is the same
        for name, buffer in model.named_buffers():
            kept = facts.buffers.get(name)
            if kept is not None and kept.shape == buffer.shape:
                buffer.data = kept.to(self.device)

    def _supervised_tokens(self) -> list[int] | None:
        """None where a call was given no labels."""
        totals = [0] * len(self.ranks[0].facts.steps)
        for rank in self.ranks:
            for step, calls in enumerate(rank.facts.steps):
                for call in calls:
                    labels = labels_of(self.arguments(call)[1])
                    if labels is None or call.path:
                        return None
                    totals[step] += supervised(labels, self._predicts_next(labels))
        return totals

    def _predicts_next(self, labels: torch.Tensor) -> bool:
        config = getattr(self.model, "config", None)
        return labels.ndim == 2 and not getattr(config, "is_encoder_decoder", False)

    def infer_averaging(self) -> str | None:
        """Several ranks without a strategy that averages: whether the script sums their gradients or averages them, as
        the first step shows. Returns what was found, in words."""
        facts, first = self.ranks[0].facts, self.ranks[0].trace.run.steps[0]
        if facts.averaged or facts.world == 1 or first.skipped or self.tokens is not None:
            return None
        sums = self.gradient(0, losses=False).total
        seen = self.ranks[0].sketches[0].gradient
        both = [(g, sketch(sums[name])) for name, g in seen.items() if g is not None and name in sums]
        along = sum((one * one).sum().item() for _, one in both)
        factor = sum((seen * one).sum().item() for seen, one in both) / max(along, 1e-300)
        summed = abs(factor - 1.0) < 1e-3
        self.averaged = 1 if summed else facts.world
        return f"no strategy reduces the gradients; they are compared with the {'sum' if summed else 'mean'} over ranks"

    def scale(self, step: int) -> float:
        """What the gradients at the outputs still have in them: the loss scale, and the ranks that are averaged."""
        scale = self.ranks[0].trace.run.steps[step].loss_scale * self.averaged
        return scale / self.multiplied.get(step, 1.0)

    def weights_before(self, step: int) -> Tensors:
        return self.ranks[0].trace.run.weights_before(step)

    def gradient(self, step: int, how: Summing = BY_RANK, *, losses: bool = True) -> StepGradient:
        """Make every call of a step again, at the weights that the recorded step began with."""
        with torch.no_grad():
            for name, weight in self.weights_before(step).items():
                self.trained[name].copy_(weight)
        before = self._shake()
        places = [(rank, micro) for rank, one in enumerate(self.ranks) for micro in range(len(one.facts.steps[step]))]
        by_micro = how.groups == "micro"
        if how.shuffled is not None:
            random.Random(how.shuffled).shuffle(places)
        if how.groups:
            places.sort(key=lambda place: place[by_micro])  # stable: what was shuffled is, within its group
        calls: list[Contribution] = []
        parts: Tensors = {}
        total: Tensors = {}
        scale = self.scale(step)
        for number, (rank, micro) in enumerate(places):
            calls.append(self._contribution(self.ranks[rank].facts.steps[step][micro], (step, rank, micro), losses))
            self._add_gradients(parts, how.dtype)
            if how.groups and number + 1 < len(places) and places[number + 1][by_micro] == (rank, micro)[by_micro]:
                continue  # the group goes on
            for name in list(parts):
                part = parts.pop(name)
                part = part.div_(scale).float() if by_micro else part
                total[name] = total[name].add_(part) if name in total else part
        with torch.no_grad():
            for table, values in before:
                table.copy_(values)
        calls.sort(key=lambda one: (one.micro, one.rank))
        return StepGradient(calls, total if by_micro else {name: one.div_(scale) for name, one in total.items()})

    def _add_gradients(self, into: Tensors, dtype: torch.dtype | None) -> None:
        """Add what the last backward left to ``into``, and clear it."""
        for name, parameter in self.trained.items():
            if parameter.grad is not None:
                gradient = parameter.grad.to(dtype or self.dtypes[name]).cpu()
                into[name] = into[name].add_(gradient) if name in into else gradient.clone()
        self.model.zero_grad(set_to_none=True)

    def _contribution(self, call: CallTrace, place: tuple[int, int, int], losses: bool) -> Contribution:
        """``place``: step, rank and micro-batch."""
        args, kwargs = self.arguments(call)
        module = self.model.get_submodule(call.path)
        self.model.train(call.training)
        set_generators(call.rng, self.device)
        self.model.zero_grad(set_to_none=True)
        autocast = getattr(torch, call.autocast) if call.autocast else None
        with torch.enable_grad(), torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None):
            try:
                answered = answer(module, args, kwargs, self._draw(*place[1:]))
            except Exception as error:  # whatever a model's own code raises
                lines = str(error).strip().splitlines() or [""]
                raise InputError(
                    f"{self.source}: the rebuilt model cannot repeat a call of {call.path or 'the model'}: "
                    f"{type(error).__name__}: {lines[0]}"
                ) from None
        outputs = {name: one for name, one in named_tensors(answered) if one.requires_grad}
        found = Contribution(*place[1:], outputs=self._compare(call, outputs))
        if self.tokens is not None:
            seeds, found.tokens = self._of_labels(outputs, kwargs, place[0])
        else:
            seeds = self._seeds(call, outputs)
            if losses and (loss := _loss_of(call, outputs, seeds, kwargs)) is not None:
                found.loss, found.tokens = loss, loss.tokens
        torch.autograd.backward([outputs[name] for name in seeds], list(seeds.values()))
        for name, parameter in self.trained.items():
            if parameter.grad is not None:
                gradient = parameter.grad.to(self.dtypes[name])
                found.gradients[name] = sketch(gradient)
                found.norms[name] = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        return found

    def arguments(self, call: CallTrace) -> tuple[list[Any], dict[str, Any]]:
        tensors = [one.to(self.device) for one in call.tensors]
        given = unflatten(call.arguments, tensors, self.source)
        if not (isinstance(given, list) and len(given) == 2 and isinstance(given[1], dict)):
            raise InputError(f"--trace: {self.source}: the inputs of a call cannot be read; record it again")
        return given[0], given[1]

    def _compare(self, call: CallTrace, outputs: Tensors) -> dict[str, float]:
        found = {}
        for one in call.outputs:
            if not one.arrived or one.name not in outputs:
                continue
            flat = outputs[one.name].detach().reshape(-1)
            seen = one.sample.double()
            mine = flat[:: max(1, -(-flat.numel() // SAMPLE))].cpu().double()
            off = (mine - seen).norm().item()
            found[one.name] = off / max(seen.norm().item(), 1e-300) if off else 0.0
        return found

    def _of_labels(self, outputs: Tensors, kwargs: dict[str, Any], step: int) -> tuple[Tensors, int]:
        """The gradient that a call's logits should have been given, and the supervised tokens in it."""
        assert self.tokens is not None
        labels = labels_of(kwargs)
        name = "logits" if "logits" in outputs else "output"
        if labels is None or name not in outputs:
            raise InputError(f"{self.source}: the rebuilt model does not answer with logits, which labels are for")
        following, factor = self._predicts_next(labels), self.scale(step) / max(1, self.tokens[step])
        seeds = {name: seed(outputs[name], labels, following, factor, self._shake_losses, self._loss_by_sum)}
        return seeds, supervised(labels, following)

    def _seeds(self, call: CallTrace, outputs: Tensors) -> Tensors:
        """The gradient that reached each output from outside the model."""
        arrived = {one.name: one for one in call.outputs if one.gradient is not None}
        direct = {name for name, one in arrived.items() if one.reached} or set(arrived)
        if missing := sorted(direct - outputs.keys()):
            raise InputError(
                f"{self.source}: the rebuilt model does not answer with {missing[0]}, which the loss was computed "
                "from: something changed its forward"
            )
        seeds = {}
        for name in sorted(direct):
            gradient, output = arrived[name].gradient, outputs[name]
            assert gradient is not None
            if gradient.shape != output.shape:
                raise InputError(
                    f"{self.source}: the rebuilt model answers with {name} of shape {tuple(output.shape)}, the "
                    f"recorded one with {tuple(gradient.shape)}: something changed its forward"
                )
            seeds[name] = gradient.to(output)
        return _from_outside(outputs, seeds)

    @contextlib.contextmanager
    def perturbed(self, seed: int = 0) -> Iterator[None]:
        """Inside, the input embedding is off by one rounding of the dtype that computes, up or down at random; every
        trained weight, where the model has no embedding."""
        facts = self.ranks[0].facts
        names = {facts.autocast or "float32", *facts.dtypes.values()}
        eps = max(torch.finfo(getattr(torch, name)).eps for name in names)
        table = None
        if (find := getattr(self.model, "get_input_embeddings", None)) is not None:
            with contextlib.suppress(NotImplementedError):
                table = getattr(find(), "weight", None)
        self._shaken = (list(self.trained.values()) if table is None else [table], eps, seed)
        try:
            yield
        finally:
            self._shaken = None

    def _draw(self, rank: int, micro: int) -> torch.Generator | None:
        """Of a perturbed replay, for one call."""
        if self._shaken is None:
            return None
        seed = (self._shaken[2] * len(self.ranks) + rank) * 1000 + micro
        return torch.Generator().manual_seed(seed)

    @contextlib.contextmanager
    def perturbed_losses(self, seed: int) -> Iterator[None]:
        """Inside, the gradient at the outputs is off by roundings, where it is computed from labels."""
        self._shake_losses = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            self._shake_losses = None

    @contextlib.contextmanager
    def loss_by_sum(self) -> Iterator[None]:
        """Inside, a loss that is computed from labels is computed in the other right way."""
        self._loss_by_sum = True
        try:
            yield
        finally:
            self._loss_by_sum = False

    def _shake(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Perturb the weights as they are now; returns them with their values, to be put back."""
        if self._shaken is None:
            return []
        tables, eps, seed = self._shaken
        draw = torch.Generator().manual_seed(seed)
        before = [(one, one.detach().clone()) for one in tables]
        with torch.no_grad():
            for one in tables:
                signs = torch.randint(0, 2, one.shape, generator=draw).mul_(2).sub_(1).to(one.device)
                one.mul_((1 + signs * eps).to(one.dtype))
        return before


def _from_outside(outputs: Tensors, arrived: Tensors) -> Tensors:
    """What arrived at an output includes what came through other outputs that the model computed from it: less that,
    beginning with those that nothing else was computed from."""
    if len(arrived) == 1:
        return arrived
    behind = {name: {other for other in arrived if other != name and _depends(outputs[other], outputs[name])}
              for name in arrived}  # fmt: skip
    found: Tensors = {}
    while len(found) < len(arrived):
        name = next(one for one in arrived if one not in found and behind[one] <= found.keys())
        seed = arrived[name]
        for other in behind[name]:
            seed = seed - torch.autograd.grad(outputs[other], outputs[name], found[other], retain_graph=True)[0]
        found[name] = seed
    return found


def _depends(later: torch.Tensor, earlier: torch.Tensor) -> bool:
    zeros = torch.zeros_like(later)
    return torch.autograd.grad(later, earlier, zeros, retain_graph=True, allow_unused=True)[0] is not None


def _loss_of(call: CallTrace, outputs: Tensors, seeds: Tensors, kwargs: dict[str, Any]) -> CallLoss | None:
    """What the loss was, where it is a cross-entropy of the logits."""
    if chunks := _chunks(outputs, seeds):
        return cross_entropy(*chunks, None)
    logits = outputs.get("logits", outputs.get("output"))
    if logits is None or logits.ndim not in (2, 3):
        return None
    name = "logits" if "logits" in outputs else "output"
    gradient = next((one.gradient for one in call.outputs if one.name == name and name in seeds), None)
    if gradient is None:
        others = [outputs[one] for one in seeds]
        gradient = torch.autograd.grad(others, logits, list(seeds.values()), retain_graph=True, allow_unused=True)[0]
    return (
        None
        if gradient is None
        else cross_entropy(logits.detach(), gradient.to(logits.device), kwargs.get("attention_mask"))
    )


def _chunks(outputs: Tensors, seeds: Tensors) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits that a model answers with in pieces of the sequence, and their gradient, where it does."""
    names = [str(at) for at in range(len(outputs))]
    if not names or set(outputs) != set(names):
        return None
    pieces = [outputs[name] for name in names]
    if any(one.ndim != 3 or one.shape[::2] != pieces[0].shape[::2] for one in pieces):
        return None
    gradients = [seeds[name] if name in seeds else torch.zeros_like(outputs[name]) for name in names]
    return torch.cat(pieces, 1).detach(), torch.cat(gradients, 1)
