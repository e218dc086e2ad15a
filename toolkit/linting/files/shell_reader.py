"""Launch commands of accelerate, DeepSpeed, torchrun and other tools, alone or inside a shell script."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from toolkit.linting import keys
from toolkit.linting.files.launchers import LAUNCHERS, find_launcher
from toolkit.linting.files.shell_words import Word, split
from toolkit.linting.files.tree import Entry, Node

# torchrun's flags come from torch, which we know no keys of: those that take no value.
_TORCHRUN_BARE = {"standalone", "no-python", "no_python", "m", "module", "run-path", "run_path"}


@dataclass(slots=True)
class Command:
    """One launcher call: its own flags, and the arguments of the script it starts.

    A flag whose value is not known is in ``unknown_flags`` or ``unknown_arguments``. ``open_…``: a variable may hold
    further ones.
    """

    launcher: str  # "accelerate", "deepspeed", "torchrun" or the name of a tool
    flags: Node
    script: str | None
    args: Node
    unknown_flags: dict[str, Entry] = field(default_factory=dict)
    unknown_arguments: dict[str, Entry] = field(default_factory=dict)
    open_flags: bool = False
    open_arguments: bool = False
    positional: list[Word] = field(default_factory=list)  # words before the script's first flag


def parse_commands(text: str, folder: str | None = None) -> list[Command]:
    """Every launcher call in a shell text. ``folder``: where the script is, if it is a file."""
    found = []
    for words in split(text, folder):
        begin = find_launcher(words)
        if begin is not None:
            found.append(_command(*begin, text))
    return found


def _command(launcher: str, words: list[Word], text: str) -> Command:
    known = keys.section(launcher, "flags") if launcher in ("accelerate", "deepspeed") else {}
    raw = keys.package(launcher)["sections"]["flags"] if known else {}
    start = words[0].start if words else len(text)
    command = Command(launcher, Node(start, start, entries={}), None, Node(start, start, entries={}))
    index = 0
    if launcher in LAUNCHERS:
        while index < len(words) and (words[index].text.startswith("-") or words[index].bare):
            index += _flag(command, words, index, raw)
        command.script = words[index].text if index < len(words) else None
        index += 1
    _arguments(command, words[index:])
    return command


def _flag(command: Command, words: list[Word], index: int, raw: dict[str, Any]) -> int:
    """Take one flag of the launcher; the number of words that it used."""
    word = words[index]
    if word.bare:
        command.open_flags = True
        return 1
    name, equals, value = word.text.lstrip("-").partition("=")
    facts = raw.get(name, {})
    takes = facts.get("takes", 0 if command.launcher == "torchrun" and name in _TORCHRUN_BARE else 1)
    dest = facts.get("dest", name.replace("-", "_"))
    if equals:
        _put(command.flags, command.unknown_flags, dest, word, [_after(word, value)])
    elif takes and index + 1 < len(words):
        _put(command.flags, command.unknown_flags, dest, word, [words[index + 1]])
        return 2
    else:
        _put(command.flags, command.unknown_flags, dest, word, [])
    return 1


def _arguments(command: Command, words: list[Word]) -> None:
    """`--key value`, `--key=value`, `--flag` and `--list a b`, as HfArgumentParser takes them."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_flag(word):
            if word.bare:
                command.open_arguments = True
            elif not command.args.entries and not command.unknown_arguments:
                command.positional.append(word)
            continue
        name, equals, value = word.text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if equals:
            _put(command.args, command.unknown_arguments, name, word, [_after(word, value)])
            continue
        values: list[Word] = []
        while index < len(words) and not _is_flag(words[index]):
            if values and words[index].bare:  # further values, or further flags
                break
            values.append(words[index])
            index += 1
        _put(command.args, command.unknown_arguments, name, word, values)


def _is_flag(word: Word) -> bool:
    return (word.text.startswith("--") and len(word.text) > 2 and not word.unknown) or _known_name(word)


def _known_name(word: Word) -> bool:
    """`--key=$VALUE`: the name is known."""
    return word.text.startswith("--") and "=" in word.text and "$" not in word.text.partition("=")[0]


def _after(word: Word, value: str) -> Word:
    return Word(value, word.end - len(value), word.end, word.unknown, word.expanded)


def _put(node: Node, unknown: dict[str, Entry], key: str, flag: Word, values: list[Word]) -> None:
    """Set a flag; a later one of the same name replaces it."""
    assert node.entries is not None
    if any(value.unknown for value in values):
        node.entries.pop(key, None)
        unknown[key] = Entry(key, flag.start, flag.end, Node(values[0].start, values[-1].end), merged=True)
        return
    unknown.pop(key, None)
    if len(values) > 1:
        items = [Node(v.start, v.end, _typed(v)) for v in values]
        content = Node(values[0].start, values[-1].end, items=items)
    else:
        content = (
            Node(values[0].start, values[0].end, _typed(values[0])) if values else Node(flag.start, flag.end, True)
        )
    # A value from a variable is written elsewhere in the script: it cannot be edited here.
    merged = flag.expanded or any(value.expanded for value in values)
    node.entries[key] = Entry(key, flag.start, flag.end, content, merged)


def _typed(word: Word) -> Any:
    lowered = word.text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(word.text)
    return word.text
