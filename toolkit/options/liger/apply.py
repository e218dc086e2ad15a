"""Liger's kernels in place of a model's norms, MLPs and rotary embeddings: ``model.kernels: liger``.

liger_kernel changes the modules of a model, and the code of its model type for the whole process: classes, and the
function that rotates. The second is undone here, so that every other model of the process, `verify`'s plain one among
them, keeps torch's operators. This model's attention finds the kernel under the function's name while it runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from toolkit.errors import InputError
from toolkit.options.liger.spec import KINDS, PACKAGE, liger_arguments, liger_version, other_activation, why_no_liger
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.resolve import Resolved


@dataclass(frozen=True)
class Replaced:
    """How many modules of a model run Liger's kernels. ``rotations``: attentions whose rotary embedding is Liger's."""

    norms: int = 0
    mlps: int = 0
    rotations: int = 0

    def __str__(self) -> str:
        return f"{self.norms} norms, {self.mlps} MLPs, {self.rotations} rotary embeddings"


def prepare(model: Any, settings: str, resolved: Resolved) -> Replaced:
    """Replace what liger_kernel can of a transformers ``model``, before adapters, and count it.

    Raises InputError where it is not installed, does not know the model type, or replaces nothing.
    """
    if (reason := why_no_liger(resolved.device)) is not None:
        raise InputError(f"{resolved.source}: model.kernels: liger: {reason}, or set torch")
    key = f"{resolved.source}: model.kernels: liger"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    arguments = (liger_arguments() or {}).get(model.config.model_type, ())
    if (other := other_activation(ModelFacts(model.config.to_dict(), None), arguments)) is not None:
        raise InputError(f"{key}: {other}; set torch")
    # The loss is `loss`'s. What else a function can replace (ReLU squared) it replaces for every model of the process.
    options = {name: name in KINDS for name in arguments if name != "model"}
    with _own_code(model) as changed:
        if arguments:
            MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](model=model, **options)
    for module in model.modules():
        _keep_experts(module)
        _rotate(module, changed)
    found = replaced(model)
    if found == Replaced():
        kind = model.config.model_type
        raise InputError(f"{key}: {PACKAGE} {liger_version()} replaces nothing in {kind}; set torch")
    return found


def replaced(model: nn.Module) -> Replaced:
    """What of ``model`` runs Liger's kernels now."""
    norms = mlps = rotations = 0
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, RotatedByLiger):
            rotations += 1
        elif (getattr(forward, "__module__", None) or "").startswith("liger_kernel."):
            norm = "Norm" in type(module).__name__
            norms, mlps = norms + norm, mlps + (not norm)
    return Replaced(norms, mlps, rotations)


class RotatedByLiger:
    """An attention's forward during which functions of its code's module are others. ``functions``: by name.

    Backwards that compute a block again run it on another thread, while the first waits: never two at a time."""

    def __init__(self, forward: Callable[..., Any], code: str, functions: dict[str, Callable[..., Any]]) -> None:
        self.forward, self.code, self.functions = forward, code, functions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = vars(sys.modules[self.code])
        before = {name: names[name] for name in self.functions}
        names.update(self.functions)
        try:
            return self.forward(*args, **kwargs)
        finally:
            names.update(before)


_Changed = dict[str, dict[str, Any]]
"""By module: what liger_kernel has put in place of which name."""


@contextmanager
def _own_code(model: nn.Module) -> Iterator[_Changed]:
    """The code of the model's modules as it was, afterwards; what it was in between is what is yielded."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    before = {name: dict(vars(sys.modules[name])) for name in names}
    changed: _Changed = {}
    try:
        yield changed
    finally:
        for name, values in before.items():
            now = vars(sys.modules[name])
            changed[name] = {key: now[key] for key, value in values.items() if now[key] is not value}
            now.update({key: values[key] for key in changed[name]})


def _keep_experts(module: nn.Module) -> None:
    """Experts keep transformers' own products: Liger's kernel of them has run nowhere here, not even interpreted."""
    if getattr(vars(module).get("forward"), "__qualname__", "").startswith("LigerExperts."):
        for name in [name for name, value in vars(module).items() if inspect.ismethod(value)]:
            delattr(module, name)  # its name in a printed model too


def _rotate(module: nn.Module, changed: _Changed) -> None:
    """Have an attention whose code calls a function that liger_kernel has replaced call the other one."""
    code = type(module).__module__
    called = inspect.unwrap(type(module).forward).__code__.co_names
    functions: dict[str, Callable[..., Any]] = {
        name: value for name, value in changed.get(code, {}).items() if inspect.isfunction(value) and name in called
    }
    if functions:
        own: Any = module  # mypy lets no method be set
        own.forward = RotatedByLiger(module.forward, code, functions)
