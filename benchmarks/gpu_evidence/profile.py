"""Where the time of a step went, by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

_SHOWN = 15


def top_kernels(run: Callable[[], None], device: str) -> list[dict[str, Any]]:
    """What takes most of the device's own time while ``run`` runs: name, milliseconds, calls."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as seen:
        run()
    clock = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda event: getattr(event, clock), reverse=True)
    return [
        {"name": event.key[:120], "ms": round(getattr(event, clock) / 1000, 3), "calls": event.count}
        for event in events[:_SHOWN]
        if getattr(event, clock) > 0
    ]
