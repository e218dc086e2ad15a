"""`toolkit doctor --self-test`: each strategy, on this very installation, proven equal to a plain PyTorch loop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from toolkit.doctor.model import Condition

PROCESSES = 2
_TIME_LIMIT_S = 300.0
_MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip


def self_test(shown: Callable[[Condition], None]) -> list[Condition]:
    """A verdict of every strategy of the toolkit's own with LoRA in float32, a model of two layers; ``shown`` gets each
    as it ends. On GPUs where there are two, otherwise on the CPU: what differs between versions of the packages is
    how models are wrapped, sharded, updated and saved, which a CPU runs too."""
    from toolkit.launch.group import WorkerGroup
    from toolkit.machine import cpu_count, cuda_device_count
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve, strategies
    from toolkit.verification.run import verify

    device = "cuda" if cuda_device_count() >= PROCESSES else "cpu"
    conditions = []
    with tempfile.TemporaryDirectory(prefix="toolkit-self-test-") as folder:
        log = Path(folder) / "ranks.log"
        threads = max(1, cpu_count() // PROCESSES)
        with WorkerGroup(1, threads, log=log) as lone, WorkerGroup(PROCESSES, threads, log=log) as group:
            for name, strategy in strategies().items():
                if not type(strategy).__module__.startswith("toolkit."):
                    continue
                workers = group if strategy.traits.distributed else lone
                recipe = {
                    "model": {"config": _MODEL},
                    "tokenizer": {"path": folder},
                    "data": {"train": folder, "max_length": 32, "workers": 0},
                    "adapter": {"r": 4},
                    "batch": {"micro_size": 2, "accumulation": 2},
                    "precision": "fp32",
                    "strategy": {"name": name},
                    "run": {"max_steps": 4, "output_dir": folder},
                    "machine": {"device": device, "processes": workers.size},
                }
                started = time.monotonic()
                try:
                    resolved = resolve(Recipe.model_validate(recipe), "doctor --self-test", device=device)
                    outcome = verify(resolved, group=workers, time_limit=_TIME_LIMIT_S)
                    verdict: str = outcome.verdict
                    why = outcome.failure or (outcome.difference and outcome.difference[2].sentence) or ""
                except Exception as error:  # a name that an upgrade took away, say: what this is asked for
                    verdict, why = "failed", f"{type(error).__name__}: {error}"
                where = f"{workers.size} x {device}, {time.monotonic() - started:.0f} s"
                if verdict == "equivalent":
                    condition = Condition(name, "ok", f"equivalent to a plain loop on {where}")
                else:
                    advice = "the tested versions of the packages (constraints.txt)"
                    condition = Condition(name, "error", f"{verdict} on {where}: {why}".rstrip(": "), advice)
                conditions.append(condition)
                shown(condition)
    return conditions
