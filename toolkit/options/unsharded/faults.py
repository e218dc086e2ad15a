"""How frozen weights that are to be whole are sharded."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from toolkit.verification.diagnose.known import MISSING, Known
from toolkit.verification.faults.base import Applies, Fault, Patch
from toolkit.verification.faults.helpers import LORA


class UnshardedIgnored(Fault):
    id = "unsharded-ignored"
    title = "frozen weights are sharded, where strategy.unsharded_blocks has them whole"
    stages = ("engagement",)
    diagnoses = ("unsharded-not-as-set",)
    strategies = Applies(lambda strategy: strategy.traits.unshards_frozen)
    needs: ClassVar[dict[str, Any]] = {"strategy": {"unsharded_blocks": 1}, "adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from accelerate.utils import fsdp_utils
        from torch.distributed.fsdp import FullyShardedDataParallel

        from toolkit.strategies.engines import zero

        @self.breaking(patch, fsdp_utils, "get_parameters_from_modules")
        def none_ignored(right: Any, *args: Any) -> set[Any]:
            return set()

        @self.breaking(patch, zero, "_as_buffers")
        def as_buffers(right: Any, *args: Any) -> None:
            pass

        def init(right: Any) -> Any:
            @functools.wraps(right)
            def wrong(*args: Any, **kwargs: Any) -> None:
                self.reached()
                right(*args, **(kwargs | {"ignored_modules": None, "ignored_states": None}))

            return wrong

        patch(FullyShardedDataParallel, "__init__", init)


FAULTS = (UnshardedIgnored,)
DIAGNOSES = {
    "unsharded-not-as-set": Known("other frozen weights are whole than strategy.unsharded_blocks says", MISSING)
}
