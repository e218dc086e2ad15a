"""The app: pages, and the requests that they make. Everything that reads what a request brings happens in a worker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from toolkit.errors import InputError
from toolkit.studio import pages
from toolkit.studio.folders import Folders
from toolkit.studio.gate import Gate, Refused, Rules
from toolkit.studio.payload import Payload
from toolkit.studio.routes import build_routes, check_routes, run_routes
from toolkit.studio.workers import Busy, Failed, Worker

MAX_CONFIG = 1 << 20
_SECONDS = 5
_MOST = 2000


class Configs:
    """Public mode: the config of a hub model, and nothing else of it, small and at most once. Downloads into ``cache``,
    a folder that the workers may read."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._asked: set[tuple[str, str | None]] = set()

    def fetch(self, repo: str, revision: str | None) -> bool:
        """Whether a config arrived now. A model is asked for once; what fails stays unknown, and the plan says so."""
        if (repo, revision) in self._asked or len(self._asked) >= _MOST:
            return False
        self._asked.add((repo, revision))
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        try:
            url = hf_hub_url(repo, "config.json", revision=revision)
            size = get_hf_file_metadata(url, token=False, timeout=_SECONDS).size
            if size is None or size > MAX_CONFIG:
                return False
            hf_hub_download(repo, "config.json", revision=revision, cache_dir=self.cache, token=False,
                            etag_timeout=_SECONDS)  # fmt: skip
        except Exception:  # whatever the network or the name does: the worker then tells that the config is not known
            return False
        return True


STATIC = Path(__file__).parent / "static"
Answer = Callable[[Payload, Request], Awaitable[Response | dict[str, Any]]]
_KEPT_PAGES = 16


@dataclass
class Studio:
    """What the routes share. ``seconds``: limits of a quick task and of a plan."""

    folders: Folders
    cache: Path
    public: bool = False
    seconds: tuple[float, float] = (30.0, 120.0)
    light: Worker = field(init=False)
    heavy: Worker = field(init=False)
    configs: Configs = field(init=False)
    pages: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        folders = Folders(()) if self.public else self.folders
        waiting = 8 if self.public else 16
        self.light = Worker(folders, self.cache, self.public, heavy=False, waiting=4 * waiting)
        self.heavy = Worker(folders, self.cache, self.public, heavy=True, waiting=waiting)
        self.configs = Configs(self.cache)

    def keep(self, page: str) -> str:
        """Keep a report for a while; returns its name."""
        name = secrets.token_urlsafe(16)
        self.pages[name] = page
        while len(self.pages) > _KEPT_PAGES:
            self.pages.popitem(last=False)
        return name


def make_app(studio: Studio, rules: Rules) -> Gate:
    """The ASGI app with its gate."""
    asked = {**build_routes(studio), **check_routes(studio)}
    if not studio.public:
        asked |= run_routes(studio)
    routes = [
        Route("/", lambda request: RedirectResponse("/build", 303)),
        Route("/static/{name}", _static),
        *(Route(f"/{name}", _page(studio, name)) for name in pages.names(studio.public)),
        *(Route(f"/api/{name}", _asked(answer), methods=["POST"]) for name, answer in asked.items()),
    ]
    if not studio.public:
        routes.append(Route("/report", pages.report_of(studio)))

    @contextlib.asynccontextmanager
    async def alive(app: Starlette) -> AsyncIterator[None]:
        # While the first page is read: the packages that a plan needs take seconds to import.
        warming = asyncio.create_task(_warm(studio))
        yield
        warming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await warming
        await studio.light.stop()
        await studio.heavy.stop()

    return Gate(
        Starlette(routes=routes, lifespan=alive, exception_handlers={404: _missing, Refused: _refused}),
        rules,
        pages.refusal,
    )


async def _warm(studio: Studio) -> None:
    with contextlib.suppress(InputError, Failed, Busy):
        await studio.heavy.call("warm", {}, studio.seconds[1])


async def _missing(request: Request, error: Exception) -> Response:
    return Response("There is no such page.", 404, media_type="text/plain")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return Response(error.why, error.status, media_type="text/plain")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name == "look.css":
        return Response(pages.look(), media_type="text/css")
    file = STATIC / name
    if name not in pages.static_names() or not file.is_file():
        raise Refused(404, "There is no such file.")
    return FileResponse(file, headers={"cache-control": "no-cache"})


def _page(studio: Studio, name: str) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        return Response(pages.page(studio, name), media_type="text/html")

    return page


def _asked(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """A request with a JSON object, answered with JSON; what is wrong with it is said in ``problems``."""

    async def endpoint(request: Request) -> Response:
        try:
            found = await answer(await Payload.of(request), request)
        except Refused as refused:
            return JSONResponse({"problems": [refused.why]}, refused.status)
        except InputError as error:
            return JSONResponse({"problems": list(error.problems)}, 422)
        except Failed as failed:
            return JSONResponse({"problems": [failed.why]}, 422)
        except Busy:
            return JSONResponse({"problems": ["The server is busy; try again in a moment."]}, 503)
        return found if isinstance(found, Response) else JSONResponse(found)

    return endpoint
