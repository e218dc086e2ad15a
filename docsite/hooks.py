"""MkDocs hooks: adds the pages that are made from the code, and those of the repository's root (mkdocs.yml)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


LISTS = (
    *("reference/rules/", "reference/faults", "reference/messages", "measurements/"),
    *("changelog.md", "source/", "kill-matrix.md", "findings.md", "rehearsal.md"),
)
"""Pages of many entries: in the search they come after pages that say what to do."""


def on_config(config: Any) -> Any:
    """List the rules' pages in the navigation."""
    from docsite.rules import FAMILIES, family
    from docsite.site import with_rules
    from toolkit.linting.registry import all_rules

    groups: dict[str, list[str]] = {}
    for code in all_rules():
        groups.setdefault(f"{family(code)}: {FAMILIES[family(code)]}", []).append(code)
    config.nav = with_rules(config.nav, groups)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    from docsite.site import generated_pages, root_pages

    for path, text in {**generated_pages(), **root_pages()}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files outside docs/ into links within the site."""
    from docsite.site import DOCS, rewritten

    if page.file.src_uri.startswith(LISTS):
        page.meta.setdefault("search", {"boost": 0.2})
    source = page.file.abs_src_path
    if source is None or not Path(source).is_relative_to(DOCS):
        return markdown
    return rewritten(markdown, Path(source), page.file.src_uri)
