"""The plain loop that every strategy is compared with: one process, torch and the model.

Read it from top to bottom; it is complete. It imports the recipe, model loading and sample order, and nothing of the
strategies, accelerate or DeepSpeed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.data.collate import MicroBatch
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.resolve import Resolved
from toolkit.reference.columns import in_columns
from toolkit.reference.context import Mistake, attending_in_parts, computing, part_of
from toolkit.reference.experts import among_ranks, meeting_in_experts
from toolkit.reference.extras import Extras
from toolkit.reference.meeting import Meeting, replicas
from toolkit.reference.order import NATURAL, Order, fused_loss, summed_by_module
from toolkit.reference.rules import plain_matrices, plain_rules
from toolkit.reference.stages import HEAD, in_stages, joined_heads
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels

Seed = Callable[[int, int, int], None]
"""``seed(step, micro, rank)``: sets torch's generator before a micro-batch, so that dropout masks agree."""

Window = Sequence[tuple[int, MicroBatch]]
"""One optimizer step: (rank, micro-batch) pairs, computed one after another."""

Compute = Literal["plain", "autocast", "copy"]
"""How products run: in the weights' own dtype; under torch's autocast over float32 weights; or with a 16-bit copy
of the float32 weights, whose 16-bit gradients are summed in float32 (DeepSpeed's and FSDP's mixed precision)."""


