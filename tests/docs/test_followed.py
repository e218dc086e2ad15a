"""Pages that are followed: their blocks of code are written to files and their commands are run, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tiny import LLAMA, make_tokenizer, recipe_dict
from toolkit.recipe.starter import starter

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run(arguments: list[str], folder: Path, package: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])  # its python
    command = ["-m", "toolkit", *arguments[1:]] if arguments[0] == "toolkit" else arguments[1:]
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.timeout(900)
def test_a_script_of_ones_own_is_proven(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorials/prove-your-script.md").read_text()
    script = tmp_path / "train.py"
    verdicts = []
    for language, title, body in BLOCK.findall(text):
        if title == "train.py":
            script.write_text(body)
        elif title == "loop.py":
            before, _, _ = script.read_text().partition("\nfor batch in batches(8):\n")
            script.write_text(f"{before}\n{body}")
        elif language == "sh":
            for line in body.splitlines():
                done = run(line.split(), tmp_path)
                if line.startswith("toolkit"):
                    verdicts.append((done.returncode, done.stdout))
                else:
                    assert done.returncode == 0, done.stderr[-2000:]
    (wrong, message), (right, proven) = verdicts
    assert (wrong, right) == (1, 0)
    assert "the loss is averaged per micro-batch, not per supervised token" in message
    assert "equivalent" in proven


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.timeout(900)
def test_the_page_on_adding_a_fault_adds_one(tmp_path: Path, tiny_root: Path) -> None:
    shutil.copytree(ROOT / "toolkit", tmp_path / "package/toolkit", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "docs/how-to/add-fault.md").read_text()
    ((_, path, body),) = (block for block in BLOCK.findall(text) if block[0] == "python")
    (tmp_path / "package" / path).write_text(body)
    recipe = recipe_dict(tiny_root, run={"output_dir": "runs/fault"}, strategy={"name": "single"})
    recipe["machine"] = {"device": "cpu", "processes": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = next(line for block in BLOCK.findall(text) for line in block[2].splitlines() if "--fault" in line)
    done = run(command.split(), tmp_path, tmp_path / "package")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different  at schedule" in done.stdout


def follow(page: Path, folder: Path, commands: tuple[str, ...]) -> str:
    """Write the recipe of a page, run those of its commands, and check each one's exit status; what they print.

    A command is expected to succeed, unless the comment after it says «exit status N».
    """
    printed = []
    for language, title, body in BLOCK.findall(page.read_text()):
        if title == "recipe.yaml":
            (folder / title).write_text(body)
        for line in body.splitlines() if language == "sh" else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["toolkit"] and words[1] in commands:
                expected = re.search(r"# exit status (\d)", line)
                done = run(words, folder)
                assert done.returncode == (int(expected.group(1)) if expected else 0), line + done.stdout + done.stderr
                printed += [done.stdout, done.stderr]
    return "\n".join(printed)


FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$|`(toolkit [^\s`]+ [^`\n]+)`', re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/quickstart.md", "docs/tutorials/lora-one-gpu.md", "docs/tutorials/two-nodes.md")
"""What a newcomer follows; the third tutorial has a test of its own, above."""

IN_PLACE = {
    r"HuggingFaceTB/SmolLM2-135M-Instruct|Qwen/Qwen3-8B": "small",
    r"max_steps: 500": "max_steps: 2",
    r"^(DS_BUILD_OPS=0 )?pip install .*|^python3 -m venv .*|^make (demo|test) .*": None,  # tests/install; themselves
    r"^sbatch .*|^launch(-zero3)?/launch-hosts\.sh .*|^NODE_RANK=.*": None,  # nodes: tests/launch
}
"""What is run in place of what a page says: a model of the same type for one to download, fewer steps, and nothing for
lines that install or need several nodes."""

OWN_FILES = {
    "accelerate.yaml": (ROOT / "ds_configs/zero3/accelerate.yaml")
    .read_text()
    .replace("ds_configs/zero3/deepspeed", "ds_zero3"),
    "ds_zero3.json": json.dumps(
        {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "gradient_accumulation_steps": 4,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        },
        indent=2,
    ),
    "axolotl.yaml": """\
base_model: small
datasets: [{path: data/train.jsonl, ds_type: json, type: chat_template, field_messages: messages}]
val_set_size: 0.05
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 1
num_epochs: 1
learning_rate: 0.0002
bf16: true
sequence_len: 512
""",
}
"""What README takes to be the reader's."""
OWN_FILES["train.py"] = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("small")
tokenizer.pad_token = tokenizer.eos_token


def encode(row):
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    ids = tokenizer(text, truncation=True, max_length=16, padding="max_length")
    return {**ids, "labels": ids["input_ids"]}


