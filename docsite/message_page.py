"""The page that lists every message, with a link to its entry in troubleshooting where it has one."""

from __future__ import annotations

from itertools import groupby

from docsite.messages import ROOT, VALUE, listed, messages, raised_as

_HEAD = f"""\
# Messages

Every error message of the commands, extracted from the sources. `{VALUE}` stands for a part that varies: a file and its
line, a key, a value, a reason. Exit status 2: the input cannot be used; 1: a run failed or a check did not pass. Each
message states what to do; [troubleshooting](../troubleshooting.md) explains common ones.

Not in this list: findings of the linter ([one page per rule](rules/index.md)), verdicts of `toolkit verify`
([faults](faults.md)), and reasons that are inserted into a message.
"""


def pages() -> dict[str, str]:
    """Markdown by path within the site."""
    known = messages()
    explained = {
        message: entry
        for entry in listed((ROOT / "docs/troubleshooting.md").read_text())
        for message in raised_as(entry, known)
    }
    parts = [_HEAD]
    for area, found in groupby(sorted(known, key=lambda m: m.area), key=lambda m: m.area):
        parts += [f"## {area}\n", "| exit | message | |", "| --- | --- | --- |"]
        for message in found:
            more = f"[more](../troubleshooting.md#{anchor(explained[message])})" if message in explained else ""
            parts.append(f"| {message.status} | {_code(message.text)} | {more} |")
        parts.append("")
    return {"reference/messages.md": "\n".join(parts)}


def anchor(entry: str) -> str:
    """The anchor of an entry's heading, as the site's Markdown makes it."""
    from markdown.extensions.toc import slugify

    return str(slugify(entry, "-"))


def _code(text: str) -> str:
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"
