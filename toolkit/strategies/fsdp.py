"""PyTorch FSDP (arXiv:2304.11277) through Accelerate: version 1 (flat parameters) and 2 (per parameter)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.mesh import Mesh
from toolkit.recipe.resolve import Decisions, Resolved
from toolkit.recipe.shared_weights import shared_beside_frozen, why_not_in_units
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.recipe.traits import Traits
from toolkit.strategies.base import Strategy
from toolkit.strategies.memory.base import EMBED, TAIL, Holdings
from toolkit.strategies.traffic import Axis, Traffic, sharded_traffic


@dataclass(frozen=True)
class FsdpSettings:
    version: int
    reshard: bool
    last: bool
    """Gradients are summed after the last micro-batch of a step; without ``reshard``, weights stay gathered until
    then (version 2)."""
    offload: bool
    blocks: tuple[str, ...]
    state_dict_type: str
    mesh: Mesh | None = None
    """The recipe's mesh; None: one group of all processes, without a mesh of the recipe's."""

    @property
    def mesh_of_accelerate(self) -> bool:
        """Whether accelerate 1.15.0 has keys for the mesh: it knows no stages, and wants two ranks that shard."""
        return self.mesh is not None and self.mesh.pipeline == 1 and self.mesh.shard > 1

    @property
    def sharding_strategy(self) -> str:
        """FSDP1's name for it."""
        if self.mesh is not None and self.mesh.hybrid:
            return "HYBRID_SHARD" if self.reshard else "HYBRID_SHARD_ZERO2"
        return "FULL_SHARD" if self.reshard else "SHARD_GRAD_OP"


