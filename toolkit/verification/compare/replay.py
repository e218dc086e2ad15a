"""The plain loop over the same windows from the candidate's own weights, and how far correct runs differ."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from toolkit.model.checkpointing import find_blocks
from toolkit.model.load import input_weight
from toolkit.reference.context import Mistake, by_row, joined
from toolkit.reference.extras import Extras
from toolkit.reference.loop import PlainLoop, Window
from toolkit.reference.model import plain_decayed, plain_model
from toolkit.reference.roundings import other_roundings
from toolkit.rooms import active_options
from toolkit.training.session import seed_micro_batch
from toolkit.verification.cases.case import Case, compute_of
from toolkit.verification.cases.samples import expected_windows
from toolkit.verification.compare.arithmetic import order_of, why_measured
from toolkit.verification.compare.noise import Draws, Noise, relative_error
from toolkit.verification.compare.rearrange import (
    Grouped,
    all_together,
    drawn,
    is_packed,
    reversed_order,
    rows_apart,
    shuffled,
)
from toolkit.verification.record.block_inputs import BlockInputs, watched_inputs

DRAWS = 8
"""Random orders and splits, and random roundings where options round, at each step that noise is measured at."""


class Reference:
    """The plain loop of a case. Everything that the candidate is held against comes from here."""

    def __init__(self, case: Case) -> None:
        self.resolved = case.resolved()
        model = plain_model(self.resolved, case.samples.pad_id)
        self.device = torch.device(self.resolved.device)
        self.decayed = plain_decayed(model, self.resolved)
        # Before any 16-bit copy is made: what the weights are at the start.
        self.first = {n: p.detach().cpu().clone() for n, p in model.named_parameters() if p.requires_grad}
        self.tied = _tied(model)
        self.blocks = find_blocks(model, self.resolved) if self.resolved.blocks else []
        seed = self.resolved.recipe.run.seed
        self.loop = PlainLoop(
            model,
            self.resolved,
            self.decayed,
            lambda step, micro, rank: seed_micro_batch(seed, step, micro, rank),
            compute_of(self.resolved),
        )
        self.windows: list[Window] = [
            [(rank, micro.to(self.device)) for rank, micro in window]
            for window in expected_windows(case.samples, self.resolved, case.steps)
        ]
        self.loop.order = order_of(self.resolved, self.loop.config, len(self.blocks))
        self.loop.blocks = [block for _, block in self.blocks]
        active = [option for option, _ in active_options(self.resolved.recipe)]
        self.options = {option.name: plain for option, plain in zip(active, self.loop.extras.options, strict=True)}
        """The options' parts of the plain loop, by name."""
        self.measured_because: str | None = why_measured(
            self.resolved, self.windows, self._vocabulary(), self._depends_on_batch()
        )
        """Why the candidate's operations may have another order; None where they may not."""
        self.rounding = [self.options[option.name] for option in active if option.rounds]
        self.fuses = self.resolved.recipe.compile or any(option.fuses for option in active)
        self.counted: dict[str, Any] = {}
        """What each option counted in the step where its operators are counted."""
        self.noise = Noise(
            eps=torch.finfo(getattr(torch, self.resolved.precision.trainable)).eps,
            compute_eps=torch.finfo(self.loop.compute_dtype).eps,
            comparisons=self._comparisons(),
        )

    def gradient(
        self, step: int, weights: dict[str, torch.Tensor], loss_scale: float = 1.0
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Loss of each micro-batch and the window's gradient, at ``weights``, dropout as the candidate drew it."""
        self.set_weights(weights)
        losses = self.loop.backward(step, self.windows[step], loss_scale)
        return losses, {name: g.cpu() for name, g in self.loop.gradients.items()}

    def in_natural_order(
        self, step: int, weights: dict[str, torch.Tensor], loss_scale: float = 1.0
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        """``gradient`` in the plain loop's own order of sums, of whole rows; with the masks that stages draw, where
        there are stages: others would be another computation."""
        self.set_weights(weights)
        with self.loop.in_natural_order(stages=self.loop.order.stages):
            losses = self.loop.backward(step, self.whole_rows(step), loss_scale)
            return losses, {name: g.cpu() for name, g in self.loop.gradients.items()}

    def whole_rows(self, step: int) -> Window:
        """A step's micro-batches, of which each has its rows whole."""
        return joined(self.windows[step])

    def without_rounding(
        self, step: int, weights: dict[str, torch.Tensor], loss_scale: float = 1.0
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        """``gradient`` of the same model without options that round to fewer bits."""
        with contextlib.ExitStack() as stack:
            for plain in self.rounding:
                stack.enter_context(plain.without(self.loop.model))
            return self.gradient(step, weights, loss_scale)

    def count_operators(self) -> None:
        """Note what options have counted since they were reset."""
        blocks = [block for _, block in self.blocks]
        self.counted = {name: plain.count(self.loop.model, blocks) for name, plain in self.options.items()}

    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Take the candidate's weights: those that train here too."""
        self.loop.set_weights({name: weight for name, weight in weights.items() if name in self.first})

    def _fits_one_row(self, window: Window) -> bool:
        """Whether a model's tables are long enough for all packed rows in one: GPT-Neo keeps its causal mask."""
        if not is_packed(window[0][1]):
            return True
        longest = getattr(self.loop.model.config, "max_position_embeddings", None)
        return longest is None or sum(micro.tensors["input_ids"].numel() for _, micro in window) <= longest

    def measure_noise(self, step: int, weights: dict[str, torch.Tensor], loss_scale: float = 1.0) -> None:
        """Add what correct runs of this step differ by. Without dropout: masks depend on order and shape."""
        window, random_orders = self.whole_rows(step), random.Random(step)
        self.set_weights(weights)
        packed, noise = is_packed(window[0][1]), self.noise
        # Packed samples apart are something to be proven, in float32. No other variant may then join or part samples:
        # in a model that lets them see each other it would be no correct run, and what it differs by no noise.
        proven = packed and self.loop.compute_dtype == torch.float32 and not self._balances_experts()
        if self._balances_experts() or self._depends_on_batch():
            variants = [shuffled(window, random_orders) for _ in range(DRAWS)]
        else:
            variants = [drawn(window, random_orders, across=bool(at % 2)) for at in range(DRAWS)]
            if not proven:
                variants += [all_together(window)] if self._fits_one_row(window) else []
                variants += [] if packed else [rows_apart(window)]
        with self.without_dropout():
            same: Grouped = [(micro, [at]) for at, (_, micro) in enumerate(window)]
            plain = self._run(same, step, loss_scale)
            for variant in variants:
                _differ(noise.arranged, plain, self._run(variant, step, loss_scale), noise.eps)
            if self.resolved.precision.loss_scaling:
                # Averaging over ranks multiplies the loss by their number before the backward, and divides after it.
                # Gradients below fp16's normal numbers are rounded otherwise then: by an amount, not by a share.
                scale = loss_scale * max(2, self.resolved.token_parts)
                _differ(noise.scaled, plain, self._run(same, step, scale), noise.eps)
            if self.measured_because and self.loop.reorders:
                with self.loop.in_natural_order():
                    _differ(noise.scaled, plain, self._run(same, step, loss_scale), noise.eps)
            if self.measured_because and self.loop.order.in_parts:
                losses = by_row(self.windows[step], self.loop.backward(step, self.windows[step], loss_scale))
                in_parts = dict(enumerate(losses)), {name: g.cpu() for name, g in self.loop.gradients.items()}
                _differ(noise.scaled, (dict(enumerate(plain[0].values())), plain[1]), in_parts, noise.eps)
            if proven:
                apart = _distances(plain, self._run(rows_apart(window), step, loss_scale))
                noise.apart[step] = {name: error for name, (error, _) in apart.items()}
            for option in self.rounding:
                for seed in range(DRAWS):
                    with option.shaken(self.loop.model, seed):
                        _differ(noise.shaken, plain, self._run(same, step, loss_scale), noise.eps)
            if self.fuses:
                for seed in range(DRAWS):
                    with other_roundings(self.loop.blocks, seed):
                        _differ(noise.rounded, plain, self._run(same, step, loss_scale), noise.eps)
            with self._perturbed():
                for name, (error, _) in _distances(plain, self._run(reversed_order(window), step, loss_scale)).items():
                    noise.perturbed[name] = max(noise.perturbed[name], error)

    def block_inputs(self) -> BlockInputs:
        """What the blocks are given in the first micro-batch."""
        with watched_inputs(self.blocks) as seen:
            self.loop.backward(0, self.windows[0][: self.resolved.mesh.context])
        return seen

    def backward_reaches(self) -> list[bool]:
        """Of each block, whether a gradient goes through it: something trains in it or before it in the model, as
        virtual tokens do, wherever their parameters are named."""
        if self.loop.virtual_tokens():
            return [True] * len(self.blocks)
        order = [name for name, _ in self.loop.model.named_parameters()]
        first = min((order.index(name) for name in self.first), default=len(order))
        ends = [
            max((at for at, name in enumerate(order) if name.startswith(f"{block}.")), default=-1)
            for block, _ in self.blocks
        ]
        return [end >= first for end in ends]

    def dropout_matters(self, step: int, weights: dict[str, torch.Tensor]) -> bool:
        """Whether masks are drawn at all: the same window gives another loss without them, or another gradient (at
        first an adapter adds nothing to what it would change, and its dropout has no effect on the loss)."""
        losses, gradients = self.gradient(step, weights)
        with_masks = {name: gradient.clone() for name, gradient in gradients.items()}
        with self.without_dropout():
            others, without = self.gradient(step, weights)
        return losses != others or any(not torch.equal(one, without[name]) for name, one in with_masks.items())

    def gradient_with_shared_masks(self, step: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The window's gradient if every rank drew the first one's dropout masks."""
        right = self.loop.seed
        self.loop.seed = lambda at, micro, rank: right(at, micro, 0)
        try:
            return {name: gradient.clone() for name, gradient in self.gradient(step, weights)[1].items()}
        finally:
            self.loop.seed = right

    def losses_without_blocks(self, step: int, weights: dict[str, torch.Tensor]) -> list[float]:
        """Loss of each micro-batch of packed rows if every sample saw all that is before it in its row."""
        self.set_weights(weights)
        blind = []
        for rank, micro in self.windows[step]:
            everything = torch.ones_like(micro.tensors["input_ids"])  # a mask given: positions tell nothing apart
            blind.append((rank, replace(micro, tensors=micro.tensors | {"attention_mask": everything})))
        return self.loop.backward(step, blind)

    def losses_with(self, step: int, weights: dict[str, torch.Tensor], extras: Extras) -> list[float]:
        """Loss of each micro-batch with other ``extras`` than the recipe's."""
        right, self.loop.extras = self.loop.extras, extras
        try:
            return self.gradient(step, weights)[0]
        finally:
            self.loop.extras = right

    def losses_with_mistake(self, mistake: Mistake, step: int, weights: dict[str, torch.Tensor]) -> list[float]:
        """Loss of each micro-batch if parts of rows, or stages, were computed with this mistake."""
        self.loop.mistake = mistake
        try:
            return self.gradient(step, weights)[0]
        finally:
            self.loop.mistake = ""

    def gradients_with_mistake(
        self, mistake: Mistake, step: int, weights: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The window's gradient if parts of rows, or stages, were computed with this mistake."""
        self.loop.mistake = mistake
        try:
            return {name: gradient.clone() for name, gradient in self.gradient(step, weights)[1].items()}
        finally:
            self.loop.mistake = ""

    def losses_without_prompt(self, step: int, weights: dict[str, torch.Tensor]) -> list[float]:
        """Loss of each micro-batch if the adapter's virtual tokens were not there; [] for other adapters."""
        if self.loop.virtual_tokens() == 0:
            return []
        self.set_weights(weights)
        adapted: Any = self.loop.model
        self.loop.model = adapted.get_base_model()
        losses = []
        try:
            with torch.no_grad(), self.loop.autocast():
                for rank, micro in self.windows[step]:
                    self.loop.seed(step, micro.micro, rank)
                    losses.append(self.loop.loss_sum(micro, virtual_tokens=0).item())
            return losses
        finally:
            self.loop.model = adapted

    def _run(self, groups: Grouped, step: int, loss_scale: float) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        taken = self.loop.order
        if taken.first == "average":  # the sum so far is divided by the number of ranks, and here one has all groups
            self.loop.order = replace(taken, first="rank")
        try:
            losses = self.loop.backward(step, [(0, micro) for micro, _ in groups], loss_scale)
        finally:
            self.loop.order = taken
        by_place: dict[str, float] = defaultdict(float)
        for (_, places), loss in zip(groups, losses, strict=True):
            by_place["+".join(map(str, places))] += loss
        return by_place, {name: g.cpu() for name, g in self.loop.gradients.items()}

    def _comparisons(self) -> int:
        """Losses and gradients of every step, in two passes; after a resumption gradients, weights and two moments
        again, if arithmetic does not repeat bit by bit."""
        tensors = len(self.first) * (1 if self.device.type == "cpu" else 5)
        return 2 * sum(tensors + len(window) for window in self.windows)

    def _vocabulary(self) -> int:
        head = self.loop.model.get_output_embeddings()  # type: ignore[operator]
        return 0 if head is None else int(head.weight.shape[0])

    def _balances_experts(self) -> bool:
        return bool(getattr(self.loop.config, "output_router_logits", False))

    def _depends_on_batch(self) -> bool:
        """Whether what a row gives depends on the others of its micro-batch."""
        return any(plain.couples(self.loop.model) for plain in self.options.values())

    def _running(self) -> Iterator[tuple[str, torch.Tensor]]:
        for plain in self.options.values():
            yield from plain.running(self.loop.model).items()

    def set_statistics(self, statistics: dict[str, torch.Tensor]) -> None:
        """Take the candidate's running statistics."""
        for name, own in self._running():
            if name in statistics:
                own.copy_(statistics[name])

    def statistics(self) -> dict[str, torch.Tensor]:
        """A copy of the running statistics as they are now, on the CPU."""
        return {name: own.detach().cpu().clone() for name, own in self._running()}

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Inside, the plain loop draws no masks."""
        self.loop.model.eval()
        try:
            yield
        finally:
            self.loop.model.train()

    @contextlib.contextmanager
    def _perturbed(self, seed: int = 0) -> Iterator[None]:
        """The input embedding off by one machine epsilon of the compute dtype, up or down at random."""
        table = input_weight(self.loop.model)
        before = table.detach().clone()
        draw = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, table.shape, generator=draw).mul_(2).sub_(1).to(table.device)
        with torch.no_grad():
            table.mul_(1 + signs * torch.finfo(self.loop.compute_dtype).eps)
        try:
            yield
        finally:
            with torch.no_grad():
                table.copy_(before)


def _differ(into: dict[str, Draws], plain: tuple, other: tuple, eps: float) -> None:
    for name, (relative, absolute) in _distances(plain, other).items():
        rounding = eps * plain[1][name].double().norm().item() if name in plain[1] else 0.0
        into[name].add(relative, max(absolute, rounding))


def _distances(plain: tuple, other: tuple) -> dict[str, tuple[float, float]]:
    """By tensor: the 2-norm of the difference, relative and absolute. Of losses the largest of the micro-batches that
    both runs have; none where a run has others."""
    losses, gradients = plain
    others, other_gradients = other
    found = {}
    if losses.keys() == others.keys():
        apart = {place: abs(others[place] - loss) for place, loss in losses.items()}
        relative = max((apart[place] / abs(loss) for place, loss in losses.items() if loss), default=0.0)
        found["loss"] = relative, max(apart.values())
    for name, gradient in gradients.items():
        error = relative_error(other_gradients[name], gradient)
        if error != float("inf"):
            found[name] = error, (other_gradients[name].double() - gradient.double()).norm().item()
    return found


def _tied(model: torch.nn.Module) -> list[list[str]]:
    sharing: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in sharing.values() if len(names) > 1]
