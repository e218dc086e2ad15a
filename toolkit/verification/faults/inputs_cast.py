"""float32 inputs of blocks are rounded to the compute dtype."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import GATHERED_BY_TORCH, Fault, Patch

# A model that hands float32 rotary tables to its blocks.
_OLMO2 = {
    "model_type": "olmo2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip


class InputsCast(Fault):
    id = "inputs-cast"
    title = "float32 inputs of blocks are rounded to the compute dtype"
    reference = "torch 2.13.0, FSDP: cast_forward_inputs, True by default in FSDP2"
    stages = ("engagement",)
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
