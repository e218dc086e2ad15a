"""Whether a recipe's matrix products can run in float8, told without torch; and whether this machine has them."""

from __future__ import annotations

from toolkit.machine import compute_capabilities
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.quantisable import kept_elsewhere
from toolkit.recipe.schema import Recipe

MULTIPLE = 16
"""Sizes of a float8 product are multiples of it (cuBLASLt, «cublasLtMatmul», requirements of FP8 kernels)."""

NEEDS = (8, 9)
"""Compute capability: the first with float8 tensor cores (CUDA C++ Programming Guide, compute capabilities)."""


def why_not_fp8(recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...]) -> str | None:
    """The reason why ``fp8: true`` cannot be had with this recipe and what can, or None."""
    if recipe.precision == "fp32":
        return "takes the place of products in bf16, and precision: fp32 asks for float32; take precision: bf16"
    if recipe.precision == "fp16":
        return (
            "scales each tensor by a power of two, which may lie outside of what fp16 holds (6e-8 to 65504); take "
            "precision: bf16"
        )
    if recipe.adapter is not None and recipe.adapter.method == "qlora":
        return "multiplies by weights of 16 bits or more, and qlora keeps the base in 4; take adapter.method: lora"
    if not blocks:
        return (
            "converts the linear layers of a model's blocks, and which modules those are is not known; name their "
            "class in strategy.wrap"
        )
    if facts.config is None:
        return f"needs to see the model's code, and {facts.why_unknown}"
    if facts.config.get("quantization_config"):
        return (
            "multiplies by weights of 16 bits or more, and model.path holds quantised ones; name what they were made of"
        )
    if (found := kept_elsewhere(facts)) is not None:
        return f"converts linear layers, and {facts.model_type} keeps weights in {found}; bf16 is the nearest"
    if (width := facts.hidden_size) is not None and width % MULTIPLE:
        return (
            f"takes layers whose sizes are multiples of {MULTIPLE}, and this model is {width} wide; bf16 is the nearest"
        )
    return None


def why_no_fp8_device(device: str) -> str | None:
    """What this machine lacks for float8 products on ``device``, or None. A CPU computes them too, slowly."""
    if device != "cuda":
        return None
    poor = [capability for capability in compute_capabilities() if capability < NEEDS]
    return None if not poor else told_capability(min(poor))


def told_capability(found: tuple[int, int]) -> str:
    """What a GPU without float8 products is refused with."""
    return (
        f"needs GPUs of compute capability {NEEDS[0]}.{NEEDS[1]} or newer (Ada, Hopper, Blackwell), and here is one of "
        f"{found[0]}.{found[1]}; bf16 products are the nearest that it has"
    )
