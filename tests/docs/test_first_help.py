"""What a reader with a failed run finds first, and README within its bounds."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from docsite import hooks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SYMPTOMS = ("out of memory", "OOM", "NaN", "does not fall", "hangs", "NCCL", "slow", "-9", "-7", "cannot resume", "401")


def test_troubleshooting_begins_with_a_table_of_symptoms() -> None:
    _, front, text = PAGE.split("---\n", 2)
    assert yaml.safe_load(front)["search"]["boost"] > 1
    assert text.index("| symptom |") < text.index("## ")
    rows = re.findall(r"^\| \[(.+)\]\(#([\w-]+)\) \| .{20,}\|$", text, re.MULTILINE)
    assert len(rows) == 8
    together = " ".join(symptom for symptom, _ in rows)
    for word in SYMPTOMS:
        assert word in together
    headings = re.findall(r"^### ([^`\n]+)$", text, re.MULTILINE)
    assert len(headings) == len(rows)


@pytest.mark.parametrize(
    ("path", "quiet"),
    [("reference/rules/XL213.md", True), ("reference/messages.md", True), ("measurements/plan.md", True),
     ("troubleshooting.md", False), ("recovery.md", False)],
)  # fmt: skip
def test_lists_come_after_help_in_the_search(path: str, quiet: bool) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=path, abs_src_path=None), meta={})
    hooks.on_page_markdown("text", page)
    assert page.meta == ({"search": {"boost": 0.2}} if quiet else {})


def test_readme_is_short_and_begins_with_its_state() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert "not yet measured on a GPU" in " ".join(lines[:8])
    assert sum(line.startswith("![") for line in lines) == 1
    assert "make demo" in "\n".join(lines)
    assert "make test" in "\n".join(lines)
    commands = next(part for part in "\n".join(lines).split("```") if part.startswith("sh\ntoolkit plan"))
    assert commands.strip().count("\ntoolkit ") == 4
