"""torch.compile of a model's blocks, one by one: one compilation serves all blocks of a kind.

A block's ``forward`` is replaced on the instance, inside checkpointing and FSDP's hooks, so only arithmetic is compiled
and not gathering or recomputation. Lengths are dynamic, so ragged batches do not recompile; torch specialises
dimensions of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from toolkit.upstream.torch import compiler

BACKEND = "inductor"
GRAPHS = 64
"""Maximum number of graphs per code object before torch falls back to eager (its default is 8): kinds of blocks,
dimensions of 1, training and evaluation multiply."""


@dataclass
class Compilation:
    """What was compiled in this process since ``compile_blocks``, and its number of calls."""

    blocks: int = 0
    graphs: int = 0
    runs: int = 0
    """Calls of compiled graphs, counted in the function that torch calls for the code."""
    calls: int = 0
    """Calls of blocks."""
    breaks: int = 0
    """Graph breaks."""
    seconds: float = 0.0
    fell_back: str | None = None
    """Why the blocks run uncompiled, if they do."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 2)}


_NO_COMPILER = "this torch sets and counts its compiler by other names (toolkit doctor)"


class _NoCompiler(Exception):
    """Of a function that is not compiled, since it cannot be counted."""


_NOW = Compilation()
_BUSY = 0


def compiling() -> bool:
    """Whether a graph is being compiled now; called from another thread."""
    return _BUSY > 0


def compile_blocks(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Compile each block's forward at its first call. Call it before ``checkpoint_blocks``."""
    global _NOW
    _NOW = Compilation(blocks=len(blocks))
    if compiler() is None:
        _NOW.fell_back = _NO_COMPILER
        return
    _configure()
    for _, block in blocks:
        block.forward = _Compiled(block.forward)


def compilation() -> Compilation:
    """The current state of the last ``compile_blocks``."""
    if _NOW.blocks and (parts := compiler()) is not None:
        _NOW.breaks = sum(parts.counters["graph_break"].values())
        _NOW.seconds = _seconds(parts)
        if not _NOW.fell_back and (gave_up := _gave_up(parts.counters)):
            _NOW.fell_back = gave_up
    return _NOW


def describe(now: Compilation) -> str:
    """One line for the screen."""
    if now.fell_back:
        return f"the {now.blocks} blocks run uncompiled, the compiler failed: {now.fell_back}"
    breaks = f", {now.breaks} graph breaks" if now.breaks else ""
    return f"{now.blocks} blocks as {now.graphs} graphs{breaks}, {now.seconds:.1f} s in the first step"


def _configure() -> None:
    torch.compiler.reset()
    parts = compiler()
    parts.counters.clear()
    parts.times.clear()
    # DDP's buckets need no cut in a graph that is one block.
    parts.tracing.optimize_ddp = False
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(parts.tracing, name, max(GRAPHS, getattr(parts.tracing, name)))
    # The masks of dropout are those that torch draws without the compiler.
    parts.kernels.fallback_random = True
    # 16-bit results are rounded where they are without the compiler, also between operations that it fuses.
    parts.kernels.emulate_precision_casts = True
    _same_dropout_both_ways()


def _same_dropout_both_ways() -> None:
    """torch 2.13.0, ``fallback_random``, dropout of 16-bit values. On a CPU the forward multiplies by 1 / (1 - p)
    rounded to their dtype, the compiled backward by the exact number: gradients are off by 0.16 % for each dropout of
    0.1 in bf16. And before another decomposition (of GELU's or softmax's backward) its result is not rounded, whatever
    ``emulate_precision_casts`` says."""
    decompositions = compiler().decompositions
    backward = torch.ops.aten.native_dropout_backward.default
    if decompositions[backward] is _dropout_backward:
        return
    decompositions[backward] = _dropout_backward
    # Graphs that were compiled without it are in the cache on disk, and torch's key does not cover decompositions.
    torch.compiler.config.cache_key_tag += "dropout"


def _dropout_backward(grad_output: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of dropout's input, like ``grad_output``; ``mask`` is of booleans, ``scale`` 1 / (1 - p)."""
    if grad_output.device.type == "cpu":
        mantissa, exponent = math.frexp(scale)
        digits = 1 - math.log2(torch.finfo(grad_output.dtype).eps)
        scale = math.ldexp(round(mantissa * 2**digits) / 2**digits, exponent)
    wide = torch.promote_types(grad_output.dtype, torch.float32)
    return (grad_output.to(wide) * mask * scale).to(grad_output.dtype)


class _Compiled:
    """A block's compiled forward; the eager forward if the compiler fails."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.compiled = torch.compile(forward, backend=_counted, dynamic=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _NOW.fell_back:
            return self.forward(*args, **kwargs)
        _NOW.calls += 1
        try:
            return self.compiled(*args, **kwargs)
        except compiler_errors() as error:
            _NOW.fell_back = why_failed(error)
            return self.forward(*args, **kwargs)


def compiler_errors() -> tuple[type[BaseException], ...]:
    """What a compiled function raises if it cannot be compiled."""
    parts = compiler()
    return (_NoCompiler,) if parts is None else (parts.error, _NoCompiler)


def need_compiler() -> None:
    """Raise one of ``compiler_errors`` where torch's compiler cannot be set."""
    if compiler() is None:
        raise _NoCompiler(_NO_COMPILER)


def why_failed(error: BaseException) -> str:
    """A compiler's error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]


def compile_graph(graph: Any, example_inputs: Any) -> Callable[..., Any]:
    """A backend for torch.compile, during which `compiling` is true."""
    global _BUSY
    _BUSY += 1
    try:
        inner: Callable[..., Any] = compiler().backend(BACKEND)(graph, example_inputs)
    finally:
        _BUSY -= 1
    return inner


def _counted(graph: Any, example_inputs: Any) -> Callable[..., Any]:
    inner = compile_graph(graph, example_inputs)
    _NOW.graphs += 1

    def run(*args: Any) -> Any:
        _NOW.runs += 1
        return inner(*args)

    return run


def _seconds(parts: Any) -> float:
    """Seconds spent in compiling: a block's code with its backward, and backwards that were left for later."""
    names = ("_compile.compile_inner", "backward._backward_impl")
    return float(sum(sum(parts.times.get(name, ())) for name in names))


def _gave_up(counters: Any) -> str | None:
    unimplemented = [key for key in counters["unimplemented"] if "limit" in str(key)]
    return f"more than {GRAPHS} graphs of one block" if unimplemented else None
