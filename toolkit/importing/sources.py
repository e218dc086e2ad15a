"""Finds the training configuration among the given files, and the files beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, Place
from toolkit.importing.draft import Written
from toolkit.linting.files.load import load, read_sources
from toolkit.linting.files.shell_reader import parse_commands
from toolkit.linting.files.text import read_text
from toolkit.linting.files.tree import Source

EXPECTED = "a training configuration of Axolotl, LLaMA-Factory, ms-swift, TRL, torchtune or the transformers Trainer"
# Launchers that take their arguments from a YAML file as first word.
_TAKES_A_FILE = ("llamafactory", "axolotl", "swift")


@dataclass
class Subject:
    """What to import: the arguments and the tool that reads them; ``beside``: launch files."""

    tool: str
    path: str
    written: dict[str, Written]
    beside: list[Source]
    script: str | None = None
    command: str | None = None
    """The tool's subcommand, such as sft."""
    open: Place | None = None
    """Where a shell variable may add arguments."""


def find(paths: list[str]) -> Subject:
    """The one training configuration of the files; raises InputError if there is none, or several."""
    for path in paths:
        if Path(path).is_dir():
            raise InputError.at(Place(path), None, f"a folder; expected {EXPECTED}")
    loaded = load(paths)
    if loaded.unread:
        raise InputError(*loaded.unread)
    sources = [*loaded.sources, *_named_configs(loaded.sources)]
    subjects = [source for source in sources if source.kind in ("args", "tool")]
    own = [source for source in subjects if source.named_by is None]
    if not own:
        kinds = ", ".join(sorted({source.kind for source in sources})) or "nothing that is known"
        raise InputError.at(Place(paths[0]), None, f"not {EXPECTED} (it is: {kinds})")
    files = list(dict.fromkeys(source.path for source in own))
    if len(files) > 1:
        raise InputError(
            f"{' and '.join(files)}: expected one training configuration, and at most launch files beside it"
        )
    if len(own) > 1:
        lines = ", ".join(str(source.place(source.root.start).line) for source in own)
        raise InputError.at(Place(files[0]), None, f"{len(own)} training commands, in lines {lines}; expected one")
    (first,) = own
    named = [source for source in subjects if source.named_by is not None and source.kind in ("args", "tool")]
    tool = _tool(first) or (_tool(named[0]) if named else "")
    if not tool:
        raise InputError.at(
            Place(first.path), None, f"no tool is known that reads these arguments; expected {EXPECTED}"
        )
    written: dict[str, Written] = {}
    for source in (*named, first):  # the command line overrides the file that it names
        written |= _written(source)
    beside = [source for source in sources if source.kind in ("accelerate", "deepspeed", "launch", "distributed")]
    where = first.place(first.root.start) if first.open else None
    return Subject(tool, first.path, written, beside, _script(first), _subcommand(first), where)


def _tool(source: Source) -> str:
    """The tool; the example scripts of transformers take no YAML, so that one with data sets is TRL's."""
    names_data = source.has("datasets") or source.has("dataset_name")
    return "trl" if source.tool == "trainer" and source.syntax == "yaml" and names_data else source.tool


def _written(source: Source) -> dict[str, Written]:
    if source.tool == "torchtune":
        return _flat(source)
    found = {key: Written(entry.node.plain(), source.place(entry.start)) for key, entry in source.section("").items()}
    hidden = {key: Written(None, source.place(entry.start), known=False) for key, entry in source.unknown.items()}
    return found | hidden


def _flat(source: Source) -> dict[str, Written]:
    """Keys with dots, as torchtune's command line writes them; `${key}` replaced by the value of that key."""
    found = {
        path: Written(entry.node.plain(), source.place(entry.start))
        for path, entry in source.walk()
        if entry.node.entries is None or not entry.node.entries
    }

    def filled(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        known = {f"${{{key}}}": str(item.value) for key, item in found.items() if isinstance(item.value, str)}
        for name, text in known.items():
            value = value.replace(name, text)
        return value

    return {path: Written(filled(item.value), item.place) for path, item in found.items()}


def _script(source: Source) -> str | None:
    if source.syntax != "shell":
        return None
    commands = parse_commands(source.text)
    return commands[source.command].script if source.command < len(commands) else None


def _subcommand(source: Source) -> str | None:
    """`swift sft`, or the name of the script that a launcher starts: `torchrun swift/cli/sft.py`."""
    script = _script(source)
    if script is not None:
        return Path(script).stem
    if source.syntax != "shell":
        return None
    before = source.text[: source.root.start].split()
    return before[-1] if before else None


def _named_configs(sources: list[Source]) -> list[Source]:
    """The YAML files that commands take their arguments from: `--config FILE` of TRL, `llamafactory-cli train FILE`."""
    found = []
    for source in sources:
        if source.syntax != "shell":
            continue
        names: list[Any] = [source.get("config")] if source.kind == "args" else []
        commands = parse_commands(source.text)
        command = commands[source.command] if source.command < len(commands) else None
        if source.kind == "launch" and command is not None and command.launcher in _TAKES_A_FILE:
            names += [word.text for word in command.positional[:1]]
        for name in names:
            for candidate in (Path(str(name)), Path(source.path).parent / str(name)):
                if isinstance(name, str) and candidate.is_file():
                    read = read_sources(str(candidate), read_text(candidate))
                    alone = not any(s.kind in ("args", "tool") and s.command == source.command for s in sources)
                    for item in read:
                        item.named_by = None if alone else source.place(source.root.start)
                    found += read
                    break
    return found
