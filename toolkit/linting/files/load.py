"""Loads the given files, and the files that they refer to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, Place
from toolkit.linting.files.json_reader import parse_json
from toolkit.linting.files.kinds import recognise
from toolkit.linting.files.shell_reader import parse_commands
from toolkit.linting.files.text import read_text
from toolkit.linting.files.tree import Node, Source
from toolkit.linting.files.unrelated import UnrelatedFile
from toolkit.linting.files.yaml_reader import parse_yaml

_SHELL = (".sh", ".bash", ".sbatch", ".slurm")

# Where a file of one kind names a file of another.
_NAMES: dict[str, dict[str, str]] = {
    "accelerate": {"deepspeed_config.deepspeed_config_file": "deepspeed"},
    "args": {"deepspeed": "deepspeed", "deepspeed_config": "deepspeed", "fsdp_config": "fsdp"},
    "launch": {"config_file": "accelerate", "deepspeed_config_file": "deepspeed"},
}


@dataclass
class Loaded:
    """The sources, and the names of files that are written in one of them but are not there."""

    sources: list[Source] = field(default_factory=list)
    missing: list[tuple[Place, str]] = field(default_factory=list)


def load(files: list[str], command: str | None = None) -> Loaded:
    """Read everything; raises InputError with all the problems at once."""
    loaded = Loaded()
    problems: list[str] = []
    for file in files:
        try:
            loaded.sources.extend(read_sources(file))
        except InputError as error:
            problems.extend(error.problems)
    if command is not None:
        loaded.sources.extend(_shell_sources(command, "<command>"))
    if problems:
        raise InputError(*problems)
    _follow(loaded)
    return loaded


def read_sources(file: str, text: str | None = None) -> list[Source]:
    """One file's sources (two per command of a shell script). ``text`` replaces the contents on disk."""
    text = read_text(file) if text is None else text
    suffix = Path(file).suffix.lower()
    if suffix in _SHELL or text.startswith("#!"):
        return _shell_sources(text, file)
    syntax = (
        "json"
        if suffix == ".json" or (suffix not in (".yaml", ".yml") and text.lstrip("\ufeff \t\r\n")[:1] == "{")
        else "yaml"
    )
    root = parse_json(text, file) if syntax == "json" else parse_yaml(text, file)
    if root.entries is None:
        raise UnrelatedFile.at(
            Place(file, 1),
            None,
            "expected a mapping of settings (accelerate YAML, DeepSpeed JSON, training arguments)",
        )
    kind = recognise(root)
    if kind is None:
        raise UnrelatedFile.at(
            Place(file, 1),
            None,
            "not a configuration file: it has no key of accelerate, DeepSpeed, the training arguments or PEFT",
        )
    return [Source(file, kind, text, root, syntax)]


def _shell_sources(text: str, file: str) -> list[Source]:
    commands = parse_commands(text)
    if not commands:
        raise UnrelatedFile.at(Place(file, 1), None, "it has no accelerate launch, deepspeed or torchrun command")
    sources = []
    for command in commands:
        sources.append(Source(file, "launch", text, command.flags, "shell", launcher=command.launcher))
        if command.args.entries:
            sources.append(Source(file, "args", text, command.args, "shell"))
    return sources


def _follow(loaded: Loaded) -> None:
    """Read the files that the given ones name, once each."""
    seen = {_identity(source.path) for source in loaded.sources}
    queue = list(loaded.sources)
    while queue:
        source = queue.pop(0)
        for key, kind in _NAMES.get(source.kind, {}).items():
            entry = source.entry(key)
            name = entry.node.value if entry is not None else None
            if (
                entry is None
                or not isinstance(name, str)
                or not name
                or name in ("none", "auto")
                or name.startswith("{")
            ):
                continue
            place = source.place(entry.start)
            path = _find(name, source.path)
            if path is None:
                loaded.missing.append((place, name))
                continue
            if _identity(path) in seen or kind == "fsdp":
                continue
            seen.add(_identity(path))
            for found in read_sources(path):
                found.named_by = place
                loaded.sources.append(found)
                queue.append(found)


def _find(name: str, beside: str) -> str | None:
    """A named file: from the working directory, as the packages look for it, else beside its namer."""
    for candidate in (Path(name), Path(beside).parent / name):
        try:
            if candidate.is_file():
                return str(candidate)
        except (OSError, ValueError):
            return None
    return None


def _identity(path: str) -> Any:
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError):
        return path


def empty(kind: str) -> Source:
    """A source of a kind that was not given: every look-up in it finds nothing."""
    return Source("", kind, "", Node(0, 0, entries={}))
