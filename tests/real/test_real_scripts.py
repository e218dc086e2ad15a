"""`toolkit prove` on unmodified scripts that fine-tune a pretrained model. Last of the set: they need gigabytes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.usefixtures("launches")]

HEAD = """
import json, sys
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

folder, rows = sys.argv[1:3]
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
rows = [json.loads(line)["messages"] for line in open(rows)][:8]
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
common = dict(output_dir="out", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
              learning_rate=1e-3, report_to="none", save_strategy="no", use_cpu=True, bf16=False)
"""
SCRIPTS = {
    "trainer": """
from peft import get_peft_model

def collate(batch):
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in batch]
    made = tokenizer(texts, padding=True, truncation=True, max_length=96, return_tensors="pt")
    made["labels"] = made.input_ids.masked_fill(made.attention_mask == 0, -100)
    return made

data = Dataset.from_list([{"messages": row} for row in rows])
Trainer(model=get_peft_model(model, lora), args=TrainingArguments(remove_unused_columns=False, **common),
        train_dataset=data, data_collator=collate).train()
""",
    "sft": """
from trl import SFTConfig, SFTTrainer

data = Dataset.from_list([{"messages": row} for row in rows])
SFTTrainer(model=model, args=SFTConfig(max_length=96, gradient_checkpointing=False, **common), train_dataset=data,
           processing_class=tokenizer, peft_config=lora).train()
""",
    "dpo": """
from trl import DPOConfig, DPOTrainer

data = Dataset.from_list([{"prompt": row[:1], "chosen": row[1:], "rejected": rows[at - 1][1:]}
                          for at, row in enumerate(rows)])
DPOTrainer(model=model, args=DPOConfig(max_length=96, gradient_checkpointing=False, **common), train_dataset=data,
           processing_class=tokenizer, peft_config=lora).train()
""",
}
GIB = 8
"""What one of these may take; a machine that has less free skips it."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unmodified_script_is_proven(name: str, model: str, data: Path, tmp_path: Path) -> None:
    import psutil

    if name != "trainer":
        pytest.importorskip("trl")
    if psutil.virtual_memory().available < GIB * 2**30:
        pytest.skip(f"{GIB} GiB of free memory are needed")
    (tmp_path / "train.py").write_text(HEAD + SCRIPTS[name], "utf-8")
    command = [sys.executable, "train.py", model, str(data / "conversations.jsonl")]
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "prove", "-o", "recording", "--timeout", "900", "--", *command],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    print(done.stdout, f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.1f} GiB at most")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "equivalent" in done.stdout


def test_a_loop_that_records_itself_is_proven(model: str, data: Path, tmp_path: Path) -> None:
    """TRL computes its loss without logits, and the recorder asks for that of the labels."""
    pytest.importorskip("trl")
    body = SCRIPTS["sft"].replace("SFTTrainer(model", "trainer = SFTTrainer(model").replace(").train()", ")")
    ending = 'trainer.add_callback(Recorder("trace", trainer.model).callback())\ntrainer.train()\n'
    (tmp_path / "train.py").write_text(HEAD + "from toolkit import Recorder\n" + body + ending, "utf-8")
    for command in (
        ["train.py", model, str(data / "conversations.jsonl")], ["-m", "toolkit", "verify", "--trace", "trace"]
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "equivalent" in done.stdout