class _Fsdp(Strategy):
    version: int
    distributed_type = "FSDP"
    offloads = ("none", "all")

    def check(self, resolved: Resolved) -> None:
        super().check(resolved)
        if not resolved.blocks:
            why = resolved.facts.why_unknown or f"no block class is known for {resolved.facts.model_type}"
            raise InputError(
                f"{resolved.source}: strategy.wrap: {self.name} needs the class of the model's blocks ({why}); "
                "set it, for example strategy: {wrap: [LlamaDecoderLayer]}, or use zero3, which does not need it"
            )
        self._check_adapter(resolved)
        if self.version == 1 and (names := shared_beside_frozen(resolved.recipe, resolved.facts)) is not None:
            raise InputError(f"{resolved.source}: strategy.name: {why_not_in_units(names)}")
        rounds = resolved.precision.compute != resolved.precision.trainable
        if self.version == 1 and rounds and not resolved.reduces_each_micro_batch:
            raise InputError(
                f"{resolved.source}: strategy.sync: fsdp1 adds up gradients in {resolved.precision.compute} until they "
                "are summed over the ranks (torch 2.13.0), which rounds them; set every, or use fsdp2"
            )
        once = not (resolved.reduces_each_micro_batch or resolved.recipe.strategy.reshard_after_forward)
        if self.version == 1 and once:
            raise InputError(
                f"{resolved.source}: strategy.sync: fsdp1 with reshard_after_forward: false then frees no weight and "
                "no gradient before the end of a step's last backward (measured with torch 2.13.0); set "
                "reshard_after_forward: true, or use fsdp2"
            )
        if resolved.recipe.strategy.offload != "none" and resolved.device == "cpu":
            raise InputError(
                f"{resolved.source}: strategy.offload: FSDP offloads from a GPU, but machine.device is cpu; "
                "set offload: none, or machine.device: cuda to write files for a machine with GPUs"
            )

    def _check_adapter(self, resolved: Resolved) -> None:
        """Weights are gathered in units, around the calls of their modules; parameters are replaced by shards."""
        if resolved.recipe.adapter is None:
            return
        method = METHODS[resolved.recipe.adapter.method]
        reason = self.traits.why_no_expert_adapters
        if reason is not None and resolved.recipe.adapter.options.get("target_parameters"):
            raise InputError(f"{resolved.source}: strategy.name: {reason}")
        if method.shares:
            raise InputError(
                f"{resolved.source}: adapter.method: the trained weights of {method.name} belong to several blocks, "
                f"and {self.name} shards each block by itself; use zero3, or lora"
            )
        if method.hooks:
            raise InputError(
                f"{resolved.source}: adapter.method: {method.name} projects gradients in hooks on its weights, "
                f"which {self.name} replaces by shards: they would never run (PEFT 0.21.2); use zero3, or lora"
            )
        if self.version == 1 and (key := _rows_key(resolved)) is not None:
            raise InputError(
                f"{resolved.source}: {key}: PEFT 0.21.2 reads the embedding outside of its call, which fsdp1 has "
                "already sharded; use fsdp2, or modules_to_save: [embed_tokens], and [embed_tokens, lm_head] if the "
                "head has weights of its own"
            )
        if self.version == 1 and not method.layers_called:
            reads = "the weights of the layer it wraps" if method.name == "dora" else "its weights outside of a layer"
            raise InputError(
                f"{resolved.source}: adapter.method: {method.name} reads {reads}, which fsdp1 has already sharded "
                "(PEFT 0.21.2); fsdp2 and every other strategy support it, or use lora"
            )

    def settings(self, resolved: Resolved, decide: Decisions) -> FsdpSettings:
        strategy = resolved.recipe.strategy
        kind = "FULL_STATE_DICT" if self.version == 1 else "SHARDED_STATE_DICT"
        mesh = resolved.mesh if strategy.mesh is not None else None
        if self.version == 1 and resolved.mesh.hybrid:
            self._groups(resolved, decide)
        return FsdpSettings(
            version=decide(
                "fsdp.version", self.version, "written because the defaults differ: accelerate 1, transformers 2"
            ),
            reshard=strategy.reshard_after_forward,
            last=not resolved.reduces_each_micro_batch,
            offload=strategy.offload == "all",
            blocks=resolved.blocks,
            state_dict_type=decide("fsdp.state_dict_type", kind, "for other scripts; the toolkit does not use it"),
            mesh=mesh,
        )

    def _groups(self, resolved: Resolved, decide: Decisions) -> None:
        """accelerate 1.15.0 has no key for the groups of HYBRID_SHARD, which are then a node's GPUs (torch 2.13.0,
        _init_utils.py, ``_init_intra_and_inter_node_groups``)."""
        own = resolved.device == "cuda" and resolved.mesh.shard == resolved.recipe.machine.processes
        why = "a node's GPUs, torch's own groups" if own else (
            "set by toolkit train; accelerate.yaml has no key for it, and other scripts would shard over a node's GPUs"
        )  # fmt: skip
        decide("fsdp.group_size", resolved.mesh.shard, why)

    def accelerate_config(self, resolved: Resolved, folder: Path) -> dict[str, Any]:
        settings: FsdpSettings = resolved.settings
        fsdp: dict[str, Any] = {
            "fsdp_version": settings.version,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(settings.blocks),
            "fsdp_offload_params": settings.offload,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": settings.state_dict_type,
            "fsdp_activation_checkpointing": False,
        }
        if settings.version == 1:
            fsdp |= {
                # accelerate 1.15.0 reads fsdp_reshard_after_forward for version 2 alone
                "fsdp_sharding_strategy": settings.sharding_strategy,
                "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_forward_prefetch": False,
                "fsdp_use_orig_params": True,
                "fsdp_sync_module_states": resolved.device == "cuda",
            }
        else:
            fsdp["fsdp_reshard_after_forward"] = settings.reshard
            if settings.mesh is not None and settings.mesh_of_accelerate:
                sizes = {"dp_replicate": settings.mesh.replicate, "dp_shard": settings.mesh.shard}
                sizes |= {"tp": settings.mesh.columns, "cp": 1, "sp": 1}
                axes = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
                return {"fsdp_config": fsdp, "parallelism_config": axes}
        return {"fsdp_config": fsdp}

    def collectives_by_axis(self, resolved: Resolved) -> tuple[tuple[str, Axis], ...]:
        mesh = resolved.mesh
        found: list[tuple[str, Axis]] = []
        if mesh.hybrid:
            found = [("all-gather", "shard"), ("reduce-scatter", "shard"), ("all-reduce", "replicate")]
        elif mesh.pipeline > 1 or mesh.expert > 1:
            found = [("all-gather", "all"), ("reduce-scatter", "all")]
        if mesh.expert > 1 and mesh.expert_shards > 1:
            found.append(("all-gather", "copies"))
        return tuple(found)

    def traffic(self, resolved: Resolved, holdings: Holdings) -> Traffic:
        return sharded_traffic(resolved, holdings, self._gathered_once(holdings))

    def _gathered_once(self, holdings: Holdings) -> tuple[int, ...]:
        """What is outside of blocks and stays gathered from the forward to the backward, or has none."""
        raise NotImplementedError


