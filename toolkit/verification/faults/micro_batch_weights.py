"""Micro-batches or ranks have wrong weights in the gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from toolkit.data.collate import MicroBatch
from toolkit.verification.faults.base import ALL_REDUCED, DISTRIBUTED, Fault, Patch
from toolkit.verification.faults.helpers import WindowView, WrongWeight

_THREE_MICRO_BATCHES = {"batch": {"accumulation": 3, "micro_size": 2, "global_size": None}}
"""Of a window of one micro-batch most of these weights would be right."""


class AccumDoubleDivide(WrongWeight):
    id = "accum-double-divide"
    title = "loss divided by the accumulation count twice"
    reference = "transformers#35808, accelerate#3533"
    diagnoses = ("accumulation-divided-twice",)
    needs: ClassVar = _THREE_MICRO_BATCHES

    def factor(self, view: WindowView) -> float:
        return 1.0 / view.accumulation


class AccumLastOnly(WrongWeight):
    id = "accum-last-only"
    title = "only the last micro-batch's gradient kept"
    reference = "DeepSpeed#6550, DeepSpeed#7981"
    diagnoses = ("only-last-micro-batch",)
    needs: ClassVar = _THREE_MICRO_BATCHES

    def factor(self, view: WindowView) -> float:
        return float(view.at == len(view.window) - 1)


class AccumLastUnreduced(Fault):
    id = "accum-last-unreduced"
    title = "last micro-batch not reduced over ranks"
    reference = "DeepSpeed#7985"
    stages = ("gradient", "cross-rank")
    diagnoses = ("last-micro-batch-not-reduced", "tensors-not-reduced")
    strategies = ALL_REDUCED
    needs: ClassVar = _THREE_MICRO_BATCHES

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.replicated import DdpEngine
        from toolkit.strategies.engines.zero import ZeroEngine

        @patch.replacing(DdpEngine, "accumulating")
        def accumulating(right: Any, engine: Any, last: bool) -> Any:
            if last:
                self.reached()
            return engine.accelerator.no_sync(engine.model) if last else contextlib.nullcontext()

        @patch.replacing(ZeroEngine, "backward")
        def backward(right: Any, engine: Any, loss: Any, last: bool) -> None:
            if not last:
                return right(engine, loss, last)
            import deepspeed.comm

            unreduced = Patch()
            unreduced(deepspeed.comm, "all_reduce", lambda _: self._nothing)
            try:
                return right(engine, loss, last)
            finally:
                unreduced.undo()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        self.reached()


class AccumMeanOfMeans(WrongWeight):
    id = "accum-mean-of-means"
    title = "loss averaged per micro-batch, not per supervised token"
    reference = "trl#2175, transformers#34198"
    diagnoses = ("mean-per-micro-batch",)
    needs: ClassVar = _THREE_MICRO_BATCHES

    def factor(self, view: WindowView) -> float:
        return view.tokens / (max(1, view.micro.supervised) * len(view.window) * view.data_size)


class AccumNoDivide(WrongWeight):
    id = "accum-no-divide"
    title = "gradient summed over micro-batches, not averaged"
    reference = "transformers#45305"
    diagnoses = ("accumulation-summed",)
    needs: ClassVar = _THREE_MICRO_BATCHES

    def factor(self, view: WindowView) -> float:
        return float(view.accumulation)


class AccumPartialWindow(WrongWeight):
    id = "accum-partial-window"
    title = "last, short window divided by the full accumulation count"
    reference = "transformers#39659"
    diagnoses = ("short-window-divided-by-full",)
    needs: ClassVar = _THREE_MICRO_BATCHES

    def factor(self, view: WindowView) -> float:
        return len(view.window) / view.accumulation


class AccumRankMean(WrongWeight):
    id = "accum-rank-mean"
    title = "ranks weighted equally although their token counts differ"
    reference = "transformers#34242, transformers#39392"
    diagnoses = ("mean-per-rank",)
    strategies = DISTRIBUTED

    def factor(self, view: WindowView) -> float:
        return view.tokens / (max(1, view.local_tokens) * view.data_size)


class GradScaled65536(Fault):
    id = "grad-scaled-65536"
    title = "the loss scale is left in the gradient"
    reference = "DeepSpeed#7839"
    stages = ("gradient",)
    diagnoses = ("loss-scale-left",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        # DeepSpeed runs fp16 on a GPU only.
        return {} if not resolved.traits.torch_optimizer and resolved.device == "cpu" else {"precision": "fp16"}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.base import Engine
        from toolkit.strategies.engines.zero import ZeroEngine

        @patch.replacing(Engine, "unscale")
        def unscale(right: Any, engine: Any) -> None:
            if engine.scaler is None:
                right(engine)
            else:
                self.reached()

        @self.breaking(patch, ZeroEngine, "backward")
        def backward(right: Any, engine: Any, loss: Any, last: bool) -> None:
            right(engine, loss * 65536.0, last)


class TokensOvercount(Fault):
    id = "tokens-overcount"
    title = "the token count includes the never-predicted first position"
    reference = "transformers#46204"
    stages = ("gradient",)
    diagnoses = ("unpredicted-tokens-counted",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.loader import TrainLoader
        from toolkit.training import loop

        rows = 0

        @patch.replacing(TrainLoader, "__iter__")
        def windows(iterate: Any, loader: Any) -> Iterator[list[MicroBatch]]:
            nonlocal rows
            for window in iterate(loader):
                rows = sum(len(micro.sample_ids) for micro in window)
                yield window

        @self.breaking(patch, loop, "sum_over_ranks")
        def overcount(total: Any, tensor: Any) -> Any:
            return total(tensor + rows)
