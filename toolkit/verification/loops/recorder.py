"""Records somebody's own loop, so that `toolkit verify --trace DIR` can replay it through the plain loop.

In an Accelerate loop:

    recorder = Recorder("trace", model)                    # before prepare: keeps the model as it is
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recorder.attach(model, optimizer)                      # after it

In a transformers Trainer (TRL's SFTTrainer too):

    recorder = Recorder("trace", model)                    # with its adapter, if it has one
    trainer = Trainer(model=model, ..., callbacks=[recorder.callback()])

It works for one process, DDP, FSDP2 and DeepSpeed's ZeRO 1 to 3, with AdamW.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from toolkit.verification.loops.kept_model import keep_model
from toolkit.verification.loops.replay_device import (
    GeneratorStates,
    drawn_since,
    float32_products,
    generator_states,
)
from toolkit.verification.loops.replay_device import (
    device_name as _device_name,
)
from toolkit.verification.loops.watched import unwrapped, watched_loop, when_deepspeed_begins, whole
from toolkit.verification.record.plain_form import save_plain
from toolkit.verification.record.trace import LoopFacts, MicroTrace, RankTrace, StepTrace, digest


class Recorder:
    """Hooks on a model and its optimizer for the first ``steps`` optimizer steps; then lets go by itself."""

    def __init__(self, folder: str | Path, model: nn.Module, steps: int = 3) -> None:
        self.folder = Path(folder)
        self.steps = steps
        self.names = {name for name, p in model.named_parameters() if p.requires_grad}
        # Now: FSDP2 splits the model in its place, TRL puts another forward into it.
        if os.environ.get("RANK", "0") == "0":
            self.folder.mkdir(parents=True, exist_ok=True)
            save_plain(keep_model(unwrapped(model)), self.folder / "model.pt")
        self._handles: list[Any] = []
        self._clip = torch.nn.utils.clip_grad_norm_
        self.limit = 0.0
        self.autocast: str | None = None

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """Begin to record; call it with what ``accelerator.prepare`` gave back."""
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.trace = RankTrace(self.rank)
        self.watched = watched_loop(model, optimizer, self.names)
        self.device = next(iter(self.watched.parameters.values())).device
        self._before_forward: GeneratorStates | None = None
        self.rng: list[list[GeneratorStates]] = [[]]
        self.drawn: list[list[list[str]]] = [[]]
        self._step = StepTrace(0)
        trained = self.watched.parameters.keys()
        if strange := sorted(trained - self.names):
            raise ValueError(
                f"{strange[0]} and {len(strange) - 1} others train and were not in the model that the recorder was "
                "given; give it the model with its adapter: model = get_peft_model(model, config), before Recorder(...)"
            )
        self.trace.trainable = list(trained)
        self.trace.run.weights, self.trace.run.states = self.watched.weights(), self.watched.states()
        inner = self.watched.inner
        self._handles = [
            inner.register_forward_pre_hook(self._before, with_kwargs=True),
            inner.register_forward_hook(self._after, with_kwargs=True),
            inner.get_input_embeddings().register_forward_pre_hook(self._look_at_autocast),
            *self.watched.watch(self._before_step, self._after_step),
        ]
        own = self.watched.limit()
        if own is None:
            torch.nn.utils.clip_grad_norm_ = self._clipping
        else:
            self.limit = own

    def callback(self) -> Any:
        """A transformers TrainerCallback that attaches when training begins."""
        from transformers import TrainerCallback

        recorder = self

        class Attach(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                if type(given["optimizer"]).__name__ == "DeepSpeedOptimizerWrapper":
                    when_deepspeed_begins(given["model"], lambda engine: recorder.attach(engine, engine.optimizer))
                else:
                    recorder.attach(given["model"], given["optimizer"])

        return Attach()

    # ------------------------------------------------------------------ hooks

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.device = _computing(args, kwargs, self.device)
            self._before_forward = generator_states(self.device)

    def _look_at_autocast(self, module: nn.Module, args: Any) -> None:
        if torch.is_autocast_enabled(self.device.type):
            self.autocast = str(torch.get_autocast_dtype(self.device.type)).removeprefix("torch.")

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._before_forward is None:
            return
        self.rng[-1].append(self._before_forward)
        self.drawn[-1].append(drawn_since(self._before_forward, self.device))
        self._before_forward = None
        names = ("input_ids", "attention_mask", "labels", "position_ids", "token_type_ids")
        tensors = {n: kwargs[n].detach().cpu().clone() for n in names if isinstance(kwargs.get(n), torch.Tensor)}
        if "labels" not in tensors:
            raise ValueError("the recorder requires `labels` among the model's inputs")
        tensors.setdefault("attention_mask", torch.ones_like(tensors["input_ids"]))
        self._step.micros.append(MicroTrace(tensors, _loss_sum(module, kwargs["labels"], output)))

    def _clipping(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        self.limit = float(max_norm)
        self._take_gradients()
        norm = self._clip(parameters, max_norm, *args, **kwargs)
        self._step.norm = float(whole(norm).item())
        return norm

    def _before_step(self) -> None:
        if not self._step.gradient_digests:
            self._take_gradients()
        self._step.loss_scale = self.watched.loss_scale
        self._step.lr = sorted({float(group["lr"]) for group in self.watched.groups})

    def _after_step(self, norm: float | None, skipped: bool) -> None:
        step, run = self._step, self.trace.run
        step.weights, step.states = self.watched.weights(), self.watched.states()
        step.skipped = skipped
        if norm is not None:
            step.norm = norm
        run.steps.append(step)
        self._step = StepTrace(len(run.steps), updates_before=len(run.steps))
        if len(run.steps) == self.steps:
            self._finish()
        else:
            self.rng.append([])
            self.drawn.append([])

    def _finish(self) -> None:
        for handle in self._handles:
            handle.remove()
        torch.nn.utils.clip_grad_norm_ = self._clip
        group = self.watched.groups[0]
        computed = {str(p.dtype).removeprefix("torch.") for p in self.watched.inner.parameters()}
        computed |= {name for name in (self.autocast, self.watched.copy_dtype) if name is not None}
        facts = LoopFacts(
            device=self.device.type,
            device_name=_device_name(self.device),
            float32_products=float32_products(self.device),
            dtypes=sorted(computed),
            betas=[float(beta) for beta in group["betas"]],
            eps=float(group["eps"]),
            limit=self.limit,
            decay={name: float(decay) for name, decay in self.watched.decays().items()},
            copy=self.watched.copy_dtype,
            autocast=self.autocast,
            rng=self.rng,
            drawn=self.drawn,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.trace.save(self.folder)
        facts.save(self.folder, self.rank)

    def _take_gradients(self) -> None:
        self._step.gradient = self.watched.gradients()
        for name, gradient in self._step.gradient.items():
            self._step.gradient_digests[name] = "none" if gradient is None else digest(gradient)


def _computing(args: Any, kwargs: dict[str, Any], otherwise: torch.device) -> torch.device:
    """The device of what the model is given: parameters that are offloaded wait on another one."""
    given = (value.device for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor))
    return next(given, otherwise)


def _loss_sum(module: Any, labels: torch.Tensor, output: Any) -> float:
    """The micro-batch's loss, summed over its supervised tokens. TRL's model gives log-probabilities and no logits."""
    if getattr(output, "log_probs", None) is not None:
        return -output.log_probs.detach().double().sum().item()
    logits = output.logits.detach().float()
    if labels.ndim == 2 and not module.config.is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum").item()
