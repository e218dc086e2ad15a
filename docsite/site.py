"""Which pages the site has that are not files of docs/: generated ones, and files of the repository's root."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

# Files outside docs/ that the site shows as pages.
SHOWN = {
    "ds_configs/README.md": "presets.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".json": "json"}
# A link, its target without a fragment, its fragment. Images have the same form.
LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")


def is_external(target: str) -> bool:
    """Whether a link leaves the site."""
    return "://" in target or target.startswith("mailto:")


def sources_linked() -> dict[str, str]:
    """Site path of each source file that a page links to, and the file's path in the repository."""
    found = {}
    for page in [*DOCS.rglob("*.md"), *(ROOT / name for name in SHOWN)]:
        for match in LINK.finditer(page.read_text()):
            target = resolve(page, match.group(2))
            if target is not None and target not in SHOWN and not target.startswith("docs/"):
                found[source_page(target)] = target
    return found


def resolve(page: Path, target: str) -> str | None:
    """A relative link's file as a path from the repository's root; None for other links."""
    if not target or is_external(target):
        return None
    return str((page.parent / target).resolve().relative_to(ROOT))


def source_page(file: str) -> str:
    """Where the site shows a source file."""
    return f"source/{file}.md"


def site_path(file: str) -> str:
    """Where the site has a file of the repository."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return SHOWN.get(file) or source_page(file)


def rewritten(markdown: str, page: Path, at: str) -> str:
    """The page's text with its links to files outside docs/ turned into links within the site.

    ``page`` is the file, ``at`` its path within the site.
    """

    def link(match: re.Match[str]) -> str:
        file = resolve(page, match.group(2))
        if file is None or (file.startswith("docs/") and page.is_relative_to(DOCS)):
            return match.group(0)
        return f"{match.group(1)}{_relative(site_path(file), at)}{match.group(3) or ''}{match.group(4)}"

    return LINK.sub(link, markdown)


def _relative(target: str, page: str) -> str:
    up = len(PurePosixPath(page).parent.parts)
    return "../" * up + target


def root_pages() -> dict[str, str]:
    """The pages that are files outside docs/: as they are, or, for a source, in a block of code."""
    shown = {path: rewritten((ROOT / file).read_text(), ROOT / file, path) for file, path in SHOWN.items()}
    for path, file in sources_linked().items():
        language = _LANGUAGES.get(Path(file).suffix, "text")
        text = (ROOT / file).read_text().rstrip("\n")
        shown[path] = f"---\nsearch:\n  exclude: true\n---\n\n# `{file}`\n\n````{language}\n{text}\n````\n"
    return shown


def generated_pages() -> dict[str, str]:
    """Every page that is made from the code, by its path within the site. Imports torch for the faults."""
    from docsite import api, commands, faults, message_page, notebook, rules

    made = (api, rules, faults, commands, message_page, notebook)
    return {path: text for module in made for path, text in module.pages().items()}


def with_rules(nav: list[Any], codes: dict[str, list[str]]) -> list[Any]:
    """The navigation with the pages of the rules, by family, under the rules' index."""
    made = []
    for item in nav:
        if isinstance(item, dict):
            (title, inner), *_ = item.items()
            if inner == "reference/rules/index.md":
                item = {title: [inner, *({name: _of_family(found)} for name, found in codes.items())]}
            elif isinstance(inner, list):
                item = {title: with_rules(inner, codes)}
        made.append(item)
    return made


def _of_family(codes: list[str]) -> list[dict[str, str]]:
    return [{code: f"reference/rules/{code}.md"} for code in codes]
