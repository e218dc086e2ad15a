"""The meaning of a set of launch files, independent of the program that reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Meaning:
    """A run's sharding and arithmetic. Numbers that the files leave to the script are None."""

    source: str  # "zero1", "zero2", "zero3", "fsdp1" or "fsdp2"
    precision: str = "no"
    reshard: bool = True  # weights are freed between forward and backward (ZeRO-3, FULL_SHARD)
    replicas: int = 1  # hybrid sharding: copies of the sharded group
    shards: int = 1  # hybrid sharding: processes of a group
    offload: bool = False  # weights, gradients and optimizer state live on the host
    offload_optimizer: bool = False  # the optimizer state alone does
    full_checkpoint: bool = True
    rank0_loading: bool = False  # no process but the first holds the whole model while loading
    wrap: str | None = None
    wrap_classes: str | None = None
    wrap_size: int | None = None
    checkpointing: bool | None = None  # FSDP's own activation checkpointing
    top: dict[str, Any] = field(default_factory=dict)  # topology: processes, machines, addresses
    arguments: dict[str, Any] = field(default_factory=dict)  # what belongs to the training arguments
    refused: list[str] = field(default_factory=list)  # what has no equal, and why
    notes: list[str] = field(default_factory=list)  # what is said differently, or not at all, and why that is safe

    def refuse(self, place: str, reason: str) -> None:
        """Record a setting that cannot be converted."""
        self.refused.append(f"{place}: {reason}")

    def note(self, place: str, reason: str) -> None:
        """Record a setting that is safely dropped or written differently."""
        self.notes.append(f"{place}: {reason}")

    def argument(self, key: str, value: Any, place: str) -> None:
        """Set a training argument that replaces this setting; conflicting values are rejected."""
        if key in self.arguments and self.arguments[key] != value:
            self.refuse(place, f"{key} would be {value}, but it is {self.arguments[key]} elsewhere")
            return
        self.arguments[key] = value
