"""One way to train a recipe, with its memory and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.planning.allocator import Parts
from toolkit.planning.hardware import GIB
from toolkit.planning.memory import Memory
from toolkit.planning.storage import Storage
from toolkit.planning.time import Seconds
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import asked_options, asked_whole, host_settings, whole_keys
from toolkit.tasks import task_of

LIGER_UNKNOWN = "loss from liger_kernel"
"""What is counted is the toolkit's own chunked loss; that kernel's chunks are of another size."""

WHOLE = "whole blocks"
"""An entry of ``Traits.validated``."""


@dataclass
class Candidate:
    """One way to train, with its memory and time. ``error``: why it is not possible, instead of both."""

    resolved: Resolved
    memory: Memory
    reserve: int
    host: int
    seconds: Seconds | None
    capacity: int
    usable: int
    asked: bool = False
    host_loading: int = 0
    """Bytes of a node's host while all its processes load the model; ``host``: while they train."""
    storage: Storage = dataclasses.field(default_factory=Storage)
    sent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Bytes that a device sends in a step, by axis of the mesh; ``all``: in collectives of all ranks."""
    interval: tuple[int, int] | None = None
    """Bytes that the process takes on a GPU, from and to (toolkit/planning/allocator.py); None on a CPU."""
    loop: str = "toolkit"
    """The training loop that is planned for."""
    parts: Parts | None = None
    """What its process takes on a GPU beyond its tensors; None on a CPU."""
    stages: Sequence[tuple[range, int]] = ()
    """Blocks and peak bytes of each pipeline stage (``strategy.mesh.pipeline``)."""

    @property
    def peak(self) -> int:
        return self.memory.peak + self.reserve

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices; None without a time."""
        if self.seconds is None:
            return None
        return self.resolved.global_size * self.resolved.recipe.data.max_length / self.seconds.total

    @property
    def needed(self) -> int:
        """Bytes that decide whether it fits: the most that nvidia-smi will show; on a CPU the peak."""
        return self.peak if self.parts is None else max(self.peak, int(self.parts.most()))

    @property
    def expected(self) -> int:
        """Bytes that nvidia-smi will show, the middle of the interval; on a CPU the peak."""
        return self.peak if self.parts is None else max(self.peak, int(self.parts.process()))

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def breakdown(self) -> dict[str, int]:
        return {**self.memory.breakdown, "reserve": self.reserve}

    @property
    def shares(self) -> dict[str, int]:
        """``breakdown`` with what the allocator keeps at most, whose sum is what is needed: for bars."""
        return {**self.breakdown, "cache": self.needed - self.peak}

    @property
    def label(self) -> str:
        recipe = self.resolved.recipe
        parts: list[str] = [recipe.strategy.name]
        if self.resolved.mesh.hybrid:
            parts.append(f"mesh {self.resolved.mesh.replicate} x {self.resolved.mesh.shard}")
        parts += [f"{axis} {size}" for axis, size in self.resolved.mesh.axes.items()]
        if recipe.strategy.sync is not None:
            parts.append(f"sync {recipe.strategy.sync}")
        if not getattr(self.resolved.settings, "reshard", True):
            parts.append("weights kept")
        if (whole := asked_whole(recipe)) is not None:
            parts.append(f"{whole.option.name} {whole.settings}")
        if recipe.strategy.offload != "none":
            parts.append(f"offload {recipe.strategy.offload}")
        if recipe.activation_checkpointing != "none":
            parts.append(f"{recipe.activation_checkpointing} ckpt")
        parts += [option.name.replace("_", " ") for option, _ in asked_options(recipe) if option.host_value is not None]
        if recipe.loss != "plain":
            parts.append(f"{recipe.loss} loss")
        return " ".join([*parts, f"micro {self.resolved.micro_size}"])

    @property
    def reason(self) -> str:
        """Why it is not chosen, in numbers; empty if it fits."""
        if self.fits:
            return ""
        term, size = max(self.breakdown.items(), key=lambda item: item[1])
        when = " while loading" if self.memory.peak_phase == "load" else ""
        needs, usable = gib(self.needed), gib(self.usable)
        if needs == usable:  # more, by less than what a tenth shows
            needs, usable = f"{self.needed / GIB:.3f}", f"{self.usable / GIB:.3f}"
        if self.needed > self.peak:
            when = f" with the allocator's cache ({gib(self.peak)} without){when}"
        share = f"{self.usable / self.capacity:.0%}".replace("%", " %")
        return (
            f"needs {needs} GiB{when}, {usable} usable ({share} of {gib(self.capacity)} GiB), most of it {term} "
            f"{gib(size)}"
            + (f", loss {gib(self.breakdown['loss'])}" if term != "loss" and self.breakdown["loss"] else "")
        )

    @property
    def unmeasured(self) -> list[str]:
        """Features for which no prediction has been compared with real training, on any device."""
        recipe, validated = self.resolved.recipe, self.resolved.traits.validated
        if validated is None:
            return [recipe.strategy.name]
        offload, task = recipe.strategy.offload, recipe.model.task
        used = {
            "offload": f"offload {offload}" if offload != "none" else "",
            "fp16": "fp16" if self.resolved.precision.compute == "float16" else "",
            WHOLE: f"{whole.option.name} blocks" if (whole := asked_whole(recipe)) is not None else "",
            task: "" if task_of(task).validated else task,
        }
        found = [shown for what, shown in used.items() if shown and what not in validated]
        found += [LIGER_UNKNOWN] if self.resolved.loss_kernel == "liger" else []
        return found + [option.unmeasured for option, _ in asked_options(recipe) if option.unmeasured]

    def as_json(self) -> dict[str, Any]:
        """The contract's fields, and more."""
        recipe = self.resolved.recipe
        return {
            "strategy": recipe.strategy.name,
            "offload": recipe.strategy.offload,
            "sync": recipe.strategy.sync,
            "reshard_after_forward": recipe.strategy.reshard_after_forward,
            **dict.fromkeys(whole_keys(), self.resolved.whole_blocks or None),
            "activation_checkpointing": recipe.activation_checkpointing,
            "micro_size": self.resolved.micro_size,
            "accumulation": self.resolved.accumulation,
            "loss": recipe.loss,
            **host_settings(recipe),
            "tokens_per_micro_batch": self.resolved.micro_size * recipe.data.max_length // self.resolved.mesh.context,
            "fits": self.fits,
            "peak_bytes": self.peak,
            "needed_bytes": self.needed,
            "interval": None if self.interval is None else list(self.interval),
            "loop": self.loop,
            "tokens_per_second": self.tokens_per_second,
            "host_bytes": self.host,
            "host_load_bytes": self.host_loading,
            "disk": self.storage.to_json(),
            "mesh": {"replicate": self.resolved.mesh.replicate, "shard": self.resolved.mesh.shard}
            | self.resolved.mesh.axes,
            "stages": [
                {"first_block": blocks[0], "last_block": blocks[-1], "peak_bytes": peak} for blocks, peak in self.stages
            ],
            "sent_bytes": {axis: round(size) for axis, size in self.sent.items()},
            "breakdown": self.breakdown,
            "phases": {name: size + self.reserve for name, size in self.memory.phases.items()},
            "peak_phase": self.memory.peak_phase,
            "seconds_per_step": None if self.seconds is None else self.seconds.total,
            "seconds_range": None if self.seconds is None else [self.seconds.low, self.seconds.high],
            "seconds": None if self.seconds is None else dataclasses.asdict(self.seconds),
            "reason": self.reason,
            "unmeasured": self.unmeasured,
            "asked": self.asked,
        }


def gib(size: int) -> str:
    """Bytes in GiB, to a tenth."""
    return f"{size / GIB:.1f}"
