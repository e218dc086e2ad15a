"""Checks a built site's search: `python -m docsite.check_search build/site`. Exit 1 names every question whose first
hit is another page.

It asks the worker that the site has in the reader's browser, over the site's own index. Needs node; says so without.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

QUESTIONS = {
    "OOM": "troubleshooting/",
    "out of memory": "troubleshooting/#out-of-memory-oom",
    "CUDA out of memory": "troubleshooting/#out-of-memory-oom",
    "LoRA ZeRO-3": "training/#lora-under-zero-3-zero3-and-fsdp",
    "lora zero3": "training/#lora-under-zero-3-zero3-and-fsdp",
    "fewer GPUs": "recovery/#resume-on-fewer-gpus-on-more-or-under-another-strategy",
    "resume on fewer GPUs": "recovery/#resume-on-fewer-gpus-on-more-or-under-another-strategy",
    "resume": "recovery/",
    "NaN": "troubleshooting/#loss-is-nan",
    "hang": "troubleshooting/#hangs-and-nccl-time-outs",
    "NCCL": "troubleshooting/#hangs-and-nccl-time-outs",
    "slow": "troubleshooting/#slow",
}
"""What people type, and the place that answers it."""


def first_hits(site: Path) -> dict[str, str | None]:
    """The first hit of each question; None where there is none. Raises FileNotFoundError without node."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    command = ["node", str(Path(__file__).with_name("search.js")), str(worker), str(site / "search/search_index.json")]
    done = subprocess.run([*command, *QUESTIONS], capture_output=True, text=True, check=True, timeout=120)
    return {
        question: hits[0] if hits else None for question, hits in zip(QUESTIONS, json.loads(done.stdout), strict=True)
    }


def main(site: str) -> int:
    """Print the result; the exit status."""
    if shutil.which("node") is None:
        print("the search was not checked: node is not installed")
        return 0
    found = first_hits(Path(site).resolve())
    wrong = [f"{asked}: {hit}, not {QUESTIONS[asked]}" for asked, hit in found.items() if hit != QUESTIONS[asked]]
    print("\n".join(wrong) if wrong else f"{len(found)} questions find their answer first")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
