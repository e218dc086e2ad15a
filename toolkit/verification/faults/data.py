"""Other samples or labels than the recipe's reach the model."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import DISTRIBUTED, Fault, Patch


class DataDroppedTail(Fault):
    id = "data-dropped-tail"
    title = "the remainder batch is never trained on"
    stages = ("ledger",)
    diagnoses = ("remainder-dropped",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        def windows(right: Any) -> Any:
            def wrong(order: Any, global_size: int) -> Any:
                for window in right(order, global_size):
                    if len(window) == global_size:
                        yield window
                    else:
                        self.reached()

            return wrong

        patch(loader, "windows", windows)


class DataDuplicated(Fault):
    id = "data-duplicated"
    title = "the sampler pads the last batch with samples seen before"
    reference = "accelerate#2316"
    stages = ("ledger",)
    diagnoses = ("samples-repeated",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        def deal(right: Any) -> Any:
            def wrong(window: list[Any], micro_size: int, data_size: int) -> Any:
                short = -len(window) % (micro_size * data_size)
                if short:
                    self.reached()
                return right([*window, *window[:short]], micro_size, data_size)

            return wrong

        patch(loader, "deal", deal)


class DataSameShard(Fault):
    id = "data-same-shard"
    title = "every rank reads the same samples"
    stages = ("ledger",)
    diagnoses = ("same-samples-on-every-rank",)
    strategies = DISTRIBUTED

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        def deal(right: Any) -> Any:
            def wrong(window: list[Any], micro_size: int, data_size: int) -> Any:
                self.reached()
                return [[ranks[0]] * len(ranks) for ranks in right(window, micro_size, data_size)]

            return wrong

        patch(loader, "deal", deal)


class LabelsUnmasked(Fault):
    id = "labels-unmasked"
    title = "padding or prompt tokens are supervised"
    stages = ("ledger", "forward")
    diagnoses = ("wrong-labels",)

    def inject(self, patch: Patch, case: Any) -> None:
        from dataclasses import replace

        from toolkit.data import loader
        from toolkit.data.formats import IGNORED

        def collate(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                micro = right(*args, **kwargs)
                labels = micro.tensors["labels"]
                if not labels.eq(IGNORED).any():
                    return micro
                self.reached()
                shown = labels.masked_fill(labels == IGNORED, 0)
                return replace(micro, tensors=micro.tensors | {"labels": shown})

            return wrong

        patch(loader, "collate", collate)
