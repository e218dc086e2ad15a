"""Builds and loads ``shim.cpp``; nothing here imports torch, which must come after it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.cpp")
CACHE = Path(__file__).parents[2] / "build" / "rehearsal"
_BUILD_LIMIT_S = 240


def compiler() -> str | None:
    """The C++ compiler, as DeepSpeed and torch choose it: ``CXX``, else the system's."""
    return shutil.which(os.environ.get("CXX", "")) or shutil.which("c++") or shutil.which("g++")


def build() -> Path:
    """The compiled shim, from the cache where this source, torch and compiler were built before.

    Raises RuntimeError with the compiler's output where it cannot be compiled.
    """
    torch = _torch()
    name = compiler()
    assert name is not None, "ask compiler() first"
    version = (torch / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + name.encode()).hexdigest()[:16]
    library = CACHE / f"shim-{key}.so"
    if library.exists():
        return library
    CACHE.mkdir(parents=True, exist_ok=True)
    writing = CACHE / f".{library.name}.{os.getpid()}"
    include = [torch / "include", torch / "include/torch/csrc/api/include"]
    command = [name, "-shared", "-fPIC", "-std=c++20", *(f"-I{path}" for path in include), str(SOURCE), "-o", writing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name} could not be compiled:\n{done.stderr[-4000:]}")
    os.replace(writing, library)  # whole or not there, also where two processes build it
    return library


def load() -> ctypes.CDLL:
    """Load the shim into this process. torch asks for its hooks once, so this comes before ``import torch``."""
    lib = _torch() / "lib"
    needed = [*lib.glob("libgomp*.so*"), lib / "libc10.so", lib / "libtorch_cpu.so"]
    for library in needed:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
