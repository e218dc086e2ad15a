"""float8 products are scaled back by another tensor's scale."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch


class Float8OtherScale(Fault):
    id = "float8-other-scale"
    title = "float8 products are scaled back by the scale of the tensor before"
    stages = ("products",)
    needs: ClassVar = {"precision": "bf16", "fp8": True}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import fp8

        last: list[Any] = []

        def rounded(right: Any) -> Any:
            def wrong(tensor: Any, dtype: Any) -> Any:
                values, scale = right(tensor, dtype)
                used = last.pop() if last else scale
                last.append(scale)
                if used is not scale:
                    self.reached()
                return values, used

            return wrong

        patch(fp8, "rounded", rounded)
