"""The best checkpoint by evaluation is kept beside the newest; an export says what it is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from jobs import resolved_from
from signalled import TOOLKIT
from tiny import recipe_dict
from toolkit.checkpoint_export.command import Request, export_command
from toolkit.training import checkpoint, finding
from toolkit.training.loop import Progress
from toolkit.training.session import open_session


def names(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in finding.all_checkpoints(folder)]


@pytest.fixture
def run(tiny_root: Path, tmp_path: Path) -> Path:
    """Six checkpoints saved with their held-out losses, of which the newest two and the best stay."""
    recipe = recipe_dict(
        tiny_root, strategy={"name": "single"}, machine={"processes": 1}, adapter={"r": 2}, run={"keep": 2}
    )
    session = open_session(resolved_from(recipe))
    run = tmp_path / "my-run"
    kept = []
    for step, loss in enumerate([3.0, 2.0, 2.5, None, 2.2, 9.0], start=1):
        checkpoint.save(session, run / "checkpoints", Progress(step, step), loss)
        kept.append(names(run / "checkpoints"))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    return run


def test_the_best_is_kept_beside_the_newest(run: Path, tmp_path: Path) -> None:
    assert finding.best(run / "checkpoints") == run / "checkpoints/step-00000002"
    (run / "metrics.jsonl").write_text(json.dumps({"step": 2, "loss": 1.5}) + "\n")
    (run / "verify.json").write_text(json.dumps({"verdict": "equivalent"}))
    export_command(Request(str(run), str(tmp_path / "out"), best=True))
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n")
    for said in (
        "# my-run",
        "| optimizer steps | 2 |",
        "| held-out loss | 2.0000 |",
        "| loss, last step | 1.5000 |",
        "| data | train.jsonl (text, truncated to 48 tokens) |",
        "| verified | equivalent to a plain PyTorch loop |",
        "| trained | lora, r 2, alpha 32 |",
        "  train: train.jsonl\n",
    ):
        assert said in card, said


@pytest.mark.usefixtures("launches")
def test_a_push_without_a_network_fails_cleanly(run: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*TOOLKIT, "export", str(run), "-o", "out", "--push", "me/model"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("--push me/model: ")
    assert done.stderr.endswith("out is complete; to retry the upload: hf upload me/model out\n")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out/adapter_config.json").exists()
