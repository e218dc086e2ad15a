"""Edits at known positions: the rest of the file, its comments and its order do not change."""

from __future__ import annotations

import json
import shlex
from typing import Any

from toolkit.linting.files.tree import Entry, Node, Source
from toolkit.linting.model import Edit, Fix, Setting
from toolkit.recipe.yaml_text import scalar


def set_value(setting: Setting | None, value: Any, title: str | None = None) -> Fix | None:
    """Replace a scalar; None if the file cannot be edited there."""
    if setting is None or not _editable(setting) or setting.entry.node.entries is not None:
        return None
    node = setting.entry.node
    shown = render(value, setting.source.syntax)
    lead = " " if node.start == node.end and setting.source.text[node.start - 1 : node.start] == ":" else ""
    edit = Edit(setting.source.path, node.start, node.end, lead + shown)
    return Fix(title or f"set {setting.name}: {shown}", (edit,))


def rename(setting: Setting, name: str, title: str | None = None) -> Fix | None:
    """Another name for a key; None if that name is there already."""
    parent = setting.key.rpartition(".")[0]
    if not _editable(setting) or name in setting.source.section(parent):
        return None
    shown = json.dumps(name) if setting.source.text[setting.entry.start] == '"' else name
    if setting.source.syntax == "shell":
        shown = f"--{name}" + ("=" if setting.entry.node.end == setting.entry.end else "")
        return None
    edit = Edit(setting.source.path, setting.entry.start, setting.entry.end, shown)
    return Fix(title or f"rename to {name}", (edit,))


def remove(setting: Setting | None, title: str | None = None) -> Fix | None:
    """Remove a key and its value, with its line or comma."""
    if setting is None or not _editable(setting) or setting.source.syntax == "shell":
        return None
    parent = _parent(setting)
    span = _flow_span(setting, parent) if parent.flow else _block_span(setting, parent)
    if span is None:
        return None
    return Fix(title or f"remove {setting.name}", (Edit(setting.source.path, *span, ""),))


def add(source: Source, section: str, key: str, value: Any, title: str | None = None) -> Fix | None:
    """A new key at the end of a section (``""`` is the file itself)."""
    if source.syntax == "shell" or not source.path:
        return None
    entry = source.entry(section) if section else None
    node = entry.node if entry is not None else (None if section else source.root)
    if node is None or node.entries is None or (entry is not None and entry.merged) or key in node.entries:
        return None
    written = [e for e in node.entries.values() if not e.merged]
    if not written or len(written) != len(node.entries):
        return None
    last = max(written, key=lambda e: e.node.end)
    shown = render(value, source.syntax)
    if node.flow:
        name = json.dumps(key) if source.syntax == "json" else key
        newline = "\n" in source.text[node.start : last.start]
        lead = source.text[source.text.rfind("\n", 0, last.start) + 1 : last.start]
        lead = f",\n{lead}" if newline and not lead.strip() else ", "
        edit = Edit(source.path, last.node.end, last.node.end, f"{lead}{name}: {shown}")
    else:
        at = source.text.find("\n", max(last.node.end, last.end))
        at = len(source.text) if at < 0 else at
        column = (source.place(written[0].start).column or 1) - 1
        edit = Edit(source.path, at, at, f"\n{' ' * column}{key}: {shown}")
    return Fix(title or f"add {key}: {shown}", (edit,))


def both(*fixes: Fix | None, title: str | None = None) -> Fix | None:
    """Several fixes as one; None if one of them cannot be made."""
    made = [fix for fix in fixes if fix is not None]
    if len(made) != len(fixes):
        return None
    edits = tuple(edit for fix in made for edit in fix.edits)
    return Fix(title or ", ".join(fix.title for fix in made), edits)


def strip(source: Source, start: int, end: int, title: str) -> Fix:
    """Remove a range of text."""
    return Fix(title, (Edit(source.path, start, end, ""),))


def render(value: Any, syntax: str) -> str:
    """A value as the file's language writes it."""
    if syntax == "yaml":
        return scalar(value)
    return shlex.quote(value) if syntax == "shell" and isinstance(value, str) else json.dumps(value)


def apply(text: str, edits: list[Edit]) -> str:
    """The text with the edits made; of edits that touch each other the first is made, the rest wait."""
    result, done = [], 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        if edit.start < done:
            continue
        result += [text[done : edit.start], edit.text]
        done = max(edit.end, done)
    return "".join([*result, text[done:]])


def _editable(setting: Setting) -> bool:
    source = setting.source
    node = source.root
    if setting.entry.merged or not source.path or source.path.startswith("<"):
        return False
    for part in setting.key.split("."):
        entry = (node.entries or {}).get(part)
        if entry is None or entry.merged:
            return False
        # Behind an alias the text is elsewhere, and serves others too.
        if source.text[entry.node.start : entry.node.start + 1] == "*":
            return False
        node = entry.node
    return True


def _parent(setting: Setting) -> Node:
    parent = setting.key.rpartition(".")[0]
    entry = setting.source.entry(parent) if parent else None
    return entry.node if entry is not None else setting.source.root


def _flow_span(setting: Setting, parent: Node) -> tuple[int, int]:
    text, entry = setting.source.text, setting.entry
    start, end = entry.start, entry.node.end
    after = end
    while after < len(text) and text[after] in " \t\r\n":
        after += 1
    if text[after : after + 1] == ",":  # take the comma behind, and the white space up to the next key
        end = after + 1
        while end < len(text) and text[end] in " \t\r\n":
            end += 1
        return start, end
    before = start
    while before > parent.start and text[before - 1] in " \t\r\n":
        before -= 1
    if text[before - 1] == ",":  # the last of several: the comma in front goes
        return before - 1, end
    return start, end


def _block_span(setting: Setting, parent: Node) -> tuple[int, int] | None:
    text, entry = setting.source.text, setting.entry
    if len(parent.entries or {}) == 1:
        return None  # an empty block mapping is another value: null
    start = text.rfind("\n", 0, entry.start) + 1
    if text[start : entry.start].strip():
        return None  # `- key: value` or `? key`: the line holds more than the key
    end = text.find("\n", max(_last(entry), entry.end))
    return start, len(text) if end < 0 else end + 1


def _last(entry: Entry) -> int:
    return entry.node.end
