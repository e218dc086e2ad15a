"""What the recipe asks for is not active."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import (
    DISTRIBUTED,
    GATHERED_BY_TORCH,
    SHARDED,
    SYNC_CHOSEN,
    TORCH_OPTIMIZER,
    Fault,
    Patch,
)
from toolkit.verification.faults.helpers import LORA, patch_engines, replace_engine


class AdapterDtype(Fault):
    id = "adapter-dtype"
    title = "adapters in another dtype than the recipe says"
    reference = "peft#1706, DeepSpeed#8113"
    stages = ("engagement", "forward", "update")
    diagnoses = ("wrong-dtype",)
    # DeepSpeed keeps float32 masters whatever dtype it is given: there the fault is none.
    strategies = TORCH_OPTIMIZER
    needs: ClassVar = {"adapter": LORA, "precision": "bf16"}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import preparation

        @patch.replacing(preparation, "set_dtypes")
        def set_dtypes(right: Any, model: Any, trainable: str, frozen: str) -> None:
            if trainable != frozen:
                self.reached()
            right(model, frozen, frozen)


class AdapterFrozen(Fault):
    id = "adapter-frozen"
    title = "one adapter matrix never trains"
    stages = ("gradient", "update", "engagement")
    diagnoses = ("tensors-do-not-train", "other-parameters-train")
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import preparation

        @patch.replacing(preparation, "add_adapter")
        def add_adapter(right: Any, *args: Any, **kwargs: Any) -> Any:
            model = right(*args, **kwargs)
            matrix = next(p for name, p in model.named_parameters() if "lora_B" in name)
            matrix.requires_grad_(False)
            self.reached()
            return model


class BaseUnfrozen(Fault):
    id = "base-unfrozen"
    title = "a base weight trains under LoRA"
    stages = ("engagement", "update")
    diagnoses = ("frozen-weight-trains",)
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import preparation

        @patch.replacing(preparation, "add_adapter")
        def add_adapter(right: Any, *args: Any, **kwargs: Any) -> Any:
            model = right(*args, **kwargs)
            base = next(p for name, p in model.named_parameters() if "base_layer" in name)
            base.requires_grad_(True)
            self.reached()
            return model


class CheckpointingOff(Fault):
    id = "checkpointing-off"
    title = "activation checkpointing asked, never applied"
    stages = ("engagement",)
    diagnoses = ("checkpointing-not-applied",)
    needs: ClassVar = {"activation_checkpointing": "full"}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import preparation

        @self.breaking(patch, preparation, "checkpoint_blocks")
        def checkpoint_blocks(right: Any, *arguments: Any) -> None:
            pass


# A model that hands float32 rotary tables to its blocks.
_OLMO2 = {
    "model_type": "olmo2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip


class InputsCast(Fault):
    id = "inputs-cast"
    title = "float32 inputs of blocks are rounded to the compute dtype"
    reference = "torch 2.13.0, FSDP: cast_forward_inputs, True by default in FSDP2"
    stages = ("forward", "engagement")
    diagnoses = ("block-inputs-cast",)
    strategies = GATHERED_BY_TORCH
    needs: ClassVar = {
        "precision": "bf16",
        "model": {"path": None, "revision": None, "config": _OLMO2},
        "tokenizer": {"path": "none"},
    }

    def inject(self, patch: Patch, case: Any) -> None:
        import dataclasses

        from toolkit.strategies.engines.fsdp1 import Fsdp1Engine
        from toolkit.strategies.engines.fsdp2 import Fsdp2Engine

        def plugin(right: Any) -> Any:
            def wrong(*args: Any) -> Any:
                made = right(*args)
                if made.mixed_precision_policy is not None:
                    self.reached()
                    made.mixed_precision_policy = dataclasses.replace(
                        made.mixed_precision_policy, cast_forward_inputs=True
                    )
                return made

            return wrong

        for engine in (Fsdp1Engine, Fsdp2Engine):
            patch(engine, "plugin", plugin)


class SilentDdp(Fault):
    id = "silent-ddp"
    title = "the sharded strategy never engages: plain DDP runs instead"
    reference = "accelerate 1.15.0 without a GPU"
    stages = ("engagement",)
    diagnoses = ("collectives-missing", "strategy-not-active")
    strategies = SHARDED

    def inject(self, patch: Patch, case: Any) -> None:
        replace_engine(self, patch, "ddp")


class SyncIgnored(Fault):
    id = "sync-ignored"
    title = "gradients are summed over the ranks after every micro-batch, where strategy.sync is last"
    stages = ("engagement",)
    diagnoses = ("sync-not-as-set",)
    strategies = SYNC_CHOSEN
    needs: ClassVar[dict[str, Any]] = {"strategy": {"sync": "last"}}

    def inject(self, patch: Patch, case: Any) -> None:
        def accumulating(right: Any) -> Any:
            def wrong(engine: Any, last: bool) -> Any:
                if not last:
                    self.reached()
                return right(engine, True)

            return wrong

        patch_engines(patch, "accumulating", accumulating)


class SilentSingle(Fault):
    id = "silent-single"
    title = "the processes never connect"
    reference = "accelerate 1.15.0 without a GPU"
    stages = ("engagement", "gradient", "cross-rank")
    diagnoses = ("ranks-not-reduced", "processes-not-connected")
    strategies = DISTRIBUTED

    def inject(self, patch: Patch, case: Any) -> None:
        replace_engine(self, patch, "single")
