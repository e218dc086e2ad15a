"""The calls of a model under grad: what it was given, what it answered, and the gradient that came back.

Hooks only read. They draw no random numbers and change no tensor, so the run is the same with and without them.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from toolkit.upstream.torch import changes_of, notices_changes
from toolkit.verification.scripts.facts import SAMPLE, CallTrace, OutputTrace
from toolkit.verification.scripts.replay_device import drawn_since, generator_states
from toolkit.verification.scripts.tree import Unrecordable, flatten, named_tensors

_REDIRECT = ("lightning", "lightning_fabric", "pytorch_lightning")


class Calls:
    """Watches one model until ``remove``. A call of a part of it by the script itself is a call of its own."""

    def __init__(self, model: nn.Module, keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> None:
        """``keep``: of a gradient that is complete, what to keep in its place."""
        self.model, self.keep = model, keep
        self.device = next(iter(model.parameters())).device
        self.unseen: list[str] = []
        self.finished: list[CallTrace] = []
        self.nodes: dict[Any, OutputTrace] = {}
        """By node of the autograd graph: the output that it computed."""
        self._shared: list[tuple[OutputTrace, torch.Tensor, int]] = []
        """Outputs whose gradient shares autograd's memory, that gradient, and its version when it arrived."""
        self._dropped: dict[int, OutputTrace] = {}
        self._inside: list[nn.Module] = []
        self._open: CallTrace | None = None
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList | nn.ModuleDict) or next(module.parameters(), None) is None:
                continue
            before, after = _hooks(weakref.ref(self), name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            # Before FSDP casts what the model answers, and before DeepSpeed wraps it in nodes of its own.
            self._handles.append(module.register_forward_hook(after, prepend=True, always_call=True))

    def take(self) -> list[CallTrace]:
        """The calls since the last ``take`` whose answers a gradient reached."""
        self._settle()
        done = [call for call in self.finished if any(one.gradient is not None for one in call.outputs)]
        self.finished, self.nodes = [], {}
        self._dropped.clear()
        return done

    def _settle(self) -> None:
        """Keep the gradients that have arrived, and free those that nothing asks for: at outputs from which the loss
        was computed only through others. That of a language model's logits is as large as many weights."""
        for one, gradient, version in self._shared:
            if changes_of(gradient) != version:
                one.gradient = None
                self._not_seen(f"the gradient of an output ({one.name}) was changed in place after it arrived")
        self._shared.clear()
        for call in self.finished:
            reached = any(one.reached for one in call.outputs)
            for one in call.outputs:
                if reached and one.gradient is not None and not one.reached:
                    one.gradient = None
                    self._dropped[id(one)] = one
                elif one.gradient is not None:
                    one.gradient = self.keep(one.gradient)
                if one.reached and self._dropped.pop(id(one), None) is not None:
                    self._not_seen(f"a later backward began at an output ({one.name}) that an earlier one had passed")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.take()

    def guarded(self, action: Callable[..., None], *args: Any) -> None:
        """An error in here is a call that is not seen, never an error of the script."""
        try:
            action(*args)
        except Exception as error:
            self._open = None
            self._not_seen(f"a call could not be recorded: {type(error).__name__}: {error}")

    def before(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if in_backward():
            return  # recomputed for activation checkpointing
        if _redirected(module):
            return
        self._inside.append(module)
        if len(self._inside) > 1:
            if self._open is not None and len(self._inside) == 2:
                self._look_at_autocast(self._open)
            return
        self._open = None
        if not torch.is_grad_enabled():
            return
        self._settle()
        self.device = _computing(args, kwargs, self.device)
        try:
            text, tensors = flatten([list(args), dict(kwargs)], _kept)
        except Unrecordable as error:
            self._not_seen(f"{name or 'the model'} was called with an argument that cannot be recorded: {error}")
            return
        self._open = CallTrace(
            path=name,
            training=module.training,
            arguments=text,
            tensors=tensors,
            autocast=None,
            rng=generator_states(self.device),
            drawn=[],
        )
        self._look_at_autocast(self._open)

    def after(self, module: nn.Module, output: Any) -> None:
        if in_backward() or not any(one is module for one in self._inside):
            return
        while self._inside and self._inside.pop() is not module:
            continue  # a call that raised
        call = self._open
        if self._inside or call is None:
            return
        self._open = None
        trained = [(name, one) for name, one in named_tensors(output) if one.requires_grad and one.grad_fn is not None]
        if not trained:
            return
        call.drawn = drawn_since(call.rng, self.device)
        for name, tensor in trained:
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, -(-flat.numel() // SAMPLE))].to("cpu", copy=True)
            one = OutputTrace(name, list(tensor.shape), sample)
            call.outputs.append(one)
            self.nodes[tensor.grad_fn] = one
            tensor.register_hook(functools.partial(_arrived, one, self._shared))
        self.finished.append(call)

    def _look_at_autocast(self, call: CallTrace) -> None:
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            call.autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")

    def _not_seen(self, why: str) -> None:
        if why not in self.unseen:
            self.unseen.append(why)


def in_backward() -> bool:
    """Whether autograd is computing gradients, in whatever thread: what is called then recomputes activations."""
    return _backwards > 0


@contextlib.contextmanager
def computing_gradients() -> Iterator[None]:
    """Context of a call of autograd; one may be inside of another's recomputation."""
    global _backwards
    _backwards += 1
    try:
        yield
    finally:
        _backwards -= 1


_backwards = 0


def _redirected(module: nn.Module) -> bool:
    """Whether another method is about to run in the place of the module's forward: Lightning calls a model's training
    step, or any method, through the forward of its wrappers."""
    forward = vars(module).get("forward")
    return isinstance(forward, types.FunctionType) and forward.__module__.partition(".")[0] in _REDIRECT


def follow(roots: Iterable[torch.Tensor], nodes: dict[Any, OutputTrace]) -> list[torch.Tensor]:
    """Mark the outputs that ``roots`` were computed from directly, without another output in between. Returns the
    parameters that were read without any."""
    todo: list[tuple[Any, int]] = [
        (root.grad_fn, root.output_nr) for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None
    ]
    met, leaves = set(todo), []
    while todo:
        node, number = todo.pop()
        if node in nodes:
            nodes[node].reached = True
            continue
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
        passed = type(node).__name__ == _PASSES_ON
        for other, its in node.next_functions[number : number + 1] if passed else node.next_functions:
            edge = (other, its if other is not None and type(other).__name__ == _PASSES_ON else 0)
            if other is not None and edge not in met:
                met.add(edge)
                todo.append(edge)
    return leaves


_PASSES_ON = "_DDPSinkBackward"
"""DDP passes all outputs of its model through one node, each to its own place: the loss is not computed from the logits
for that. Where torch calls it otherwise, the gradients of more outputs are kept."""


def _hooks(calls: weakref.ref[Calls], name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (watching := calls()) is not None:
            watching.guarded(watching.before, name, module, args, kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if (watching := calls()) is not None:
            watching.guarded(watching.after, module, output)

    return before, after


def _arrived(
    one: OutputTrace, shared: list[tuple[OutputTrace, torch.Tensor, int]], gradient: torch.Tensor | None
) -> None:
    if gradient is None:  # autograd calls hooks of one output for another's gradient too
        return
    one.arrived = True
    if one.gradient is None and notices_changes() and _owns_storage(gradient):
        # The gradient of the logits is as large as many weights, and writing to new memory takes five times a copy.
        one.gradient = gradient.detach()
        shared.append((one, one.gradient, changes_of(gradient)))
        return
    found = gradient.detach().to("cpu", copy=True)
    one.gradient = found if one.gradient is None else one.gradient + found


def _owns_storage(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor is contiguous and the only content of its storage."""
    size = tensor.numel() * tensor.element_size()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == size


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "full_tensor"):
        raise Unrecordable("a tensor that is split over ranks")
    return tensor.detach().to("cpu", copy=True)


def _computing(args: Any, kwargs: dict[str, Any], otherwise: torch.device) -> torch.device:
    given = (value.device for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor))
    return next(given, otherwise)
