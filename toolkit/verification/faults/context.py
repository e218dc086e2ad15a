"""The tokens of a row are divided over ranks, and what belongs to the row is taken from a part of it."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import DISTRIBUTED, Fault, Patch


class _OfParts(Fault):
    """Base of faults that need rows whose tokens are divided."""

    stages = ("forward",)
    strategies = DISTRIBUTED

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        """Two parts on all processes; the state is divided over the same ranks."""
        if resolved.mesh.context > 1:
            return {}
        batch = {"micro_size": resolved.micro_size, "accumulation": resolved.accumulation, "global_size": None}
        return {
            "strategy": {"mesh": {"context": 2}, "offload": "none"},
            "machine": {"processes": 2, "nodes": 1},
            "model": {"attention": "sdpa"},
            "batch": batch,
            "compile": False,
        }


class PositionsRestart(_OfParts):
    id = "parts-positions-restart"
    title = "positions begin at 0 in every part of a row"
    diagnoses = ("positions-restart",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import context

        @patch.replacing(context, "_inputs")
        def inputs(right: Any, *args: Any) -> Any:
            found = right(*args)
            self.reached()
            return found | {"position_ids": found["position_ids"] - found["position_ids"][:, :1]}


class EdgesLost(_OfParts):
    id = "parts-edges-lost"
    title = "labels are shifted within each part: its last token predicts nothing"
    diagnoses = ("predictions-lost-at-edges",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import context

        @patch.replacing(context, "_labels")
        def labels(right: Any, *args: Any) -> Any:
            found = right(*args).clone()
            self.reached()
            found[:, -1] = -100
            return found


class AttendsAlone(_OfParts):
    id = "parts-attend-alone"
    title = "each part of a row attends to its own tokens alone"
    diagnoses = ("attention-within-parts",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import context

        @patch.replacing(context, "attention")
        def exchange(
            right: Any, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
        ) -> Any:
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            if attention_mask is None or attention_mask.shape[-1] == key.shape[2]:
                return right(module, query, key, value, attention_mask, **options)
            self.reached()
            if (row := context._ROW.get()) is not None:
                row.exchanges += 1
            return sdpa_attention_forward(module, query, key, value, None, **options)


class KeyHeadsMixed(_OfParts):
    id = "parts-key-heads-mixed"
    title = "ranks get the key heads of another rank's query heads"
    diagnoses = ("key-heads-of-another-rank",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        """Fewer key heads than query heads, so that these can be distinguished."""
        found = super().needs_of(resolved)
        config = dict(resolved.facts.config or {})
        config["num_key_value_heads"] = max(2, config["num_attention_heads"] // 2)
        return found | {"model": found.get("model", {}) | {"config": config, "path": None}}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import context

        @patch.replacing(context, "_exchanged")
        def exchanged(right: Any, x: Any, group: Any, to_heads: bool) -> Any:
            if to_heads and x.shape[1] == self._key_heads(case):
                self.reached()
                x = x.roll(x.shape[1] // group.size(), dims=1)
            return right(x, group, to_heads)

    @staticmethod
    def _key_heads(case: Any) -> int:
        return int(case.resolved().facts.config["num_key_value_heads"])


class SameMasks(_OfParts):
    id = "parts-same-masks"
    title = "all parts of a row draw the same dropout masks"
    diagnoses = ("masks-of-another-part",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        found = super().needs_of(resolved)
        config = dict(resolved.facts.config or {})
        return found | {"model": found.get("model", {}) | {"config": config | {"attention_dropout": 0.1}, "path": None}}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training.session import Session

        def rank(right: Any) -> Any:
            def wrong(session: Any) -> int:
                self.reached()
                return int(session.data_rank)

            return property(wrong)

        patch(Session, "token_rank", rank)


class GradientOfParts(_OfParts):
    id = "parts-averaged"
    title = "gradients are averaged over the parts of a row, though each has a part of the sum"
    stages = ("gradient",)
    diagnoses = ("gradients-scaled-by-parts",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.base import Engine

        @patch.replacing(Engine, "__init__")
        def init(right: Any, engine: Any, *args: Any) -> None:
            right(engine, *args)
            self.reached()
            engine.gradient_divisor //= engine.resolved.mesh.context


class OtherRows(_OfParts):
    id = "parts-of-other-rows"
    title = "ranks that divide rows between them are given different ones"
    stages = ("ledger",)
    diagnoses = ("parts-of-different-rows",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        @patch.replacing(loader, "divided")
        def own(right: Any, micro: Any, part: Any) -> Any:
            if part is not None and part.index and micro.supervised:
                self.reached()
                ids = micro.tensors["input_ids"]
                micro.tensors["input_ids"] = ids.where(micro.tensors["labels"] == -100, ids.flip(0).roll(1, 1))
            return right(micro, part)
