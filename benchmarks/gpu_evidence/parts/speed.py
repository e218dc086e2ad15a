"""Tokens per second of the training loop, and where a step's time went; options in turns, as `toolkit bench` does."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_evidence.cells import Cell, Part, Setting, Skipped
from benchmarks.gpu_evidence.shapes import LORA, Values, recipe, resolved_here
from benchmarks.gpu_evidence.train import WARM, own_linear, train_here
from toolkit.benchmark.cells import Cell as BenchCell
from toolkit.benchmark.cells import Plan, as_json, rate_of, run_cells

STEPS = WARM + 5
PACKED: Values = {"max_length": 2048, "packing": True}


def cells(setting: Setting) -> list[Cell]:
    return [
        Cell("bench", partial(_bench, OPTIONS), usual=150),
        Cell("bench-compile", partial(_bench, COMPILED), usual=150),
        *(_peers_cell(shape) for shape in PEERS),
        *(_cell("1b", way, "single", kind, 4) for way in ("lora", "full") for kind in ("none", "full")),
        *(_cell("1b", "full", strategy, "full", 4) for strategy in ("ddp", "zero2", "zero3", "fsdp2")),
        _cell("1b", "full", "single", "selective", 4),
        _cell("8b", "lora", "single", "full", 2),
        _cell("8b", "lora", "fsdp2", "full", 2),
        _cell("8b", "lora", "single", "full", 2, compile=True),
        _cell("8b", "lora", "single", "full", 2, compile=True, fp8=True),
    ]


OPTIONS: dict[str, Values] = {
    "plain": {},
    "fused": {"loss": "fused"},
    "packing": {"data": PACKED},
    "activation-offload": {"activation_offload": True},
    "adamw8bit": {"optimizer": {"name": "adamw8bit"}},
    "qlora": {"adapter": LORA | {"method": "qlora"}},
    "fp8": {"fp8": True},
}
"""Every option that makes a run faster or smaller, over LoRA with full checkpointing; those that compile are apart."""
COMPILED: dict[str, Values] = {
    "plain": {},
    "compile": {"compile": True},
    "compile-fused": {"compile": True, "loss": "fused"},
    "compile-fp8": {"compile": True, "fp8": True},
}


PEERS = {"small": (5, 90, ""), "1b": (3, 200, ""), "1b-full-rows": (3, 200, ""),
         "8b-full-rows": (1, 240, "bare,trainer,sft,toolkit")}  # fmt: skip
"""Turns, usual seconds and (where not all) the peers of each shape: each creates the model again in every turn."""


def _peers_cell(shape: str) -> Cell:
    return Cell(f"peers-{shape}", partial(_peers, shape), usual=PEERS[shape][1], limit=480)


def _peers(shape: str, setting: Setting) -> dict[str, Any]:
    """`benchmarks.peers` in a process of its own: Trainers take a launcher's environment for a job of many processes.
    Those that are not installed are named with the reason."""
    setting.workers.close()  # what a worker holds of the device would be missing there
    plain = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    steps = ["--warmup", "1", "--steps", "1", "--tiny"] if setting.tiny else ["--warmup", "2", "--steps", "8"]
    turns, _, only = PEERS[shape]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peers.json"
        command = [sys.executable, "-m", "benchmarks.peers", "--shape", shape, "--json", str(file), *steps]
        command += ["--only", only, "--turns", "1" if setting.tiny else str(turns)]
        done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=setting.seconds, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command[1:])}: {' '.join(done.stderr.split())[-600:]}")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


_LAUNCHED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def _bench(options: dict[str, Values], setting: Setting) -> dict[str, Any]:
    """The options of one recipe in turns, as `toolkit bench` measures them."""
    base: Values = {"adapter": LORA, "activation_checkpointing": "full", "data": {"max_length": 2048},
                    "batch": {"micro_size": 2, "accumulation": 2}}  # fmt: skip
    cells: list[BenchCell] = []
    refused: dict[str, str] = {}
    for label, sections in options.items():
        try:
            resolved = resolved_here(setting, recipe(setting, "1b", "single", **(base | sections)))
        except Skipped as reason:
            refused[label] = str(reason)
            continue
        cells.append(BenchCell(label, resolved, asked=not cells))
    plan = Plan(turns=2, steps=3, warmup=1, full=True, memory=False)
    with own_linear():
        run_cells(cells, plan, None, lambda line: None, {1: setting.workers.one})
    rate = rate_of(setting.device.type, None)
    measured = [as_json(cell, rate) for cell in cells]
    return {"ok": all(cell["fits"] for cell in measured), "cells": measured, "refused": refused,
            "data": "full rows of random tokens"}  # fmt: skip


def _cell(model: str, way: str, strategy: str, kind: str, micro: int, **options: bool) -> Cell:
    name = "-".join([f"loop-{model}-{way}-{strategy}-{kind}-{micro}x2048", *options])
    sections: Values = {
        "adapter": LORA if way == "lora" else None,
        "activation_checkpointing": kind,
        "data": {"max_length": 2048},
        "batch": {"micro_size": micro, "accumulation": 2},
        "strategy": {"name": strategy},
        **options,
    }
    return Cell(name, partial(_measure, model, strategy, sections), usual=80 if model == "8b" else 35)


def _measure(model: str, strategy: str, sections: Values, setting: Setting) -> dict[str, Any]:
    resolved = resolved_here(setting, recipe(setting, model, strategy, **sections))
    return {"recipe_sha256": resolved.sha256} | train_here(setting, resolved, STEPS, profile=True)


PART = Part("speed", "tokens per second of the training loop, and the kernels of a step", cells)
