"""A fault: a known defect of this stack, put into an otherwise right run where it really happened."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from toolkit.strategies import strategies
from toolkit.strategies.base import Strategy


class Applies:
    """Which strategies a fault can be in, by their traits."""

    def __init__(self, test: Callable[[Strategy], bool]) -> None:
        self._test = test

    def names(self) -> list[str]:
        """Every registered strategy that the fault can be in."""
        return [name for name, strategy in strategies().items() if self._test(strategy)]


EVERY = Applies(lambda strategy: True)
DISTRIBUTED = Applies(lambda strategy: strategy.traits.distributed)
SYNC_CHOSEN = Applies(lambda s: s.traits.other_sync and not (s.traits.shards and s.traits.flat_state))
"""`strategy.sync` chooses in any precision when gradients are summed over the ranks."""
REPLICATED = Applies(lambda strategy: strategy.traits.distributed and not strategy.traits.shards)
SHARDED = Applies(lambda strategy: bool(strategy.traits.shards))
ALL_REDUCED = Applies(lambda strategy: any("all-reduce" in group for group in strategy.traits.collectives))
"""Gradients are all-reduced, whole."""
GATHERED_BY_DEEPSPEED = Applies(
    lambda strategy: "weights" in strategy.traits.shards and not strategy.traits.torch_optimizer
)
GATHERED_BY_TORCH = Applies(lambda strategy: "weights" in strategy.traits.shards and strategy.traits.torch_optimizer)
REFRESHED_COPY = Applies(lambda strategy: not strategy.traits.torch_optimizer)
"""Forwards compute with a copy of the masters that the strategy makes in its step."""
TORCH_OPTIMIZER = Applies(lambda strategy: strategy.traits.torch_optimizer)
SHARDED_TENSORS = Applies(lambda strategy: "weights" in strategy.traits.shards and not strategy.traits.flat_state)
"""Each weight is sharded on its own, so an optimizer can gather it."""
NOT_BROADCAST = Applies(lambda strategy: strategy.traits.distributed and not strategy.traits.broadcasts)
WITHOUT_GRADIENT = Applies(lambda strategy: strategy.traits.continues_without_gradient)
"""Training continues where a weight gets no gradient."""


SPLITS_LAYERS = Applies(lambda strategy: "tensor" in strategy.traits.layouts)
"""`strategy.mesh.tensor` divides the matrices of layers."""
SPLITS_EXPERTS = Applies(lambda strategy: "expert" in strategy.traits.layouts)
"""`strategy.mesh.expert` divides the experts of layers."""
STAGES = Applies(lambda strategy: "pipeline" in strategy.traits.layouts)
"""`strategy.mesh.pipeline` divides the model's blocks over ranks."""
STAGES_OF_COPIES = Applies(lambda s: "pipeline" in s.traits.layouts and not s.traits.shards)
HYBRID = Applies(lambda strategy: strategy.traits.hybrid is not None)
HYBRID_STATE = Applies(lambda strategy: strategy.traits.hybrid == "state")
"""Gradients are reduced over the axes of a mesh one after the other."""
SECOND_COPIES = Applies(lambda strategy: strategy.traits.hybrid == "weights")


class Fault:
    """One defect. ``inject`` patches the library or the loop, in the worker, before a session is opened.

    Patched code says ``self.reached()``: a fault that never comes to pass is an error, not a success.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str] = ""
    """Where it was seen: project#number."""
    stages: ClassVar[tuple[str, ...]]
    """The first stage that may see it, any of these; ``engagement`` stands for evidence."""
    diagnoses: ClassVar[tuple[str, ...]]
    """What may be diagnosed, any of these: keys of ``diagnose.known.known()``."""
    strategies: ClassVar[Applies] = EVERY
    processes: ClassVar[int] = 2
    """The least number of processes that it can be seen on, unless the strategy has one."""
    needs: ClassVar[dict[str, Any]] = {}
    """Sections of the recipe without which the fault cannot be, merged over it. ``options: None``: without all of the
    recipe's options."""

    def __init__(self) -> None:
        self._reached = False

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        """What has to be merged over a recipe so that the fault can be in it."""
        return cls.needs

    def inject(self, patch: Patch, case: Any) -> None:
        """Put the fault in with ``patch``."""
        raise NotImplementedError

    def reached(self) -> None:
        """Called by the patched code when it does harm."""
        self._reached = True

    def was_reached(self) -> bool:
        return self._reached

    def breaking(self, patch: Patch, owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """``patch.replacing`` by a function each call of which does harm."""

        def replace(wrong: Callable[..., Any]) -> None:
            @patch.replacing(owner, name)
            def harmful(right: Any, *args: Any, **kwargs: Any) -> Any:
                self.reached()
                return wrong(right, *args, **kwargs)

        return replace

    @contextlib.contextmanager
    def injected(self, case: Any) -> Iterator[None]:
        """The fault is there inside, and gone after."""
        patch = Patch()
        try:
            self.inject(patch, case)
            yield
        finally:
            patch.undo()


class NoFault(Fault):
    """The run as it is."""

    id = "none"
    title = "nothing injected"
    stages = ()
    diagnoses = ()

    def inject(self, patch: Patch, case: Any) -> None:
        self.reached()


class Patch:
    """Replaces attributes and puts them back."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any, bool]] = []

    def __call__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``make(what it was)``."""
        own = name in vars(owner)
        before = vars(owner)[name] if own else getattr(owner, name)
        self._saved.append((owner, name, before, own))
        setattr(owner, name, make(getattr(owner, name)))

    def replacing(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """A decorator: calls of ``owner.name`` become calls of the function, with what it was before the arguments."""

        def replace(wrong: Callable[..., Any]) -> None:
            def make(right: Any) -> Any:
                # Who looks at its name or its parameters finds those of the right one.
                return functools.wraps(right)(lambda *args, **kwargs: wrong(right, *args, **kwargs))

            self(owner, name, make)

        return replace

    def undo(self) -> None:
        for owner, name, before, own in reversed(self._saved):
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
        self._saved.clear()
