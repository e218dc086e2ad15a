"""packed documents attend to each other."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch


class PackingLeak(Fault):
    id = "packing-leak"
    title = "packed documents attend to each other"
    stages = ("forward",)
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
