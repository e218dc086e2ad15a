"""What other projects' GPU kernels keep and allocate, for a trace: shapes only, from their source.

unsloth's kernels as fms_acceleration_foak 0.7.4 has them (kernels/unsloth, fused_ops/unsloth_lora/bnb/fast_lora.py) and
Liger's chunked loss (fused_ops/liger_ce/fused_linear_cross_entropy_loss.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.planning.loops.trainer import linear4bit
from toolkit.planning.meter import kernel


class FastNorm(torch.autograd.Function):
    """rms_layernorm.py: keeps its input in its own dtype and a number a row; its gradient is written over what it is
    given."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, torch.empty(hidden.shape[:-1], dtype=torch.float32))
        kernel(hidden, hidden)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        kernel(grads[0], grads[0], ctx.saved_tensors[0])
        return grads[0], None


class FastRotation(torch.autograd.Function):
    """rope_embedding.py: turned in place, forth and back."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        kernel(states, states)
        return states.view(states.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        kernel(grads[0], grads[0])
        return grads[0].contiguous()


class FastLoss(torch.autograd.Function):
    """cross_entropy_loss.py: keeps the logits and writes their gradient over them."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        losses = torch.empty(logits.shape[0], dtype=torch.float32)
        ctx.save_for_backward(logits, torch.empty_like(losses))
        kernel(logits)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        kernel(ctx.saved_tensors[0], ctx.saved_tensors[0])
        return ctx.saved_tensors[0]


class LigerLoss(torch.autograd.Function):
    """As many rows a chunk as make its logits about as large as the hidden states; all gradients in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        rows, width = hidden.shape
        factor = -(-weight.shape[0] // width)
        chunk = 1 << (-(-rows // factor) - 1).bit_length()
        of_weight = [torch.zeros_like(weight)] if weight.requires_grad else []
        of_hidden = torch.zeros_like(hidden)
        for start in range(0, rows, chunk):
            logits = functional.linear(hidden[start : start + chunk], weight)
            logits = logits.float()
            logits = logits.to(half)
            scaled = logits * 0.5
            of_hidden[start : start + chunk] = functional.linear(scaled, weight.t())
        ctx.save_for_backward(of_hidden, *of_weight)
        return torch.zeros(rows, dtype=torch.float32).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        of_hidden, *of_weight = ctx.saved_tensors
        return of_hidden, of_weight[0] if of_weight else None


class FusedLora(torch.autograd.Function):
    """fast_lora.py, ``LoRA_QKV`` and ``LoRA_W``: 4-bit layers of one input with their adapters. The gradient of the
    input of q, k and v is written over that input."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layers: list[Any], drop: float, *pairs: torch.Tensor) -> Any:
        flat = hidden.view(-1, hidden.shape[-1])
        outputs, inputs = [], []
        for layer, a, b in zip(layers, pairs[::2], pairs[1::2], strict=True):
            output = flat.matmul(layer.dequantised(hidden.dtype).t())
            dropped = torch.native_dropout(flat, drop, True)[0] if drop else flat
            inputs.append(dropped)
            output += (dropped @ a.t().to(hidden.dtype)) @ b.t().to(hidden.dtype)
            outputs.append(output.view(*hidden.shape[:-1], -1))
        ctx.layers = layers
        ctx.save_for_backward(hidden, *inputs, *pairs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        count = len(ctx.layers)
        hidden, *rest = ctx.saved_tensors
        inputs, pairs = rest[:count], rest[count:]
        given = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        half = given[0].dtype
        of_pairs = []
        for dropped, grad, a, b in zip(inputs, given, pairs[::2], pairs[1::2], strict=True):
            of_a = dropped.t() @ (grad @ b.to(half))
            of_b = (a.to(half) @ dropped.t()) @ grad
            of_pairs += [of_a.t().to(a.dtype), of_b.t().to(b.dtype)]
        total = None
        for at, (layer, dropped, grad) in enumerate(zip(ctx.layers, inputs, given, strict=True)):
            weight = layer.dequantised(half)
            if total is None:
                total = hidden.view(-1, hidden.shape[-1]) if count == 3 else grad @ weight
            else:
                total += grad @ weight
            del weight
            total += (dropped != 0) * (grad @ pairs[2 * at + 1].to(half) @ pairs[2 * at].to(half))
        assert total is not None
        return total.view(hidden.shape), None, None, *of_pairs


def fast_rotation(query: torch.Tensor, key: torch.Tensor, *tables: Any, **options: Any) -> tuple[Any, Any]:
    """For ``apply_rotary_pos_emb`` of transformers' models."""
    turned = [FastRotation.apply(states.transpose(1, 2)).transpose(1, 2) for states in (query, key)]
    return turned[0], turned[1]


def fast_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any) -> torch.Tensor:
    """cross_entropy_loss.py, ``FastForCausalLMLoss``."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    losses: torch.Tensor = FastLoss.apply(shifted.view(-1, vocab_size))
    return torch.sum(losses)


@contextlib.contextmanager
def fast_kernels(model: nn.Module, *, fused_lora: bool) -> Iterator[None]:
    """``fast_rms_layernorm``, ``fast_rope_embeddings`` and, ``fused_lora``, adapters on 4-bit layers."""
    changed: list[nn.Module] = []
    base: Any = getattr(model, "get_base_model", lambda: model)()
    module = sys.modules[type(base).__module__]
    rotation = getattr(module, "apply_rotary_pos_emb", None)
    try:
        if rotation is not None:
            module.apply_rotary_pos_emb = fast_rotation  # type: ignore[attr-defined]
        for part in model.modules():
            if type(part).__name__.endswith("RMSNorm"):
                part.forward = lambda hidden, norm=part: FastNorm.apply(hidden, norm.weight)
                changed.append(part)
            if fused_lora:
                changed += _fuse(part, ("q_proj", "k_proj", "v_proj")) + _fuse(part, ("o_proj",))
        with linear4bit(model):
            yield
    finally:
        if rotation is not None:
            module.apply_rotary_pos_emb = rotation  # type: ignore[attr-defined]
        for part in changed:
            part.__dict__.pop("forward", None)


def _fuse(owner: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Give layers of one input a forward that computes all of them when the first is called."""
    layers: list[Any] = [getattr(owner, name, None) for name in names]
    if not all(hasattr(layer, "lora_A") for layer in layers):
        return []
    waiting: dict[int, torch.Tensor] = {}

    def computed(hidden: torch.Tensor, at: int) -> torch.Tensor:
        if not waiting:
            pairs = [part["default"].weight for layer in layers for part in (layer.lora_A, layer.lora_B)]
            drop = getattr(layers[0].lora_dropout["default"], "p", 0.0)
            waiting.update(enumerate(FusedLora.apply(hidden, [x.base_layer for x in layers], drop, *pairs)))
        return waiting.pop(at)

    for at, layer in enumerate(layers):
        layer.forward = lambda hidden, at=at, **options: computed(hidden, at)
    return layers
