"""Which operators CUDA can run, from torch's own declarations.

A CPU build registers no CUDA kernels, so it cannot be asked. What its kernels are generated from says it, and comes
with every torch: ``native_functions.yaml``, read here by torch's own reader, of the version that is installed.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch

from rehearsal.shim import CACHE

_FOR_ANY_DEVICE = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional",
                   "CompositeImplicitAutograd", "Autograd")  # fmt: skip


def runs_on_cuda(func: Any) -> bool:
    """Whether an operator has a kernel for CUDA, or one that is made of other operators."""
    name = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
    if name.startswith("aten::"):
        declared = _declared().get(name.removeprefix("aten::"))
        if declared is not None:
            return declared
    # Generated variants (out=, functional), torch's operators in Python, and those of other packages.
    if name.startswith(("prim::", "prims::")):
        return True  # of the interpreter, or made of other operators, each of which is seen
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _FOR_ANY_DEVICE)


@functools.cache
def _declared() -> dict[str, bool]:
    """By name; read once for each version of torch, which takes seconds."""
    kept = CACHE / f"kernels-{torch.__version__}.json"
    if kept.exists():
        found: dict[str, bool] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    found = _read()
    CACHE.mkdir(parents=True, exist_ok=True)
    writing = CACHE / f".{kept.name}.{os.getpid()}"
    writing.write_text(json.dumps(found), encoding="utf-8")
    os.replace(writing, kept)
    return found


def _read() -> dict[str, bool]:
    import torchgen
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DispatchKey

    root = Path(torchgen.__file__).parent / "packaged/ATen/native"
    parsed = parse_native_yaml(str(root / "native_functions.yaml"), str(root / "tags.yaml"))
    cuda = parsed.backend_indices[DispatchKey.CUDA]
    by_name = {str(f.func.name): f for f in parsed.native_functions}

    def has(function: Any) -> bool:
        # The functional and the in-place form of a structured operator are generated from its out= form.
        delegate = by_name[str(function.structured_delegate)] if function.structured_delegate else function
        return bool(function.has_composite_kernel or cuda.has_kernel(delegate))

    return {name: has(function) for name, function in by_name.items()}
