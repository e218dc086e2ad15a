"""`toolkit verify` on the device: each strategy alone, two processes that share it, a forced overflow, known faults."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu_evidence.cells import Cell, Part, Record, Setting, Skipped
from benchmarks.gpu_evidence.shapes import DISTRIBUTED, LORA, STRATEGIES, TINY, Values, recipe, resolved_here
from toolkit.errors import InputError, RunFailed
from toolkit.verification.faults import fault_class, faults
from toolkit.verification.matrix import what_caught
from toolkit.verification.outcome import Outcome
from toolkit.verification.run import verify

_TIME = 100.0
"""Seconds for a pass: a rank that does not answer by then hangs."""


def cells(setting: Setting) -> list[Cell]:
    return [
        *(Cell(f"one-{s}-{way}", partial(_one, s, way == "lora")) for s in STRATEGIES for way in ("lora", "full")),
        *(Cell(f"two-{s}", partial(_two, s)) for s in DISTRIBUTED),
        *(Cell(f"overflow-{s}", partial(_overflow, s)) for s in STRATEGIES),
        *(Cell(f"{label}-{s}", partial(_option, s, label)) for label in OPTIONS for s in STRATEGIES),
        *(Cell(f"kill-{s}-{fault}", partial(_kill, s, fault)) for fault in faults() for s in _breaks(fault)),
    ]


def _breaks(fault: str) -> list[str]:
    return fault_class(fault).strategies.names()


def _recipe(setting: Setting, strategy: str, world: int, **sections: Any) -> Values:
    """What a fault can hide in: dropout, accumulation, warm-up, decay. The model is its own twin."""
    return recipe(
        setting,
        "small",
        strategy,
        model={"config": TINY | {"attention_dropout": 0.1}},
        batch={"micro_size": 2, "accumulation": 3},
        machine={"device": setting.device.type, "processes": world},
        run={"max_steps": 4, "seed": 3, "save_every": 0, "eval_every": 0},
        **sections,
    )


def _one(strategy: str, lora: bool, setting: Setting) -> dict[str, Any]:
    adapter = LORA | {"r": 4, "dropout": 0.1} if lora else None
    values = _recipe(setting, strategy, 1, adapter=adapter, activation_checkpointing="full")
    return _verified(_run(setting, values))


OPTIONS: dict[str, Values] = {
    "fused": {"loss": "fused"},
    "packing": {"data": {"packing": True}},
    "compile": {"compile": True},
    "activation-offload": {"activation_offload": True},
    "adamw8bit": {"optimizer": {"name": "adamw8bit"}},
    "qlora": {"adapter": LORA | {"r": 4, "dropout": 0.1, "method": "qlora"}},
    "fp8": {"fp8": True},
    "fp8-compile": {"fp8": True, "compile": True},
}
"""Each is refused under some strategies: those cells are skipped with the reason."""


def _option(strategy: str, label: str, setting: Setting) -> dict[str, Any]:
    """One option in bf16, LoRA unless it says otherwise."""
    sections: Values = {"adapter": LORA | {"r": 4, "dropout": 0.1}, "activation_checkpointing": "full"}
    return _verified(_run(setting, _recipe(setting, strategy, 1, **(sections | OPTIONS[label]))))


def _two(strategy: str, setting: Setting) -> dict[str, Any]:
    """``ran`` False: torch does not let this strategy run so; ``failure`` says why. That is an answer. A run that got
    to its end and is not equivalent is a failure."""
    adapter = LORA | {"r": 4, "dropout": 0.1}
    outcome = _run(setting, _recipe(setting, strategy, 2, adapter=adapter, activation_checkpointing="full"))
    found = _verified(outcome)
    ran = outcome.failure is None and not any(one.not_engaged for one in outcome.passes)
    return found | {"ok": found["ok"] or not ran, "ran": ran, "backend": "gloo"}


def _overflow(strategy: str, setting: Setting) -> dict[str, Any]:
    """fp16 with one step whose loss scale no gradient survives: it is skipped, and nothing else is."""
    found = _verified(_run(setting, _recipe(setting, strategy, 1, precision="fp16")))
    skipped = [claim for claim in found["overflow"] if claim["ok"]]
    return found | {"ok": found["ok"] and bool(skipped)}


def _kill(strategy: str, fault: str, setting: Setting) -> dict[str, Any]:
    """One fault under one strategy: with two processes where a right run is found right so, else with one."""
    world = _world(strategy, setting) if strategy in DISTRIBUTED else 1
    resolved = resolved_here(setting, _recipe(setting, strategy, world, precision="fp32"))
    try:
        outcome = verify(
            resolved,
            group=setting.workers.of(world),
            fault=fault,
            time_limit=min(_TIME, setting.seconds),
            stop_early=True,
        )
    except InputError as error:
        raise Skipped(f"refused: {error}") from None
    except RunFailed as error:
        if world == 1 and strategy in DISTRIBUTED:
            raise Skipped(f"not to be seen in one process: {error}") from None
        raise
    caught, where = what_caught(outcome)
    killed = outcome.exit_code != 0
    expected = fault_class(fault).stages
    found = {
        "killed": killed,
        "processes": world,
        "caught": caught,
        "right_stage": caught in expected or ("engagement" in expected and bool(outcome.unproven)),
        "where": where,
        "diagnosis": outcome.diagnosis.cause if outcome.diagnosis else None,
    }
    if not killed and world == 1 and strategy in DISTRIBUTED:
        raise Skipped(f"does no harm in one process, and two cannot run {strategy} here")
    return found | {"ok": killed}


def _world(strategy: str, setting: Setting) -> int:
    """A crash would pass for a kill: two processes only where the same run without a fault was equivalent."""
    pair = setting.finished.get(f"two-{strategy}")
    if pair is None:
        raise Skipped(f"cell two-{strategy} has not run, which shows how many processes can")
    return 2 if pair["status"] == "done" and pair["result"]["verdict"] == "equivalent" else 1


def _run(setting: Setting, values: Values) -> Outcome:
    resolved = resolved_here(setting, values)
    group = setting.workers.of(resolved.world_size)
    return verify(resolved, group=group, time_limit=min(_TIME, setting.seconds))


def _verified(outcome: Outcome) -> dict[str, Any]:
    """The contract's fields; of the claims, those without evidence, and the overflow's."""
    fields = outcome.fields()
    claims = fields.pop("engagement")
    return {
        "ok": outcome.verdict == "equivalent",
        **fields,
        "claims": len(claims),
        "unproven": [claim for claim in claims if not claim["ok"]],
        "overflow": [claim for claim in claims if claim["claim"] == "overflow skipped"],
    }


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    pairs = {r["cell"]: r["result"] for r in records if r["cell"].startswith("two-") and "result" in r}
    kills = [r["result"] for r in records if r["cell"].startswith("kill-") and "result" in r]
    return {
        "two_processes_over_gloo": {name: pair["verdict"] if pair["ran"] else "cannot" for name, pair in pairs.items()},
        "why_not": {name: pair["failure"] for name, pair in pairs.items() if not pair["ran"]},
        "faults_killed": sum(kill["killed"] for kill in kills),
        "faults_run": len(kills),
    }


PART = Part("verify", "toolkit verify: alone, two on one device, a forced overflow, the kill matrix", cells, summarise)
