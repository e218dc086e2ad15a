"""The first weights or a loss are wrong."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import DISTRIBUTED, NOT_BROADCAST, Fault, Patch
from toolkit.verification.faults.helpers import DROPPING, LORA


class AdapterInit(Fault):
    id = "adapter-init"
    title = "the adapter's special initialisation is lost"
    reference = "peft#1887"
    stages = ("forward",)
    diagnoses = ("adapter-initialisation",)
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from torch import nn

        from toolkit.training import preparation

        @patch.replacing(preparation, "add_adapter")
        def add_adapter(right: Any, *args: Any, **kwargs: Any) -> Any:
            model = right(*args, **kwargs)
            for name, matrix in model.named_parameters():
                if "lora_A" in name:
                    nn.init.normal_(matrix, std=0.02)
                    self.reached()
            return model


class DropoutShared(Fault):
    id = "dropout-shared"
    title = "every rank draws the same dropout mask"
    reference = "transformers#31412"
    # The other ranks' losses differ as soon as their masks do.
    stages = ("forward", "gradient")
    diagnoses = ("dropout-mask-shared",)
    strategies = DISTRIBUTED
    needs: ClassVar = {"adapter": DROPPING}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import loop

        @patch.replacing(loop, "seed_micro_batch")
        def seed_micro_batch(right: Any, seed: int, step: int, micro: int, rank: int) -> None:
            if rank:
                self.reached()
            right(seed, step, micro, 0)


class InitDiffers(Fault):
    id = "init-differs"
    title = "ranks start from different weights"
    stages = ("forward", "cross-rank")
    diagnoses = ("initial-weights-differ",)
    # DDP and DeepSpeed broadcast the first rank's weights; FSDP takes each rank's as they are.
    strategies = NOT_BROADCAST
    needs: ClassVar = {"adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        import os

        import torch

        from toolkit.training import preparation

        @patch.replacing(preparation, "load_base")
        def load_base(right: Any, *args: Any, **kwargs: Any) -> Any:
            model = right(*args, **kwargs | {"by_part": False})  # with the values that are changed here
            if os.environ["RANK"] != "0":
                self.reached()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
            return model


class PackingLeak(Fault):
    id = "packing-leak"
    title = "packed documents attend to each other"
    stages = ("forward",)
    diagnoses = ("packed-samples-attend",)
    needs: ClassVar = {"data": {"packing": True, "group_by_length": False}}

    def inject(self, patch: Patch, case: Any) -> None:
        from transformers import masking_utils, modeling_flash_attention_utils

        def untold(right: Any) -> Any:
            def wrong(position_ids: Any, *args: Any) -> Any:
                found = right(position_ids, *args)
                if found is None or found is False:
                    return found
                self.reached()
                return False if args else None

            return wrong

        patch(masking_utils, "find_packed_sequence_indices", untold)
        patch(modeling_flash_attention_utils, "_is_packed_sequence", untold)
