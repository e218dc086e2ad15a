"""The HTML of the pages: Jinja templates with everything escaped."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from toolkit.errors import InputError
from toolkit.planning.hardware import devices
from toolkit.report.style import BARS, STYLE
from toolkit.studio.form import form
from toolkit.studio.gate import REPORT_POLICY, Refused
from toolkit.studio.reports import read_report
from toolkit.studio.starts import starts

if TYPE_CHECKING:
    from toolkit.studio.app import Studio

_HERE = Path(__file__).parent
PAGES = {"build": "Build", "check": "Check", "data": "Data", "runs": "Runs", "reports": "Reports"}
_PUBLIC = ("build", "check")


def names(public: bool) -> list[str]:
    """The pages of a server."""
    return [name for name in PAGES if name in _PUBLIC or not public]


@functools.cache
def static_names() -> frozenset[str]:
    """What is served from the folder of scripts and styles."""
    return frozenset(path.name for path in (_HERE / "static").iterdir() if path.suffix in (".js", ".css", ".svg"))


def look() -> str:
    """The style of the reports, which the pages share."""
    return STYLE + BARS


@functools.cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )


def refusal(refused: Refused) -> str:
    """The page for a browser that is not answered: what to do, in the style of the others."""
    style = look() + (_HERE / "static" / "studio.css").read_text(encoding="utf-8")
    return _templates().get_template("refused.html").render(refused=refused, style=style)


def page(studio: Studio, name: str) -> str:
    """One page."""
    root = None if studio.public else studio.folders.roots[0]
    return _page(name, studio.public, tuple(starts(root).items()) if name == "build" else ())


@functools.cache
def _page(name: str, public: bool, choices: tuple[tuple[str, tuple[str, str]], ...]) -> str:
    shown: dict[str, Any] = {"pages": {key: PAGES[key] for key in names(public)}, "name": name, "public": public}
    if name == "build":
        table = [(device.name, f"{device.name.upper()} · {device.memory:.0f} GiB") for device in devices().values()]
        shown |= {"groups": form(), "devices": table, "starts": dict(choices)}
    return _templates().get_template(f"{name}.html").render(shown)


def report_of(studio: Studio) -> Callable[[Request], Awaitable[Response]]:
    """A report in a frame: its own style, no script, nothing loaded."""

    async def report(request: Request) -> Response:
        kept, file = request.query_params.get("kept"), request.query_params.get("file")
        try:
            text = studio.pages.get(kept) if kept else read_report(studio.folders, file or "")
        except InputError as error:
            raise Refused(404, error.problems[0]) from None
        if text is None:
            raise Refused(404, "This page is no longer kept; make it again.")
        headers = {"content-security-policy": REPORT_POLICY, "x-frame-options": "SAMEORIGIN"}
        return Response(text, media_type="text/html", headers=headers)

    return report
