"""Every PEFT method under every strategy, verified, as a table of docs/measurements.

``python -m tests.peft_methods -o docs/measurements/peft-methods.md`` writes it.

Each cell is `toolkit verify` of a tiny model, in float32 and in bf16, with the round trip through a checkpoint and an
export that PEFT loads. ``--only`` and ``--strategy`` choose rows and columns.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from families import EVERY_FAMILY
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.schema import Recipe
from toolkit.results import versions
from toolkit.strategies import resolve
from toolkit.verification.run import verify

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
TIME_LIMIT = 90.0


@dataclass(frozen=True)
class Row:
    """One row of the table: a method with options, on a model."""

    name: str
    adapter: dict[str, Any]
    model: dict[str, Any]
    sections: dict[str, Any] = field(default_factory=dict)
    """Further keys of the recipe."""


def rows() -> Iterator[Row]:
    """Every method with its least options, then what else LoRA can do."""
    llama = {"config": LLAMA | {"attention_dropout": 0.1}}
    for name, method in METHODS.items():
        adapter: dict[str, Any] = {"method": name}
        if method.required:
            adapter["options"] = dict(method.required)
        if name == "trainable-tokens":
            adapter["options"] = {"token_indices": [5, 7, 9]}
        if "dropout" in method.keys and name in ("lora", "vera", "hira"):
            adapter["dropout"] = 0.1
        yield Row(name, adapter, llama)
    mixtral = EVERY_FAMILY["mixtral"]
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    for name, extra, model in (
        ("lora, rsLoRA", {"options": {"use_rslora": True}}, llama),
        ("lora, gaussian", {"options": {"init_lora_weights": "gaussian"}}, llama),
        ("lora, orthogonal", {"options": {"init_lora_weights": "orthogonal"}}, llama),
        ("lora, PiSSA", {"options": {"init_lora_weights": "pissa"}}, llama),
        ("lora, OLoRA", {"options": {"init_lora_weights": "olora"}}, llama),
        ("lora, MiCA", {"options": {"init_lora_weights": "mica"}}, llama),
        (
            "lora, some layers",
            {
                "target_modules": ["q_proj", "v_proj"],
                "options": {"layers_to_transform": [1], "rank_pattern": {"q_proj": 2}},
            },
            llama,
        ),
        ("lora, bias", {"options": {"lora_bias": True}}, llama),
        ("lora, new tokens", {"options": {"trainable_token_indices": [5, 7]}}, llama),
        ("lora, experts", {"target_modules": ["q_proj"], "options": {"target_parameters": experts}}, mixtral),
    ):
        yield Row(name, {"method": "lora", "r": 4} | extra, model)
    # Dtypes are looked at again when a block is recomputed.
    for name in ("vera", "hra", "prompt-tuning"):
        method = METHODS[name]
        options = {"method": name, "options": dict(method.required)}
        yield Row(f"{name}, checkpointing", options, llama, {"activation_checkpointing": "full"})


def cell(row: Row, strategy: str, group: WorkerGroup) -> dict[str, Any]:
    """Verify one row under one strategy: ``verdict``, and why it is not equivalent."""
    sections = {
        "adapter": row.adapter,
        "model": row.model,
        "strategy": {"name": strategy},
        "machine": {"processes": 1 if strategy == "single" else 2},
        "batch": {"micro_size": 2, "accumulation": 2},
        "precision": "bf16",
        **row.sections,
    }
    started = time.perf_counter()
    try:
        resolved = resolve(Recipe.model_validate(recipe_dict(Path("nowhere"), **sections)), "recipe", device="cpu")
        # Checkpoints and exports are whole tensors, whatever the strategy: assembled where weights are sharded.
        round_trip = "weights" in resolved.traits.shards
        outcome = verify(resolved, group=group, time_limit=TIME_LIMIT, round_trip=round_trip)
    except InputError as error:
        return {"verdict": "refused", "why": str(error).removeprefix("recipe: ")}
    except Exception as error:  # the plain loop cannot compute it either
        return {"verdict": "error", "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    found: dict[str, Any] = {"verdict": outcome.verdict, "seconds": round(time.perf_counter() - started, 1)}
    if outcome.verdict != "equivalent":
        found["why"] = outcome.failure or "; ".join(f"{one.claim}: {one.seen}" for one in outcome.unproven)
        if outcome.difference is not None:
            name, stage, measure = outcome.difference
            found["why"] = f"{name.name} pass, {stage.name}: {measure.sentence}"
    return found


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The page in Markdown, rows in the order of ``rows``. Reasons that differ in the method alone are one."""
    strategies = [name for name in STRATEGIES if any(name in found for found in results.values())]
    reasons: dict[str, int] = {}
    lines = [f"| | {' | '.join(strategies)} |", f"| --- |{' --- |' * len(strategies)}"]
    for row in rows():
        cells = []
        for strategy in strategies:
            one = results.get(row.name, {}).get(strategy)
            if one is None:
                cells.append("")
            elif one["verdict"] == "equivalent":
                cells.append("equivalent")
            else:
                why = re.sub(rf"\b{row.adapter['method']}\b", "*method*", one["why"], count=2)
                number = reasons.setdefault(why, len(reasons) + 1)
                cells.append(f"{one['verdict']} [{number}](#{number})")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    notes = [f'{number}. <a id="{number}"></a>{why}' for why, number in reasons.items()]
    packages = ("torch", "peft", "transformers", "deepspeed", "accelerate")
    installed = ", ".join(f"{name} {versions()[name]}" for name in packages)
    return _HEAD.format(versions=installed) + "\n".join(lines) + "\n\n## Reasons\n\n" + "\n".join(notes) + "\n"


_HEAD = """\
# PEFT methods

Each method under each strategy, compared with the plain loop by [`toolkit verify`](../verify.md): two processes on a
CPU, a tiny Llama (Mixtral for experts), in float32 and in bf16. Under strategies that shard weights also a checkpoint,
its resumption, and an export that PEFT loads again (and merges, where the method merges). *refused*: an error before
training, with the reason below.
[Choose a PEFT method](../how-to/choose-a-peft-method.md) describes the methods.

Measured with {versions};
written by `python -m tests.peft_methods -o docs/measurements/peft-methods.md`.

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; exit status 1 if a cell is neither equivalent nor refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--json", type=Path, help="cells that are there already are not measured again")
    parser.add_argument("--only", nargs="*", default=[], help="names of rows")
    parser.add_argument("--strategy", nargs="*", default=list(STRATEGIES))
    asked = parser.parse_args(arguments)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    if asked.json and asked.json.exists():
        results = json.loads(asked.json.read_text(encoding="utf-8"))
    with WorkerGroup(2) as two, WorkerGroup(1) as one:
        for row in rows():
            for strategy in asked.strategy:
                if (asked.only and row.name not in asked.only) or strategy in results.get(row.name, {}):
                    continue
                found = cell(row, strategy, one if strategy == "single" else two)
                results.setdefault(row.name, {})[strategy] = found
                print(f"{row.name:24} {strategy:8} {found['verdict']} {found.get('seconds', '')} "
                      f"{found.get('why', '')[:300]}", flush=True)  # fmt: skip
                if asked.json:
                    asked.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if asked.output:
        asked.output.write_text(table(results), encoding="utf-8")
    bad = [name for name, found in results.items() for one in found.values()
           if one["verdict"] not in ("equivalent", "refused")]  # fmt: skip
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
