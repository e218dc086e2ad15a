"""Records somebody's own loop, so that `toolkit verify --trace DIR` can replay it through the plain loop.

In an Accelerate loop:

    recorder = Recorder("trace", model)                    # before prepare: keeps the model as it is
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recorder.attach(model, optimizer)                      # after it

In a transformers Trainer (TRL's SFTTrainer too):

    recorder = Recorder("trace", model)                    # with its adapter, if it has one
    trainer = Trainer(model=model, ..., callbacks=[recorder.callback()])

It works for one process, DDP and FSDP2, with AdamW; DeepSpeed hides its gradients from an optimizer's hooks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from toolkit.strategies.engines.base import OptimizerState
from toolkit.verify.trace import MicroTrace, RankTrace, StepTrace, digest

_MOMENTS = ("exp_avg", "exp_avg_sq")
_BLANK = ("base_model.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Recorder:
    """Hooks on a model and its optimizer for the first ``steps`` optimizer steps; then lets go by itself."""

    def __init__(self, folder: str | Path, model: nn.Module, steps: int = 3) -> None:
        self.folder = Path(folder)
        self.steps = steps
        self.names = {name for name, p in model.named_parameters() if p.requires_grad}
        # Now: FSDP2 splits the model in its place, TRL puts another forward into it.
        if os.environ.get("RANK", "0") == "0":
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(_unwrapped(model), self.folder / "model.pt")
        self._handles: list[Any] = []
        self._clip = torch.nn.utils.clip_grad_norm_
        self.limit = 0.0
        self.extra: dict[str, Any] = {}

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """Begin to record; call it with what ``accelerator.prepare`` gave back."""
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.trace = RankTrace(self.rank)
        self.model, self.optimizer = model, getattr(optimizer, "optimizer", optimizer)
        self._rng: torch.Tensor | None = None
        self._step = StepTrace(0)
        self._rngs: list[torch.Tensor] = []
        self.parameters = {_clean(name, self.names): p for name, p in model.named_parameters() if p.requires_grad}
        if strange := sorted(self.parameters.keys() - self.names):
            raise ValueError(
                f"{strange[0]} and {len(strange) - 1} others train and were not in the model that the recorder was "
                "given; give it the model with its adapter: model = get_peft_model(model, config), before Recorder(...)"
            )
        self.trace.trainable = list(self.parameters)
        self.trace.run.weights, self.trace.run.states = self._weights(), self._states()
        inner = _unwrapped(model)
        self._handles = [
            inner.register_forward_pre_hook(self._before, with_kwargs=True),
            inner.register_forward_hook(self._after, with_kwargs=True),
            inner.get_input_embeddings().register_forward_pre_hook(self._look_at_autocast),
            self.optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            self.optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        torch.nn.utils.clip_grad_norm_ = self._clipping

    def callback(self) -> Any:
        """A transformers TrainerCallback that attaches when training begins."""
        from transformers import TrainerCallback

        recorder = self

        class Attach(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                recorder.attach(given["model"], given["optimizer"])

        return Attach()

    # ------------------------------------------------------------------ hooks

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._rng = torch.get_rng_state()

    def _look_at_autocast(self, module: nn.Module, args: Any) -> None:
        device = self.optimizer.param_groups[0]["params"][0].device.type
        if torch.is_autocast_enabled(device):
            self.extra["autocast"] = str(torch.get_autocast_dtype(device)).removeprefix("torch.")

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._rng is None:
            return
        names = ("input_ids", "attention_mask", "labels", "position_ids", "token_type_ids")
        tensors = {n: kwargs[n].detach().cpu().clone() for n in names if isinstance(kwargs.get(n), torch.Tensor)}
        if "labels" not in tensors:
            raise ValueError("the recorder needs labels among the model's inputs, to know what is supervised")
        tensors.setdefault("attention_mask", torch.ones_like(tensors["input_ids"]))
        self._step.micros.append(MicroTrace(tensors, _loss_sum(module, kwargs["labels"], output)))
        self._rngs.append(self._rng)
        self._rng = None

    def _clipping(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        self.limit = float(max_norm)
        self._take_gradients()
        norm = self._clip(parameters, max_norm, *args, **kwargs)
        self._step.norm = float(_whole(norm).item())
        return norm

    def _before_step(self) -> None:
        if not self._step.gradient_digests:
            self._take_gradients()
        self._step.lr = sorted({float(group["lr"]) for group in self.optimizer.param_groups})

    def _after_step(self) -> None:
        step, run = self._step, self.trace.run
        step.weights, step.states = self._weights(), self._states()
        run.steps.append(step)
        self.extra.setdefault("rng", []).append(self._rngs)
        self._step, self._rngs = StepTrace(len(run.steps), updates_before=len(run.steps)), []
        if len(run.steps) == self.steps:
            self._finish()

    def _finish(self) -> None:
        for handle in self._handles:
            handle.remove()
        torch.nn.utils.clip_grad_norm_ = self._clip
        group = self.optimizer.param_groups[0]
        self.extra |= {"betas": list(group["betas"]), "eps": group["eps"], "limit": self.limit, "decay": self._decays()}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.trace.save(self.folder)
        torch.save(self.extra, self.folder / f"extra{self.rank}.pt")

    # ------------------------------------------------------------------ whole tensors

    def _take_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            gradient = None if parameter.grad is None else _whole(parameter.grad)
            self._step.gradient[name] = gradient
            self._step.gradient_digests[name] = "none" if gradient is None else digest(gradient)

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: _whole(parameter) for name, parameter in self.parameters.items()}

    def _states(self) -> dict[str, OptimizerState | None]:
        found: dict[str, OptimizerState | None] = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter)
            found[name] = None
            if state:
                moments = {key: _whole(state[key]) for key in _MOMENTS}
                found[name] = OptimizerState(int(_whole(state["step"]).item()), moments)
        return found

    def _decays(self) -> dict[str, float]:
        by_parameter = {id(p): g["weight_decay"] for g in self.optimizer.param_groups for p in g["params"]}
        return {name: by_parameter.get(id(p), 0.0) for name, p in self.parameters.items()}


def _loss_sum(module: Any, labels: torch.Tensor, output: Any) -> float:
    """The micro-batch's loss, summed over its supervised tokens. TRL's model gives log-probabilities and no logits."""
    if getattr(output, "log_probs", None) is not None:
        return -output.log_probs.detach().double().sum().item()
    logits = output.logits.detach().float()
    if labels.ndim == 2 and not module.config.is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum").item()


def _whole(tensor: Any) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()


def _unwrapped(model: Any) -> Any:
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def _clean(name: str, known: set[str]) -> str:
    """A wrapped parameter's own name."""
    for part in _BLANK[1:]:
        candidate = name.replace(part, "")
        name = candidate if candidate in known or name not in known else name
    return name
