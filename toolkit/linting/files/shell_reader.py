"""`accelerate launch …`, `deepspeed …` and `torchrun …` command lines, alone or inside a shell script."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from toolkit.linting import keys
from toolkit.linting.files.tree import Entry, Node

_LAUNCHERS = {"accelerate-launch": "accelerate", "deepspeed": "deepspeed", "torchrun": "torchrun"}
# torchrun's flags come from torch, which we know no keys of: those that take no value.
_TORCHRUN_BARE = {"standalone", "no-python", "no_python", "m", "module", "run-path", "run_path"}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command and its span; ``unknown`` where the shell would put a variable in."""

    text: str
    start: int
    end: int
    unknown: bool = False


@dataclass(slots=True)
class Command:
    """One launcher call: its own flags, and the arguments of the script it starts."""

    launcher: str  # "accelerate", "deepspeed" or "torchrun"
    flags: Node
    script: str | None
    args: Node


def parse_commands(text: str) -> list[Command]:
    """Every launcher call in a shell text."""
    found = []
    for words in _split(text):
        begin = _launcher(words)
        if begin is not None:
            found.append(_command(*begin, text))
    return found


def _launcher(words: list[Word]) -> tuple[str, list[Word]] | None:
    for index, word in enumerate(words):
        name = PurePath(word.text).name if word.text else ""
        if name == "accelerate" and index + 1 < len(words) and words[index + 1].text == "launch":
            return "accelerate", words[index + 2 :]
        if name == "accelerate.commands.launch" and index and words[index - 1].text == "-m":
            return "accelerate", words[index + 1 :]
        # Only where a command may stand: `pip install deepspeed` starts nothing.
        if name in _LAUNCHERS and all(
            "=" in w.text or w.text in ("exec", "time", "nohup", "srun") for w in words[:index]
        ):
            return _LAUNCHERS[name], words[index + 1 :]
    return None


def _command(launcher: str, words: list[Word], text: str) -> Command:
    known = keys.section(launcher, "flags") if launcher != "torchrun" else {}
    raw = keys.package(launcher)["sections"]["flags"] if known else {}
    start = words[0].start if words else len(text)
    flags, index = Node(start, start, entries={}), 0
    while index < len(words) and words[index].text.startswith("-"):
        word = words[index]
        name, equals, value = word.text.lstrip("-").partition("=")
        facts = raw.get(name, {})
        takes = facts.get("takes", 0 if launcher == "torchrun" and name in _TORCHRUN_BARE else 1)
        dest = facts.get("dest", name.replace("-", "_"))
        if equals:
            _put(flags, dest, word, Word(value, word.end - len(value), word.end, word.unknown))
        elif takes and index + 1 < len(words):
            index += 1
            _put(flags, dest, word, words[index])
        else:
            _put(flags, dest, word, None)
        index += 1
    script = words[index].text if index < len(words) else None
    return Command(launcher, flags, script, _arguments(words[index + 1 :], start))


def _arguments(words: list[Word], start: int) -> Node:
    """`--key value`, `--key=value`, `--flag` and `--list a b`, as HfArgumentParser takes them."""
    node, index = Node(start, start, entries={}), 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.text.startswith("--") or len(word.text) < 3:
            continue
        name, equals, value = word.text[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            _put(node, name, word, Word(value, word.end - len(value), word.end, word.unknown))
            continue
        values = []
        while index < len(words) and not words[index].text.startswith("--"):
            values.append(words[index])
            index += 1
        _put(node, name, word, values[0] if values else None)
        if len(values) > 1:
            assert node.entries is not None
            items = [Node(v.start, v.end, _typed(v)) for v in values]
            node.entries[name].node = Node(values[0].start, values[-1].end, items=items)
    return node


def _put(node: Node, key: str, flag: Word, value: Word | None) -> None:
    assert node.entries is not None
    scalar = Node(flag.start, flag.end, True) if value is None else Node(value.start, value.end, _typed(value))
    if value is not None and value.unknown:
        return  # a shell variable: its value is unknown
    node.entries[key] = Entry(key, flag.start, flag.end, scalar)


def _typed(word: Word) -> Any:
    lowered = word.text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(word.text)
    return word.text


_TOKEN = re.compile(r"""\\\r?\n|[ \t\r]+|\n|&&|\|\||[;|&]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|[^\s;|&\\'"]+|.""", re.S)


def _split(text: str) -> list[list[Word]]:
    """The text's simple commands as words, by the shell's rules as far as launch scripts use them."""
    commands: list[list[Word]] = [[]]
    parts: list[str] = []
    start, unknown, position = -1, False, 0

    def finish(end: int) -> None:
        nonlocal start, unknown
        if start >= 0:
            commands[-1].append(Word("".join(parts), start, end, unknown))
        parts.clear()
        start, unknown = -1, False

    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None
        token, begin, position = match.group(), position, match.end()
        if token[0] in " \t\r" or token.startswith(("\\\n", "\\\r")):
            finish(begin)
        elif token in ("\n", ";", "|", "&", "&&", "||"):
            finish(begin)
            commands.append([])
        elif token[0] == "#" and start < 0:
            newline = text.find("\n", begin)
            position = newline if newline >= 0 else len(text)
        else:
            start = begin if start < 0 else start
            unknown |= ("$" in token and token[0] != "'") or "`" in token
            parts.append(token[1:-1] if token[0] in "'\"" and len(token) > 1 else token.lstrip("\\"))
    finish(len(text))
    return [words for words in commands if words]
