"""How far loss and gradients with Liger's kernels are from those with torch's operators, as JSON.

With TRITON_INTERPRET=1 it needs no GPU. Arguments: sections of the recipe, as JSON; ``selective``."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tiny import recipe_dict
from toolkit.model.checkpointing import checkpoint_blocks
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.training.preparation import prepare_model


@triton.jit
def rsqrt(x: Any) -> Any:
    return 1 / tl.sqrt(x)


@triton.jit
def tanh(x: Any) -> Any:
    return 2 / (1 + tl.exp(-2 * x)) - 1


def complete_the_interpreter() -> None:
    """triton 3.9.0 interprets neither CUDA's library functions nor methods of numbers, which its compiler makes
    float32."""
    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if type(value) is not float:
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = converted
    for name, function in (("rms_norm", rsqrt), ("geglu", tanh)):
        setattr(importlib.import_module(f"liger_kernel.ops.{name}"), function.__name__, function)


def gradients(kernels: str, sections: dict[str, Any], selective: bool) -> tuple[Any, list[torch.Tensor]]:
    """What was replaced; the loss and all gradients."""
    with tempfile.TemporaryDirectory() as folder:
        values = recipe_dict(Path(folder), **sections)
        values["model"]["kernels"] = kernels
        prepared = prepare_model(resolve(Recipe.model_validate(values), "r", device="cuda"))
    if selective:  # which a recipe cannot have
        checkpoint_blocks(prepared.blocks, "selective")
    draw = torch.Generator().manual_seed(1)
    for parameter in prepared.model.parameters():  # adapters and norms begin with values that show little
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(2))
    loss = prepared.model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = [p.grad for p in prepared.model.parameters() if p.grad is not None]
    return prepared.options.get("liger"), [loss.detach(), *found]


def main() -> None:
    complete_the_interpreter()
    sections, selective = json.loads(sys.argv[1]), "selective" in sys.argv
    first = gradients("torch", sections, selective)[1]
    replaced, found = gradients("liger", sections, selective)
    again = gradients("torch", sections, selective)[1]
    apart = [float((one - other).norm() / one.norm()) for one, other in zip(first, found, strict=True)]
    same = all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    print(json.dumps({"replaced": vars(replaced), "apart": apart, "torch as before": same}))


if __name__ == "__main__":
    main()
