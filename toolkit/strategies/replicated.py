"""single and ddp: every process has the whole state."""

from __future__ import annotations

from toolkit.recipe.resolve import Resolved
from toolkit.recipe.traits import Traits
from toolkit.strategies.base import Strategy
from toolkit.strategies.memory.base import Holdings
from toolkit.strategies.memory.replicated import BUCKET
from toolkit.strategies.traffic import Axis, Traffic, Volumes


class Single(Strategy):
    name = "single"
    title = "one process"
    distributed_type = "NO"
    engine = "toolkit.strategies.engines.replicated:SingleEngine"
    memory = "toolkit.strategies.memory.replicated:SingleMemory"
    traits = Traits(
        autocast=True,
        same_operations=True,
        distributed=False,
        precedence=0,
        validated=frozenset({"fp16", "sequence-classification"}),
    )

    def traffic(self, resolved: Resolved, holdings: Holdings) -> Traffic:
        return Traffic()


class DistributedDataParallel(Strategy):
    name = "ddp"
    title = "full state on every process, gradients averaged"
    distributed_type = "MULTI_GPU"
    engine = "toolkit.strategies.engines.replicated:DdpEngine"
    memory = "toolkit.strategies.memory.replicated:DdpMemory"
    traits = Traits(
        autocast=True,
        same_operations=True,
        collectives=(("all-reduce",),),
        rearranges_sums=True,  # torch 2.13.0, Reducer::rebuild_buckets
        reduces_what_is_added_up=True,  # torch 2.13.0, Reducer::mark_variable_ready_dense
        other_sync=True,
        broadcasts=True,
        continues_without_gradient=False,
        layouts=frozenset({"pipeline"}),
        precedence=1,
        validated=frozenset({"fp16"}),
    )

    def collectives_by_axis(self, resolved: Resolved) -> tuple[tuple[str, Axis], ...]:
        # Without stages DDP's own axis is all processes.
        return (("all-reduce", "all"),) if resolved.mesh.pipeline > 1 and resolved.mesh.replicate > 1 else ()

    def traffic(self, resolved: Resolved, holdings: Holdings) -> Traffic:
        volumes = Volumes(resolved, holdings)
        sent = ((2 * volumes.gradients, max(1, int(volumes.trained_bytes // BUCKET))),)
        if resolved.mesh.pipeline > 1:  # between the copies of a stage, when all micro-batches have passed
            return Traffic(at_end=sent if resolved.mesh.replicate > 1 else ())
        return Traffic(sent) if resolved.reduces_each_micro_batch else Traffic(at_end=sent, end_overlaps=True)
