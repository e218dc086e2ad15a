"""Checks a built site: `python -m docsite.check_links build/site`. Exit 1 names every link that leads nowhere.

MkDocs checks links between Markdown pages. This reads the HTML, so it also covers links made by the theme and by
generated pages, images, style sheets and every fragment. Links to other sites are counted, not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value and not (tag == "link" and ("rel", "canonical") in attrs):
                self.links.append(value)


def broken(site: Path) -> tuple[list[str], int]:
    """Every broken link as ``page: link``, and how many links were checked."""
    pages = {}
    for file in site.rglob("*.html"):
        pages[file] = _Page()
        pages[file].feed(file.read_text(encoding="utf-8"))
    found, checked = [], 0
    for file, page in pages.items():
        if file.name == "404.html":
            continue  # its links start from the site's address
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            checked += 1
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            fragment = unquote(parts.fragment)
            if not target.is_file() or (fragment and target in pages and fragment not in pages[target].ids):
                found.append(f"{file.relative_to(site)}: {link}")
    return found, checked


def main(site: str) -> int:
    """Print the result; the exit status."""
    found, checked = broken(Path(site).resolve())
    print("\n".join(sorted(set(found))) if found else f"{checked:,} links within the site lead somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
