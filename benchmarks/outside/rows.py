"""Every row of the collection: predicted, or left out with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.outside import fms

GIB = 2**30
NO_LOOP = {
    "Lightning-AI/litgpt": "litgpt's own models and chunked loss: no loop here",
    "pytorch/torchtune": "active bytes, and torchtune's own models: no loop here",
    "pytorch/torchtitan": "reserved bytes, and torchtitan's own models: no loop here",
    "pytorch/ao": "reserved bytes, and torchtitan's own models: no loop here",
    "AnswerDotAI/fsdp_qlora": "reserved bytes, and a loop of its own: no loop here",
    "huggingface/peft": "padded to the longest of a batch, which is not recorded",
    "mosaicml/llm-foundry": "throughput alone",
}
"""Why no row of a source is predicted yet."""


@dataclass(frozen=True)
class Row:
    """One measurement (GiB, ``max_memory_allocated``; 0: it ran out of memory), and what is predicted for it in bytes;
    ``left_out``: why nothing is. ``process``: the peak that nvidia-smi shows, GiB."""

    id: str
    what: str
    measured: float
    predicted: int = 0
    left_out: str = ""
    source: str = fms.SOURCE
    exact: bool = True
    process: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted / GIB / self.measured - 1


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
    if row["source_repo"] != fms.SOURCE:
        return NO_LOOP.get(row["source_repo"], "no complete configuration")
    if "peak_allocated_gib" not in row and row["outcome"] != "oom":
        return "how much was allocated is not known"
    return fms.why_left_out(row)


def held_against(
    rows: list[dict[str, Any]], told: Callable[[str], None] = lambda text: None, predicted: Any = fms.predicted
) -> list[Row]:
    """Every exact row, and those that ran out of memory."""
    found = []
    for row in rows:
        if row["quality"] != "exact" and row["outcome"] != "oom":
            continue
        reason = why_left_out(row)
        measured = 0.0 if row["outcome"] == "oom" else row.get("peak_allocated_gib", 0.0)
        made = Row(row["id"], described(row), measured, 0 if reason else predicted(row), reason, row["source_repo"],
                   row["quality"] == "exact", row.get("peak_process_gib", 0.0))  # fmt: skip
        told(f"{made.id} {made.what}")
        found.append(made)
    return found
