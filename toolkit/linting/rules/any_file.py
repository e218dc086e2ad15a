"""KY: problems in any file, whichever program reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.linting.context import LintContext
from toolkit.linting.edits import strip
from toolkit.linting.examples import acc, args, ds, multi_gpu
from toolkit.linting.files.load import FILE_KEYS
from toolkit.linting.model import Diagnostic, Edit, Fix, Setting, Severity
from toolkit.linting.registry import rule

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE]\d+|[-+]?\d+[eE][-+]?\d+")


@rule(
    "KY101",
    "error",
    source="deepspeed 0.19.8 runtime/config_utils.py:dict_raise_error_on_duplicate_keys; Python json, PyYAML",
    fails=multi_gpu("num_processes: 4"),
    passes=multi_gpu(),
)
def written_twice(context: LintContext) -> Iterator[Diagnostic]:
    """A key is set twice.

    json and PyYAML silently keep the last value; DeepSpeed, if it opens the file itself, rejects
    it. With equal values nothing is lost, except where DeepSpeed opens the file.
    """
    for source in context.sources:
        for path, node in source.mappings():
            for lost in node.repeats:
                kept = node.entries[lost.key] if node.entries else lost
                line = source.place(kept.start).line
                key = f"{path}.{lost.key}" if path else lost.key
                equal = lost.node.plain() == kept.node.plain()
                yield Diagnostic(
                    Setting(source, key, lost),
                    f"duplicate key, set again in line {line}"
                    + (" to the same value" if equal else ": this value is silently dropped"),
                    severity="warning" if equal else None,
                )


@rule(
    "KY102",
    "error",
    source="Python json.load: «Unexpected UTF-8 BOM»; accelerate 1.15.0 utils/deepspeed.py:HfDeepSpeedConfig",
    fails={"ds.json": "\ufeff" + ds()["ds.json"]},
    passes=ds(),
)
def byte_order_mark(context: LintContext) -> Iterator[Diagnostic]:
    """A JSON file begins with a byte-order mark.

    The packages open it as plain UTF-8, and json rejects the mark: the run fails at startup.
    """
    for source in context.sources:
        if source.syntax == "json" and source.text.startswith("\ufeff"):
            fix = strip(source, 0, 1, "remove the byte-order mark")
            yield Diagnostic(None, "starts with a byte-order mark, which json rejects", fix, source=source)


@rule(
    "KY103",
    "error",
    source="PyYAML follows YAML 1.1 (https://yaml.org/type/float.html); transformers "
    "5.23.0 hf_argparser.py:parse_yaml_file",
    fails={"args.yaml": "output_dir: out\nlearning_rate: 2e-4\n"},
    passes={"args.yaml": "output_dir: out\nlearning_rate: 2.0e-4\n"},
)
def exponent_without_dot(context: LintContext) -> Iterator[Diagnostic]:
    """A number such as 2e-4 is text in YAML 1.1.

    PyYAML, which all three packages read YAML with, takes a number with an exponent only where it has a dot
    and a signed exponent: `2e-4` arrives as the text "2e-4" and fails where it is first compared. A warning for
    training arguments: TrlParser makes a number of it, HfArgumentParser does not.
    """
    for source in context.sources:
        if source.syntax != "yaml" or source.kind == "tool" or source.tool == "trl":
            continue
        severity: Severity | None = "warning" if source.kind == "args" else None
        for path, entry in source.walk():
            value = entry.node.value
            written = source.text[entry.node.start : entry.node.end]
            if isinstance(value, str) and value == written and _EXPONENT.fullmatch(value):
                better = _with_dot(value)
                edit = Edit(source.path, entry.node.start, entry.node.end, better)
                message = f"{value} is text to PyYAML, not a number; write {better}"
                yield Diagnostic(Setting(source, path, entry), message, Fix(f"write {better}", (edit,)), severity)


def _with_dot(text: str) -> str:
    mantissa, exponent = re.split("[eE]", text)
    mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
    return f"{mantissa}e{exponent if exponent[0] in '+-' else '+' + exponent}"


@rule(
    "KY104",
    "warning",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin; transformers 5.23.0 training_args.py:__post_init__",
    fails=acc(
        "distributed_type: DEEPSPEED",
        "num_processes: 2",
        "deepspeed_config:",
        "  deepspeed_config_file: gone.json",
    ),
    passes=args(),
)
def names_a_missing_file(context: LintContext) -> Iterator[Diagnostic]:
    """A referenced file does not exist.

    It is looked for from the working directory, as the packages do, and then beside the file that names it.
    What it holds could not be checked. A note where a shell variable that the script does not set names the file.
    """
    for command in context.sources:
        for key in FILE_KEYS.get(command.kind, {}):
            hidden = command.unknown.get(key)
            if hidden is not None:
                message = f"a shell variable names the file of {key}: its contents were not checked"
                yield Diagnostic(Setting(command, key, hidden), message, severity="note")
    for place, name in context.missing:
        source = next((s for s in context.sources if s.path == str(place.file)), None)
        setting = next(
            (
                Setting(s, path, entry)
                for s in context.sources
                if s is source or s.path == str(place.file)
                for path, entry in s.walk()
                if s.place(entry.start) == place
            ),
            None,
        )
        if setting is not None:
            yield Diagnostic(setting, f"{name} does not exist: its contents were not checked")
