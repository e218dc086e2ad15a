"""What the product answers, written down, and two such recordings compared: a change that is to leave all answers as
they are does, or shows which it changes.

    python -m tests.product_answers record BEFORE                     all but verdicts; some minutes
    python -m tests.product_answers record AFTER --as BEFORE          another version is asked the same
    python -m tests.product_answers compare BEFORE AFTER              exit 1 where answers differ, each with its lines
    python -m tests.product_answers record BEFORE --only verdicts     60 verdicts and first losses: some ten minutes
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from product_answers.inputs import make_inputs
from toolkit.errors import ToolkitError


def config(recipe: str) -> Any:
    from toolkit.launch.files import launch_files
    from toolkit.recipe.load import validate
    from toolkit.recipe.positions import parse
    from toolkit.strategies import resolve

    resolved = resolve(validate(parse(recipe, "recipe.yaml")), "recipe.yaml", device="cpu")
    return launch_files(resolved, "out", "recipe.yaml") | {"resolved": "\n".join(map(str, resolved.decisions))}


def plan(asked: list[str]) -> Any:
    from toolkit import api

    Path("recipe.yaml").write_text(asked[0], encoding="utf-8")
    return _lasting(api.plan("recipe.yaml", ["machine.device=cuda"], gpu=asked[1]).to_json())


def bad(override: str) -> Any:
    from toolkit.recipe.load import recipe_from
    from toolkit.strategies import resolve

    Path("recipe.yaml").write_text(_PLAIN, encoding="utf-8")
    resolve(recipe_from("recipe.yaml", [override]), "recipe.yaml", device="cpu")
    return "taken"


def lint(files: dict[str, str]) -> Any:
    from toolkit import api

    return _lasting(api.lint(_put(files)).to_json())


def migrate(asked: list[Any]) -> Any:
    from toolkit import api

    return _lasting(api.migrate(_put(asked[0]), asked[1]).to_json())


def import_config(text: str) -> Any:
    from toolkit import api

    name = "run.sh" if text.lstrip().startswith(("#!", "swift", "torchrun", "accelerate")) else "config.yaml"
    return _lasting(api.import_config(_put({name: text})).to_json())


def help_text(command: str) -> Any:
    from typer.testing import CliRunner

    from toolkit.cli import app

    return CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "120", "TERM": "dumb"}).output


def verdict(recipe: str) -> Any:
    from toolkit.launch.group import WorkerGroup
    from toolkit.recipe.load import validate
    from toolkit.recipe.positions import parse
    from toolkit.strategies import resolve
    from toolkit.verification.run import verify

    resolved = resolve(validate(parse(recipe, "recipe.yaml")), "recipe.yaml", device="cpu")
    group = _GROUPS.setdefault(resolved.world_size, WorkerGroup(resolved.world_size, log=_LOG))
    outcome = verify(resolved, group=group, stop_early=True, round_trip=False)
    losses = [micro.loss for found in outcome.passes for rank in found.ranks[:1]
              for step in rank.run.steps[:1] for micro in step.micros]  # fmt: skip
    return [outcome.verdict, losses]


_GROUPS: dict[int, Any] = {}
_LOG = Path(tempfile.gettempdir()) / "answers.log"
KINDS: dict[str, Callable[[Any], Any]] = {
    "config": config, "plan": plan, "bad": bad, "lint": lint, "migrate": migrate, "import": import_config,
    "help": help_text, "verdicts": verdict,
}  # fmt: skip


_PLAIN = """
model: {config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 300}}
tokenizer: {path: none}
data: {train: rows.jsonl}
batch: {micro_size: 2}
machine: {device: cpu, processes: 2}
strategy: {name: fsdp2}
run: {max_steps: 5, output_dir: run}
"""
_VOLATILE = ("seconds", "started", "versions", "toolkit", "toolkit_version", "run_id", "finished", "created")


def _lasting(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in _VOLATILE}


def _put(files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    return list(files)


def answer(kind: str, question: Any) -> Any:
    """The answer, or the message of the error that a user sees; what is no error for users is one here, by its name."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        try:
            found = KINDS[kind](question)
        except ToolkitError as error:
            found = f"exit {error.exit_code}: {error}"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        text = json.dumps(found, default=str, ensure_ascii=False).replace(folder, "FOLDER")
    return json.loads(re.sub(r"0x[0-9a-f]{6,}", "0x", text))


def record(target: Path, like: Path | None, only: list[str]) -> None:
    """Raises OSError where ``target`` cannot be written."""
    target.mkdir(parents=True, exist_ok=True)
    source = (like or target) / "inputs.json"
    inputs = json.loads(source.read_text(encoding="utf-8")) if source.exists() else make_inputs()
    (target / "inputs.json").write_text(json.dumps(inputs, indent=1), encoding="utf-8")
    try:
        for kind in only:
            started = time.monotonic()
            answers = {name: answer(kind, question) for name, question in inputs[kind].items()}
            (target / f"{kind}.json").write_text(json.dumps(answers, indent=1, ensure_ascii=False), encoding="utf-8")
            print(f"{kind:10} {len(answers):5} answers {time.monotonic() - started:6.0f} s", flush=True)
    finally:
        for group in _GROUPS.values():
            group.close()


def compare(before: Path, after: Path) -> int:
    """The number of answers that differ, each printed with the lines that do."""
    count = 0
    for kind in KINDS:
        files = before / f"{kind}.json", after / f"{kind}.json"
        if not all(file.exists() for file in files):
            print(f"{kind:10} not in both")
            continue
        old, new = (json.loads(file.read_text(encoding="utf-8")) for file in files)
        changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        print(f"{kind:10} {len(changed)} of {len(old)} differ")
        count += len(changed)
        for name in changed:
            lines = (json.dumps(one.get(name), indent=1, ensure_ascii=False).splitlines() for one in (old, new))
            print("\n".join([f"--- {kind} {name}", *list(difflib.unified_diff(*lines, n=0, lineterm=""))[2:]]))
    return count


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="ask everything, and write the answers")
    recording.add_argument("target", type=Path)
    recording.add_argument("--as", dest="like", type=Path, help="a recording, whose questions are asked again")
    recording.add_argument("--only", nargs="+", choices=KINDS, default=[kind for kind in KINDS if kind != "verdicts"])
    comparing = commands.add_parser("compare", help="two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    asked = parser.parse_args(arguments)
    if asked.command == "compare":
        return int(compare(asked.before, asked.after) > 0)
    record(asked.target.absolute(), asked.like and asked.like.absolute(), asked.only)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
