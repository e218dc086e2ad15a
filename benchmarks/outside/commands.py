"""Rows that a command line can express: predicted by ``toolkit plan``, and shown with that command.

Of the first collection those that transformers' own loop and kernels ran; of the second Anassbzdd/fitcheck (a bare
loop on a Tesla T4, torch 2.14, transformers 5.17, PEFT 0.20; every second step measured) and the steps of projects
whose loop is their own, for their time alone.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.outside import fms, fsdp_qlora, peft
from benchmarks.outside.models import MODELS
from benchmarks.outside.rows import Row
from toolkit.planning.allocator import workspaces
from toolkit.planning.candidate import Candidate
from toolkit.planning.command import Planned, Request, make_plan
from toolkit.recipe.shapes import shape_of

GIB = 2**30
FITCHECK = "Anassbzdd/fitcheck"
_LLAMA = {"model_type": "llama", "tie_word_embeddings": False}
_HUB = {
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B", "Qwen2.5-1.5B": "Qwen/Qwen2.5-1.5B",
    "Mistral-7B-v0.3": "mistralai/Mistral-7B-v0.3",
    "Llama-3.2-3B": "meta-llama/Llama-3.2-3B", "Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B", "Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
    "Qwen2.5-32B": "Qwen/Qwen2.5-32B", "Llama-2-7B": "meta-llama/Llama-2-7b-hf", "Qwen3-0.6B": "Qwen/Qwen3-0.6B",
    "Qwen3-4B": "Qwen/Qwen3-4B",
    "SmolLM2-1.7B": "HuggingFaceTB/SmolLM2-1.7B", "SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M",
    "TinyLlama-1.1B": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "deepseek-coder-1.3b": "deepseek-ai/deepseek-coder-1.3b-base",
}  # fmt: skip
_OTHERS = MODELS | {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
       "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048},
    "deepseek-ai/deepseek-coder-1.3b-base": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16,
       "num_key_value_heads": 16, "vocab_size": 32256, "max_position_embeddings": 16384},
}  # fmt: skip
"""Of their own config.json files, where `toolkit.recipe.shapes` has none."""
_GPUS = {"T4": "t4", "A100 80GB": "a100-80gb", "L40S": "l40s", "RTX 3090": "rtx3090", "RTX 4090": "rtx4090",
         "H100": "h100", "B200": "b200"}  # fmt: skip
_OWN_LOOP = "its loop is the project's own, which plan leaves out; predicted with its code in benchmarks/outside"
_OWN_TIMES = ("NVIDIA-NeMo/Automodel", "foundation-model-stack/fms-fsdp", "PrimeIntellect-ai/prime-rl")
"""Sources of the second collection whose loop is their own, and whose steps a command can say."""


@dataclass(frozen=True)
class Typed:
    """A row and the words of ``toolkit plan``. ``allocated``, ``process``: GiB that were measured, 0 where they were
    not, or are not what a plan says. ``seconds``: of a step."""

    id: str
    source: str
    words: tuple[str, ...]
    allocated: float = 0.0
    process: float = 0.0
    seconds: float = 0.0


def why_not(row: dict[str, Any]) -> str:
    """Why no command predicts a row; empty if one does."""
    if "source" in row:
        if row.get("tensor", 1) > 1 and row["compile"]:
            return "tensor parallelism of compiled blocks: no recipe has both"
        if row["source"] == FITCHECK or (row["source"] in _OWN_TIMES and row["quality"] == "exact"):
            return ""
        if "transformers docs" in row["source"]:
            return "classification by the Trainer of a version that is not named"
        return row["quality"] if row["quality"] != "exact" else "no bytes were published"
    source = row["source_repo"]
    if source not in (fms.SOURCE, fsdp_qlora.SOURCE, peft.SOURCE):
        return _OWN_LOOP if source in _PREDICTED else "no complete configuration"
    if row["quality"] != "exact" or row["outcome"] == "oom":
        return "it ran out of memory" if row["outcome"] == "oom" else "a part of its configuration is inferred"
    if source == peft.SOURCE:
        return peft.why_not_timed(row)
    if source == fms.SOURCE and (reason := fms.why_left_out(row)):
        return reason
    if row.get("kernel_family", "hf") != "hf":
        return "kernels of fms_acceleration or of Liger in it: plan has no option for them"
    if source == fsdp_qlora.SOURCE:
        return "a loop of its own with adapters in bfloat16, which no loop of plan has"
    if "4.48.1" not in row["notes"]:
        return "transformers 4.45: plan knows the Trainer of 4.48 and of today"
    if row["model"] == fms.BIGCODE:
        return "gpt_bigcode of transformers 4.48 keeps keys and values, which today's does not"
    if "Mixtral" in row["model"] and row["task"] == "qlora":
        return "today's transformers holds all experts in one tensor, which is not quantised"
    if fms.norms_alone(row):
        return "norms alone in float32, as that version of TRL had them: no --loop-set says so"
    return ""


_PREDICTED = ("Lightning-AI/litgpt", "pytorch/torchtune", "pytorch/torchtitan", "pytorch/ao", "mosaicml/llm-foundry")


def typed(row: dict[str, Any]) -> Typed:
    """A row that ``why_not`` has nothing against."""
    if "source" in row:
        own = row["source"] != FITCHECK
        seconds = row.get("seconds") or row["micro"] * row["length"] / row["tokens_per_second"]  # a GPU
        if own:
            return Typed(row["id"], row["source"], tuple(_own(row)), seconds=seconds)
        return Typed(row["id"], row["source"], tuple(_bare(row)), row["allocated"], row["process"], seconds=seconds)
    source = row["source_repo"]
    if source == peft.SOURCE:
        words = _of_recipe(row, peft.recipe(row), "trainer")
        return Typed(row["id"], source, words, seconds=row["step_time_s"])
    tokens = row["seq_len"] * row["micro_batch"] * row["grad_accum"]
    seconds = tokens / row["tokens_per_second_per_gpu"]
    words = _of_recipe(row, fms.recipe(row), "trainer@4.48")
    return Typed(row["id"], source, words, row["peak_allocated_gib"], row["peak_process_gib"], seconds)


def _gpu(row: dict[str, Any]) -> str:
    return next((name for part, name in _GPUS.items() if part in str(row["gpu"])), "")


def _of_recipe(row: dict[str, Any], recipe: dict[str, Any], loop: str) -> tuple[str, ...]:
    """The words that make the recipe: options, and keys for what they do not say."""
    adapter = recipe["adapter"]
    words = [row["model"], "--gpu", _gpu(row)]
    words += ["--full"] if adapter is None else [f"--{adapter['method'].replace('dora', 'lora')}", str(adapter["r"])]
    words += ["--length", str(recipe["data"]["max_length"]), "--micro", str(recipe["batch"]["micro_size"])]
    if row["world"] > 1:
        words += ["--gpus", str(row["world"])]
    words += ["--loop", loop]
    keys: dict[str, Any] = {}
    for section in ("model", "adapter", "optimizer", "strategy"):
        keys |= {f"{section}.{key}": value for key, value in (recipe[section] or {}).items() if key != "config"}
    keys.pop("adapter.r", None)
    if keys.get("adapter.method") in ("lora", "qlora"):
        del keys["adapter.method"]
    keys |= {"precision": recipe["precision"], "batch.accumulation": recipe["batch"]["accumulation"],
             "activation_checkpointing": recipe.get("activation_checkpointing", "none")}  # fmt: skip
    return (*words, *(f"{key}={_value(value)}" for key, value in keys.items()))


def _value(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _bare(row: dict[str, Any]) -> list[str]:
    """A row of fitcheck."""
    adapter, method = row["adapter"], row["method"]
    words = [_HUB[row["model"]], "--gpu", "t4", f"--{method}", str(adapter["r"]), "--length", str(row["length"])]
    words += ["--micro", str(row["micro"]), "--loop", "bare", "--loop-set", "autocast=false"]
    if method == "qlora":
        words += ["--loop-set", "prepare_for_kbit=true", "--loop-set", "double_quant=false"]
    targets = ",".join(adapter["targets"])
    return [*words, f"model.attention={row['attention']}", f"adapter.target_modules=[{targets}]",
            "adapter.dropout=0.0", "optimizer.max_grad_norm=null",
            "batch.accumulation=1"]  # fmt: skip


def _own(row: dict[str, Any]) -> list[str]:
    """The steps of a project with a loop of its own, as the toolkit's."""
    nodes = max(1, row["world"] // 8)
    trained = ["--full"] if row["method"] == "full" else ["--lora", str(row["adapter"]["r"])]
    words = [_HUB[row["model"]], "--gpu", _gpu(row), *trained]
    words += ["--length", str(row["length"]), "--micro", str(row["micro"])]
    words += ["--gpus", str(min(8, row["world"]))] + (["--nodes", str(nodes)] if nodes > 1 else [])
    keys = {"model.attention": row["attention"], "batch.accumulation": row["accumulation"],
            "activation_checkpointing": row["ac"], "precision": row["precision"].split()[0],
            "compile": str(bool(row["compile"])).lower(),
            "strategy.name": "single" if row["world"] == 1 else row["strategy"]}  # fmt: skip
    if row["method"] == "lora":
        keys |= {"adapter.target_modules": f"[{','.join(row['adapter']['targets'])}]"}
        keys |= {"adapter.dropout": row["adapter"]["dropout"]}
    if row.get("hybrid"):  # the recipe compiles under FSDP2
        keys |= {"strategy.name": "fsdp2", "strategy.mesh": f"{{replicate: {row['world'] // 8}, shard: 8}}"}
    return words + [f"{key}={value}" for key, value in keys.items()]


def _request(words: Sequence[str]) -> Request:
    flags: dict[str, Any] = {"loop_set": ()}
    overrides, left = [], list(words[1:])
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            overrides.append(word)
        elif word == "--loop-set":
            flags["loop_set"] += (left.pop(0),)
        elif word == "--full":
            flags["full"] = True
        else:
            value = left.pop(0)
            flags[word[2:]] = int(value) if value.isdigit() else value
    return Request(words[0], tuple(overrides), **flags)


@dataclass(frozen=True)
class Answered:
    """A row, what ``toolkit plan`` says of it, and the device of the table that it names."""

    typed: Typed
    planned: Planned
    device: str
    first: bool
    """Whether it is of the first collection, whose rows are predicted without a command too."""

    @property
    def candidate(self) -> Candidate:
        return self.planned.candidates[0]

    def row(self) -> Row:
        """Its process, for toolkit/planning/allocator.py's numbers."""
        one, made = self.typed, self.candidate
        assert made.parts is not None
        return Row(one.id, " ".join(one.words), one.allocated, int(made.parts.peak), source=one.source,
                   process=one.process, device=made.capacity / GIB, parts=made.parts)  # fmt: skip


def answered(rows: Sequence[dict[str, Any]], say: Callable[[str], None] = lambda text: None) -> list[Answered]:
    """Every row that a command predicts, asked as the command line asks."""
    found = []
    for row in rows:
        if why_not(row):
            continue
        one = typed(row)
        hub, *rest = one.words
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(shape_of(hub) or _OTHERS[hub]), encoding="utf-8")
            planned = make_plan(_request([str(file), *rest]))
        found.append(Answered(one, planned, rest[rest.index("--gpu") + 1], "source" not in row))
        say(f"{one.id} {' '.join(one.words)}")
    return found


