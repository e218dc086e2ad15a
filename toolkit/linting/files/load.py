"""Loads the given files, and the files that they refer to."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, Place
from toolkit.linting.files.json_reader import parse_json
from toolkit.linting.files.kinds import recognise
from toolkit.linting.files.script_arguments import reader_of
from toolkit.linting.files.shell_reader import parse_commands
from toolkit.linting.files.text import MAX_BYTES, read_text
from toolkit.linting.files.tree import Node, Source
from toolkit.linting.files.yaml_reader import parse_yaml

SHELL = (".sh", ".bash", ".sbatch", ".slurm")
_NAMES = (*SHELL, ".yaml", ".yml", ".json")
_KEYS = re.compile(rb"zero_optimization|distributed_type|train_(micro_)?batch_size|num_train_epochs|peft_type")
# Folders that hold other people's files or a program's own.
_SKIPPED = {"node_modules", "site-packages", "__pycache__"}


def walk(folder: str) -> list[str] | None:
    """Every file of a folder that may be a configuration, by name; None if it is not a folder.

    Hidden folders and files over 1 MB are left out.
    """
    if not folder or "\0" in folder or not os.path.isdir(folder):
        return None
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        found += [str(Path(root) / name) for name in sorted(names) if _usable(os.path.join(root, name))]
    return found


def is_for_a_launch(path: str) -> bool:
    """Whether a file that cannot be parsed has a key that decides a launch: then it is worth a message."""
    with open(path, "rb") as file:
        return _KEYS.search(file.read(MAX_BYTES)) is not None


def _usable(path: str) -> bool:
    return path.lower().endswith(_NAMES) and os.path.isfile(path) and os.path.getsize(path) <= MAX_BYTES


class UnrelatedFile(InputError):
    """No key and no command of accelerate, DeepSpeed, the training arguments or PEFT is in the file: an error when it
    is named, skipped when a hook passes it."""


# Where a file of one kind names a file of another.
FILE_KEYS: dict[str, dict[str, str]] = {
    "accelerate": {"deepspeed_config.deepspeed_config_file": "deepspeed"},
    "args": {"deepspeed": "deepspeed", "deepspeed_config": "deepspeed", "fsdp_config": "fsdp"},
    "tool": {"deepspeed": "deepspeed", "deepspeed_config": "deepspeed"},
    "launch": {"config_file": "accelerate", "deepspeed_config_file": "deepspeed"},
}


@dataclass
class Loaded:
    """The sources; the names of files that are written in one of them but are not there; files that cannot be used."""

    sources: list[Source] = field(default_factory=list)
    missing: list[tuple[Place, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    apart: bool = False  # from a folder: each file is checked alone


def load(files: list[str], command: str | None = None) -> Loaded:
    """Read everything that can be read; raises InputError with all the problems if nothing can."""
    loaded = Loaded()
    for file in files:
        found = walk(file)
        loaded.apart |= found is not None
        for path in [file] if found is None else found:
            try:
                loaded.sources.extend(read_sources(path))
            except InputError as error:
                if found is None or (not isinstance(error, UnrelatedFile) and is_for_a_launch(path)):
                    loaded.unread.extend(error.problems)
    if command is not None:
        try:
            loaded.sources.extend(_shell_sources(command, "<command>"))
        except InputError as error:
            loaded.unread.extend(error.problems)
    if loaded.unread and not loaded.sources:
        raise InputError(*dict.fromkeys(loaded.unread))
    _follow(loaded)
    return loaded


def read_sources(file: str, text: str | None = None) -> list[Source]:
    """One file's sources (two per command of a shell script). ``text`` replaces the contents on disk."""
    text = read_text(file) if text is None else text
    suffix = Path(file).suffix.lower()
    if suffix in SHELL or text.startswith("#!"):
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
    found = recognise(root, syntax)
    if found is None:
        raise UnrelatedFile.at(
            Place(file, 1),
            None,
            "not a configuration file: it has no key of accelerate, DeepSpeed, the training arguments or PEFT",
        )
    return [Source(file, found.kind, text, root, syntax, tool=found.tool, certain=found.certain)]


def _shell_sources(text: str, file: str) -> list[Source]:
    commands = parse_commands(text, None if file == "<command>" else str(Path(file).absolute().parent))
    if not commands:
        raise UnrelatedFile.at(Place(file, 1), None, "it has no accelerate launch, deepspeed or torchrun command")
    sources = []
    for number, command in enumerate(commands):
        flags = Source(file, "launch", text, command.flags, "shell", launcher=command.launcher, command=number)
        flags.unknown, flags.open = command.unknown_flags, command.open_flags
        sources.append(flags)
        if command.args.entries or command.unknown_arguments or command.open_arguments:
            who = reader_of(command)
            arguments = Source(file, who.kind, text, command.args, "shell", tool=who.tool, certain=who.certain)
            arguments.unknown, arguments.open = command.unknown_arguments, command.open_arguments
            arguments.command = number
            sources.append(arguments)
    return sources


def _follow(loaded: Loaded) -> None:
    """Read the files that the given ones name, once each."""
    known = {_identity(source.path): source.path for source in loaded.sources}
    queue = list(loaded.sources)
    while queue:
        source = queue.pop(0)
        for key, kind in FILE_KEYS.get(source.kind, {}).items():
            entry = source.entry(key)
            name = entry.node.value if entry is not None else None
            if entry is None or not isinstance(name, str) or not names_a_file(name):
                continue
            place = source.place(entry.start)
            path = _find(name, source.path)
            if path is None:
                if source.kind != "tool" or "/" in name or "." in name:  # else one of the tool's own presets
                    loaded.missing.append((place, name))
                continue
            if kind == "fsdp":
                continue
            source.names.append(known.get(_identity(path), path))
            if _identity(path) in known:
                continue
            known[_identity(path)] = path
            try:
                made = read_sources(path)
            except InputError as error:
                loaded.unread.extend(error.problems)
                continue
            for found in made:
                found.named_by = place
                loaded.sources.append(found)
                queue.append(found)


def names_a_file(value: str) -> bool:
    """Whether a value can be the name of a file: no JSON in place, and no variable that another program fills in."""
    return bool(value) and value not in ("none", "auto") and not value.startswith(("{", "$"))


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
