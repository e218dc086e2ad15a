"""Whether a recipe's matrix products can run in float8, determined without torch; and whether this machine has them."""

from __future__ import annotations

from toolkit.machine import compute_capabilities
from toolkit.recipe.adapter_methods import METHODS, Method
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.quantisable import kept_elsewhere
from toolkit.recipe.schema import Recipe

MULTIPLE = 16
"""Sizes of a float8 product are multiples of it (cuBLASLt, «cublasLtMatmul», requirements of FP8 kernels)."""

NEEDS = (8, 9)
"""Compute capability: the first with float8 tensor cores (CUDA C++ Programming Guide, compute capabilities)."""


def why_not_fp8(recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...]) -> str | None:
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


def why_no_fp8_device(device: str) -> str | None:
    """What this machine lacks for float8 products on ``device``, or None. A CPU computes them too, slowly."""
    if device != "cuda":
        return None
    poor = [capability for capability in compute_capabilities() if capability < NEEDS]
    return None if not poor else capability_message(min(poor))


def capability_message(found: tuple[int, int]) -> str:
    """The message for a GPU without float8 products."""
    return (
        f"needs GPUs of compute capability {NEEDS[0]}.{NEEDS[1]} or newer (Ada, Hopper, Blackwell); this GPU has "
        f"{found[0]}.{found[1]}; use bf16 products"
    )
