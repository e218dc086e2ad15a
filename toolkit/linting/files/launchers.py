"""Which words of a shell command start a launcher, and which only precede it."""

from __future__ import annotations

import re
from pathlib import PurePath

from toolkit.linting.files.shell_words import Word

# Programs with flags of their own before the script that they start.
LAUNCHERS = ("accelerate", "deepspeed", "torchrun")
_PROGRAMS = {"accelerate-launch": "accelerate", "deepspeed": "deepspeed", "torchrun": "torchrun"}
_MODULES = {
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
}
# Commands of tools that start the training themselves, by their first argument.
_SUBCOMMANDS: dict[str, tuple[str, set[str]]] = {
    "accelerate": ("accelerate", {"launch"}),
    "swift": ("swift", {"pt", "sft", "rlhf"}),
    "llamafactory-cli": ("llamafactory", {"train"}),
    "lmf": ("llamafactory", {"train"}),
    "trl": ("trl", {"sft", "dpo", "grpo", "reward", "rloo", "kto", "distillation"}),
    "axolotl": ("axolotl", {"train"}),
    "tune": ("torchtune", {"run"}),
}
# What may precede a command: the shell's own words, and programs that start another one.
_SHELL_WORDS = {"do", "then", "else", "elif", "if", "while", "until", "!", "{", "(", "time", "exec", "nohup", "command"}
_WRAPPERS = {
    "srun", "mpirun", "mpiexec", "uv", "poetry", "pipenv", "conda", "mamba", "micromamba", "env", "sudo", "numactl",
    "timeout", "nice", "stdbuf", "nsys", "coverage", "singularity", "apptainer", "eval", "setsid", "taskset", "ibrun",
}  # fmt: skip
_PYTHON = re.compile(r"python[\d.]*$")


def find_launcher(words: list[Word]) -> tuple[str, list[Word]] | None:
    """The launcher that a command starts, and the words behind it."""
    index = 0
    while index < len(words):
        text = words[index].text
        here = _at(words, index)
        if here is not None:
            return here
        name = PurePath(text).name if text else ""
        if name in _WRAPPERS:
            return _behind_wrapper(words, index + 1)
        before = text in _SHELL_WORDS or re.match(r"[A-Za-z_]\w*=", text) or text.endswith(")")
        if not before:
            return None
        index += 1
    return None


def _behind_wrapper(words: list[Word], index: int) -> tuple[str, list[Word]] | None:
    """The first launcher behind a program that starts it; none in `uv pip install deepspeed`."""
    for later in range(index, len(words)):
        if words[later].text in ("pip", "install", "add", "sync", "lock"):
            return None
        found = _at(words, later)
        if found is not None:
            return found
        if _PYTHON.match(PurePath(words[later].text).name):
            return None  # a script of its own: it decides what becomes of the words behind it
    return None


def _at(words: list[Word], index: int) -> tuple[str, list[Word]] | None:
    """The launcher that begins at a word."""
    name = PurePath(words[index].text).name if words[index].text else ""
    following = [word.text for word in words[index + 1 : index + 2]]
    if name in _SUBCOMMANDS:
        launcher, commands = _SUBCOMMANDS[name]
        return (launcher, words[index + 2 :]) if following and following[0] in commands else None
    if name in _PROGRAMS:
        return _PROGRAMS[name], words[index + 1 :]
    if _PYTHON.match(name):
        for later in range(index + 1, len(words) - 1):
            if words[later].text == "-m":
                launcher = _MODULES.get(words[later + 1].text, "")
                return (launcher, words[later + 2 :]) if launcher else None
            if not words[later].text.startswith("-"):
                return None
    return None
