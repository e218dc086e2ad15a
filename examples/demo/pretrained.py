"""Fine-tune SmolLM2-135M-Instruct with LoRA on two processes, through the same commands as a user.

The run is stopped in the middle and resumed. What the model answers before and after is computed by answers.py, with
plain transformers and PEFT.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from corpus import write_conversations
from steps import HERE, RECIPES, ROOT, say, started, toolkit

RECIPE = str(RECIPES / "smollm2-lora.yaml")
RUN = ROOT / "lora"
ADAPTER = ROOT / "adapter"
HELD_OUT = ROOT / "data/conversations-held-out.jsonl"
STOP_AT = 16
"""Steps of 38 after which the run is interrupted."""
LARGEST_DIFFERENCE = 1e-3
"""Of the held-out loss in the run and in plain transformers and PEFT: batches of other shapes round otherwise, by about
1e-5; a lost adapter or another template changes the first digits."""


def main(model: Path) -> None:
    say("1/7 data: functions of Python's standard library as questions, their docstrings as answers")
    counts = write_conversations(ROOT / "data")
    print("   " + ", ".join(f"{name} {count:,}" for name, count in counts.items()))
    say("2/7 the model before training, in plain transformers")
    before = answers(str(model))
    say("3/7 does it fit?")
    toolkit("plan", RECIPE)
    say("4/7 does the recipe compute what a plain PyTorch loop computes? Proved on a small twin of the model")
    toolkit("verify", RECIPE)
    say(f"5/7 LoRA on two processes, stopped after step {STOP_AT} as by Ctrl-C, and resumed")
    train_and_stop()
    toolkit("train", RECIPE, "--resume")
    say("6/7 export")
    toolkit("export", str(RUN), "-o", str(ADAPTER))
    say("7/7 the model after training, in plain transformers and PEFT")
    after = answers(str(model), str(ADAPTER))
    print(f"   held-out loss: {before:.3f} before, {after:.3f} after")
    compare(before, after)


def answers(*paths: str) -> float:
    """Show answers of a model, with its adapter if there is one; returns its held-out loss."""
    model, *adapter = paths
    command = [sys.executable, str(HERE / "answers.py"), model, str(HELD_OUT), *adapter]
    loss = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := re.match(r"\s*held-out loss: (\S+)", line):
                loss = float(found[1])
    if process.returncode != 0 or loss is None:
        sys.exit(f"answers.py ended with exit status {process.returncode}")
    return loss


def train_and_stop() -> None:
    """Send the running training the signal of Ctrl-C, and wait until it has saved and ended."""
    process = subprocess.Popen(started("train", RECIPE))
    while process.poll() is None and steps_done() < STOP_AT:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    if (status := process.wait(timeout=600)) != 128 + signal.SIGINT:
        sys.exit(f"the interrupted training ended with exit status {status}, not {128 + signal.SIGINT}")


def steps_done() -> int:
    metrics = RUN / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def compare(before: float, after: float) -> None:
    """End with a message if the run's own evaluations are others, or if nothing was learned."""
    evaluations = [json.loads(line)["loss"] for line in (RUN / "eval.jsonl").read_text("utf-8").splitlines()]
    print(f"   the run's own evaluations: {evaluations[0]:.3f} before, {evaluations[-1]:.3f} after")
    pairs = ((before, evaluations[0]), (after, evaluations[-1]))
    if max(abs(plain - own) for plain, own in pairs) > LARGEST_DIFFERENCE:
        sys.exit("plain transformers and PEFT do not give the loss that the run gives")
    if after >= before:
        sys.exit("the fine-tune did not lower the held-out loss")
