"""``python -m benchmarks.floor``: its counts, on the quick sizes. Nothing here depends on the clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.floor import __main__ as command
from benchmarks.floor import operators, wire
from benchmarks.floor.loops import Work, llama
from benchmarks.floor.table import Row, page, timed
from toolkit.threads import torch_threads
from toolkit.training import loop

WORK = Work(llama(2, 32), rows=2, length=64)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Counts do not depend on it, and threads wait for each other on a busy machine."""
    with torch_threads(1):
        yield


def test_a_step_has_the_bare_loops_operators_and_bytes_and_asks_the_device_nothing() -> None:
    rows = {row.what: row for row in operators.measure(quick=True)}
    for kind in ("every weight", "LoRA"):
        for what in ("operators", "bytes allocated", "bytes copied"):
            assert rows[f"{what}, {kind}"].ratio <= operators.GOAL, rows[f"{what}, {kind}"]
    [own] = [row for name, row in rows.items() if name.startswith("toolkit,")]
    assert own.ratio == 0


def test_a_copy_too_many_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right, bare = loop.loss_sum, operators.counted("bare", WORK)

    def copying(model: Any, config: Any, tensors: Any, *args: Any) -> torch.Tensor:
        answer = right(model, config, tensors, *args)
        torch.zeros(*tensors["input_ids"].shape, config.vocab_size).clone()  # as large as the logits
        return answer

    monkeypatch.setattr(loop, "loss_sum", copying)
    found = operators.counted("toolkit", WORK)
    assert found.copied > operators.GOAL * bare.copied
    assert found.allocated > operators.GOAL * bare.allocated


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_two_processes_send_what_plan_counts(group: Any) -> None:
    """Weights kept gathered and gradients summed once: the least. Freed after each use: more, as planned."""
    for case in (*wire.QUICK, *(name for name in wire.cases(True, wire.BLOCKS) if "unsharded" in name)):
        sent, planned, least = group.run(wire.sent_job, wire.work_of(case, True), timeout=200)[0]
        # The last unit of a forward is still gathered when its backward begins; plan counts it again.
        assert 0.9 * planned <= sent <= 1.01 * planned, case
        if case == "fsdp2":
            assert sent > 2 * least
        elif "unsharded" not in case:
            assert sent <= wire.GOAL * least, case


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("operators", "operators, LoRA", 1.001, "1,001 to 1,000", 1.01)]
    monkeypatch.setattr(operators, "measure", lambda quick: rows)
    monkeypatch.setattr(sys, "argv", ["floor", "--only", "operators", "--quick", "--out", str(tmp_path)])
    command.main()
    text = (tmp_path / "floor.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert "| operators, LoRA | 1,001 to 1,000 | 1.001 |  | ≤ 1.01 | yes |" in text
    assert json.loads((tmp_path / "floor.json").read_text())["rows"][0]["met"] is True


def test_a_part_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["floor", "--only", "wires"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no such part: wires" in capsys.readouterr().err


def test_a_timed_row_has_its_spread_and_a_goal_in_its_direction() -> None:
    row = timed("sharded", "fsdp2, LoRA", [0.9, 0.96, 0.97], goal=0.95, least=True)
    assert (row.ratio, row.low, row.high, row.met) == (0.96, 0.9, 0.97, True)
    assert "| 0.960 | 0.900, 0.970 | ≥ 0.95 | yes |" in page([row], {"sharded": "To ddp"}, "")
