"""A page for each lint rule: its reason, an example that fails with what the linter prints, one that passes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from toolkit.linting.engine import check
from toolkit.linting.evidence import holds_for
from toolkit.linting.files.load import load
from toolkit.linting.fix import diff, plan
from toolkit.linting.model import Files, Rule
from toolkit.linting.output.text import show
from toolkit.linting.registry import all_rules

# The letters of a code: what the rules are about. tests/docs/test_site.py checks that each has a name here.
FAMILIES = {
    "AC": "Accelerate configs",
    "AU": 'values of "auto"',
    "DS": "DeepSpeed configs",
    "DC": "transformers' DistributedConfig",
    "FA": "FSDP in the training arguments",
    "FS": "FSDP in an Accelerate config",
    "KY": "any file",
    "LR": "LoRA and other adapters",
    "LT": "launch and topology",
    "MM": "memory and speed",
    "SV": "saving",
    "TA": "training arguments",
    "TR": "arguments of TRL",
    "XL": "between files",
}
_LANGUAGE = {".yaml": "yaml", ".json": "json", ".sh": "bash"}


def family(code: str) -> str:
    """The letters of a code."""
    return code.rstrip("0123456789")


def pages() -> dict[str, str]:
    """Markdown by path within the site: an index, and one page per rule."""
    rules = all_rules()
    made = {f"reference/rules/{code}.md": page(rule) for code, rule in rules.items()}
    return {"reference/rules/index.md": index(rules)} | made


def index(rules: dict[str, Rule]) -> str:
    lines = [
        "# Lint rules",
        "",
        f"`toolkit lint` has {len(rules)} rules. `toolkit explain CODE` prints the same text as a rule's page. "
        "How to run the linter and how to allow a finding: [check configuration files](../../lint.md).",
    ]
    for letters in dict.fromkeys(family(code) for code in rules):
        lines += ["", f"## {letters}: {FAMILIES[letters]}", "", "| code | severity | |", "| --- | --- | --- |"]
        chosen = (rule for code, rule in rules.items() if family(code) == letters)
        lines += [f"| [{r.code}]({r.code}.md) | {r.severity} | {_cell(r.title)} |" for r in chosen]
    return "\n".join(lines) + "\n"


def page(rule: Rule) -> str:
    printed, changes = outcome(rule)
    reader = f" --reader {rule.reader}" if rule.reader else ""
    parts = [
        f"# {rule.code}: {rule.title}",
        f"Severity: **{rule.severity}** · family: [{FAMILIES[family(rule.code)]}](index.md#{_anchor(rule.code)})",
        " ".join(rule.reason.split()),
        "## Fails",
        _files(rule.fails),
        f"`toolkit lint{reader} {' '.join(rule.fails)}` prints:",
        _fence("text", printed),
        *(["The safe fix, `--fix`:", _fence("diff", changes)] if changes else []),
        "## Passes",
        _files(rule.passes),
        f"**Source:** {_plain(rule.source)}",
        *([f"**Holds for** {'; '.join(versions)}."] if (versions := holds_for(rule.code)) else []),
        f"**To allow this finding** in YAML or shell: `# toolkit: allow {rule.code}` at the end of the line or on the "
        f'line above it; in JSON: the key `"//": "toolkit: allow {rule.code}"` in the section; on the command line: '
        f"`--ignore {rule.code}`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def outcome(rule: Rule) -> tuple[str, str]:
    """What the linter prints for the failing example, of this rule alone, and the fix as a diff."""
    with _in_folder(rule.fails):
        report = check(load(list(rule.fails)), reader=rule.reader, select=(rule.code,))
        fixed = plan(load(list(rule.fails)), reader=rule.reader, select=(rule.code,))
        return show(report), diff(fixed)


@contextlib.contextmanager
def _in_folder(files: Files) -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name, text in files.items():
                Path(name).write_text(text, encoding="utf-8")
            yield
        finally:
            os.chdir(before)


def _files(files: Files) -> str:
    return "\n\n".join(_fence(_LANGUAGE.get(Path(name).suffix, "text"), text, name) for name, text in files.items())


def _fence(language: str, text: str, title: str = "") -> str:
    head = f'{language} title="{title}"' if title else language
    body = text.replace("\ufeff", "<BOM>").rstrip("\n")
    return f"````{head}\n{body}\n````"


def _anchor(code: str) -> str:
    letters = family(code)
    return "".join(c for c in f"{letters}: {FAMILIES[letters]}".lower().replace(" ", "-") if c.isalnum() or c == "-")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Text that Markdown must not read: underscores and asterisks of key names, angle brackets."""
    for character in ("\\", "*", "_", "<", "[", "]"):
        text = text.replace(character, "\\" + character)
    return text