rows = load_dataset("json", data_files="data/train.jsonl", split="train").map(encode, remove_columns="messages")
arguments = TrainingArguments("out", per_device_train_batch_size=2, max_steps=3, use_cpu=True, report_to="none")
Trainer(AutoModelForCausalLM.from_pretrained("small"), arguments, train_dataset=rows).train()
"""
DIFFERS = "toolkit import"
"""Ends with status 1 where the recipe does not train the same, and says what differs."""
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def small_model(folder: Path) -> None:
    """A Llama of two layers with a tokenizer that has a chat template."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"max_position_embeddings": 8192}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)


def in_place(text: str, used: set[str]) -> str:
    """``text`` with what is run in its place."""
    for pattern, other in IN_PLACE.items():
        text, count = re.subn(pattern, other or "", text, flags=re.MULTILINE)
        used |= {pattern} if count else set()
    return text


def lines_of(page: str, folder: Path, used: set[str]) -> Iterator[list[str]]:
    """The commands of a page, in their order, each split into words; its files are written as they come."""
    for language, title, body, inline in FENCE.findall((ROOT / page).read_text()):
        body = in_place(body, used)
        if inline:
            yield shlex.split(in_place(inline, used))
        elif title or language == "yaml":
            (folder / (title or "recipe.yaml")).write_text(body)
        elif language == "python":
            yield ["python", "-c", body]
        elif language in ("sh", ""):
            yield from (words for line in body.splitlines() if (words := shlex.split(line, comments=True)))


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs_in_order_in_one_folder(page: str, tmp_path: Path) -> None:
    small_model(tmp_path / "small")
    (tmp_path / "data").mkdir()
    row = {"messages": [{"role": "user", "content": "a model"}, {"role": "assistant", "content": "the gradient of"}]}
    rows = [row | {"messages": [*row["messages"][:1], {"role": "assistant", "content": f"{n} of"}]} for n in range(60)]
    (tmp_path / "data/train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for name, text in OWN_FILES.items():
        (tmp_path / name).write_text(text)
    commands = 0
    for words in lines_of(page, tmp_path, set()):
        done = run(words, tmp_path)
        commands += words[0] == "toolkit"
        right = (0, 1) if shlex.join(words).startswith(DIFFERS) else (0,)
        assert done.returncode in right, f"{page}: {shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert commands >= 3


def test_what_is_run_in_place_of_a_page_is_still_on_one(tmp_path: Path) -> None:
    used: set[str] = set()
    for page in PAGES:
        assert list(lines_of(page, tmp_path, used))
    assert used == set(IN_PLACE)


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.timeout(900)
def test_a_newcomer_with_readme_and_an_empty_folder_gets_to_a_trained_adapter(tmp_path: Path) -> None:
    """Without data: what `toolkit train` says of it has a row to copy. The model is the small one, for the hub's."""
    small_model(tmp_path / "small")
    used: set[str] = set()
    commands = [words for words in lines_of("README.md", tmp_path, used) if "recipe.yaml" in words or "export" in words]
    stopped = run(["toolkit", "train", "recipe.yaml"], tmp_path)
    assert stopped.returncode == 2, stopped.stderr
    (row,) = re.findall(
        r"data/train\.jsonl does not exist .*; expected a row a line, for example (\{.*\})$", stopped.stderr
    )
    (tmp_path / "data").mkdir()
    rows = [row.replace("1 plus 1", f"{number} plus 1") for number in range(60)]
    (tmp_path / "data/train.jsonl").write_text("\n".join(rows))
    assert [words[1] for words in commands] == ["plan", "train", "verify", "export"]
    for words in commands:
        done = run(words, tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "my-adapter/adapter_config.json").exists()


def test_readme_shows_what_init_writes() -> None:
    text = (ROOT / "README.md").read_text()
    shown = next(body for language, _, body in BLOCK.findall(text) if language == "yaml")
    answers = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "data": "data/train.jsonl", "format": "messages",
               "eval": "0.05", "lora": 16, "processes": 2, "strategy": "zero2", "precision": "bf16",
               "steps": 500}  # fmt: skip
    assert shown == starter(answers)


FAMILY = ROOT / "docs/how-to/add-model-family.md"


def quoted(number: int) -> str:
    """A block of text of the page, with single spaces."""
    return " ".join(
        [body for language, _, body in BLOCK.findall(FAMILY.read_text()) if language == "text"][number].split()
    )


@pytest.mark.usefixtures("launches")
def test_a_new_family_shows_its_block_and_is_refused_with_a_reason(tmp_path: Path) -> None:
    printed = " ".join(follow(FAMILY, tmp_path, ("config",)).split())
    assert quoted(0) in printed
    assert quoted(1) in printed
    assert quoted(3) in printed


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.timeout(1200)
def test_the_page_on_adding_a_family_verifies_one(tmp_path: Path) -> None:
    printed = follow(FAMILY, tmp_path, ("verify", "plan"))
    assert quoted(2) in " ".join(printed.split())
    assert printed.count("\nequivalent") == 3
    assert "blocks recomputed 2 blocks" in printed
    assert "tensors that train 16" in printed
    assert "plan  gpt_oss" in printed
