"""How products in float8 go wrong: layers or scales."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.diagnose.known import MISSING, Known
from toolkit.verification.faults.base import Fault, Patch


class Float8LayerLeft(Fault):
    id = "float8-layer-left"
    title = "one linear layer stays in bf16 under fp8"
    stages = ("engagement", "gradient")
    diagnoses = ("float8-products-missing",)
    needs: ClassVar = {"precision": "bf16", "fp8": True, "adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        from torch import nn

        from toolkit.options.fp8 import apply

        @patch.replacing(apply, "convert")
        def convert(right: Any, model: Any, *arguments: Any) -> list[str]:
            names: list[str] = right(model, *arguments)
            left = model.get_submodule(names.pop())
            left.__class__ = nn.Linear
            self.reached()
            return names


class Float8OtherScale(Fault):
    id = "float8-other-scale"
    title = "float8 products are scaled back by the scale of the tensor before"
    stages = ("products",)
    diagnoses = ("float8-product-wrong",)
    needs: ClassVar = {"precision": "bf16", "fp8": True}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.options.fp8 import apply
        from toolkit.upstream.torch import is_fake

        last: list[Any] = []

        @patch.replacing(apply, "rounded")
        def rounded(right: Any, tensor: Any, dtype: Any) -> Any:
            values, scale = right(tensor, dtype)
            if is_fake(scale):  # of a forward without values, before training
                return values, scale
            used = last.pop() if last else scale
            last.append(scale)
            if used is not scale:
                self.reached()
            return values, used


FAULTS = (Float8LayerLeft, Float8OtherScale)
DIAGNOSES = {
    "float8-products-missing": Known("some products of the recipe's layers are not in float8", MISSING),
    "float8-product-wrong": Known(
        "a float8 product differs from that of its operands: scale, format or layout",
        "step {step}: {count} of {all} products ({kinds})",
    ),
}
