"""The matrices of layers are divided over ranks, and what these compute of them does not fit together."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import SPLITS_LAYERS, Fault, Patch


class _OfLayers(Fault):
    """Base of faults that need divided layers."""

    stages: ClassVar[tuple[str, ...]] = ("gradient",)
    strategies = SPLITS_LAYERS

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        """Two parts of every layer."""
        if resolved.mesh.tensor > 1:
            return {}
        batch = {"micro_size": resolved.micro_size, "accumulation": resolved.accumulation, "global_size": None}
        config = dict(resolved.facts.config or {})
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "attention_dropout": 0.0}
        return {
            "strategy": {"mesh": {"tensor": 2}, "offload": "none"},
            "machine": {"processes": 2, "nodes": 1},
            "model": {"config": config | heads, "path": None},
            "batch": batch,
            "compile": False,
        }


class HiddenGradientsApart(_OfLayers):
    id = "layers-hidden-gradients-apart"
    title = "the gradient of hidden states is that of one rank's part of a layer, not the sum of all"
    diagnoses = ("hidden-gradients-not-summed",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import tensor

        @patch.replacing(tensor, "entering")
        def entering(right: Any, x: Any, ranks: Any) -> Any:
            if x.dim() < 3:  # a weight of a norm
                return right(x, ranks)
            self.reached()
            return x


class HeadNormsApart(_OfLayers):
    id = "layers-head-norms-apart"
    title = "a norm of heads trains with the gradient of one rank's heads"
    diagnoses = ("head-norms-not-summed",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        """A model with such norms."""
        found = super().needs_of(resolved)
        config = dict(found.get("model", {}).get("config") or resolved.facts.config or {})
        width = config["hidden_size"] // config["num_attention_heads"]
        kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "vocab_size", "tie_word_embeddings")  # fmt: skip
        other = {key: config[key] for key in kept if key in config} | {"model_type": "qwen3", "head_dim": width}
        return found | {"model": {"config": other, "path": None}, "adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import tensor

        @self.breaking(patch, tensor, "_sum_gradients")
        def sum_gradients(right: Any, module: Any, ranks: Any) -> None:
            pass


class HiddenGradientsTwice(_OfLayers):
    id = "layers-hidden-gradients-twice"
    title = "the gradient of hidden states is summed where they leave a layer, and where they enter it"
    diagnoses = ("hidden-gradients-summed-twice",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import tensor

        def backward(right: Any) -> Any:
            def wrong(ctx: Any, outer: Any) -> Any:
                self.reached()
                return tensor._added(outer, ctx.ranks), None

            return staticmethod(wrong)

        def forward(right: Any) -> Any:
            def wrong(ctx: Any, x: Any, ranks: Any) -> Any:
                ctx.ranks = ranks
                return right(ctx, x, ranks)

            return staticmethod(wrong)

        patch(tensor._Leaving, "forward", forward)
        patch(tensor._Leaving, "backward", backward)


class LayersCounted(_OfLayers):
    id = "layers-counted-as-data"
    title = "the loss is multiplied by all ranks, though those of a layer have the same samples"
    diagnoses = ("gradients-scaled-by-layers", "accumulation-summed", "ranks-summed")

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.base import Engine

        @patch.replacing(Engine, "__init__")
        def init(right: Any, engine: Any, *args: Any) -> None:
            right(engine, *args)
            self.reached()
            engine.gradient_divisor *= engine.resolved.mesh.tensor


class NormOfOnePart(_OfLayers):
    id = "layers-norm-of-one-part"
    title = "each rank clips by the norm of its own part of divided layers"
    stages = ("clip",)
    diagnoses = ("norm-of-one-shard",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.layouts import divided

        @self.breaking(patch, divided, "square")
        def square(right: Any, *args: Any) -> Any:
            return right(*args)

        def over_ranks(right: Any) -> Any:
            return lambda squares, group: None

        patch(divided, "_over_ranks", over_ranks)


class MasksOfEachRank(_OfLayers):
    id = "layers-masks-apart"
    title = "the ranks of a layer draw different dropout masks for the hidden states that all of them have"
    stages = ("gradient", "forward")  # an adapter begins at zero: its first losses do not show the masks
    diagnoses = ("masks-of-layer-ranks",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        adapter = {"method": "lora", "r": 4, "alpha": 8, "dropout": 0.3, "target_modules": "all-linear"}
        return super().needs_of(resolved) | {"adapter": adapter}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training.session import Session

        def rank(right: Any) -> Any:
            def wrong(session: Any) -> int:
                self.reached()
                return int(session.rank)

            return property(wrong)

        patch(Session, "token_rank", rank)


class MasksOfParts(MasksOfEachRank):
    id = "layers-masks-alike"
    title = "the ranks of a layer draw the same dropout mask, each for its own part of the inner units"

    def inject(self, patch: Patch, case: Any) -> None:
        from torch.nn import functional

        from toolkit.model import tensor

        @patch.replacing(tensor, "_dropped_part")
        def dropped_part(right: Any, ranks: Any) -> Any:
            def forward(dropout: Any, x: Any) -> Any:
                self.reached()
                return functional.dropout(x, dropout.p, dropout.training)

            return forward


class OtherSamples(_OfLayers):
    id = "layers-of-other-samples"
    title = "the ranks of a layer are given samples of their own"
    stages = ("ledger",)
    diagnoses = ("parts-of-different-rows",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        @patch.replacing(loader, "divided")
        def own(right: Any, micro: Any, part: Any) -> Any:
            import torch.distributed as dist

            if dist.get_rank() % 2 and micro.supervised:
                self.reached()
                ids = micro.tensors["input_ids"]
                micro.tensors["input_ids"] = ids.where(micro.tensors["labels"] == -100, ids.flip(0).roll(1, 1))
            return right(micro, part)