_FSDP: dict[str, Any] = {
    "autocast": False,
    "same_operations": True,
    "reduces_each_micro_batch": True,
    "other_sync": True,
    "unshards_frozen": True,
    "shards": frozenset({"optimizer", "gradients", "weights"}),
    "collectives": (("reduce-scatter",), ("all-gather",)),
    "hybrid": "state",
}


class Fsdp1(_Fsdp):
    name = "fsdp1"
    title = "weights, gradients and optimizer state sharded, as flat parameters"
    version = 1
    engine = "toolkit.strategies.engines.fsdp1:Fsdp1Engine"
    memory = "toolkit.strategies.memory.fsdp:Fsdp1Memory"
    # InternalTorchDynamoError: «attempting to assign a gradient of size» other than the tensor's (torch 2.13.0).
    traits = Traits(
        precedence=5,
        flat_state=True,
        continues_without_gradient=False,
        validated=frozenset({"whole blocks"}),
        why_no_compile=(
            "is not supported with fsdp1: torch cannot capture its weights, which are views of a flat "
            "parameter, once there "
            "is a gradient; fsdp2 supports it"
        ),
        why_no_expert_adapters=(
            "fsdp1 has views of a flat parameter in the place of weights, but the adapters of experts, whose weights "
            "are one tensor, exchange a weight while they multiply it (PEFT 0.21.2, ParamWrapper); use fsdp2, or set "
            "adapter.target_modules to the attention's layers"
        ),
        **_FSDP,
    )

    def _gathered_once(self, holdings: Holdings) -> tuple[int, ...]:
        return (EMBED, TAIL)  # the root's unit


class Fsdp2(_Fsdp):
    name = "fsdp2"
    title = "weights, gradients and optimizer state sharded, per parameter"
    version = 2
    engine = "toolkit.strategies.engines.fsdp2:Fsdp2Engine"
    memory = "toolkit.strategies.memory.fsdp:Fsdp2Memory"
    traits = Traits(
        precedence=4,
        validated=frozenset({"fp16", "whole blocks"}),
        sums_input_gradients_by_block=True,
        layouts=frozenset({"tensor", "expert", "pipeline"}),
        **_FSDP,
    )

    def _gathered_once(self, holdings: Holdings) -> tuple[int, ...]:
        # Tied embeddings are with the head; no gradient reaches those that are frozen.
        kept = holdings.tied or not any(w.trains for w in holdings.embed)
        return (EMBED, TAIL) if kept else (TAIL,)


def _rows_key(resolved: Resolved) -> str | None:
    """The key of a recipe whose adapter trains rows of embeddings; None if it has none."""
    adapter = resolved.recipe.adapter
    if adapter is None:
        return None
    if adapter.options.get("trainable_token_indices"):
        return "adapter.options.trainable_token_indices"
    tables = 1 if resolved.facts.value("tie_word_embeddings") is True else 2
    if added_tokens(resolved.recipe) and len(adapter.modules_to_save) < tables:
        return "tokenizer.add_tokens"
    return None
