"""What a strategy is, as facts. The rest of the package asks for these and never for a strategy's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["optimizer", "gradients", "weights"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about one strategy; every field without a default must be given."""

    autocast: bool
    """Mixed precision runs under torch.autocast over the trained weights; False: on a copy in the compute dtype."""
    distributed: bool = True
    """Takes several processes; False: exactly one."""
    shards: frozenset[Part] = frozenset()
    """The parts of the training state of which each rank keeps a share."""
    collectives: tuple[tuple[str, ...], ...] = ()
    """What the first step of several processes calls: of each group at least one, as `verify` names them."""
    torch_optimizer: bool = True
    """The toolkit's own torch optimizer takes the step; False: the engine wraps it and keeps float32 masters."""
    broadcasts: bool = False
    """The first rank's weights replace those of the others at the start."""
    continues_without_gradient: bool = True
    """Training continues where a trained weight gets no gradient; False: it ends with an error, or hangs."""
    precedence: int = 100
    """Among strategies that are equal otherwise, the smaller is chosen: less communication, less machinery."""
    hybrid: bool = False
    """Can shard within a node and replicate over nodes."""
    validated: frozenset[str] | None = None
    """What `plan`'s predictions were compared with measurements for, beyond plain training: offload, fp16, task names.
    None: nothing was."""
    why_no_compile: str | None = None
    """The reason why blocks cannot be compiled under it, and what can be used in its place."""
    reentrant_adapters: bool = False
    """The transformers Trainer needs reentrant activation checkpoints for adapters under it."""
