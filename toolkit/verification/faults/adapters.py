"""Adapters that are there and do not act."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import DISTRIBUTED, WITHOUT_GRADIENT, Fault, Patch
from toolkit.verification.faults.helpers import LORA


class PromptDropped(Fault):
    id = "prompt-dropped"
    title = "one rank trains without the virtual tokens"
    stages = ("forward",)
    diagnoses = ("prompt-missing",)
    strategies = DISTRIBUTED
    needs: ClassVar = {
        "adapter": {"method": "prompt-tuning", "r": None, "alpha": None, "dropout": None, "target_modules": None,
                    "modules_to_save": [], "options": {"num_virtual_tokens": 4}, "path": None},
        "data": {"packing": False},
        "loss": "plain",
    }  # fmt: skip

    def inject(self, patch: Patch, case: Any) -> None:
        import os

        from peft import PeftModelForCausalLM

        @patch.replacing(PeftModelForCausalLM, "forward")
        def forward(right: Any, model: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
            if os.environ["RANK"] == "0":
                return right(model, input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            self.reached()
            embeds = model.word_embeddings(input_ids)
            # The prompt stays in the graph, so that collectives match; its gradient is zero.
            nothing = 0.0 * model.get_prompt(batch_size=len(input_ids)).sum()
            return model.base_model(inputs_embeds=embeds + nothing.to(embeds.dtype), attention_mask=attention_mask)


# A model that has the weights of all experts in one tensor.
_MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


class ExpertsSkipped(Fault):
    id = "experts-skipped"
    title = "the adapters of experts get no gradient"
    reference = "peft 0.21.2: ParamWrapper computes its update beside the layer's call"
    stages = ("gradient", "update", "engagement")
    diagnoses = ("no-gradient", "tensors-do-not-train")
    strategies = WITHOUT_GRADIENT
    needs: ClassVar = {
        "model": {"path": None, "revision": None, "config": _MIXTRAL},
        "tokenizer": {"path": "none"},
        "adapter": LORA
        | {"target_modules": ["q_proj"], "path": None}
        | {"options": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}},
        "data": {"packing": False},
        "loss": "plain",
    }

    def inject(self, patch: Patch, case: Any) -> None:
        from peft.tuners.lora.layer import ParamWrapper

        @self.breaking(patch, ParamWrapper, "get_delta_factors")
        def factors(right: Any, layer: Any, name: str) -> Any:
            left, other, scaling = right(layer, name)
            return left.detach(), other.detach(), scaling


class NewTokensFrozen(Fault):
    id = "new-tokens-frozen"
    title = "the rows of new tokens get no gradient beside an adapter"
    stages = ("gradient", "update", "engagement")
    diagnoses = ("no-gradient", "tensors-do-not-train")
    strategies = WITHOUT_GRADIENT
    needs: ClassVar = {
        "tokenizer": {"path": "none", "add_tokens": ["<new>"], "add_special_tokens": []},
        "adapter": LORA | {"path": None},
        "data": {"packing": False},
        "loss": "plain",
    }

    def inject(self, patch: Patch, case: Any) -> None:
        from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

        @self.breaking(patch, TrainableTokensLayer, "get_merged_weights")
        def weights(right: Any, layer: Any, adapters: Any) -> Any:
            return right(layer, adapters).detach()
