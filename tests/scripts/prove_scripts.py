"""Runs other projects' scripts under `toolkit prove`, as they are, on tiny models and made data.

    python -m tests.scripts.prove_scripts FOLDER [--only NAME] [--strategy S] [-o table.md]

FOLDER holds a checkout of each project, under the project's name. ``--environments`` holds the virtual environments of
tools that need other versions, each with this toolkit in it. A result that is there already is kept; the table is
written from all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.cases import SCRIPTS, Script
from scripts.inputs import make_inputs

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 240


def command(script: Script, strategy: str, folder: Path) -> list[str]:
    """How a user launches it."""
    project = folder / script.project
    path = project / script.path
    named = str(path) if path.exists() else script.path
    if (own := script.launch.get(strategy)) is not None:
        own = own.replace("{file}", named).replace("{arguments}", script.arguments)
        return shlex.split(own.replace("{project}", str(project)))
    file = [str(path), *shlex.split(script.arguments)]
    if strategy == "single":
        return ["python", *file]
    if strategy == "ddp":
        return ["torchrun", "--nproc_per_node", "2", *file]
    if strategy == "deepspeed":
        return ["deepspeed", "--num_accelerators", "2", "--bind_cores_to_rank", *file][:3] + file
    return ["accelerate", "launch", "--config_file", f"{strategy}.yaml", *file]


def prove(script: Script, strategy: str, folder: Path, work: Path, result: Path, bins: Path) -> dict[str, Any]:
    environment = os.environ | {
        "PATH": os.pathsep.join([str(bins), os.environ["PATH"]]), "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "HF_MODULES_CACHE": str(work / "modules"), "HF_DATASETS_CACHE": str(work / "cache"),
        "TOKENIZERS_PARALLELISM": "false", "NLTK_DATA": str(work / "nltk"),
    }  # fmt: skip
    call = [str(bins / "python"), "-m", "toolkit", "prove", "--stop", "--on-cpu", "--timeout", str(LIMIT_S), "--json",
            str(result), "--", *command(script, strategy, folder)]  # fmt: skip
    begun = time.perf_counter()
    with result.with_suffix(".log").open("wb") as log:
        code = subprocess.run(call, cwd=work, env=environment, stdout=log, stderr=log, check=False).returncode
    if not result.exists():
        last = result.with_suffix(".log").read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
        messages = [line for line in last.splitlines() if line.strip()]
        result.write_text(
            json.dumps({"verdict": "failed", "why": messages[-1] if messages else f"exit {code}"}), encoding="utf-8"
        )
    document = json.loads(result.read_text(encoding="utf-8"))
    document["runner_seconds"] = round(time.perf_counter() - begun, 1)
    return document


def row(script: Script, strategy: str, document: dict[str, Any]) -> str:
    if document["verdict"] == "failed":
        return f"| {script.project} | {named(script)} | {strategy} | not run | {reason(document['why'])} |"
    said = []
    for model in document["models"]:
        if model["diagnosis"]:
            said.append(model["diagnosis"]["cause"])
        elif model["first_difference"]:
            first = model["first_difference"]
            said.append(f"{first['stage']}: {first['tensor']}, off by {first['error']}")
        limit = next(
            (s["detection_limit"] for p in model["passes"] for s in p["stages"] if s["stage"] == "gradient"), None
        )
        said.append(f"{model['loss']}, detects {limit:.1e}" if limit else model["loss"])
        said += [short for note in model.get("notes", []) if (short := shortened(note))]
        said += [f"{one['claim']}: {one['seen']}" for one in model["engagement"] if not one["ok"]]
    return f"| {script.project} | {named(script)} | {strategy} | {document['verdict']} | {'; '.join(said)} |"


def named(script: Script) -> str:
    """The script, or the arguments of a tool's command, and what tells two rows of one script apart."""
    marks = {"--use_peft": "with LoRA", "--bf16 --use_cpu": "in bf16", "tuner_type full": "full", "hook bf16": "bf16",
             "--launcher python": ""}  # fmt: skip
    mark = next((text for sign, text in marks.items() if sign in script.arguments), "")
    path = script.path.split(" --")[0].removesuffix(".py").removesuffix(".yaml")
    short = "/".join(path.split("/")[-2:]) if path.endswith("/train") else path.rsplit("/", 1)[-1]
    return f"`{short}`" + (f" {mark}" if mark else "")


def reason(why: str) -> str:
    """Of the last line of a command that failed: its error, without where it ran."""
    message = re.sub(r"/\S*/(?=[\w.-]+)", "", why.split("exit status 1: ")[-1].split("nothing to record: ")[-1])
    message = re.sub(r"^rank \d+: ", "", message).replace("|", "/").strip()
    return message if len(message) <= 130 else message[:130].rsplit(" ", 1)[0] + " …"


def shortened(note: str) -> str:
    """A note of the verdict in the words of a table."""
    for text, short in (("the plain loop runs a copy", "copy of its own model"), ("not a cross-entropy", ""),
                        ("its step is not compared", "its step is not compared"),
                        ("multiplies its gradients", "gradients are divided after the backward passes"),
                        ("no strategy reduces", "no strategy reduces gradients")):  # fmt: skip
        if text in note:
            return f"{note.split(':')[0]}: {short}" if short == text else short
    return note


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--strategy", default="")
    parser.add_argument("--work", type=Path, default=Path("runs/scripts"))
    parser.add_argument("--environments", type=Path, default=Path("runs/environments"))
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    work = given.work.absolute()
    make_inputs(work)
    (work / "results").mkdir(exist_ok=True)
    rows = ["| project | script | strategy | verdict | |", "| --- | --- | --- | --- | --- |"]
    for at, script in enumerate(SCRIPTS):
        for strategy in script.strategies:
            same = [one for one in SCRIPTS[:at] if (one.project, one.name) == (script.project, script.name)]
            name = script.name.split(" --")[0].replace(" ", "-")
            result = work / "results" / f"{script.project}-{name}{len(same) or ''}-{strategy}.json"
            if result.exists():
                document = json.loads(result.read_text(encoding="utf-8"))
            elif given.only in f"{script.project}/{script.path}" and given.strategy in strategy:
                own = given.environments.absolute() / script.environment / "bin"
                bins = own if script.environment else Path(sys.executable).parent
                document = prove(script, strategy, given.folder.absolute(), work, result, bins)
                print(row(script, strategy, document), f"{document['runner_seconds']} s", flush=True)
            else:
                continue
            rows.append(row(script, strategy, document))
    if given.output:
        given.output.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
