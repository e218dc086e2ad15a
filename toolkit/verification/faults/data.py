"""Other samples or labels than the recipe's reach the model."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

from toolkit.verification.faults.base import DISTRIBUTED, Fault, Patch


class DataDroppedTail(Fault):
    id = "data-dropped-tail"
    title = "the remainder batch is never trained on"
    stages = ("ledger",)
    diagnoses = ("remainder-dropped",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        @patch.replacing(loader, "windows")
        def windows(right: Any, order: Any, global_size: int) -> Any:
            for window in right(order, global_size):
                if len(window) == global_size:
                    yield window
                else:
                    self.reached()


class DataDuplicated(Fault):
    id = "data-duplicated"
    title = "the sampler pads the last batch with samples seen before"
    reference = "accelerate#2316"
    stages = ("ledger",)
    diagnoses = ("samples-repeated",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        @patch.replacing(loader, "deal")
        def deal(right: Any, window: list[Any], micro_size: int, data_size: int) -> Any:
            short = -len(window) % (micro_size * data_size)
            if short:
                self.reached()
            return right([*window, *window[:short]], micro_size, data_size)


class DataSameShard(Fault):
    id = "data-same-shard"
    title = "every rank reads the same samples"
    stages = ("ledger",)
    diagnoses = ("same-samples-on-every-rank",)
    strategies = DISTRIBUTED

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        @self.breaking(patch, loader, "deal")
        def deal(right: Any, window: list[Any], micro_size: int, data_size: int) -> Any:
            return [[ranks[0]] * len(ranks) for ranks in right(window, micro_size, data_size)]


class LabelsUnmasked(Fault):
    id = "labels-unmasked"
    title = "padding or prompt tokens are supervised"
    stages = ("ledger", "forward")
    diagnoses = ("wrong-labels",)

    def inject(self, patch: Patch, case: Any) -> None:
        from dataclasses import replace

        from toolkit.data import loader
        from toolkit.tasks.labels import IGNORED

        @patch.replacing(loader, "collate")
        def collate(right: Any, *args: Any, **kwargs: Any) -> Any:
            micro = right(*args, **kwargs)
            labels = micro.tensors["labels"]
            if not labels.eq(IGNORED).any():
                return micro
            self.reached()
            shown = labels.masked_fill(labels == IGNORED, 0)
            return replace(micro, tensors=micro.tensors | {"labels": shown})


_MESSAGES = {"data": {"format": "messages", "train": "built-in", "fields": {}}, "model": {"task": "causal-lm"}}
_MIXTURE = {"data": {"train": [{"path": "one", "proportion": 0.4}, {"path": "two", "proportion": 0.2},
                               {"path": "three", "proportion": 0.4}]}}  # fmt: skip


class HeaderSupervised(Fault):
    id = "header-supervised"
    title = "the header of each assistant turn is supervised"
    reference = "trl: training templates of gptoss, muse_glimmer"
    stages = ("data",)
    diagnoses = ("header-learned",)
    needs: ClassVar = _MESSAGES

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.chat import Chat

        @self.breaking(patch, Chat, "_covered")
        def covered(right: Any, chat: Any, base: str, turns: Any) -> Any:
            header = len(chat._dialect.header)
            return {index: (start - header, end) for index, (start, end) in right(chat, base, turns).items()}


class TurnEndUnlearned(Fault):
    id = "turn-end-unlearned"
    title = "the token that ends a turn is not supervised"
    stages = ("data",)
    diagnoses = ("end-of-turn-not-learned",)
    needs: ClassVar = _MESSAGES

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.chat import Chat

        @self.breaking(patch, Chat, "_covered")
        def covered(right: Any, chat: Any, base: str, turns: Any) -> Any:
            shown = right(chat, base, turns)
            return {index: (start, chat._special.words_end(base[:end])) for index, (start, end) in shown.items()}


class ToolResultSupervised(Fault):
    id = "tool-result-supervised"
    title = "a tool's result between two assistant turns is supervised"
    stages = ("data",)
    diagnoses = ("results-learned",)
    needs: ClassVar = _MESSAGES

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.chat import Chat

        @patch.replacing(Chat, "_piece")
        def piece(right: Any, chat: Any, fields: Any, count: int, text: str, shown: Any) -> Any:
            indices = sorted(shown)
            for before, after in itertools.pairwise(indices):
                if fields["messages"][after - 1]["role"] == "tool":
                    self.reached()
                    shown = shown | {before: (shown[before][0], shown[after][0])}
            return right(chat, fields, count, text, shown)


class EarlierReasoningSupervised(Fault):
    id = "earlier-reasoning-supervised"
    title = "earlier turns keep their reasoning, which the template would not show, and all are supervised at once"
    reference = "trl: training template of qwen3"
    stages = ("data",)
    diagnoses = ("rewritten-turns-learned",)
    needs: ClassVar = _MESSAGES

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.template_dialect import Dialect

        def message(right: Any) -> Any:
            def wrong(dialect: Any, message: Any, as_strings: bool) -> Any:
                found = right(dialect, message, as_strings)
                if reasoning := message.get("reasoning_content"):
                    self.reached()
                    found = {key: part for key, part in found.items() if key not in dialect._reasoning}
                    found["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
                return found

            return wrong

        patch(Dialect, "_message", message)


class MixtureWithReplacement(Fault):
    id = "mixture-with-replacement"
    title = "samples of a source are drawn with replacement"
    stages = ("data",)
    diagnoses = ("replaced-draws",)
    needs: ClassVar = _MIXTURE

    def inject(self, patch: Patch, case: Any) -> None:
        import numpy as np

        from toolkit.data import mixture

        @self.breaking(patch, mixture, "chosen")
        def chosen(right: Any, sizes: Any, counts: Any, seed: int) -> Any:
            part, _ = right(sizes, counts, seed)
            random = np.random.RandomState(seed)
            return part, np.array([random.randint(sizes[at]) for at in part])


class MixtureShareOff(Fault):
    id = "mixture-share-off"
    title = "a source has one sample too many in an epoch, another one too few"
    stages = ("data",)
    diagnoses = ("share-wrong",)
    needs: ClassVar = _MIXTURE

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import mixture

        @self.breaking(patch, mixture, "epoch_counts")
        def counts(right: Any, *arguments: Any) -> Any:
            found = right(*arguments)
            return [found[0] - 1, *found[1:-1], found[-1] + 1]
