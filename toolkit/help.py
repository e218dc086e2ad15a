"""What `--help` shows: the commands in groups, and two examples of each. Nothing is cut."""

from __future__ import annotations

import sys
from typing import Any

from typer.core import TyperGroup

from toolkit.terminal import coloured, paint

GROUPS = {
    "Start": ("init", "plan", "data", "studio"),
    "Train": ("train", "watch", "export", "import-checkpoint"),
    "Prove": ("verify", "prove", "record", "compare", "bench"),
    "Files": ("config", "lint", "explain", "migrate", "import", "schema"),
    "Machine": ("doctor",),
}
"""The commands in the order in which they are shown."""

EXAMPLES = {
    "init": ("toolkit init", "toolkit init --model Qwen/Qwen3-0.6B --data data/train.jsonl --format messages"),
    "plan": ("toolkit plan recipe.yaml --gpu h100 --gpus 2", "toolkit plan Qwen/Qwen3-8B --gpu rtx4090 --lora 16"),
    "data": ("toolkit data recipe.yaml", "toolkit data recipe.yaml --only cut --html data.html"),
    "studio": ("toolkit studio", "toolkit studio ~/projects --port 8080"),
    "train": ("toolkit train recipe.yaml strategy.name=fsdp2", "toolkit train recipe.yaml --resume"),
    "watch": ("toolkit watch", "toolkit watch runs/first runs/second --once"),
    "export": ("toolkit export runs/first -o my-adapter", "toolkit export runs/first -o my-model --merged --best"),
    "import-checkpoint": (
        "toolkit import-checkpoint output/checkpoint-500 recipe.yaml",
        "toolkit import-checkpoint pytorch_model_fsdp_0 recipe.yaml --step 500",
    ),
    "verify": ("toolkit verify recipe.yaml", "toolkit verify recipe.yaml strategy.name=zero3 --json result.json"),
    "prove": (
        "toolkit prove -- python train.py",
        "toolkit prove --steps 2 -- accelerate launch --config_file accelerate.yaml train.py",
    ),
    "record": ("toolkit record -- python train.py", "toolkit record -o recording --stop -- torchrun train.py"),
    "compare": ("toolkit compare runs/single runs/zero3", "toolkit compare a.pt b/checkpoint-500 --json result.json"),
    "bench": (
        "toolkit bench recipe.yaml --strategies zero2,fsdp2",
        "toolkit bench recipe.yaml --with loss=fused --turns 5",
    ),
    "config": ("toolkit config recipe.yaml -o launch", "toolkit config recipe.yaml --explain"),
    "lint": ("toolkit lint accelerate.yaml ds_zero3.json", "toolkit lint ds_zero3.json --diff"),
    "explain": ("toolkit explain XL213", "toolkit explain zero_optimization.stage accelerate.yaml ds_zero3.json"),
    "migrate": ("toolkit migrate ds_zero3.json --to fsdp2", "toolkit migrate accelerate.yaml --to zero2 -o launch"),
    "import": ("toolkit import axolotl.yaml -o recipe.yaml", "toolkit import train.sh ds_zero2.json -o recipe.yaml"),
    "schema": ("toolkit schema -o recipe.schema.json", "toolkit schema --for deepspeed"),
    "doctor": ("toolkit doctor", "toolkit doctor --json doctor.json"),
}


def summary(command: Any) -> str:
    """The first sentence of a command's help, whole."""
    first = " ".join((command.help or "").partition("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".") + "."


class Commands(TyperGroup):
    """The toolkit's commands: grouped, with examples, headings in bold on a terminal."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, command in self.commands.items():
            command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[name])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each group."""
        longest = max(len(name) for name in self.commands)
        for title, names in GROUPS.items():
            with formatter.section(_heading(title)):
                formatter.write_dl([(f"{name:<{longest}}", summary(self.commands[name])) for name in names])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """How to begin; each command has its own."""
        formatter.write("\nExamples:\n  toolkit init\n  toolkit plan --help\n")


def _heading(title: str) -> str:
    return paint(title, "bold", coloured(sys.stdout))
