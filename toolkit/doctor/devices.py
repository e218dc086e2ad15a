"""GPUs, collectives, and the compilers that DeepSpeed's ops need. Imports torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.doctor.model import Condition, check
from toolkit.half_precision import cpu_emulates


def _torch() -> Any:
    try:
        import torch
    except Exception:  # an import may fail in any way; continue with the other checks
        return None
    return torch


@check
def gpus() -> Iterator[Condition]:
    """The GPUs that torch sees."""
    torch = _torch()
    if torch is None:
        yield Condition("torch", "error", "cannot be imported", "python -c 'import torch' shows why")
        return
    if not torch.cuda.is_available():
        yield from _without_gpu(torch)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = properties.total_memory / (1 << 30)
        found = f"{properties.name}, {memory:.1f} GiB, compute capability {capability}"
        yield Condition(f"GPU {index}", "ok", found)
        if properties.major < 8:
            advice = "precision: fp16"
            yield Condition(f"GPU {index}", "warning", f"no bf16 in hardware below 8.0 (here {capability})", advice)
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    if len(names) > 1:
        yield Condition(
            "GPUs",
            "warning",
            f"of {len(names)} kinds: every step waits for the slowest",
            "CUDA_VISIBLE_DEVICES",
        )
    if any(re.search(r"RTX (40|PRO)|RTX 4\d", name) for name in names) and len(names) and torch.cuda.device_count() > 1:
        yield Condition(
            "NCCL", "note", "RTX 4000 cards have no peer-to-peer: accelerate launch disables it automatically"
        )


def _without_gpu(torch: Any) -> Iterator[Condition]:
    build = torch.version.cuda
    smi = shutil.which("nvidia-smi")
    if smi and build is None:
        advice = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        yield Condition("GPU", "error", f"nvidia-smi is here, but torch {torch.__version__} is a CPU build", advice)
    elif smi:
        advice = "the driver may be older than CUDA " + str(build) + ": nvidia-smi names what it supports"
        yield Condition("GPU", "error", f"nvidia-smi is here, but torch (CUDA {build}) finds no GPU", advice)
    else:
        yield Condition("GPU", "warning", "none: runs on the CPU with gloo, for tests", "machine.device: cpu")
        yield Condition("fp16", "note", "DeepSpeed refuses fp16 on a CPU", "precision: bf16 or fp32")
        if cpu_emulates("bfloat16"):
            found = "this CPU has no instructions for it: products take many times as long as fp32's"
            yield Condition("bf16", "note", found, "precision: fp32, to train here; for verify either is fast enough")
        yield Condition("FSDP1", "note", "a full state dict of FSDP1 on CPU tensors crashes torch", "strategy: fsdp2")


@check
def collectives() -> Iterator[Condition]:
    """The communication backends."""
    torch = _torch()
    if torch is None or not torch.distributed.is_available():
        yield Condition(
            "torch.distributed",
            "error",
            "not in this build of torch: only one process can run",
            "another build of torch",
        )
        return
    here = [name for name in ("nccl", "gloo", "mpi") if getattr(torch.distributed, f"is_{name}_available")()]
    shown = ", ".join(here)
    if "nccl" in here and torch.cuda.is_available():
        shown += f" (NCCL {'.'.join(map(str, torch.cuda.nccl.version()))})"
    yield Condition("collectives", "ok" if here else "error", shown or "none")
    if torch.cuda.is_available() and torch.cuda.device_count() > 1 and "nccl" not in here:
        yield Condition(
            "NCCL",
            "error",
            "not in this build of torch: no communication between GPUs",
            "install torch for CUDA on Linux",
        )


@check
def replacements() -> Iterator[Condition]:
    """Workarounds of defects of other packages, and private names: those that the installed versions do not have."""
    if _torch() is None:
        return
    from toolkit.upstream import replacements

    for one in replacements():
        if why := one.absent():
            yield Condition(one.package, "note", f"{one.what}: {why}; {one.without}")


@check
def compilers() -> Iterator[Condition]:
    """DeepSpeed compiles CPUAdam and its fused optimizers at first use."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if "ninja" in missing and Path(sysconfig.get_path("scripts"), "ninja").exists():
        missing.remove("ninja")  # beside the interpreter, where torch's builder finds it
    header = Path(sysconfig.get_path("include"), "Python.h").exists()
    if not header:
        missing.append("Python.h")
    if missing:
        advice = "apt-get install g++ ninja-build python3-dev, or pip install ninja"
        found = f"{', '.join(missing)} missing: offload (CPUAdam) and fused optimizers cannot be compiled"
        yield Condition("DeepSpeed ops", "warning", found, advice)
    else:
        yield Condition("DeepSpeed ops", "ok", "g++, ninja and Python.h are here: ops are compiled at first use")
    yield from _build_locks()
    yield from _nvcc()


def _build_locks() -> Iterator[Condition]:
    """torch's builder (utils/file_baton.py, 2.13.0) waits, silently or a limit, while a file ``lock`` exists.
    A job that was killed while it compiled or loaded an op leaves it behind. The builder closes the file before it
    removes it: one that no process has open is looked at once more."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    closed = [lock for lock in sorted(root.rglob("lock")) if not _is_open(lock)]
    if closed:
        time.sleep(0.2)
    for lock in closed:
        if lock.exists() and not _is_open(lock):
            found = f"{lock} was left by a killed job: every job that needs this op waits forever"
            yield Condition("DeepSpeed ops", "error", found, f"if no other machine is compiling: rm {lock}")


def _is_open(path: Path) -> bool:
    """Whether a process of this machine that may be looked into has ``path`` open."""
    for held in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samefile(held, path):
                return True
        except OSError:
            continue  # it has ended, or is another user's
    return False


def _nvcc() -> Iterator[Condition]:
    torch = _torch()
    if torch is None or torch.version.cuda is None:
        return
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    if not nvcc or not Path(nvcc).exists():
        advice = "install the CUDA toolkit of the same version, or use torch's optimizers (optimizer.name: adamw)"
        yield Condition("nvcc", "warning", "not found: DeepSpeed's CUDA ops (FusedAdam) cannot be compiled", advice)
        return
    try:
        shown = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return
    match = re.search(r"release (\d+)\.(\d+)", shown)
    if match and match[1] != torch.version.cuda.split(".")[0]:
        built = torch.version.cuda
        found = f"{match[1]}.{match[2]}, torch was built with {built}: DeepSpeed refuses to compile its ops"
        yield Condition("nvcc", "error", found, f"install CUDA {torch.version.cuda}")
    elif match:
        yield Condition("nvcc", "ok", f"{match[1]}.{match[2]}, torch's CUDA is {torch.version.cuda}")
