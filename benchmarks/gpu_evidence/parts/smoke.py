"""Every strategy, precision and way to train, ten steps each, against the plain loop on the same device."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu_evidence.cells import Cell, Part, Record, Setting
from benchmarks.gpu_evidence.meter import release
from benchmarks.gpu_evidence.shapes import LORA, STRATEGIES, Values, recipe, resolved_here
from benchmarks.gpu_evidence.syncs import Waits, cuda_waits
from benchmarks.gpu_evidence.train import own_linear

PRECISIONS = ("bf16", "fp16", "fp32")
STEPS = 10
LIMITS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Largest relative deviation of any step's loss. Ten updates let rounding grow, so these are wide: they tell a run
that trains something else. Whether each step is right to the last bit of noise is the question of `verify`."""


def cells(setting: Setting) -> list[Cell]:
    return [
        Cell(f"{strategy}-{precision}-{way}", partial(_cell, strategy, precision, way == "lora"), usual=15)
        for precision in PRECISIONS
        for strategy in STRATEGIES
        for way in ("lora", "full")
    ]


def _cell(strategy: str, precision: str, lora: bool, setting: Setting) -> dict[str, Any]:
    values = recipe(
        setting,
        "small",
        strategy,
        precision=precision,
        adapter=LORA if lora else None,
        activation_checkpointing="full",
        batch={"micro_size": 2, "accumulation": 2},
        optimizer={"lr": 1.0e-3, "weight_decay": 0.1},
        run={"max_steps": STEPS, "seed": 3, "save_every": 0, "eval_every": 0},
    )
    resolved_here(setting, values)
    [found] = setting.workers.one.run(smoke_job, values, setting.device.type, timeout=setting.seconds)
    worst = max(map(_deviation, found["losses"], found["plain_losses"]))
    finite = all(math.isfinite(loss) for loss in found["losses"])
    ok = finite and worst <= LIMITS[precision] and len(found["losses"]) == STEPS
    return {"ok": ok, "worst_loss_deviation": worst if finite else None, "limit": LIMITS[precision]} | found


def _deviation(loss: float, plain: float) -> float:
    return abs(loss - plain) / abs(plain)


def smoke_job(values: Values, device: str) -> dict[str, Any]:
    """On the worker: the candidate, then the plain loop over the same windows."""
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve
    from toolkit.verification.cases.samples import ragged_samples

    resolved = resolve(Recipe.model_validate(values), "recipe", device=device)
    samples = ragged_samples(resolved, resolved.facts.config or {}, 3)
    with own_linear():
        found = _candidate(resolved, samples)
    release(device)
    found |= _plain(resolved, samples, found)
    release(device)
    return found


def _candidate(resolved: Any, samples: Any) -> dict[str, Any]:
    from toolkit.data.loader import TrainLoader
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training import loop
    from toolkit.training.session import engage

    session = engage(resolved, make_accelerator(resolved), None, samples.pad_id)
    loader = TrainLoader.of(resolved, samples, rank=0)
    found: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "loss_scales": []}
    engine: Any = session.engine
    step = engine.step

    def noted(lr: float) -> Any:
        found["loss_scales"].append(engine.loss_scale)
        return step(lr)

    waits = Waits()
    inside = contextlib.ExitStack()

    def after(pending: Any) -> None:
        inside.close()
        norm = float(pending.grad_norm)
        found["losses"].append((pending.loss_sum / pending.tokens).item())
        found["norms"].append(norm if math.isfinite(norm) else None)
        found["skipped"].append(bool(pending.skipped))
        if pending.step == STEPS - 1 and resolved.device == "cuda":  # the last step: what begins has begun
            del engine.step  # reading the loss scale waits too
            found["loss_scales"].append(engine.loss_scale)
            waits.steps = 1
            inside.enter_context(cuda_waits(waits))

    engine.step = noted
    try:
        with inside:
            loop.train(session, loader, STEPS, loop.Progress(), after)
    finally:
        vars(engine).pop("step", None)
    found["waits"] = waits.to_json() if resolved.device == "cuda" else None
    return found | {"claims": {claim.claim: claim.seen for claim in session.claims}}


def _plain(resolved: Any, samples: Any, candidate: dict[str, Any]) -> dict[str, Any]:
    """A step that the candidate skipped (fp16, its gradient overflowed) is no step here either."""
    from toolkit.reference.loop import PlainLoop
    from toolkit.reference.model import plain_decayed, plain_model
    from toolkit.reference.schedule import plain_learning_rate
    from toolkit.training.session import seed_micro_batch
    from toolkit.verification.cases.case import compute_of
    from toolkit.verification.cases.samples import expected_windows

    model = plain_model(resolved, samples.pad_id)
    seed = resolved.recipe.run.seed
    decayed = plain_decayed(model, resolved)
    plain = PlainLoop(model, resolved, decayed, partial(seed_micro_batch, seed), compute_of(resolved))
    losses, norms, updates = [], [], 0
    for step, window in enumerate(expected_windows(samples, resolved, STEPS)):
        here = [(rank, micro.to(resolved.device)) for rank, micro in window]
        sums = plain.backward(step, here, candidate["loss_scales"][step])
        losses.append(sum(sums) / sum(micro.supervised for _, micro in here))
        if candidate["skipped"][step]:
            continue
        plain.update(plain_learning_rate(resolved, updates, STEPS))
        norms.append(plain.norm)
        updates += 1
    return {"plain_losses": losses, "plain_norms": norms}


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    worst: dict[str, float] = {}
    waits: dict[str, Counter[str]] = {"toolkit": Counter(), "others": Counter()}
    for record in records:
        if record["status"] == "done":
            for whose, lines in waits.items():
                lines.update((record["result"].get("waits") or {}).get(whose, {}))
            precision = record["cell"].split("-")[1]
            worst[precision] = max(worst.get(precision, 0.0), record["result"]["worst_loss_deviation"])
    # Of one step of each cell: which lines made the host wait for the device, and how often.
    told_waits = {whose: dict(lines.most_common()) for whose, lines in waits.items()}
    return {"worst_loss_deviation_by_precision": worst, "waits_in_a_step": told_waits}


PART = Part("smoke", "every strategy, precision and way to train: losses against the plain loop", cells, summarise)
