"""Facts about a strategy. The rest of the package uses these and never a strategy's name."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Literal

Part = Literal["optimizer", "gradients", "weights"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about one strategy; every field without a default must be given."""

    autocast: bool
    """Mixed precision runs under torch.autocast over the trained weights; False: on a copy in the compute dtype."""
    same_operations: bool = False
    """Each micro-batch is computed on one device by the plain loop's operations, one by one; only sums over
    micro-batches and ranks have another order. `verify` then allows the rounding of those sums and nothing else.
    False: unknown; it allows what correct runs differ by."""
    sums_input_gradients_by_module: bool = False
    """Each module reads its inputs through an autograd node of its own: the gradient of a tensor that several modules
    read is summed within each module first, in 16 bits another rounding."""
    sums_input_gradients_by_block: bool = False
    """The same of each block that is sharded as a unit. Matters where several blocks read one tensor, as a decoder's do
    of its encoder."""
    rearranges_sums: bool = False
    """After its first backward a process lays out the gradients that it sends in another order (DDP's buckets). More
    than two ranks then add them up in another order, and a resumed run's first step differs by its rounding."""
    reduces_each_micro_batch: bool = False
    """Gradients are summed over the ranks after each micro-batch; False: each rank adds up its own first. What a recipe
    does is ``Resolved.reduces_each_micro_batch``."""
    reduces_what_is_added_up: bool = False
    """What is summed over the ranks after each micro-batch is each rank's own sum so far, not the micro-batch's
    gradient alone: in 16 bits another rounding (DDP's buckets copy ``.grad``)."""
    other_sync: bool = False
    """`strategy.sync` can choose the other moment."""
    distributed: bool = True
    """Runs on several processes; False: exactly one."""
    shards: frozenset[Part] = frozenset()
    """The parts of the training state that are sharded over the ranks."""
    collectives: tuple[tuple[str, ...], ...] = ()
    """The collectives of the first step on several processes: at least one of each group, by the names of `verify`."""
    torch_optimizer: bool = True
    """The toolkit's torch optimizer performs the step; False: the engine wraps it and keeps float32 master weights."""
    flat_state: bool = False
    """The optimizer updates slices of flat tensors, which do not have the rows and columns of the weights."""
    broadcasts: bool = False
    """The first rank's weights are broadcast to the others at the start."""
    unshards_frozen: bool = False
    """Frozen weights of blocks can be whole on every process, beside sharded ones."""
    continues_without_gradient: bool = True
    """Training continues if a trained weight gets no gradient; False: it fails or hangs."""
    precedence: int = 100
    """Among otherwise equal strategies the one with the smallest value is chosen: less communication, less
    complexity."""
    hybrid: Literal["state", "weights"] | None = None
    """What `strategy.mesh` can both shard and replicate: the whole training state, or a second copy of the weights
    alone. None: nothing."""
    layouts: frozenset[str] = frozenset()
    """Axes of `strategy.mesh`, of tensor, pipeline and expert, that may divide its model
    (toolkit/strategies/layouts); others are refused."""
    validated: frozenset[str] | None = None
    """What `plan`'s predictions were compared with measurements for, beyond plain training: offload, fp16, task names.
    None: nothing was."""
    why_no_compile: str | None = None
    """Why blocks cannot be compiled under this strategy, and the alternative; or None."""
    why_no_expert_adapters: str | None = None
    """Why adapters cannot be on weights that all experts of a layer share, and the alternative; or None."""
    reentrant_adapters: bool = False
    """The transformers Trainer needs reentrant activation checkpointing for adapters under this strategy."""
    stages: InitVar[bool] = False
    """Read no more: ``layouts`` says it. Accepted for one release, with ``Strategy.staged_engine``."""
