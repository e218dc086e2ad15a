"""Uses an installed toolkit as a newcomer would: `python -P .ci/smoke.py TESTS`, in an empty folder.

TESTS is the folder of the tests, for their tiny tokenizer and text. Nothing else of the repository is read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import os
import subprocess
import sys
from pathlib import Path

import toolkit

BIN = Path(sys.executable).parent
# DeepSpeed compiles its CPU ops here, as on a machine that has never used it.
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path("extensions").absolute())
RECIPE = """\
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2, vocab_size: 300}
tokenizer: {path: tokenizer}
data: {train: train.jsonl, max_length: 32, workers: 0}
batch: {micro_size: 2, accumulation: 2}
optimizer: {lr: 1.0e-3}
strategy: {name: ddp}
machine: {device: cpu, processes: 2}
run: {max_steps: 3, output_dir: run}
"""


def call(*arguments: str, status: int = 0) -> str:
    """Run the installed command; its standard output. Exits where the status is another."""
    done = subprocess.run([BIN / "toolkit", *arguments], capture_output=True, text=True, timeout=600, check=False)
    print(f"  toolkit {' '.join(arguments)}: exit {done.returncode}", flush=True)
    if done.returncode != status or "Traceback" in done.stderr:
        sys.exit(f"expected {status}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def metadata() -> None:
    """What an index shows, and the files that only package data brings."""
    assert Path(toolkit.__file__).is_relative_to(sys.prefix), f"{toolkit.__file__} is not the installed toolkit"
    found = importlib.metadata.metadata("deepspeed-accelerate-toolkit")
    for field in ("Summary", "Keywords", "Author", "License-Expression", "Requires-Python", "Classifier"):
        assert found[field], f"no {field}"
    package = importlib.resources.files("toolkit")
    assert (package / "py.typed").is_file()
    assert any(entry.name.endswith(".json") for entry in (package / "linting" / "keys").iterdir())


def every_command(strategy: str, processes: str) -> None:
    """What a user does with one strategy; three optimizer steps."""
    run = [f"strategy.name={strategy}", f"machine.processes={processes}", f"run.output_dir={strategy}"]
    call("plan", "recipe.yaml", *run, "--json", "plan.json")
    assert json.loads(Path("plan.json").read_text())["schema"].startswith("toolkit.plan/")
    call("train", "recipe.yaml", *run, "--json", f"{strategy}.json")
    assert json.loads(Path(f"{strategy}.json").read_text())["steps"] == 3
    call("verify", "recipe.yaml", *run, "--json", "verdict.json")
    assert json.loads(Path("verdict.json").read_text())["verdict"] == "equivalent"
    call("export", strategy, "-o", f"exported-{strategy}")
    assert list(Path(f"exported-{strategy}").glob("*.safetensors"))


def main(tests: str) -> None:
    metadata()
    sys.path.append(tests)
    from tiny import make_text, make_tokenizer

    make_tokenizer(Path("tokenizer"))
    make_text(Path("train.jsonl"), 30)
    Path("recipe.yaml").write_text(RECIPE)

    call("--help")
    call("doctor", "--json", "doctor.json")
    call("init", "-o", "first.yaml", "--model", "some/model")
    call("config", "recipe.yaml", "strategy.name=zero2", "-o", "launch")
    call("lint", "launch/accelerate.yaml", "launch/deepspeed.json")
    call("explain", "DS101")
    call("migrate", "launch/accelerate.yaml", "--to", "fsdp2", "-o", "new")
    for strategy in ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"):
        every_command(strategy, "1" if strategy == "single" else "2")
    call("train", "recipe.yaml", "run.sead=1", status=2)
    print("the installed toolkit works")


if __name__ == "__main__":
    main(sys.argv[1])
