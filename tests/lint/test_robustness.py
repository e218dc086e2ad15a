"""Mutated files: never a traceback, never a hang, never a change to a file."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.errors import InputError
from toolkit.linting.engine import check
from toolkit.linting.examples import acc, args, ds, fsdp1, fsdp2, lora, shell, zero
from toolkit.linting.files.load import load
from toolkit.linting.fix import plan
from toolkit.linting.model import Files
from toolkit.linting.output import machine, text
from toolkit.linting.registry import all_rules

SEEDS: list[Files] = [
    zero("zero_stage: 3", "offload_param_device: cpu", "zero3_save_16bit_model: true") | args(bf16=True, max_steps=10),
    fsdp2("fsdp_activation_checkpointing: true") | lora(lora_dropout=0.1) | args(fsdp_config={"version": 1}),
    fsdp1("fsdp_sharding_strategy: HYBRID_SHARD", "fsdp_use_orig_params: false"),
    ds(3, zero={"overlap_comm": True, "offload_optimizer": {"device": "nvme"}}, fp16={"enabled": "auto"}),
    shell("accelerate launch --config_file accelerate.yaml \\",
          "  --num_processes 4 train.py --output_dir 'o' --bf16 $X"),
    acc("distributed_type: MULTI_GPU", "mixed_precision: no", "num_processes: &n 2", "num_machines: *n"),
]  # fmt: skip
SEEDS += [rule.fails for rule in all_rules().values()]
VALUES = [
    "null",
    "true",
    "-1",
    "1e400",
    "'x'",
    '"auto"',
    "[]",
    "{}",
    "[1, {a: 2}]",
    '{"a": {"b": []}}',
    "0x1F",
    "NaN",
    "''",
    "1e-5",
    "2020-01-01",
    "é\u2028",
    "*x",
    "&x 1",
    "!!binary aGk=",
    "|",
    ">\n  a",
]


def delete(rng: random.Random, source: str) -> str:
    start = rng.randrange(len(source) + 1)
    return source[:start] + source[start + rng.randrange(1, 30) :]


def truncate(rng: random.Random, source: str) -> str:
    return source[: rng.randrange(len(source) + 1)]


def misspell(rng: random.Random, source: str) -> str:
    index = rng.randrange(len(source) or 1)
    return source[:index] + rng.choice("abcxyz_:,{}[]\"'#\t\n\u00e9\ufeff\x85") + source[index + rng.randrange(2) :]


def retype(rng: random.Random, source: str) -> str:
    lines = source.split("\n")
    index = rng.randrange(len(lines))
    key, colon, _ = lines[index].partition(":")
    lines[index] = f"{key}{colon} {rng.choice(VALUES)}{',' * lines[index].endswith(',')}" if colon else lines[index]
    return "\n".join(lines)


def duplicate(rng: random.Random, source: str) -> str:
    lines = source.split("\n")
    index = rng.randrange(len(lines))
    lines.insert(rng.randrange(len(lines)), lines[index])
    return "\n".join(lines)


def move(rng: random.Random, source: str) -> str:
    lines = source.split("\n")
    line = lines.pop(rng.randrange(len(lines)))
    lines.insert(rng.randrange(len(lines) + 1), " " * rng.randrange(5) + line.strip())
    return "\n".join(lines)


def nest(rng: random.Random, source: str) -> str:
    depth = rng.choice([3, 70, 3000])
    bracket = rng.choice(["[", "{a: ", '{"a": ', "- ", "? "])
    index = rng.randrange(len(source) + 1)
    return source[:index] + bracket * depth + source[index:]


def bomb(rng: random.Random, source: str) -> str:
    lines = ["b0: &b0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 10)}]" for i in range(1, rng.randrange(2, 9))]
    return source + "\n" + "\n".join(lines)


MUTATIONS: list[Callable[[random.Random, str], str]] = [
    delete,
    truncate,
    misspell,
    retype,
    retype,
    duplicate,
    move,
    nest,
    bomb,
]
ENCODINGS = ["utf-8"] * 12 + ["utf-8-sig", "utf-16", "latin-1", "utf-32"]


def attack(number: int, folder: Path) -> float:
    """One mutated input, from its number; the seconds it took."""
    rng = random.Random(number)
    files = dict(rng.choice(SEEDS))
    name = rng.choice(list(files))
    content = files[name]
    # Two inputs of three stay close to a valid file: the rules see odd values, not only the parsers.
    mutations = MUTATIONS if number % 3 == 0 else [retype, retype, retype, move, duplicate, misspell]
    for _ in range(rng.choice([1, 1, 2, 4]) if number % 3 == 0 else rng.choice([1, 1, 2])):
        content = rng.choice(mutations)(rng, content)
    for path, unchanged in files.items():
        (folder / path).write_text(unchanged, encoding="utf-8")
    data = content.encode(rng.choice(ENCODINGS) if number % 3 == 0 else "utf-8", "replace")
    (folder / name).write_bytes(data)
    started = time.process_time()  # others may be at work on this machine
    try:
        loaded = load([str(folder / path) for path in files])
        report = check(loaded, reader=rng.choice([None, "trainer", "accelerator", "deepspeed"]))
        text.show(report).encode("utf-8", "backslashreplace")
        machine.as_json(report, 0.0)
        machine.as_sarif(report)
        plan(loaded)
    except InputError:
        pass  # one message and no traceback: all that is asked of an unusable file
    seconds = time.process_time() - started
    assert (folder / name).read_bytes() == data
    for path in files:
        (folder / path).unlink()
    return seconds


def hunt(numbers: range, folder: Path) -> None:
    for number in numbers:
        try:
            seconds = attack(number, folder)
        except Exception as error:
            raise AssertionError(f"input {number}: {type(error).__name__}: {error}") from error
        assert seconds < 30, f"input {number} took {seconds:.1f} s: a few milliseconds are usual"


def test_mutated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hunt(range(200), tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ten_thousand_mutated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hunt(range(200, 10_500), tmp_path)
