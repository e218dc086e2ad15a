"""`python -m tools.lint_keys.history WHEEL...`: arguments that earlier versions of a package had.

The wheels are read as text: nothing of them is installed or imported. The result, `history.json`, has every argument
that the newest known version lacks, with the last of the given versions that has it and the first that does not.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

# Which dataclass of a wheel is which section, by the end of its file's path.
_CLASSES = {
    "transformers": {
        "transformers/training_args.py": {"TrainingArguments": ""},
        "transformers/training_args_seq2seq.py": {"Seq2SeqTrainingArguments": "seq2seq"},
    },
    "trl": {
        "sft_config.py": {"SFTConfig": "sft"},
        "dpo_config.py": {"DPOConfig": "dpo"},
        "grpo_config.py": {"GRPOConfig": "grpo"},
        "rloo_config.py": {"RLOOConfig": "rloo"},
        "reward_config.py": {"RewardConfig": "reward"},
        "kto_config.py": {"KTOConfig": "kto"},
        "model_config.py": {"ModelConfig": "model"},
        "scripts/utils.py": {"ScriptArguments": "script", "DatasetMixtureConfig": "script"},
        "commands/cli_utils.py": {"SFTScriptArguments": "script", "DPOScriptArguments": "script"},
        "utils.py": {"SFTScriptArguments": "script", "DPOScriptArguments": "script"},
    },
}


def fields(wheel: Path) -> Iterator[tuple[str, str]]:
    """Section and name of every field of the wheel's argument classes."""
    package = wheel.name.partition("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        for path in archive.namelist():
            classes = next((c for end, c in _CLASSES[package].items() if path.endswith(end)), None)
            if classes is None or "/experimental/" in path:
                continue
            for node in ast.parse(archive.read(path)).body:
                if isinstance(node, ast.ClassDef) and node.name in classes:
                    for item in node.body:
                        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                            name = item.target.id
                            if not name.startswith("_"):
                                yield classes[node.name], name


def history(wheels: list[Path], current: dict[str, dict[str, set[str]]]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """By package and section: each argument that ``current`` lacks, with the last version that has it and the next."""
    made: dict[str, dict[str, dict[str, list[str]]]] = {}
    for package in _CLASSES:
        mine = sorted((w for w in wheels if w.name.startswith(f"{package}-")), key=_version)
        names = [w.name.split("-")[1] for w in mine] + ["installed"]
        sections = made.setdefault(package, {})
        for wheel, name, later in zip(mine, names[:-1], names[1:], strict=True):
            for section, key in fields(wheel):
                if key not in current[package].get(section, set()):
                    sections.setdefault(section, {})[key] = [name, later]
    return {p: {s: dict(sorted(k.items())) for s, k in sorted(t.items())} for p, t in made.items()}


def _version(wheel: Path) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", wheel.name.split("-")[1])]


if __name__ == "__main__":
    from toolkit.linting import keys

    shared = set(keys.package("transformers")["sections"][""])
    now = {
        name: {section: set(table) | shared for section, table in keys.package(name)["sections"].items()}
        for name in _CLASSES
    }
    made = history([Path(name) for name in sys.argv[1:]], now)
    for name, table in made.items():
        newest = keys.versions(name)[-1]
        made[name] = {
            s: {k: [last, newest if gone == "installed" else gone] for k, (last, gone) in t.items()}
            for s, t in table.items()
        }
    target = Path(str(files(keys))) / "history.json"
    target.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {target.name}")
