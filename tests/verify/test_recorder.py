"""Any loop can be recorded and judged."""

from __future__ import annotations

from pathlib import Path

import loops
import pytest

from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.verify.recorded import verify_trace


def test_a_right_accelerate_loop(group: WorkerGroup, tmp_path: Path) -> None:
    group.run(loops.accelerate_loop, str(tmp_path), True)
    outcome = verify_trace(tmp_path)
    assert outcome.verdict == "equivalent", outcome.difference
    stages = {stage.name: stage for stage in outcome.passes[0].stages}
    assert (stages["gradient"].detection_limit or 1) < 1e-5
    assert "clipped" in stages["clip"].summary
    assert len(stages["update"].measures) == 3 * len(outcome.passes[0].ranks[0].trainable)


def test_the_usual_accelerate_loop_weighs_micro_batches_wrongly(group: WorkerGroup, tmp_path: Path) -> None:
    group.run(loops.accelerate_loop, str(tmp_path), False)
    outcome = verify_trace(tmp_path)
    assert outcome.verdict == "different"
    assert outcome.difference is not None
    assert outcome.difference[1].name == "gradient"
    assert outcome.diagnosis is not None
    assert "averaged per micro-batch" in outcome.diagnosis.cause


def test_transformers_trainer(tmp_path: Path) -> None:
    loops.trainer_loop(tmp_path)
    outcome = verify_trace(tmp_path)
    assert outcome.verdict == "equivalent", outcome.difference
    assert len(outcome.passes[0].ranks[0].run.steps) == 3


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no trace"):
        verify_trace(tmp_path)
