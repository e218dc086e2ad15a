"""What several faults share."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from toolkit.data.collate import MicroBatch
from toolkit.verification.faults.base import Fault, Patch

LORA = {"method": "lora", "r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear", "modules_to_save": []}
QLORA = LORA | {"method": "qlora"}
DROPPING = LORA | {"dropout": 0.1}


def whole_model(config: dict[str, Any], task: str, form: str, **keys: Any) -> dict[str, Any]:
    """``needs`` of a fault that occurs in another task than most recipes have: a tiny model of it, all of which trains,
    and its samples."""
    model = {"config": config, "path": None, "task": task, "attention": None, **keys}
    return {
        "model": model,
        "data": {
            "train": "built-in",
            "eval": None,
            "eval_fraction": None,
            "format": form,
            "fields": {},
            "packing": False,
        },
        "strategy": {"wrap": None},
        "adapter": None,
        "loss": "plain",
        "options": None,
    }


def patch_engines(patch: Patch, method: str, make: Callable[[Any], Any]) -> None:
    """Patch ``method`` of every engine class that has its own."""
    from toolkit.strategies.engines import base, fsdp1, fsdp2, replicated, zero

    classes = (
        base.Engine,
        replicated.SingleEngine,
        replicated.DdpEngine,
        zero.ZeroEngine,
        fsdp1.Fsdp1Engine,
        fsdp2.Fsdp2Engine,
    )
    for engine in classes:
        if method in vars(engine):
            patch(engine, method, make)


@dataclass
class WindowView:
    """How far a run is in its window: what a wrong weight of the loss could be made from."""

    window: list[MicroBatch] = field(default_factory=list)
    at: int = 0
    tokens: float = 1.0
    data_size: int = 1
    accumulation: int = 1

    @property
    def micro(self) -> MicroBatch:
        return self.window[self.at]

    @property
    def local_tokens(self) -> int:
        return sum(micro.supervised for micro in self.window)


class WrongWeight(Fault):
    """Base of faults that give a micro-batch's loss another weight in the window's."""

    stages = ("gradient",)

    @abstractmethod
    def factor(self, view: WindowView) -> float:
        """What the right loss is multiplied by."""

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.loader import TrainLoader
        from toolkit.training import loop

        resolved = case.resolved()
        view = WindowView(data_size=resolved.token_parts, accumulation=resolved.accumulation)

        @patch.replacing(TrainLoader, "__iter__")
        def windows(iterate: Any, loader: Any) -> Iterator[list[MicroBatch]]:
            for window in iterate(loader):
                view.window, view.at = window, 0
                yield window

        @patch.replacing(loop, "sum_over_ranks")
        def noted(total: Any, tensor: Any) -> Any:
            result = total(tensor)
            view.tokens = float(result) / resolved.ranks_per_part
            return result

        def backward(right: Any) -> Any:
            def wrong(engine: Any, loss: Any, last: bool) -> None:
                factor = self.factor(view)
                if factor != 1.0:
                    self.reached()
                right(engine, loss * factor, last)
                view.at += 1

            return wrong

        patch_engines(patch, "backward", backward)


def after_adamw(patch: Patch, change: Callable[[Any], None]) -> None:
    """Run ``change(optimizer)`` after each of torch's AdamW steps, whichever engine takes it."""
    import functools

    import torch

    def make(step: Any) -> Any:
        # torch's learning-rate schedulers and profilers look for the wrapped attributes of the method.
        @functools.wraps(step)
        def wrong(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(optimizer, *args, **kwargs)
            with torch.no_grad():
                change(optimizer)
            return result

        return wrong

    patch(torch.optim.AdamW, "step", make)


def limit_reaching_the_engine(fault: Fault, patch: Patch, limit: float) -> None:
    """Whatever the recipe says, the engine clips at ``limit`` (0: never)."""
    from toolkit.strategies.engines import base, fsdp1
    from toolkit.strategies.zero import Zero1

    def clip(right: Any) -> Any:
        def wrong(engine: Any, max_norm: float) -> Any:
            fault.reached()
            return right(engine, limit)

        return wrong

    @patch.replacing(Zero1.__mro__[1], "deepspeed_config")
    def config(right: Any, strategy: Any, resolved: Any) -> Any:
        fault.reached()
        return right(strategy, resolved) | {"gradient_clipping": limit}

    patch(base.Engine, "clip", clip)
    patch(fsdp1.Fsdp1Engine, "clip", clip)


def replace_engine(fault: Fault, patch: Patch, name: str) -> None:
    """Another strategy's engine and Accelerator come up in place of the one asked for, and claim to be right."""
    import dataclasses

    from toolkit.strategies import strategies
    from toolkit.strategies.base import Strategy
    from toolkit.strategies.engines import connect
    from toolkit.training import preparation

    other = strategies()[name].engine_class()

    @patch.replacing(Strategy, "engine_for")
    def engine_for(right: Any, strategy: Strategy, resolved: Any) -> Any:
        fault.reached()
        return other

    # By name: the worker imports the faults.
    @patch.replacing(sys.modules["toolkit.verification.record.worker"], "make_accelerator")
    def make_accelerator(right: Any, resolved: Any, **options: Any) -> Any:
        recipe = resolved.recipe.model_copy(
            update={"strategy": resolved.recipe.strategy.model_copy(update={"name": name})}
        )
        return connect.make_accelerator(dataclasses.replace(resolved, recipe=recipe), **options)

    def load_base(right: Any) -> Any:
        return lambda *args, **kwargs: right(*args, **kwargs | {"by_part": False})  # the other engine fills no shards

    patch(preparation, "load_base", load_base)
