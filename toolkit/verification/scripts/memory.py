"""A recorded command that found no memory: where it was, what it had taken, and what recording had taken beside it."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.verification.record.spill import Spill
    from toolkit.verification.scripts.recording import Recording
    from toolkit.verification.scripts.session import Session

_GIB = 2**30
_PHASES = (
    ("backward", "/torch/autograd/"),
    ("optimizer step", "/torch/optim/"),
    ("optimizer step", "/deepspeed/runtime/zero/"),
    ("forward", "/torch/nn/modules/"),
)
"""By a file of the traceback; the outermost decides, since a backward may compute a forward again."""


def whereabouts(session: Session, trace: TracebackType | None) -> dict[str, Any]:
    """Where a process was when its script ended by memory, for ``told``: plain values, for JSON."""
    import torch

    trained = [one for one in session.recordings if any(p.requires_grad for p in one.model.parameters())]
    first = trained[0] if trained else None
    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "model": first.kind if first else None,
        "step": first.steps_seen + 1 if first else 1,
        "first": session.after + 1,
        "last": session.after + session.steps,
        "over": not session.active and session.error is None,
        "phase": _phase(trace),
        "gpu": gpu,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else peak,
        "kept_bytes": kept_bytes(session.recordings),
    }


def kept_bytes(recordings: Sequence[Recording]) -> int:
    """Bytes of host memory that what was recorded takes; what is in its file takes none."""
    return sum(
        _bytes([one.kept, one.taken, one.calls.finished, one.trace.run, one.step, one.begun, one.sketches], one.spill)
        for one in recordings
    )


def largest(recordings: Sequence[Recording]) -> tuple[str, str]:
    """The name of the largest tensor of what is recorded, and its size in words: reading takes that a few times."""
    sizes = ((p.numel() * p.element_size(), name) for one in recordings for name, p in one.model.named_parameters())
    size, name = max(sizes, default=(0, "none"))
    return name, f"{size / _GIB:.2f} GiB"


def told(found: dict[str, Any]) -> list[str]:
    """Lines after the error's own."""
    steps = (
        f"step {found['first']}" if found["first"] == found["last"] else f"steps {found['first']} to {found['last']}"
    )
    if found["model"] is None:
        when = "before an optimizer was made"
    elif found["over"]:
        when = f"after the recorded {steps}"
    else:
        when = f"in optimizer step {found['step']} of {found['model']} (recorded: {steps})"
    phase = f", in the {found['phase']}" if found["phase"] else ""
    kind = "allocated on the GPU" if found["gpu"] else "resident"
    kept = f"{found['kept_bytes'] / _GIB:.2f} GiB"
    if found["gpu"]:
        part = f"recording had taken {kept} of host memory; on the GPU it gathers one weight at a time"
    else:
        part = f"recording had taken {kept} by then, and may have a part in it: it reads one tensor after another"
    return [
        f"the script ended by memory {when}{phase}: at most {found['peak_bytes'] / _GIB:.2f} GiB {kind}",
        part,
        "what helps: fewer or shorter rows in a micro-batch, activation checkpointing, a sharding strategy; "
        "toolkit plan MODEL --gpu NAME shows what fits",
    ]


def _phase(trace: TracebackType | None) -> str | None:
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if (phase := next((name for name, part in _PHASES if part in file), None)) is not None:
            return phase
        trace = trace.tb_next
    return None


def _bytes(value: Any, spill: Spill) -> int:
    """Of the tensors in plain containers."""
    import torch

    if isinstance(value, torch.Tensor):
        there = value.device.type == "cpu" and spill.place(value) is None
        return value.numel() * value.element_size() if there else 0
    if isinstance(value, dict):
        return sum(_bytes(one, spill) for one in value.values())
    if isinstance(value, list | tuple):
        return sum(_bytes(one, spill) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return sum(_bytes(getattr(value, one.name), spill) for one in fields(value))
    return 0
