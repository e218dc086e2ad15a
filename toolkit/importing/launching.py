"""Strategy, processes and nodes, from accelerate's YAML, a DeepSpeed JSON, transformers' DistributedConfig and the
launcher's flags (accelerate 1.15.0, DeepSpeed 0.19.8, transformers 5.23.0)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolkit.importing import parallel, split
from toolkit.importing.draft import Draft
from toolkit.importing.outcome import Key, Outcome
from toolkit.importing.table import words
from toolkit.linting.files.tree import Entry, Source

_WHERE = words(
    "compute_environment debug downcast_bf16 enable_cpu_affinity gpu_ids machine_rank main_process_ip "
    "main_process_port main_training_function rdzv_backend rdzv_conf same_network config_file module m role tee t "
    "log_dir max_restarts monitor_interval num_cpu_threads_per_process quiet q env master_addr master_port node_rank "
    "rdzv_endpoint rdzv_id standalone include exclude hostfile no_local_rank multi_gpu use_deepspeed use_fsdp "
    "deepspeed_config_file deepspeed_hostfile deepspeed_multinode_launcher deepspeed_inclusion_filter "
    "deepspeed_exclusion_filter no_python tpu_env tpu_use_cluster tpu_use_sudo command_file commands "
    "use_parallelism_config"
)
_FSDP = words(
    "auto_wrap_policy backward_prefetch cpu_ram_efficient_loading forward_prefetch min_num_params state_dict_type "
    "sync_module_states transformer_layer_cls_to_wrap use_orig_params"
)
# Sections of a DeepSpeed JSON that change neither gradients nor updates.
_DEEPSPEED = words(
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown steps_per_print flops_profiler "
    "comms_logger tensorboard wandb csv_monitor comet dump_state log_level timers memory_breakdown aio "
    "activation_checkpointing checkpoint disable_python_gc autotuning comms_config monitor_config compile"
)
_ZERO = ("zero1", "zero2", "zero3")


@dataclass
class Launch:
    """How the source is started. ``amp``: mixed precision of the launcher, used where the arguments have none."""

    draft: Draft
    amp: str | None = None
    strategy: str | None = None
    names_processes: bool = False
    seen: set[int] = field(default_factory=set)
    divided: tuple[Source, Entry, Any] | None = None
    """DeepSpeed's AutoTP, and into how many parts."""

    def read(self, sources: list[Source]) -> None:
        """Read every source of kind ``launch``, ``accelerate``, ``deepspeed`` and ``distributed``; then write
        strategy and machine."""
        readers: dict[str, Callable[[Source], None]] = {
            "accelerate": self._accelerate,
            "launch": self._flags,
            "deepspeed": self._deepspeed,
        }
        for kind, reader in readers.items():
            for source in sources:
                if source.kind == kind:
                    reader(source)
        if not self._splits(sources):
            self._finish(sources)

    def _splits(self, sources: list[Source]) -> bool:
        """Whether transformers splits the model; the launch then starts processes alone."""
        for source in sources:
            found = split.read(self.draft, source) if source.kind == "distributed" else None
            if found is not None:
                self.amp = found.amp or self.amp
                self._replaced(sources)
                return True
        return False

    def _replaced(self, sources: list[Source]) -> None:
        """What accelerate or DeepSpeed would divide is not theirs where transformers splits the model."""
        reason = "transformers splits the model (DistributedConfig)"
        for source in sources:
            for entry in source.section("parallelism_config").values() if source.kind == "accelerate" else ():
                self._note(source, entry, "no-effect", reason)
        if self.divided is not None:
            self._note(*self.divided[:2], "unsupported", f"AutoTP, where {reason}")

    def _note(self, source: Source, entry: Entry, outcome: Outcome, reason: str, recipe: str = "") -> None:
        key = Key(
            entry.key, entry.node.plain(), outcome, source.place(entry.start), (recipe,) if recipe else (), reason
        )
        self.draft.keys.append(key)

    def _set(self, source: Source, entry: Entry, recipe: str, value: Any) -> None:
        self.draft.set(recipe, value, f"{source.place(entry.start).file}:{source.place(entry.start).line} {entry.key}")
        self._note(source, entry, "carried", "", recipe)

    def _accelerate(self, source: Source) -> None:
        kind = str(source.get("distributed_type", "NO")).upper()
        nodes = source.get("num_machines") or 1
        for key, entry in source.section("").items():
            value = entry.node.plain()
            if key == "num_processes" and isinstance(value, int):
                self.names_processes = True
                self._set(source, entry, "machine.processes", max(1, value // nodes))
            elif key == "num_machines" and isinstance(value, int):
                self._set(source, entry, "machine.nodes", value)
            elif key == "mixed_precision":
                self.amp = value if value in ("bf16", "fp16") else None
                outcome: Outcome = "unsupported" if value == "fp8" else "no-effect"
                self._note(source, entry, outcome, "the training arguments decide; it holds where they name none")
            elif key == "distributed_type":
                self._distributed(source, entry, kind)
            elif key == "fsdp_config":
                self._fsdp(source, source.section(key), "fsdp_")
            elif key == "deepspeed_config":
                self._plugin(source, source.section(key))
            elif key == "use_cpu" and value:
                self._set(source, entry, "machine.device", "cpu")
            elif key in ("dynamo_config", "dynamo_backend"):
                self._note(source, entry, "no-effect", "compilation; set compile: true for compiled blocks")
            elif key == "parallelism_config" and value:
                continue  # parallel.read
            elif key in ("megatron_lm_config", "fp8_config") and value:
                self._note(source, entry, "unsupported", "the recipe has no such parallelism or number format")
            elif key in _WHERE or key in ("use_cpu", "mpirun_config", "tpu_name", "tpu_vm", "tpu_zone") or not value:
                self._note(source, entry, "no-effect", "where and how processes start")
            else:
                self._note(source, entry, "unknown", "unknown to accelerate 1.15.0")

    def _distributed(self, source: Source, entry: Entry, kind: str) -> None:
        found = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp1", "DEEPSPEED": "zero2"}.get(
            kind
        )
        if found is None:
            self._note(source, entry, "unsupported", f"the recipe has no strategy for {kind}")
            return
        self.strategy = self.strategy or found
        self._note(source, entry, "carried", "", "strategy.name")

    def _fsdp(self, source: Source, entries: dict[str, Entry], prefix: str) -> None:
        section = {key.removeprefix(prefix): entry for key, entry in entries.items()}
        plain = {key: entry.node.plain() for key, entry in section.items()}
        self.strategy = "fsdp2" if str(plain.get("version", plain.get("fsdp_version", 1))) == "2" else "fsdp1"
        for name, entry in section.items():
            value = plain[name]
            if name in ("version", "fsdp_version"):
                self._note(source, entry, "carried", "", "strategy.name")
            elif name in ("reshard_after_forward", "sharding_strategy"):
                self._reshard(source, entry, str(value).upper())
            elif name == "offload_params":
                self._set(source, entry, "strategy.offload", "all" if value else "none")
            elif name == "activation_checkpointing":
                self._set(source, entry, "activation_checkpointing", "full" if value else "none")
            elif name in _FSDP:
                self._note(source, entry, "no-effect", "how weights are grouped, fetched and saved")
            elif not value:
                self._note(source, entry, "no-effect", "off")
            else:
                self._note(source, entry, "unsupported", "the recipe has no such FSDP setting")

    def _reshard(self, source: Source, entry: Entry, value: str) -> None:
        known = {"TRUE": True, "FALSE": False, "FULL_SHARD": True, "SHARD_GRAD_OP": False, "1": True, "2": False}
        if value in known:
            self._set(source, entry, "strategy.reshard_after_forward", known[value])
        else:
            self._note(source, entry, "no-effect", "where shards are kept; the recipe shards over all processes")

    def _plugin(self, source: Source, entries: dict[str, Entry]) -> None:
        for name, entry in entries.items():
            value = entry.node.plain()
            if name == "zero_stage":
                self._stage(source, entry, value)
            elif name in ("offload_optimizer_device", "offload_param_device"):
                self._offload(source, entry, value, name)
            elif name == "gradient_clipping" and isinstance(value, int | float):
                self._note(source, entry, "no-effect", "the Trainer clips at its own max_grad_norm")
            elif name == "gradient_accumulation_steps":
                self._note(source, entry, "no-effect", "the Trainer counts its own gradient_accumulation_steps")
            elif name.startswith(("deepspeed_", "zero3_", "offload_")):
                self._note(source, entry, "no-effect", "where and how processes start, load and save")
            else:
                self._note(source, entry, "unknown", "unknown to accelerate 1.15.0")

    def _stage(self, source: Source, entry: Entry, value: Any) -> None:
        self.strategy = "ddp" if str(value) == "0" else f"zero{value}" if f"zero{value}" in _ZERO else None
        if self.strategy is None:
            self._note(source, entry, "unsupported", f"no stage {value}")
        else:
            self._note(source, entry, "carried", "", "strategy.name")

    def _offload(self, source: Source, entry: Entry, value: Any, name: str) -> None:
        if value in (None, "none"):
            self._note(source, entry, "no-effect", "off")
        elif value == "cpu":
            everything = "param" in name or self.draft.values.get("strategy.offload") == "all"
            self._set(source, entry, "strategy.offload", "all" if everything else "optimizer")
        else:
            self._note(source, entry, "unsupported", f"the recipe offloads to host memory, not to {value}")

    def _flags(self, source: Source) -> None:
        for key, entry in source.section("").items():
            value = entry.node.plain()
            if key in ("num_processes", "nproc_per_node", "num_gpus") and isinstance(value, int):
                self.names_processes = True
                nodes = source.get("num_machines") or 1
                self._set(source, entry, "machine.processes", value // nodes if key == "num_processes" else value)
            elif key in ("num_machines", "nnodes", "num_nodes") and isinstance(value, int):
                self._set(source, entry, "machine.nodes", value)
            elif key == "mixed_precision":
                self.amp = value if value in ("bf16", "fp16") else None
                self._note(source, entry, "no-effect", "the training arguments decide; it holds where they name none")
            elif key == "zero_stage":
                self._stage(source, entry, value)
            elif key == "cpu" or key == "use_cpu":
                self._set(source, entry, "machine.device", "cpu")
            elif key.startswith("fsdp_"):
                self._fsdp(source, {key: entry}, "fsdp_")
            elif key in ("offload_optimizer_device", "offload_param_device"):
                self._offload(source, entry, value, key)
            elif key.startswith("parallelism_config_"):
                continue  # parallel.read
            elif key in _WHERE or key.startswith(("dynamo_", "gradient_", "zero3_", "offload_")):
                self._note(source, entry, "no-effect", "where and how processes start")
            else:
                self._note(source, entry, "unsupported", "a launcher's setting that the recipe does not have")

    def _deepspeed(self, source: Source) -> None:
        zero = source.entry("zero_optimization.stage")
        for key, entry in source.section("").items():
            value = entry.node.plain()
            if key == "zero_optimization":
                for name in ("offload_optimizer", "offload_param"):
                    device = source.entry(f"{key}.{name}.device")
                    if device is not None:
                        self._offload(source, device, device.node.plain(), name)
                if zero is not None:
                    self._stage(source, zero, zero.node.plain())
                self._note(source, entry, "no-effect", "buckets, overlap and prefetching")
            elif key in ("fp16", "bf16", "bfloat16"):
                enabled = source.get(f"{key}.enabled")
                self.amp = self.amp or (key[:4] if enabled is True else None)
                self._note(source, entry, "no-effect", "the training arguments decide; it holds where they name none")
            elif value == "auto" or key in _DEEPSPEED or key.startswith(("train_", "_", "//")):
                self._note(source, entry, "no-effect", "filled in by the Trainer, or not about training")
            elif key in ("gradient_clipping", "gradient_accumulation_steps"):
                self._note(source, entry, "no-effect", "the Trainer refuses a value other than its own")
            elif key == "tensor_parallel":
                self._tensor(source, entry, source.get(f"{key}.autotp_size", 0))
            elif key == "sequence_parallel_size" and value == 1:
                self._note(source, entry, "no-effect", "1: rows are whole")
            elif key == "sequence_parallel_size":
                self._note(source, entry, "unsupported", "the script divides rows; set strategy.mesh.context")
            elif key in ("optimizer", "scheduler"):
                self._note(source, entry, "unsupported", f"DeepSpeed's own {key} instead of the Trainer's")
            else:
                self._note(source, entry, "unsupported", "the recipe has no such DeepSpeed setting")

    def _tensor(self, source: Source, entry: Entry, count: Any) -> None:
        if count in (0, 1):
            self._note(source, entry, "no-effect", "AutoTP is off")
        else:
            self.divided = source, entry, count

    def _divide_layers(self, strategy: str) -> None:
        """DeepSpeed's AutoTP as an axis of the mesh, under fsdp2, where the number of processes is known."""
        if self.divided is None:
            return
        source, entry, count = self.divided
        values = self.draft.values
        world = values.get("machine.processes", 1) * values.get("machine.nodes", 1)
        rest = world // count if isinstance(count, int) and world % count == 0 else 0
        if strategy == "zero3":  # which DeepSpeed refuses beside it
            reason = f"AutoTP (autotp_size {count}): the recipe divides layers under fsdp2; set strategy.name: fsdp2"
            self._note(source, entry, "unsupported", reason)
        elif "strategy.mesh" in values or rest < 1:
            reason = (
                f"AutoTP (autotp_size {count}) with {world} processes; set strategy.name: fsdp2 and strategy.mesh: "
                "tensor, and shard for the others"
            )
            self._note(source, entry, "unsupported", reason)
        else:
            where = f"{source.place(entry.start).file}:{source.place(entry.start).line} {entry.key}"
            mesh = ({"shard": rest} if rest > 1 else {}) | {"tensor": count}
            self.draft.set("strategy.mesh", mesh, where)
            self.draft.set("strategy.name", "fsdp2", where)
            reason = "the recipe divides layers itself, under fsdp2, adapters too, which AutoTP drops"
            self._note(source, entry, "carried", reason, "strategy.mesh")

    def _finish(self, sources: list[Source]) -> None:
        draft = self.draft
        processes = draft.values.get("machine.processes", 1) * draft.values.get("machine.nodes", 1)
        strategy = self.strategy or ("ddp" if processes > 1 else "single")
        if strategy == "single" and processes > 1:
            strategy = "ddp"
        parallel.read(draft, sources, strategy, self.names_processes)
        self._divide_layers(strategy)
        self.names_processes = self.names_processes or "machine.processes" in draft.values
        if strategy == "single" and draft.values.get("machine.processes", 1) > 1:
            strategy = "ddp"
        draft.values.setdefault("strategy.name", strategy)
        draft.origins.setdefault(
            "strategy.name", "from the launch files" if self.strategy else f"{processes} processes"
        )
        if not self.names_processes:
            draft.notes.append(
                "one process: the files do not say how many; the global batch grows with them (machine.processes=N)"
            )
        if "strategy.offload" in draft.values and strategy in ("zero1", "zero2"):
            draft.values["strategy.offload"] = "optimizer"
