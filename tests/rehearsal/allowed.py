"""The reports that may be made, each with its reason. Everything else that a rehearsal reports fails its cell.

Nothing of the kinds ``cpu-in-nccl``, ``two-devices`` and ``no-kernel`` is here: those do not run on a GPU at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

COPY, READ = "blocking-copy", "host-read"  # as in watch.py, which needs torch
OUTSIDE = ("start", "gradients", "save", "load")


@dataclass(frozen=True)
class Allowed:
    """``file`` and ``function`` may be patterns. ``most``: times in a cell, from one line."""

    kinds: tuple[str, ...]
    stages: tuple[str, ...]
    file: str
    function: str
    why: str
    most: int | None = None

    def covers(self, report: Any, times: int) -> bool:
        return (
            (self.most is None or times <= self.most)
            and report.kind in self.kinds
            and report.stage in self.stages
            and fnmatch(report.file, self.file)
            and fnmatch(report.function, self.function)
        )


_STEPS = 3
"""Of a cell."""
_STEP = (
    ("toolkit/training/stop.py", "after", "whether the ranks stop: waits for the begin of the step just queued"),
    ("toolkit/strategies/engines/base.py", "step", "fp16: the next learning rate depends on whether this step counts; "
                                                   "run.on_bad_loss: skip: whether the norm is finite"),
    ("toolkit/training/loop.py", "_mean", "run.on_bad_loss: skip: the loss, before the step"),
)  # fmt: skip
"""The toolkit's own host reads within a step, once in each: the table of docs/speed.md."""

ALLOWED = [
    *(Allowed((READ,), ("step",), file, function, why, _STEPS) for file, function, why in _STEP),
    Allowed(
        (READ,), ("step",), "transformers/masking_utils.py", "*", "each forward: whether a row is padded, or packed"
    ),
    Allowed((READ, COPY), ("evaluate",), "transformers/masking_utils.py", "*", "as in a step"),
    Allowed((READ,), ("evaluate",), "toolkit/training/loop.py", "evaluate", "the loss, once at the end"),
    Allowed((READ,), ("after",), "toolkit/training/metrics.py", "*", "the numbers of the steps that are logged"),
    Allowed((READ, COPY), OUTSIDE, "toolkit/strategies/engines/*", "*", "whole tensors come from and go to the host"),
    Allowed((READ, COPY), ("start",), "toolkit/options/nf4/evidence.py", "base_claims", "a base's bytes, once", 1),
    Allowed((READ, COPY), OUTSIDE, "toolkit/training/agreement.py", "first_problem", "whether all ranks could write"),
    Allowed((COPY,), ("start",), "toolkit/optim/adamw8bit.py", "_tensors", "two tables of two tensors, once", 4),
    Allowed(
        (COPY,), ("load",), "toolkit/optim/adamw.py", "step_count", "a loaded count goes where fused AdamW keeps it"
    ),
    Allowed((READ, COPY), OUTSIDE, "deepspeed/*", "*", "DeepSpeed's part of whole tensors, and of starting"),
    Allowed(
        (READ,),
        ("step", "evaluate"),
        "torch/distributed/fsdp/*",
        "*",
        "FSDP1 lets the host be two gathers ahead and no more, to bound memory (limit_all_gathers)",
    ),
    Allowed(
        (COPY,),
        ("step",),
        "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
        "foreach_reduce",
        "fsdp2, offload: all: a gradient that is added to an earlier micro-batch's on the host waits for its copy",
    ),
    Allowed(
        (COPY,),
        ("step",),
        "toolkit/strategies/engines/fsdp1.py",
        "clip",
        "torch's norm of no parameters is a zero of the host (FSDP1's clip_grad_norm_)",
    ),
    Allowed(
        (COPY,),
        ("step",),
        "bitsandbytes/functional.py",
        "to",
        "QLoRA: a layer's statistics follow its weight to the device in its first forward, once",
    ),
    Allowed((COPY,), ("start",), "transformers/modeling_utils.py", "to", "the model goes to its device"),
    Allowed((COPY,), ("start",), "accelerate/*", "*", "the model goes to its device"),
    Allowed((READ, COPY), ("step", "evaluate"), "deepspeed/*", "*", "DeepSpeed decides on the host: norms, overflows"),
]


def unexpected(reports: Mapping[Any, int]) -> list[Any]:
    """The reports that no reason covers, given with how often each was made."""
    return [one for one, times in reports.items() if not any(allowed.covers(one, times) for allowed in ALLOWED)]
