"""Products in float8, ``fp8: true``: which recipes, models and machines can have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.machine import compute_capabilities
from toolkit.recipe.adapter_methods import METHODS, Method
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.quantisable import kept_elsewhere
from toolkit.recipe.schema import Recipe
from toolkit.rooms import Option

MULTIPLE = 16
"""Sizes of a float8 product are multiples of it (cuBLASLt, «cublasLtMatmul», requirements of FP8 kernels)."""

NEEDS = (8, 9)
"""Compute capability: the first with float8 tensor cores (CUDA C++ Programming Guide, compute capabilities)."""


class Fp8(Option):
    name = "fp8"
    title = "the matrix products of the blocks' linear layers are computed in float8"
    typed_key = "fp8"
    off_value = False
    claim = ("float8-products", "float8 products")
    missing = "float8-products-missing"
    before_adapters = True
    rounds = True
    reorders = "a kernel of float8 products may sum in another order"
    seen_by = "operators"
    operators = ("aten::_scaled_mm",)
    compared_claims = ("float8-layers",)

    def why_not(
        self, settings: bool, recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...], device: str
    ) -> str | None:
        reason = _why_not(recipe, facts, blocks)
        return None if reason is None else f"{reason}, or {self.turned_off}"

    def why_not_axis(self, axis: str) -> str:
        parts = {"context": "each part of a row", "tensor": "the parts of a matrix each"}
        if axis not in parts:
            return super().why_not_axis(axis)
        return f"would scale {parts[axis]} by its own largest value; {self.turned_off}"

    def why_not_here(self, settings: bool, device: str) -> str | None:
        """A CPU computes them too, slowly."""
        poor = [capability for capability in compute_capabilities() if capability < NEEDS] if device == "cuda" else []
        return f"{capability_message(min(poor))}, or {self.turned_off}" if poor else None

    def check_device(self, settings: bool, resolved: Any) -> None:
        self._needed("apply").check_device(resolved)

    def notes(self, settings: bool, device: str) -> list[str]:
        if device != "cpu":
            return []
        return ["fp8: a CPU emulates float8 products by converting every operand back, several times slower than bf16"]

    def headline(self, settings: bool, device: str) -> str:
        return "fp8" + (", slow on a CPU" if device == "cpu" else "")

    def cell(self, recipe: Recipe) -> dict[str, Any]:
        return {"fp8": recipe.fp8}

    def decision(self, settings: bool) -> tuple[str, str]:
        return "e4m3, gradients e5m2", "one dynamic scale per tensor; not in training_args.json"

    def evidence(self, model: Any, prepared: Sequence[str]) -> list[Any]:
        return [self._needed("evidence").layers_claim(model, len(prepared))]


def _why_not(recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...]) -> str | None:
    """Why ``fp8: true`` is not possible with this recipe, and the alternative; or None."""
    if recipe.precision == "fp32":
        return "replaces bf16 matrix products, but precision is fp32; use precision: bf16"
    if recipe.precision == "fp16":
        return (
            "scales each tensor by a power of two, which may be outside the range of fp16 (6e-8 to 65504); use "
            "precision: bf16"
        )
    if recipe.adapter is not None and recipe.adapter.method == "qlora":
        return "needs weights of 16 bits or more, but qlora stores the base in 4 bits; use adapter.method: lora"
    if recipe.adapter is not None and _multiplies_itself(METHODS[recipe.adapter.method]):
        return (
            f"replaces the calls of linear layers, but {recipe.adapter.method} may multiply their weights itself; use "
            "adapter.method: lora"
        )
    if not blocks:
        return (
            "converts the linear layers of the model's blocks, but the class of the blocks is not known; set it "
            "in strategy.wrap"
        )
    if facts.config is None:
        return f"needs to read the model's code, but {facts.why_unknown}"
    if facts.config.get("quantization_config"):
        return "needs weights of 16 bits or more, but those of model.path are quantised; set the original model"
    if (found := kept_elsewhere(facts)) is not None:
        return f"converts linear layers, but {facts.model_type} stores weights in {found}; use bf16"
    if (width := facts.hidden_size) is not None and width % MULTIPLE:
        return f"needs layer sizes that are multiples of {MULTIPLE}, but this model's width is {width}; use bf16"
    return None


def _multiplies_itself(method: Method) -> bool:
    """Whether an adapter of this method may read the weight of the layer that it wraps, and not call the layer."""
    return method.peft_type != "LORA" and method.prompt is None


def capability_message(found: tuple[int, int]) -> str:
    """The message for a GPU without float8 products."""
    return (
        f"needs GPUs of compute capability {NEEDS[0]}.{NEEDS[1]} or newer (Ada, Hopper, Blackwell); this GPU has "
        f"{found[0]}.{found[1]}; use bf16 products"
    )
