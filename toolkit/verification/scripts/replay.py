"""The plain side of a recorded command: one process, torch and the model.

Every recorded call is made again, on the same weights, with the same inputs and random state. Its outputs are given the
gradient that reached them in the recorded run. What comes out is summed over micro-batches and ranks, and averaged as
the strategy averages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.verification.loops.replay_device import set_generators
from toolkit.verification.scripts.answers import answer
from toolkit.verification.scripts.cross_entropy import CallLoss, cross_entropy
from toolkit.verification.scripts.facts import SAMPLE, CallTrace, UnitTrace
from toolkit.verification.scripts.tree import named_tensors, unflatten

Tensors = dict[str, torch.Tensor]


@dataclass
class Contribution:
    """What one call adds to the gradient of a step: in the dtypes of the weights, not yet averaged or unscaled."""

    rank: int
    micro: int
    gradients: Tensors
    outputs: dict[str, float] = field(default_factory=dict)
    """By output: by how much the replayed one differs from the recorded one, relative; 0 where no bit differs."""
    loss: CallLoss | None = None


class Replay:
    """A rebuilt model and the calls of all ranks."""

    def __init__(self, model: nn.Module, ranks: Sequence[UnitTrace], device: torch.device, source: str) -> None:
        self.model, self.ranks, self.device, self.source = model, ranks, device, source
        facts = ranks[0].facts
        self._shaken: tuple[list[torch.Tensor], float, int] | None = None
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
        for name, buffer in model.named_buffers():
            kept = facts.buffers.get(name)
            if kept is not None and kept.shape == buffer.shape:
                buffer.data = kept.to(self.device)

    def infer_averaging(self) -> str | None:
        """Several ranks without a strategy that averages: whether the script sums their gradients or averages them, as
        the first step shows. Returns what was found, in words."""
        facts, first = self.ranks[0].facts, self.ranks[0].trace.run.steps[0]
        if facts.averaged or facts.world == 1 or first.skipped:
            return None
        sums = self.summed(self.contributions(0, losses=False), 0)
        both = [
            (g.double(), sums[name].double()) for name, g in first.gradient.items() if g is not None and name in sums
        ]
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
        run = self.ranks[0].trace.run
        return run.weights if step == 0 else run.steps[step - 1].weights

    def contributions(self, step: int, *, losses: bool = True) -> list[Contribution]:
        """One of each call of a step, micro-batch by micro-batch, at the weights that the recorded step began with."""
        with torch.no_grad():
            for name, weight in self.weights_before(step).items():
                self.trained[name].copy_(weight)
        before = self._shake()
        found = []
        longest = max(len(rank.facts.steps[step]) for rank in self.ranks)
        for micro in range(longest):
            for rank, one in enumerate(self.ranks):
                if micro < len(one.facts.steps[step]):
                    found.append(self._contribution(one.facts.steps[step][micro], rank, micro, losses))
        with torch.no_grad():
            for table, values in before:
                table.copy_(values)
        return found

    def _contribution(self, call: CallTrace, rank: int, micro: int, losses: bool) -> Contribution:
        args, kwargs = self.arguments(call)
        module = self.model.get_submodule(call.path)
        self.model.train(call.training)
        set_generators(call.rng, self.device)
        self.model.zero_grad(set_to_none=True)
        autocast = getattr(torch, call.autocast) if call.autocast else None
        with torch.enable_grad(), torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None):
            try:
                answered = answer(module, args, kwargs)
            except Exception as error:  # whatever a model's own code raises
                lines = str(error).strip().splitlines() or [""]
                raise InputError(
                    f"{self.source}: the rebuilt model cannot repeat a call of {call.path or 'the model'}: "
                    f"{type(error).__name__}: {lines[0]}"
                ) from None
        outputs = {name: one for name, one in named_tensors(answered) if one.requires_grad}
        seeds = self._seeds(call, outputs)
        found = Contribution(rank, micro, {}, self._compare(call, outputs))
        if losses:
            found.loss = _loss_of(call, outputs, seeds, kwargs)
        torch.autograd.backward([outputs[name] for name in seeds], list(seeds.values()))
        for name, parameter in self.trained.items():
            if parameter.grad is not None:
                found.gradients[name] = parameter.grad.to(self.dtypes[name]).cpu().clone()
        self.model.zero_grad(set_to_none=True)
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
            if one.gradient is None or one.name not in outputs:
                continue
            flat = outputs[one.name].detach().reshape(-1)
            seen = one.sample.double()
            mine = flat[:: max(1, -(-flat.numel() // SAMPLE))].cpu().double()
            off = (mine - seen).norm().item()
            found[one.name] = off / max(seen.norm().item(), 1e-300) if off else 0.0
        return found

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

    def summed(self, contributions: Sequence[Contribution], step: int, *, by_rank: bool = True) -> Tensors:
        """The gradient of a step: summed on each rank, then over ranks, and averaged; or in the order given."""
        found: Tensors = {}
        if by_rank:
            parts: dict[int, Tensors] = {}
            for one in contributions:
                _add(parts.setdefault(one.rank, {}), one.gradients)
            for part in parts.values():
                _add(found, part)
        else:
            for one in contributions:
                _add(found, one.gradients)
        return {name: gradient / self.scale(step) for name, gradient in found.items()}

    @contextlib.contextmanager
    def perturbed(self, seed: int = 0) -> Iterator[None]:
        """Inside, the input embedding is off by one rounding of the dtype that computes, up or down at random; every
        trained weight, where the model has no embedding."""
        facts = self.ranks[0].facts
        names = {facts.loop.autocast or "float32", *facts.dtypes.values()}
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


def _add(into: Tensors, gradients: Tensors) -> None:
    for name, gradient in gradients.items():
        into[name] = into[name] + gradient if name in into else gradient.clone()


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
