"""What checkpointing keeps, and computes again."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import every_case
from tiny import make_llama
from toolkit.model.checkpointing import checkpoint_blocks, is_costly


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def gradients_of(model: Any, autocast: bool = False) -> list[torch.Tensor]:
    ids = torch.arange(18).reshape(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().pow(2).sum()
    loss.backward()
    return [p.grad for p in model.parameters()]


@every_case(("autocast", "attention"), product([False, True], ["sdpa", "eager"]))
def test_selective_computes_only_the_cheap_again(attention: str, autocast: bool) -> None:
    seen, gradients = {}, {}
    for kind in ("none", "selective", "full"):
        model, blocks = make_llama(attention)
        checkpoint_blocks(blocks, kind)
        with _Operators() as operators:
            gradients[kind] = gradients_of(model, autocast)
        seen[kind] = operators.seen
    costly = {"mm", "bmm"} | {name for name in seen["none"] if "dot_product" in name}
    assert len(costly) >= 2
    for name in costly:
        assert seen["selective"][name] == seen["none"][name]
    assert seen["full"]["mm"] > seen["none"]["mm"]
    assert all(seen["selective"][name] > seen["none"][name] for name in ("silu", "rsqrt", "mul"))
    for kind in ("selective", "full"):
        assert all(a.equal(b) for a, b in zip(gradients[kind], gradients["none"], strict=True))


def test_which_operators_are_costly() -> None:
    def op(name: str) -> Any:
        return SimpleNamespace(name=lambda: name)

    kept = ["aten::mm", "aten::addmm", "aten::mm.dtype", "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_grouped_mm", "aten::_scaled_mm",
            "flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd", "torch_attn::_varlen_attn"]  # fmt: skip
    again = ["aten::mul.Tensor", "aten::silu", "aten::_softmax", "aten::_to_copy", "aten::native_layer_norm",
             "aten::_scaled_dot_product_flash_attention_backward", "flash_attn::_flash_attn_backward"]  # fmt: skip
    with_hash = {name: is_costly.__wrapped__(op(name)) for name in (*kept, *again)}
    assert with_hash == dict.fromkeys(kept, True) | dict.fromkeys(again, False)


@every_case("view", [False, True], ids=["matmul", "slice"])
def test_a_kept_product_that_is_changed_in_place_is_kept_as_it_was(view: bool) -> None:
    """torch sees no change behind matmul's own view: the bias would be added twice, and gradients be wrong."""
    torch.manual_seed(0)
    weight, bias, after = (torch.randn(8, 8, requires_grad=True) for _ in range(3))

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ weight
            if view:
                y[:, 0] += bias[0]
            else:
                y += bias[0]
            return torch.tanh(y) @ after

    x, gradients = torch.randn(3, 4, 8), {}
    for kind in ("none", "selective"):
        block = Block()
        checkpoint_blocks([("block", block)], kind)
        gradients[kind] = torch.autograd.grad(block(x).pow(2).sum(), (weight, bias, after))
    for plain, kept in zip(gradients["none"], gradients["selective"], strict=True):
        assert torch.equal(plain, kept)


def test_a_recomputation_may_copy_more_often_than_the_forward() -> None:
    """As a block's under ZeRO-3 does, whose weights were gathered ahead of the forward and not of the recomputation."""
    from torch.utils.checkpoint import checkpoint

    from toolkit.model.checkpointing import keep_products

    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    calls = []

    def block(given: torch.Tensor) -> torch.Tensor:
        calls.append(torch.cat([torch.zeros(2)] * 2) if calls else None)
        return (given @ weight).tanh().sum()

    checkpoint(block, x, use_reentrant=False, context_fn=keep_products).backward()
    assert len(calls) == 2
    again = weight.detach().requires_grad_()
    (x.detach() @ again).tanh().sum().backward()
    assert torch.equal(weight.grad, again.grad)
