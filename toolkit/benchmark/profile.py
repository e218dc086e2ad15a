"""A trace of some steps for Perfetto, and a table of their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from toolkit.training.session import Session

_SHOWN = 15
_COMMUNICATION = ("nccl", "gloo", "c10d::", "allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter")

Interval = tuple[float, float]


def profiled(run: Callable[[], None], session: Session, target: Path) -> dict[str, Any]:
    """Run two steps under torch's profiler; rank 0 writes ``target`` (open it in https://ui.perfetto.dev).

    ``operations``: what takes most time of its own, on the device where there is one. ``device``: seconds of the device
    in arithmetic, in communication that arithmetic hides and does not hide, and idle; None without a GPU.
    """
    cuda = session.engine.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as seen:
        run()
    if session.accelerator.is_main_process:
        target.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(target))
    clock = "self_device_time_total" if cuda else "self_cpu_time_total"
    averages = [event for event in seen.key_averages() if not event.key.startswith("toolkit ")]
    averages.sort(key=lambda event: getattr(event, clock), reverse=True)
    whole = sum(getattr(event, clock) for event in averages) or 1.0
    operations = [
        {"name": event.key[:100], "seconds": getattr(event, clock) / 1e6, "share": getattr(event, clock) / whole,
         "calls": event.count, "talks": is_communication(event.key)}
        for event in averages[:_SHOWN]
        if getattr(event, clock) > 0
    ]  # fmt: skip
    return {"steps": 2, "trace": str(target), "operations": operations, "device": _device(seen) if cuda else None}


def _device(seen: Any) -> dict[str, float]:
    from torch.autograd import DeviceType

    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.name.lower(), (event.time_range.start / 1e6, event.time_range.end / 1e6)) for event in kernels]
    return split_time(spans)


def split_time(spans: Iterable[tuple[str, Interval]]) -> dict[str, float]:
    """Seconds by what a device did: kernels run beside each other, and communication, overlapped is hidden."""
    spans = list(spans)
    talk = merged(span for name, span in spans if is_communication(name))
    work = merged(span for name, span in spans if not is_communication(name))
    both = length(talk) + length(work) - length(merged([*talk, *work]))
    busy = merged([*talk, *work])
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    return {
        "arithmetic": length(work),
        "communication_hidden": both,
        "communication_exposed": length(talk) - both,
        "idle": whole - length(busy),
    }


def is_communication(name: str) -> bool:
    """Whether a kernel or an operation of this name moves data between processes."""
    return any(word in name.lower() for word in _COMMUNICATION)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of ``intervals``, in order, without overlaps."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds that ``intervals``, which do not overlap, take together."""
    return sum(end - start for start, end in intervals)
