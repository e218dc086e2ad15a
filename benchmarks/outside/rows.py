"""Every row of the collection: predicted, or left out with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.outside import fms, fsdp_qlora, litgpt, peft, torchtune
from toolkit.planning.allocator import Parts

GIB = 2**30
SOURCES: dict[str, Any] = {module.SOURCE: module for module in (fms, fsdp_qlora, litgpt, peft, torchtune)}
"""What predicts the rows of a source: ``why_left_out`` and ``predicted``, of a row, and ``KIND``, the field that says
what was measured."""
NO_LOOP = {
    "pytorch/torchtitan": "reserved bytes, products chosen by operator, compiled, float8 or context parallel",
    "pytorch/ao": "reserved bytes, products chosen by operator, compiled, most in float8",
    "mosaicml/llm-foundry": "throughput alone",
}
"""Why no row of a source is predicted yet."""


@dataclass(frozen=True)
class Row:
    """One measurement (GiB, of its source's ``KIND``; 0: it ran out of memory), and what is predicted for it in bytes;
    ``left_out``: why nothing is. ``process``: the peak that nvidia-smi shows, GiB."""

    id: str
    what: str
    measured: float
    predicted: int = 0
    left_out: str = ""
    source: str = fms.SOURCE
    exact: bool = True
    process: float = 0.0
    device: float = 0.0
    """GiB that torch sees of the row's device; 0: not known."""
    parts: Parts | None = None
    """Of the prediction, where the process or reserved bytes were measured."""
    reserved: bool = False
    """Whether reserved bytes were measured: ``predicted`` are allocated ones all the same."""
    foreign: bool = False
    """Whether its loss is a kernel that no plan has: fms_acceleration's, where Liger's has not taken its place."""

    @property
    def error(self) -> float:
        return self.predicted / GIB / self.measured - 1


_DEVICES = {"A100 80GB": 79.15, "A100-SXM4-40GB": 39.4, "A10G 24GB": 22.0,
            "RTX 3090 24GB": 23.4, "RTX 4090 24GB": 23.5}  # fmt: skip
"""GiB that torch sees, of toolkit/planning/hardware.py and the sources' own messages."""


def device_of(row: dict[str, Any]) -> float:
    """GiB that torch sees of the row's device; 0 where the row names none of these."""
    return next((size for name, size in _DEVICES.items() if name in str(row.get("gpu"))), 0.0)


def described(row: dict[str, Any]) -> str:
    """What a row ran, in a line."""
    size = f"{row.get('micro_batch', '?')} x {row.get('seq_len', '?')}"
    autocast = (row.get("precision") or {}).get("autocast")
    kernels = str(row.get("kernel_family", "")).replace("accelerated-peft-", "").replace("foak-fast-kernels", "foak")
    words = [row["model"].split("/")[-1], row["task"], "bf16" if autocast else "pure bf16", size]
    words += [f"{row['world']} GPU", *([kernels] if kernels not in ("", "hf") else [])]
    return ", ".join(words)


def why_left_out(row: dict[str, Any]) -> str:
    """Why a row is not predicted; empty if it is."""
    if row["source_repo"] not in SOURCES:
        return NO_LOOP.get(row["source_repo"], "no complete configuration")
    source = SOURCES[row["source_repo"]]
    if source.KIND not in row and row["outcome"] != "oom":
        return "how much was allocated is not known"
    reason: str = source.why_left_out(row)
    return reason


def predicted_bytes(row: dict[str, Any]) -> tuple[int, Parts | None]:
    """What is predicted for a row that is not left out, and its parts where its source has those of a peak."""
    source = SOURCES[row["source_repo"]]
    if hasattr(source, "parts"):
        parts: Parts = source.parts(row)
        return int(parts.peak), parts
    return source.predicted(row), None


def held_against(
    rows: list[dict[str, Any]], say: Callable[[str], None] = lambda text: None, predicted: Any = predicted_bytes
) -> list[Row]:
    """Every exact row, and those that ran out of memory."""
    found = []
    for row in rows:
        if row["quality"] != "exact" and row["outcome"] != "oom":
            continue
        reason = why_left_out(row)
        kind = getattr(SOURCES.get(row["source_repo"]), "KIND", "peak_allocated_gib")
        measured = 0.0 if row["outcome"] == "oom" else row.get(kind, 0.0)
        size, parts = (0, None) if reason else predicted(row)
        made = Row(row["id"], described(row), measured, size, reason, row["source_repo"], row["quality"] == "exact",
                   row.get("peak_process_gib", 0.0), device_of(row), parts, kind == "peak_reserved_gib",
                   (family := row.get("kernel_family", "hf")) != "hf" and "liger" not in family)  # fmt: skip
        say(f"{made.id} {made.what}")
        found.append(made)
    return found
