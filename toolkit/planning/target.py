"""Emulates the target device's kernels and autocast rules while a trace runs on fake CPU tensors.

A PyTorch build without CUDA cannot run a backward of fake CUDA tensors, and a plan must not depend on the machine. So a
trace for a GPU runs on fake CPU tensors, and memory-relevant differences of a GPU are substituted: which attention
kernel runs (what it saves), and which functions autocast runs in float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from toolkit.upstream.torch import gpu_attention

# Functions that torch.autocast("cuda") runs in float32 and torch.autocast("cpu") does not, of those that
# transformer models call (PyTorch docs, «Autocast Op Reference», CUDA ops that can autocast to float32).
_FLOAT32 = ("layer_norm", "group_norm", "softmax", "log_softmax", "softplus")
_HALF = (torch.bfloat16, torch.float16)


_acted: list[str] = []


def acted_device() -> str:
    """The device, "cuda" or "cpu", whose kernels are emulated just now."""
    return _acted[-1] if _acted else "cpu"


class TargetKernels:
    """Emulates the kernels of ``device``, "cuda" or "cpu", inside ``acting``.

    ``deepspeed_linear``: linear layers save what DeepSpeed's own saves under ZeRO-3. ``attention``: the attention
    kernels that were used, of "flash", "efficient" and "math"; only for "cuda".
    """

    def __init__(self, device: str, deepspeed_linear: bool = False) -> None:
        self.cuda = device == "cuda"
        self.deepspeed_linear = deepspeed_linear
        self.attention: set[str] = set()

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Inside, torch.nn.functional's functions are replaced, for the whole process. A torch function mode would not
        reach a recomputation, since torch switches it off inside ``backward``."""
        replacements: dict[str, Callable[..., Any]] = {}
        if self.cuda:
            replacements |= {name: _in_float32(getattr(functional, name)) for name in _FLOAT32}
            replacements["scaled_dot_product_attention"] = self._attend
            replacements["dropout"] = _dropout
        if self.deepspeed_linear:
            replacements["linear"] = _KeepsInput.apply
        if hasattr(functional, "grouped_mm"):
            replacements["grouped_mm"] = _grouped
        originals = {name: getattr(functional, name) for name in replacements}
        _acted.append("cuda" if self.cuda else "cpu")
        try:
            for name, replacement in replacements.items():
                setattr(functional, name, replacement)
            yield
        finally:
            _acted.pop()
            for name, original in originals.items():
                setattr(functional, name, original)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """The choice of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp on an Ampere or newer GPU: flash for
        16 bits without a mask and heads up to 256 wide, else memory-efficient, else plain arithmetic."""
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        same_heads = query.shape[-3] == key.shape[-3]
        if attn_mask is None and query.dtype in _HALF and query.shape[-1] <= 256:
            self.attention.add("flash")
            return gpu_attention("flash_attention")(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if same_heads and query.shape[-1] % (8 if query.dtype in _HALF else 4) == 0:
            self.attention.add("efficient")
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            trains = query.requires_grad or key.requires_grad or value.requires_grad
            return gpu_attention("efficient_attention")(
                query, key, value, bias, trains, dropout_p, is_causal, scale=scale
            )[0]
        self.attention.add("math")
        if not same_heads:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        return gpu_attention("attention_math")(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale)[0]


class _KeepsInput(torch.autograd.Function):
    """DeepSpeed's linear layer under ZeRO-3 (0.19.8, runtime/zero/linear.py), which it puts in the place of
    torch's: it keeps its input also where the weight does not train."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.save_for_backward(input, weight, bias)
        if input.dim() == 2 and bias is not None:
            return torch.addmm(bias, input, weight.t())
        output = input.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        input, weight, bias = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            grad.matmul(weight) if ctx.needs_input_grad[0] else None,
            flat.t().matmul(input.reshape(-1, input.shape[-1])) if ctx.needs_input_grad[1] else None,
            flat.sum(0) if bias is not None and ctx.needs_input_grad[2] else None,
        )


def _grouped(mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: Any = None, **options: Any) -> torch.Tensor:
    return _Experts.apply(mat_a, mat_b)


class _Experts(torch.autograd.Function):
    """Experts' grouped product of shapes only: torch 2.13's own has those for bfloat16 alone. Every row meets one
    expert, so rows (tokens, in) times experts (experts, in, out) cost and save what one expert would. Autocast knows
    nothing of the product (pytorch/pytorch issue 174763): it runs in the dtype of the weights."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        # As torch's own: what the gradient of the other operand needs (tools/autograd/derivatives.yaml, _grouped_mm).
        of_rows, of_experts = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_experts else None, experts if of_rows else None)
        with torch.autocast("cpu", enabled=False):
            return rows.matmul(experts[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        rows, experts = ctx.saved_tensors
        of_rows = grad.matmul(experts[0].t()) if ctx.needs_input_grad[0] else None
        of_experts = None
        if ctx.needs_input_grad[1]:
            rows.t().matmul(grad)  # counted; its result, of one expert's shape, is gone at once
            of_experts = torch.empty_like(experts)
        return of_rows, of_experts


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """On a GPU one kernel, which keeps a byte for each element (aten/src/ATen/native/Dropout.cpp,
    ``is_fused_kernel_acceptable``); a CPU keeps a mask in the input's dtype."""
    if training and not inplace and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(_to_float32(value) for value in args)
            kwargs = {key: _to_float32(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)

    return called


def _to_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _HALF:
        return value.float()
    return value
