"""``--on-cpu``: on a machine without a GPU, accelerate runs the strategy that it was launched for.

Without a GPU, accelerate 1.15.0 turns FSDP and DeepSpeed into DDP, or leaves the processes unconnected, and says
nothing. Here the processes are connected over gloo before accelerate decides. The script is the same; only where it
runs is not. Nothing happens where there is a GPU, or one process.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any


def connect_first(state: ModuleType) -> None:
    """Change ``accelerate.state.PartialState`` for the rest of the process."""
    import torch

    if torch.cuda.is_available() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    kind = state.PartialState
    create = kind.__init__

    @functools.wraps(create)
    def created(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if self.initialized:
            create(self, cpu, **kwargs)
            return
        if not torch.distributed.is_initialized():
            from toolkit.upstream.torch import use_one_gloo_thread

            use_one_gloo_thread()
            torch.distributed.init_process_group("gloo")
        launched = {one: os.environ.get(f"ACCELERATE_USE_{one}", "").lower() == "true" for one in ("DEEPSPEED", "FSDP")}
        if not any(launched.values()):
            os.environ["ACCELERATE_USE_CPU"] = "true"
            create(self, True)
            return
        create(self, False, backend="gloo")
        self.device = torch.device("cpu")
        if launched["FSDP"]:
            self.distributed_type = state.DistributedType.MULTI_GPU

    kind.__init__ = created


def without_shm_op(deepspeed: Any) -> None:
    """DeepSpeed 0.19.8 compiles a shared-memory all-reduce for a CPU, which takes a compiler and minutes."""
    import torch

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