class PlainLoop:
    """A model, the gradient of a window, the optimizer's formula in float64.

    ``weights``: what trains, by name: the model's own parameters, or with ``compute="copy"`` float32 masters of
    them. After ``backward``, ``gradients`` holds the gradient of the window's loss, which is the mean over its
    supervised tokens, and ``magnitudes``, where a collective may add up in an order of its own, the sum of the
    absolute values that were added. After ``update``, ``norm`` is its 2-norm and ``coefficient`` what clipping
    multiplied it by.
    """

    def __init__(
        self, model: nn.Module, resolved: Resolved, decayed: frozenset[str], seed: Seed, compute: Compute = "plain"
    ) -> None:
        self.model = model
        self.config: Any = model.config if hasattr(model, "config") else None
        self.resolved = resolved
        self.seed = seed
        self.compute = compute
        self.compute_dtype: torch.dtype = getattr(torch, resolved.precision.compute)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights: dict[str, torch.Tensor] = dict(self.trained)
        if compute == "copy":
            self.weights = {name: p.detach().clone() for name, p in self.trained.items()}
            for parameter in model.parameters():
                if parameter.is_floating_point():  # not weights that are packed
                    parameter.data = parameter.data.to(self.compute_dtype)
        self.loss_dtype = torch.float32
        self.order: Order = NATURAL
        self.extras = Extras.of(resolved.recipe)
        self.mistake: Mistake = ""
        """What to do wrong with parts of rows, or with stages, for a diagnosis."""
        self.blocks: list[nn.Module] = []
        """The model's repeated blocks, for orders that sum by them."""
        self.in_two: set[str] = set()
        """Weights whose gradient is the sum of two, of an embedding and of a head, in two stages."""
        self.gradients: dict[str, torch.Tensor] = {}
        self.magnitudes: dict[str, torch.Tensor] = {}
        self.norm = self.coefficient = 0.0
        shapes = {name: tuple(w.shape) for name, w in self.weights.items()}
        self.matrices = plain_matrices(model, resolved)
        warmup = resolved.recipe.schedule.warmup_steps or 0
        self.rules = plain_rules(resolved.recipe.optimizer, shapes, decayed, self.matrices, warmup)
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        """The optimizer's state of each weight, in its dtype."""
        self.updates = 0
        self._replicas: list[nn.Module] = []

    def backward(self, step: int, window: Window, loss_scale: float = 1.0) -> list[float]:
        """Compute the gradient of one window; returns each micro-batch's loss, summed over its supervised tokens."""
        tokens = max(1, sum(micro.supervised for _, micro in window))
        scale = loss_scale * self.order.divisor
        self.gradients, self.magnitudes = {}, {}
        self.model.zero_grad(set_to_none=True)
        losses = [0.0] * len(window)
        # A part of the sum after the other: two gradients in memory, however many ranks there are.
        parts = [rank if self.order.first == "rank" else micro.micro for rank, micro in window]
        if self._joint(window):
            self._backward_together(step, window, parts, scale / tokens, losses)
            return self._finished(scale, losses)
        for part in dict.fromkeys(parts):
            gradients: dict[str, torch.Tensor] = {}
            before = self._taken()
            for place, (rank, micro) in enumerate(window):
                if parts[place] != part:
                    continue
                self.seed(step, micro.micro, rank)
                own = self.extras.on_rank(self.model, rank, bool(micro.sample_ids))
                orders = summed_by_module(self.model, self.order, self.blocks)
                masks = functools.partial(self._stage_masks, step, (rank, micro))
                with in_stages(self.model, self.blocks, self.order.stages, masks) as heads:
                    with self.autocast(), own, orders, in_columns(self.model, self.order.columns):
                        loss = self.loss_sum(micro)
                    (loss * (scale / tokens)).backward()
                losses[place] = loss.item()
                self._collect(gradients, before, heads=heads)
                self.model.zero_grad(set_to_none=True)
            _add(self.gradients, gradients)
        return self._finished(scale, losses)

    def _stage_masks(self, step: int, place: tuple[int, MicroBatch], stage: int) -> None:
        """Set the seed that a stage draws a micro-batch's masks from."""
        rank, micro = place
        own = 0 if self.mistake == "masks" else stage
        self.seed(step, micro.micro, rank + own * self.resolved.token_parts)

    def _joint(self, window: Window) -> bool:
        """Whether micro-batches of several ranks have something in common: an option's batch, or their rows."""
        if window[0][1].part is not None or self.order.experts > 1:
            return True
        coupled = (option.couples(self.model) for option in self.extras.options)
        return self.resolved.world_size > 1 and "ranks" in coupled

    def _backward_together(
        self, step: int, window: Window, parts: Sequence[int], scale: float, losses: list[float]
    ) -> None:
        """``backward`` where the same micro-batch of all ranks is one batch to an option's layers, or that of some
        ranks to attention."""
        sums: dict[int, dict[str, torch.Tensor]] = {}
        together: dict[tuple[int, int], list[int]] = {}
        for place, (rank, micro) in enumerate(window):
            alike = micro.part.count if micro.part else self.order.experts
            together.setdefault((micro.micro, rank // alike if alike > 1 else 0), []).append(place)
        for _, places in sorted(together.items()):
            models = self._models(len(places))
            meeting = Meeting(len(places))

            def forward(at: int, models: Any = models, places: Any = places, meeting: Any = meeting) -> torch.Tensor:
                rank, micro = window[places[at]]
                model = models[at]
                masks = rank // micro.part.count if self.mistake == "masks" and micro.part else rank
                self.seed(step, micro.micro, masks)
                own: Any = contextlib.nullcontext()
                if micro.part:
                    own = computing(meeting, micro, self.mistake, self.order.columns)
                if self.order.experts > 1:
                    own = among_ranks(meeting, at, self.mistake == "order")
                with self.autocast(), own, self.extras.on_rank(model, at, bool(micro.sample_ids), meeting):
                    return self.loss_sum(micro, model=model)

            with contextlib.ExitStack() as orders:
                if window[0][1].part is not None:
                    orders.enter_context(attending_in_parts(models))
                if self.order.experts > 1:
                    orders.enter_context(meeting_in_experts(models, self.order.experts))
                for model in models:
                    blocks = _same(model, self.model, self.blocks)
                    orders.enter_context(summed_by_module(model, self.order, blocks))
                    orders.enter_context(in_columns(model, self.order.columns))
                found = meeting.run([functools.partial(forward, at) for at in range(len(places))])
            sum((loss * scale for loss in found[1:]), found[0] * scale).backward()
            for place, loss, model in zip(places, found, models, strict=True):
                losses[place] = loss.item()
                own = {n: p for n, p in model.named_parameters() if p.requires_grad}
                if parts[place] not in sums:
                    before = self._taken(sums)
                self._collect(sums.setdefault(parts[place], {}), before, own)
                model.zero_grad(set_to_none=True)
        for part in sums.values():
            _add(self.gradients, part)

    @property
    def reorders(self) -> bool:
        """Whether a micro-batch itself is computed in another order than the natural one."""
        return self.order.within_micro_batches or any(option.orders for option in self.extras.options)

    @contextlib.contextmanager
    def in_natural_order(self, stages: tuple[int, ...] = NATURAL.stages) -> Iterator[None]:
        """Inside, sums are taken in the natural order, with the masks of ``stages``."""
        taken = self.order, self.extras
        natural = tuple(option for option in self.extras.options if not option.orders)
        self.order, self.extras = replace(NATURAL, stages=stages), replace(self.extras, options=natural)
        try:
            yield
        finally:
            self.order, self.extras = taken

    def _models(self, ranks: int) -> list[nn.Module]:
        """The model, and further ones that share its memory, in its mode."""
        if len(self._replicas) < ranks:
            self._replicas = replicas(self.model, ranks)
        for model in self._replicas:
            model.train(self.model.training)
        return self._replicas[:ranks]

    def _finished(self, scale: float, losses: list[float]) -> list[float]:
        self.gradients, self.magnitudes = joined_heads(self.gradients), joined_heads(self.magnitudes)
        for sums in (self.gradients, self.magnitudes) if self.order.by_collective else (self.gradients,):
            for name in self.trained.keys() - sums.keys():  # as with zero_grad(set_to_none=False)
                sums[name] = torch.zeros_like(self.weights[name])
        if scale != 1.0:
            for tensor in (*self.gradients.values(), *self.magnitudes.values()):
                tensor.div_(scale)
        return losses

    def _taken(self, sums: dict[int, dict[str, torch.Tensor]] | None = None) -> dict[str, torch.Tensor]:
        """With the order «average»: each rank's share of the sum so far, to which it adds its next micro-batch. It is
        taken out of ``sums`` or of the gradients, since the ranks' sums contain it."""
        if self.order.first != "average":
            return {}
        total = self.gradients if sums is None else sums.popitem()[1] if sums else {}
        share = {name: gradient / self.order.divisor for name, gradient in total.items()}
        total.clear()
        return share

    def _collect(
        self,
        part: dict[str, torch.Tensor],
        before: dict[str, torch.Tensor],
        trained: dict[str, nn.Parameter] | None = None,
        heads: dict[str, nn.Parameter] | None = None,
    ) -> None:
        """Add the parameters' gradients, each to what ``before`` has of it, to a part of the window's, in the dtype
        that the weights are kept in."""
        own = {n: p.grad.to(self.weights[n].dtype) for n, p in (trained or self.trained).items()
               if p.grad is not None}  # fmt: skip
        own |= {f"{n}{HEAD}": p.grad.to(self.weights[n].dtype) for n, p in (heads or {}).items() if p.grad is not None}
        self.in_two |= set(heads or {})
        found = before | {n: before[n] + gradient if n in before else gradient for n, gradient in own.items()}
        if self.order.by_collective:
            _add(self.magnitudes, {name: gradient.abs() for name, gradient in found.items()})
        _add(part, {name: gradient.clone() for name, gradient in found.items()})

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """Clip, step, forget the gradients. ``lr``: of weights that no group of the recipe matches."""
        self.norm = sum(g.double().pow(2).sum().item() for g in self.gradients.values()) ** 0.5
        limit = self.resolved.max_grad_norm
        # torch.nn.utils.clip_grad_norm_ adds the same 1e-6
        self.coefficient = min(1.0, limit / (self.norm + 1e-6)) if limit > 0 else 1.0
        self.updates += 1
        for name, gradient in self.gradients.items():
            rule, weight = self.rules[name], self.weights[name]
            after = rule.formula.step(
                weight,
                gradient * self.coefficient,
                self.states.get(name),
                count=self.updates,
                lr=lr * rule.factor,
                weight_decay=rule.weight_decay,
            )
            weight.copy_(after.weight)
            self.states[name] = {key: moment.to(weight.dtype) for key, moment in after.moments.items()}
        if self.compute == "copy":
            self.set_weights(self.weights)

    @torch.no_grad()
    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Set other weights, by name; the 16-bit copy is created again."""
        for name, weight in weights.items():
            self.weights[name].copy_(weight)
            if self.compute == "copy":
                self.trained[name].copy_(weight)

    def loss_sum(
        self, micro: MicroBatch, virtual_tokens: int | None = None, model: nn.Module | None = None
    ) -> torch.Tensor:
        """Cross-entropy, with ``extras``, summed over a micro-batch's supervised tokens, in float32; of numbers the
        squared errors.
        ``virtual_tokens``: outputs in front of the sample's; default: as many as the recipe's adapter adds. ``model``:
        another one than ``self.model``."""
        model = model or self.model
        layout = task_of(self.resolved.recipe.model.task).labels
        inputs = {name: tensor for name, tensor in micro.tensors.items() if name != "labels"}
        labels = micro.tensors["labels"]
        if self.compute != "autocast":  # pixels and recordings, in the dtype of the weights
            inputs = {n: t.to(self.compute_dtype) if t.is_floating_point() else t for n, t in inputs.items()}
        if layout is Labels.TARGET:
            config = self.config
            start = getattr(config, "decoder_start_token_id", None)
            first = torch.full_like(labels[:, :1], config.pad_token_id if start is None else start)
            shifted = torch.cat([first, labels[:, :-1]], dim=1)
            inputs["decoder_input_ids"] = shifted.masked_fill(shifted == -100, config.pad_token_id or 0)
        extras = self.extras
        # Position t predicts the label of t + 1, which in a part of a row may be the next part's first.
        targets = functional.pad(labels[:, 1:], (0, 1), value=-100) if layout is Labels.NEXT else labels
        if micro.part is not None:
            inputs, targets = part_of(micro, self.mistake)
        if self.order.fused:
            with extras.around(model, inputs):
                output, loss = fused_loss(model, inputs, targets, extras.smoothing, extras.z_loss)
        else:
            with extras.around(model, inputs):
                output = model(**inputs)
            logits = output.logits.to(self.loss_dtype)
            if (virtual := self.virtual_tokens() if virtual_tokens is None else virtual_tokens) > 0:
                logits = logits[:, virtual:]
            everywhere = logits.flatten(0, -2)
            if layout is Labels.NEXT and micro.part is None:
                logits, targets = logits[:, :-1], targets[:, :-1]
            if task_of(self.resolved.recipe.model.task).numbers:
                loss = _squared_errors(logits, targets)
            else:
                loss = extras.loss(logits.flatten(0, -2), targets.flatten(), everywhere)
        balance = getattr(output, "aux_loss", None)
        if extras.balance and isinstance(balance, torch.Tensor):
            # A mixture of experts' balance loss is a mean over the micro-batch: weighted by predictions, as all else.
            loss = loss + self.config.router_aux_loss_coef * balance * (targets != -100).sum()
        return loss

    def virtual_tokens(self) -> int:
        """Outputs in front of a sample's own: of a prompt that is learned with it."""
        adapter = self.resolved.recipe.adapter
        if adapter is None or METHODS[adapter.method].prompt != "tokens":
            return 0
        return int(adapter.options["num_virtual_tokens"])

    def autocast(self) -> torch.autocast:
        """The context of every forward: active where products run in another dtype than the weights."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=self.compute_dtype, enabled=self.compute == "autocast")


def _squared_errors(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of ``logits`` (samples, 1) from the numbers whose float32 bits are ``labels``; samples of -100 have none."""
    kept = [at for at, label in enumerate(labels.tolist()) if label != -100]
    bits = np.array(labels.tolist(), dtype=np.int32)[kept]
    numbers = torch.from_numpy(bits.view(np.float32).astype(np.float64)).to(logits.device, logits.dtype)
    apart = logits[kept, 0] - numbers
    return (apart * apart).sum()


def _same(copied: nn.Module, model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """``modules`` of ``model`` as a copy has them."""
    wanted = {id(module) for module in modules}
    return [copied.get_submodule(name) for name, module in model.named_modules() if id(module) in wanted]


def _add(total: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> None:
    for name, tensor in more.items():
        total[name] = total[name] + tensor if name in total else tensor
