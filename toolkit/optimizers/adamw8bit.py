"""AdamW with both moments in 8 bits: a code per element, and a float32 scale per block of 256."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.optimizers.adamw import adam_arguments
from toolkit.optimizers.base import OptimizerKind

if TYPE_CHECKING:
    from toolkit.recipe.traits import Traits


def _refusal(traits: Traits) -> str | None:
    if traits.torch_optimizer:
        return None
    return (
        "DeepSpeed stores moments as slices of one flat tensor, which does not hold 8-bit codes and scales; use fsdp2 "
        "(shards like zero3), or ddp"
    )


def _trainer(optimizer: Any) -> dict[str, Any]:
    # The Trainer's own name for the like: the toolkit's is not among its optimizers.
    return {"optim": "adamw_bnb_8bit"} | adam_arguments(optimizer)


OPTIMIZER = OptimizerKind(
    name="adamw8bit",
    title="AdamW with 8-bit moments, in blocks of 256",
    source="Dettmers et al., arXiv:2110.02861, section 2",
    build="toolkit.optim.adamw8bit:build",
    formula="toolkit.reference.optimizers.adamw:AdamW",
    keys=("kernel", "betas", "eps"),
    lr="2e-4",
    refusal=_refusal,
    packed=True,
    trainer=_trainer,
)
