"""How long a plan takes and how much memory, as a user meets it: a new process, imports included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                        "num_attention_heads": 64}  # fmt: skip
_RUN = """
import resource, subprocess, sys
status = subprocess.run([sys.executable, "-m", "toolkit", "plan", *sys.argv[1:]], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(status, used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


# Processor seconds, since a machine may be busy with other work. On two cores of 2.9 GHz 2.9 and 3.3 were measured,
# 2.2 of them imports of torch, transformers and peft. The bound is what is promised, times two for slower machines.
@pytest.mark.parametrize(("config", "seconds"), [(LLAMA_8B, 3.0), (LLAMA_70B, 5.0)], ids=["8b", "70b"])
def test_every_strategy_is_planned_in_seconds(tmp_path: Path, config: dict[str, Any], seconds: float) -> None:
    file, result = tmp_path / "config.json", tmp_path / "plan.json"
    file.write_text(json.dumps(config))
    options = [str(file), "--gpu", "h100", "--gpus", "8", "--lora", "16", "--length", "4096", "--json", str(result)]
    told = subprocess.run(
        [sys.executable, "-c", _RUN, *options], capture_output=True, text=True, check=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout.split()  # fmt: skip
    status, used, kib = int(told[0]), float(told[1]), int(told[2])
    assert status in (0, 1)
    found = {c["strategy"] for c in json.loads(result.read_text())["candidates"]}
    assert found == {"ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"}
    assert used < 2 * seconds
    assert kib < 2 * 2**20


def test_what_a_plan_has_no_use_for_is_not_imported(tmp_path: Path) -> None:
    """PEFT imports bitsandbytes wherever it is installed."""
    pytest.importorskip("bitsandbytes")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512}))
    job = (
        "import atexit, runpy, sys; "
        "atexit.register(lambda: print('found:', 'peft' in sys.modules, 'bitsandbytes' in sys.modules)); "
        "runpy.run_module('toolkit', run_name='__main__')"
    )
    options = ["plan", str(file), "--gpu", "h100", "--lora", "8", "--length", "64"]
    told = subprocess.run([sys.executable, "-c", job, *options], capture_output=True, text=True, timeout=120)
    assert told.stdout.splitlines()[-1] == "found: True False", told.stderr
