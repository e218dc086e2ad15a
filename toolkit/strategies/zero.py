"""DeepSpeed ZeRO (arXiv:1910.02054): stage 1 shards optimizer state, 2 also gradients, 3 also weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.recipe.resolve import Decisions, Resolved
from toolkit.recipe.traits import Traits
from toolkit.strategies.base import Strategy
from toolkit.strategies.memory.base import Holdings
from toolkit.strategies.memory.zero3 import Zero3Memory
from toolkit.strategies.traffic import Axis, Traffic, Volumes, second_copy_traffic
from toolkit.strategies.zero_settings import Zero3Settings, Zero12Settings, ZeroSettings

# Elements per bucket where the model's width is not known: 100 MB of bf16, far below DeepSpeed's default of
# 5e8, which with overlap_comm takes about 4.5 times its size in extra device memory.
_BUCKET = 50_000_000
_LEAST = 1_000_000

# What the three stages have in common. Offload was measured on a CPU, host and device together (docs/planning.md).
_ZERO: dict[str, Any] = {
    "autocast": False,
    "same_operations": True,
    "torch_optimizer": False,
    "flat_state": True,
    "broadcasts": True,
    "validated": frozenset({"offload"}),
}
# A bucket of gradients is all-reduced (deepspeed 0.19.8), and each rank keeps its part.
_REDUCED_THEN_GATHERED = (("all-reduce", "reduce-scatter"), ("all-gather",))


class _Zero(Strategy):
    stage: int
    distributed_type = "DEEPSPEED"
    engine = "toolkit.strategies.engines.zero:ZeroEngine"

    def check(self, resolved: Resolved) -> None:
        super().check(resolved)
        recipe, source = resolved.recipe, resolved.source
        if recipe.precision == "fp16" and resolved.device == "cpu":
            raise InputError(
                f"{source}: precision: DeepSpeed runs fp16 on a GPU only; use bf16 here, or strategy ddp or fsdp2"
            )
        if recipe.precision == "bf16-pure" and recipe.strategy.offload != "none":
            raise InputError(
                f"{source}: precision: DeepSpeed stores offloaded state in bf16 only with its own optimizers; "
                "use bf16 with offload, or bf16-pure without"
            )

    def check_reach(self, by_row: Sequence[str], resolved: Resolved, *, by_values: Sequence[str] = ()) -> None:
        """DeepSpeed 0.19.8 exchanges gradients in the order in which a rank has them, in buckets: a weight's would be
        added to another's, or ranks would send unequal lengths. ZeRO-3 gathers weights ahead in the order in which
        modules ran before (``PartitionedParameterCoordinator``): ranks whose modules run otherwise wait for each other
        for ever (LongCat-Flash, in the fifth step)."""
        if by_row and resolved.world_size > 1:
            some = ", ".join(by_row[:2]) + (", ..." if len(by_row) > 2 else "")
            raise InputError(
                f"{resolved.source}: strategy.name: {self.name}: {len(by_row)} weights of this model get a gradient "
                f"from some rows alone ({some}), and DeepSpeed would mix up the gradients of ranks that have reached "
                "different ones; use fsdp2, or ddp"
            )
        if by_values and resolved.world_size > 1 and self.stage == 3:
            raise InputError(
                f"{resolved.source}: strategy.name: {self.name}: {by_values[0]} runs as often as the values or the "
                "length of a row say, and DeepSpeed gathers weights in the order in which modules ran before: ranks "
                "would wait for each other for ever; use fsdp2, or ddp"
            )

    def settings(self, resolved: Resolved, decide: Decisions) -> ZeroSettings:
        hidden = resolved.facts.hidden_size
        bucket, why = _BUCKET, "100 MB of bf16"
        if self.stage == 3 and hidden is not None:
            bucket, why = max(hidden * hidden, _LEAST), f"hidden_size^2: one weight matrix, {_LEAST:,} at least"
        overlap = resolved.device == "cuda"
        why_overlap = "overlaps the reduction with the backward" if overlap else "no GPU"
        common: dict[str, Any] = {
            "stage": decide("zero.stage", self.stage, f"strategy.name: {self.name}"),
            "reduce_bucket": decide("zero.reduce_bucket_size", bucket, why),
            "overlap": decide("zero.overlap_comm", overlap, why_overlap),
        }
        if self.stage < 3:
            gathered = decide("zero.allgather_bucket_size", _BUCKET, "100 MB of bf16")
            ranks, stage2 = resolved.token_parts, self.stage == 2
            exact = ranks & (ranks - 1) == 0
            scatter = decide(
                "zero.reduce_scatter",
                not stage2 or exact,
                "DeepSpeed's default"
                if not stage2 or exact
                else f"off: with it DeepSpeed divides gradients by {ranks} ranks in 16 bits before it adds them up; "
                "the traffic is the same",
            )
            return Zero12Settings(**common, allgather_bucket=gathered, reduce_scatter=scatter)
        return Zero3Settings(
            **common,
            prefetch_bucket=decide("zero.stage3_prefetch_bucket_size", int(0.9 * bucket), "0.9 of the reduce bucket"),
            persistence_threshold=decide(
                "zero.stage3_param_persistence_threshold",
                10 * hidden if hidden else 10_000,
                "10 x hidden_size: norms and biases are not sharded" if hidden else "norms and biases are not sharded",
            ),
            hpz=self._hpz(resolved, decide),
        )

    def _hpz(self, resolved: Resolved, decide: Decisions) -> int:
        if not resolved.mesh.hybrid:
            return 1
        why = (
            "strategy.mesh.shard: a second copy of the weights in each group of ranks; gradients and optimizer state "
            f"are sharded over all {resolved.world_size} processes"
        )
        return decide("zero.zero_hpz_partition_size", resolved.mesh.shard, why)

    def accelerate_config(self, resolved: Resolved, folder: Path) -> dict[str, Any]:
        config: dict[str, Any] = {
            "deepspeed_config_file": str(folder / "deepspeed.json"),
            "zero3_init_flag": self.stage == 3,
        }
        if resolved.recipe.machine.nodes > 1:
            # One torchrun per node, started by Slurm or by hand; pdsh would ask for password-less ssh.
            config["deepspeed_multinode_launcher"] = "standard"
        return {"deepspeed_config": config}

    def deepspeed_config(self, resolved: Resolved) -> dict[str, Any]:
        settings: ZeroSettings = resolved.settings
        recipe = resolved.recipe
        zero: dict[str, Any] = {
            "stage": settings.stage,
            "overlap_comm": settings.overlap,
            "contiguous_gradients": True,
            "reduce_scatter": settings.reduce_scatter if isinstance(settings, Zero12Settings) else True,
            "reduce_bucket_size": settings.reduce_bucket,
        }
        if isinstance(settings, Zero12Settings):
            zero |= {"allgather_partitions": True, "allgather_bucket_size": settings.allgather_bucket}
        if isinstance(settings, Zero3Settings):
            zero |= {
                "stage3_prefetch_bucket_size": settings.prefetch_bucket,
                "stage3_param_persistence_threshold": settings.persistence_threshold,
                "stage3_max_live_parameters": 1_000_000_000,
                "stage3_max_reuse_distance": 1_000_000_000,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
            if settings.hpz > 1:
                zero["zero_hpz_partition_size"] = settings.hpz
        offload = recipe.strategy.offload
        pinned = {"device": "cpu", "pin_memory": resolved.device == "cuda"}
        if offload != "none":
            zero["offload_optimizer"] = pinned
        if offload == "all":
            zero["offload_param"] = pinned
        config: dict[str, Any] = {
            "train_batch_size": resolved.global_size,
            "train_micro_batch_size_per_gpu": resolved.micro_size,
            "gradient_accumulation_steps": resolved.accumulation,
            "gradient_clipping": resolved.max_grad_norm,
            "zero_optimization": zero,
            # torch's own AdamW, fused, also where its state is offloaded: the same arithmetic everywhere.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1_000_000_000,
            "wall_clock_breakdown": False,
            "bf16": {"enabled": resolved.precision.compute == "bfloat16"},
            "fp16": {"enabled": resolved.precision.compute == "float16"},
        }
        if resolved.mesh.context > 1:
            # DeepSpeed divides the batch by the ranks that have samples of their own (0.19.8, runtime/config.py); it
            # engages nothing else, since no data_parallel_size is beside it.
            config["sequence_parallel_size"] = resolved.mesh.context
        if recipe.precision == "bf16-pure":
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        if config["bf16"]["enabled"]:
            # A gradient that is not finite must be seen, not skipped silently.
            config["bf16"]["check_grad_overflow"] = False
        if config["fp16"]["enabled"]:
            # torch.amp.GradScaler's constants, so that every strategy scales alike; loss_scale 0 means dynamic. The
            # loss of each rank is multiplied by their number already, see Engine._initial_scale.
            config["fp16"] |= {
                "auto_cast": False,
                "loss_scale": 0,
                "initial_scale_power": max(0, 16 - math.ceil(math.log2(resolved.token_parts))),
                "loss_scale_window": 2000,
                "hysteresis": 1,
                "min_loss_scale": 1,
            }
        if resolved.precision.mixed:
            # By default DeepSpeed sums gradients over ranks and micro-batches in 16 bits.
            config["communication_data_type"] = "fp32"
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        elif recipe.precision == "bf16-pure":
            config["data_types"] = {"grad_accum_dtype": "bf16"}
        return config


class Zero1(_Zero):
    name = "zero1"
    title = "optimizer state sharded"
    stage = 1
    memory = "toolkit.strategies.memory.zero:Zero1Memory"
    offloads = ("none", "optimizer")
    traits = Traits(
        shards=frozenset({"optimizer"}),
        collectives=_REDUCED_THEN_GATHERED,
        precedence=2,
        **_ZERO,
    )

    def traffic(self, resolved: Resolved, holdings: Holdings) -> Traffic:
        volumes = Volumes(resolved, holdings)
        return Traffic(at_end=((2 * volumes.gradients, 1), (volumes.trained_copies, 1)))


class Zero2(_Zero):
    name = "zero2"
    title = "optimizer state and gradients sharded"
    stage = 2
    memory = "toolkit.strategies.memory.zero:Zero2Memory"
    offloads = ("none", "optimizer")
    traits = Traits(
        shards=frozenset({"optimizer", "gradients"}),
        collectives=_REDUCED_THEN_GATHERED,
        precedence=3,
        reduces_each_micro_batch=True,
        **_ZERO,
    )

    def traffic(self, resolved: Resolved, holdings: Holdings) -> Traffic:
        # The bucket is all-reduced, and each rank keeps its part (use_multi_rank_bucket_allreduce).
        volumes = Volumes(resolved, holdings)
        buckets = -(-holdings.elements(True) // resolved.settings.reduce_bucket)
        return Traffic(((2 * volumes.gradients, buckets),), ((volumes.trained_copies, 1),))


class Zero3(_Zero):
    name = "zero3"
    title = "optimizer state, gradients and weights sharded"
    stage = 3
    memory = "toolkit.strategies.memory.zero3:Zero3Memory"
    offloads = ("none", "optimizer", "all")
    traits = Traits(
        shards=frozenset({"optimizer", "gradients", "weights"}),
        collectives=(("reduce-scatter",), ("all-gather",)),
        precedence=6,
        continues_without_gradient=False,
        why_no_compile=(
            "is not supported with zero3, which gathers the weights of each layer from within a "
            "block, where compiled code "
            "has no place for it; fsdp2 shards as much and supports it"
        ),
        reentrant_adapters=True,
        hybrid="weights",
        unshards_frozen=True,
        sums_input_gradients_by_module=True,  # deepspeed 0.19.8, parameter_offload.py
        reduces_each_micro_batch=True,
        **_ZERO,
    )

    def collectives_by_axis(self, resolved: Resolved) -> tuple[tuple[str, Axis], ...]:
        return (("all-gather", "shard"), ("reduce-scatter", "all")) if resolved.mesh.hybrid else ()

    def traffic(self, resolved: Resolved, holdings: Holdings) -> Traffic:
        if resolved.mesh.hybrid:
            return second_copy_traffic(resolved, holdings)
        ring, volumes = 1 - 1 / resolved.state_ranks, Volumes(resolved, holdings)
        micro, units, small = Zero3Memory(holdings, resolved).gathers()
        reduced = (volumes.gradients, volumes.units)
        return Traffic(((ring * micro, units), reduced), at_end=((ring * small, 1),), also_forward=True)
