"""``python -m benchmarks.gpu_evidence PART...``: 0 complete, 1 cells failed, 2 cannot run here, 3 unfinished."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_evidence.machine import check_folder, default_folder, this_device
from toolkit.errors import InputError

NAMES = ("smoke", "verify", "memory", "speed", "presets")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts one after another; returns the worst exit status."""
    given = _parser().parse_args(arguments)
    try:
        return _run(given)
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(given: argparse.Namespace) -> int:
    device = this_device(given.device)
    if given.out is None and not device.is_gpu:
        raise InputError("--out DIR: where to? On a CPU there is no default")
    folder = default_folder(device) if given.out is None else Path(given.out)
    check_folder(device, folder)
    # Random weights and ids are all that is trained on; a look for a model would wait for a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")

    from benchmarks.gpu_evidence.parts import PARTS
    from benchmarks.gpu_evidence.readme import write_rows
    from benchmarks.gpu_evidence.runner import UNFINISHED, Request, run_part

    request = Request(folder, device, given.tiny, given.minutes, given.only, given.retry, given.threads)
    statuses = []
    for name in NAMES if "all" in given.parts else dict.fromkeys(given.parts):
        statuses.append(run_part(PARTS[name], request))
        if name == "presets" and device.is_gpu and not given.tiny:
            write_rows(folder)
    if UNFINISHED in statuses:
        print("unfinished: run the same command again to continue")
    return max(statuses)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_evidence", description="Evidence from one GPU.")
    parser.add_argument("parts", nargs="+", choices=(*NAMES, "all"), metavar="PART", help=", ".join((*NAMES, "all")))
    parser.add_argument("--out", metavar="DIR", help="default: docs/measurements/<gpu>-<date>")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to try the parts out")
    parser.add_argument("--minutes", type=float, default=9.0, help="for each part; default 9")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU; without one nothing runs")
    parser.add_argument("--only", default="*", metavar="PATTERNS", help="cells by name, for example 'two-*,one-*'")
    parser.add_argument("--retry", action="store_true", help="run again the cells that failed")
    parser.add_argument("--threads", type=int, help="of each process; default: all cores")
    return parser


if __name__ == "__main__":
    sys.exit(main())
