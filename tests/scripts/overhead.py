"""What recording costs: pairs of the same run, without and with it, interleaved.

    python -m tests.scripts.overhead [--pairs 5] [--steps 40] [--hidden 256] [--rows 8]

Time is the process's CPU time (other processes of the machine do not count), of the training loop: the recorded steps,
the steps after them, and all, with what the recorder does at the first sight of the model and at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECORDED = 3

SCRIPT = """
import json, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM

steps, hidden, rows, file = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4,
                                     num_attention_heads=4, vocab_size=4096))
draw = torch.Generator().manual_seed(0)
ids = torch.randint(0, 4096, (steps, rows, 256), generator=draw)
model(input_ids=ids[0], labels=ids[0]).loss.backward()
model.zero_grad()
begun = time.process_time()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
took, losses = [], []
for batch in ids:
    before = time.process_time()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    took.append(time.process_time() - before)
    losses.append(loss.item())
print(json.dumps({"steps": took, "all": time.process_time() - begun, "losses": losses}), file=open(file, "w"))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8, help="of 256 tokens, in a step")
    given = parser.parse_args()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        for pair in range(given.pairs):
            found = {}
            for how in ("plain", "recorded") if pair % 2 else ("recorded", "plain"):
                file = folder / f"{how}.json"
                call = [sys.executable, "train.py", str(given.steps), str(given.hidden), str(given.rows), str(file)]
                if how == "recorded":
                    call = [sys.executable, "-m", "toolkit", "record", "-o", "recording", "--", *call]
                subprocess.run(call, cwd=folder, env=environment, check=True, capture_output=True)
                found[how] = json.loads(file.read_text(encoding="utf-8"))
            assert found["plain"]["losses"] == found["recorded"]["losses"], "recording changed the run"
            first, later = slice(0, RECORDED), slice(RECORDED + 1, None)

            def share(part: slice, pair: dict[str, dict] = found) -> float:
                return sum(pair["recorded"]["steps"][part]) / sum(pair["plain"]["steps"][part]) - 1

            rows.append((share(first), share(later), found["recorded"]["all"] / found["plain"]["all"] - 1))
            print(" ".join(f"{value:+.1%}" for value in rows[-1]), flush=True)
    names = ("recorded steps", "later steps", f"the loop of {given.steps} steps")
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        print(f"{name}: median {statistics.median(values):+.1%}, {min(values):+.1%} to {max(values):+.1%}")


if __name__ == "__main__":
    main()