def table(rows: Sequence[dict[str, Any]], predicted: Sequence[Answered]) -> list[str]:
    """Every row: with its command and what is predicted, or with the reason why no command does."""
    told: dict[str, list[str]] = {}
    errors: dict[str, list[float]] = {}
    counts: dict[str, list[bool]] = {}
    times: dict[str, list[tuple[float, bool]]] = {}
    for one in predicted:
        told.setdefault(one.typed.source, []).append(_line(one, errors, counts, times))
    lines = ["## Rows by command", ""]
    for source, texts in told.items():
        lines += [f"{source}: {_summary(len(texts), errors.get(source), counts.get(source), times.get(source))}", ""]
        lines += [_HEAD, "| --- | --- | --- | --- | --- | --- | --- | --- | --- |", *texts, ""]
    every = [error for found in errors.values() for error in found]
    if every:
        low = sum(error < -0.05 for error in every)
        lines += [f"All rows with a command that state allocated bytes: {len(every)}, median error "
                  f"{statistics.median(map(abs, every)):.2%}, {low} more than 5% too low.", ""]  # fmt: skip
    lines += ["No command predicts:", ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if why := why_not(row):
            reasons.setdefault((row.get("source") or row["source_repo"], why), []).append(row["id"])
    return [*lines, *(f"- {source}, {len(ids)} rows ({_some(ids)}): {why}" for (source, why), ids in reasons.items()),
            ""]  # fmt: skip


_HEAD = "| row | command | allocated GiB | predicted | error | nvidia-smi GiB | predicted | seconds | predicted |"


def _line(
    given: Answered,
    errors: dict[str, list[float]],
    counts: dict[str, list[bool]],
    times: dict[str, list[tuple[float, bool]]],
) -> str:
    one, made, device = given.typed, given.candidate, given.device
    cells = [one.id, f"`toolkit plan {' '.join(one.words)}`"]
    if one.allocated:
        size = (made.memory.peak + workspaces(device)) / GIB
        errors.setdefault(one.source, []).append(size / one.allocated - 1)
        cells += [f"{one.allocated:.2f}", f"{size:.2f}", f"{errors[one.source][-1]:+.1%}"]
    else:
        cells += ["", "", ""]
    if one.process and made.interval is not None:
        low, high = (end / GIB for end in made.interval)
        counts.setdefault(one.source, []).append(low <= one.process <= high)
        cells += [f"{one.process:.2f}", f"{low:.1f} to {high:.1f}"]
    else:
        cells += ["", ""]
    if one.seconds and made.seconds is not None:
        seconds = made.seconds
        within = seconds.low <= one.seconds <= seconds.high
        times.setdefault(one.source, []).append((seconds.total / one.seconds - 1, within))
        cells += [f"{one.seconds:.3f}", f"{seconds.total:.3f} ({seconds.low:.2f} to {seconds.high:.2f})"]
    else:
        cells += ["", ""]
    return f"| {' | '.join(cells)} |"


def _summary(
    count: int, errors: list[float] | None, counts: list[bool] | None, times: list[tuple[float, bool]] | None
) -> str:
    parts = [f"{count} rows"]
    if errors:
        parts.append(
            f"allocated bytes with a median error of {statistics.median(map(abs, errors)):.1%}, from "
            f"{min(errors):+.1%} to {max(errors):+.1%}"
        )
    if counts:
        parts.append(f"{sum(counts)} of {len(counts)} processes are inside the interval")
    if times:
        median = statistics.median(abs(error) for error, _ in times)
        inside = sum(within for _, within in times)
        parts.append(f"times with a median error of {median:.0%}, {inside} of {len(times)} inside")
    return "; ".join(parts) + "."


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids) if len(ids) <= 6 else f"{ids[0]} to {ids[-1]}"
