"""Measures cells and predicts them, and keeps the table of docs/measurements/plan.md.

``PYTHONPATH=tests python -m plan.truth`` measures every cell that is not in docs/measurements/plan-memory.json yet,
predicts all of them again and writes both; ``--again`` measures all. With words, cells with one of them in their name
alone are measured and predicted.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plan.cells import (
    AVERAGED,
    BUCKET,
    BUILT,
    DIVIDED,
    EXPERTS,
    EXPERTS_HELD_OUT,
    HELD_OUT,
    HYBRID,
    LAYERED,
    MEDIA,
    STAGED,
    STAGED_HELD_OUT,
    SYNCED,
    UNSHARDED,
    UNSHARDED_HELD_OUT,
    Cell,
)

GROUPS = {
    "built": BUILT,
    "hybrid": HYBRID,
    "one sum a step": SYNCED,
    "rows in parts": DIVIDED,
    "layers in parts": LAYERED,
    "experts in parts": EXPERTS,
    "experts in parts, held out": EXPERTS_HELD_OUT,
    "frozen weights of some blocks whole": UNSHARDED,
    "frozen weights of some blocks whole, held out": UNSHARDED_HELD_OUT,
    "blocks in stages": STAGED,
    "blocks in stages, held out": STAGED_HELD_OUT,
    "images and sound": MEDIA,
    "evaluated at an average": AVERAGED,
    "held out": HELD_OUT,
}
ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "measurements" / "plan-memory.json"
PAGE = ROOT / "docs" / "measurements" / "plan.md"
_BEGIN, _END = "<!-- cells: begin -->", "<!-- cells: end -->"


def measured(recipe: dict[str, Any], length: int) -> int:
    """Runs on a rank: the peak of the second step, in bytes. Of divided experts with routers that choose each as often,
    which is what a plan promises."""
    warnings.filterwarnings("ignore")
    from toolkit.planning.measure import measure

    mesh = recipe["strategy"].get("mesh") or {}
    with balanced() if mesh.get("expert", 1) > 1 else contextlib.nullcontext():
        return measure(resolved_from(recipe), length).peak


@contextlib.contextmanager
def balanced() -> Iterator[None]:
    """Inside, the tokens of a rank have the experts one after another."""
    import torch
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    kinds: list[Any] = [MixtralTopKRouter, Qwen3MoeTopKRouter]
    rights = [kind.forward for kind in kinds]

    def of(right: Any) -> Any:
        def forward(self: Any, hidden: Any) -> Any:
            logits, scores, chosen = right(self, hidden)
            in_turn = torch.arange(chosen.numel()) % logits.shape[-1]
            return logits, scores, in_turn.view(chosen.shape)

        return forward

    for kind, right in zip(kinds, rights, strict=True):
        kind.forward = of(right)
    try:
        yield
    finally:
        for kind, right in zip(kinds, rights, strict=True):
            kind.forward = right


def truth(group: Any, cell: Cell) -> int:
    """The peak of the rank that has the higher one. Under FSDP2 the lowest of three runs: gloo's thread lets go of what
    it has sent when it gets to it, which adds up to 4 % of a small model, and never takes anything away."""
    runs = 3 if cell.strategy == "fsdp2" else 1
    return min(max(group.run(measured, cell.recipe(), cell.length, timeout=600)) for _ in range(runs))


def predicted(cell: Cell) -> int:
    """The peak; on a CPU what is offloaded stays in the same memory, and is measured with it."""
    from toolkit.planning.predict import Planner
    from toolkit.strategies import strategy_of

    resolved = resolved_from(cell.recipe())
    planner = Planner.of(resolved, cell.length)
    host = strategy_of(resolved).memory_model()(planner.skeleton.holdings, resolved).host
    return planner.memory(resolved).peak + sum(host.values())


def resolved_from(recipe: dict[str, Any]) -> Any:
    import toolkit.strategies.zero as zero
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve

    original, zero._BUCKET = zero._BUCKET, BUCKET
    try:
        return resolve(Recipe.model_validate(recipe))
    finally:
        zero._BUCKET = original


def kept() -> dict[str, Any]:
    """What was measured and predicted: versions, and cells by name."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"versions": {}, "cells": {}}


def main(*words: str) -> None:
    from toolkit.launch.group import WorkerGroup
    from toolkit.results import versions

    warnings.filterwarnings("ignore")
    known = kept()["cells"] if kept()["versions"] == versions() else {}
    wanted = [w for w in words if not w.startswith("--")]
    cells = [(title, cell) for title, group in GROUPS.items() for cell in group]
    with WorkerGroup(1) as one, WorkerGroup(2) as two, WorkerGroup(4) as four:
        groups = {1: one, 2: two, 4: four}
        for title, cell in cells:
            chosen = not wanted or any(word in cell.name for word in wanted)
            before = known.get(cell.name, {})
            real = before.get("measured")
            if chosen and (real is None or "--again" in words):
                real = truth(groups[cell.processes], cell)
            if real is None or not chosen:
                continue
            known[cell.name] = {"kind": title, "measured": real, "predicted": predicted(cell)}
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            KEPT.write_text(json.dumps({"versions": versions(), "cells": known}, indent=1) + "\n", encoding="utf-8")
            print(_row(cell.name, known[cell.name]), flush=True)
    names = [cell.name for _, cell in cells]
    write_page({name: known[name] for name in names if name in known})


def error(row: dict[str, Any]) -> float:
    return row["predicted"] / row["measured"] - 1


def _row(name: str, row: dict[str, Any]) -> str:
    return (
        f"| {row['kind']} | {name} | {row['predicted'] / 1e6:.2f} | {row['measured'] / 1e6:.2f} | {error(row):+.2%} |"
    )


def write_page(cells: dict[str, Any]) -> None:
    """Put the table between its marks in docs/measurements/plan.md."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    lines = ["| cells | number | median error | worst |", "| --- | --- | --- | --- |"]
    for kind in GROUPS:
        errors = [error(row) for row in cells.values() if row["kind"] == kind]
        if errors:
            median = statistics.median(abs(e) for e in errors)
            lines.append(f"| {kind} | {len(errors)} | {median:.2%} | {max(errors, key=abs):+.2%} |")
    lines += ["", "| cells | cell | predicted | measured | error |", "| --- | --- | --- | --- | --- |"]
    lines += [_row(name, row) for name, row in cells.items()]
    PAGE.write_text(f"{before}{_BEGIN}\n" + "\n".join(lines) + f"\n{_END}{rest.split(_END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
