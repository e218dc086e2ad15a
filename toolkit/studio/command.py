"""`toolkit studio`: its options, and the start of its server. Declared without importing anything heavy."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.errors import InputError

if TYPE_CHECKING:
    import socket

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_HUGGING_FACE = "'self' https://huggingface.co https://*.hf.space"


@dataclass(eq=False, repr=False)
class Request:
    """Open a local page to build, check and watch. Needs the extra `studio`."""

    folders: Annotated[
        Sequence[str],
        typer.Argument(metavar="[FOLDER]...", help="folders that the page may read; default: the current one"),
    ] = ()
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port")] = 8717
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1"
    public: Annotated[
        bool, typer.Option("--public", help="only plan and lint: no token, no files, no runs, for a public server")
    ] = False


def studio_command(request: Request) -> None:
    """Serve until Ctrl-C. Raises InputError if the extra is not installed, or if the address cannot be used."""
    import tempfile

    try:
        import uvicorn

        from toolkit.studio.app import Studio, make_app
        from toolkit.studio.folders import Folders
        from toolkit.studio.gate import Rules
        from toolkit.studio.token import kept_token
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("uvicorn", "starlette"):
            raise
        raise InputError("toolkit studio needs the extra `studio`: pip install 'deepspeed-accelerate-toolkit[studio]'")\
            from None  # fmt: skip
    listening = _listen(request.host, request.port)
    port = listening.getsockname()[1]
    cache = Path(tempfile.mkdtemp(prefix="toolkit-hub-")) if request.public else hub_cache()
    folders = Folders(()) if request.public else Folders.of(request.folders or ["."])
    seconds = (15.0, 45.0) if request.public else (30.0, 120.0)
    studio = Studio(folders, cache, request.public, seconds)
    token = None if request.public else kept_token(folders.roots)
    rules = Rules(token, _hosts(request, port), _HUGGING_FACE if request.public else "'none'", f"toolkit-studio-{port}")
    shown = f"[{request.host}]" if ":" in request.host else request.host
    print(f"toolkit studio  http://{shown}:{port}/" + ("" if token is None else f"?token={token}"))
    if request.public:
        print("public: plans and lints only; no files of this machine, no runs")
    else:
        print(f"reads   {', '.join(map(str, folders.roots))}")
        if request.host not in _LOOPBACK:
            print(f"warning: {request.host} is reachable from other machines; the token is sent unencrypted",
                  file=sys.stderr)  # fmt: skip
    print("Ctrl-C ends it; runs that it started continue", flush=True)
    config = uvicorn.Config(
        make_app(studio, rules),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=15,
        limit_concurrency=200,
        h11_max_incomplete_event_size=32 << 10,
        ws="none",
        timeout_graceful_shutdown=2,
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()
        if request.public:
            shutil.rmtree(cache, ignore_errors=True)


def hub_cache() -> Path:
    """Where huggingface_hub keeps downloads, without importing it."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def _listen(host: str, port: int) -> socket.socket:
    import socket

    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(kind, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--port {port}: {why}; --port 0 takes any free port") from None
    return listening


def _hosts(request: Request, port: int) -> frozenset[str]:
    """The Host headers that the server answers to. Behind the proxy of a public server any name may arrive; without a
    token, cookie or file there is nothing that a rebound name could reach."""
    import socket

    if request.public:
        return frozenset()
    own = {"127.0.0.1", "localhost", "[::1]"}
    if request.host not in ("0.0.0.0", "::"):
        own.add(f"[{request.host}]" if ":" in request.host else request.host.lower())
    else:
        own.add(socket.gethostname().lower())
    return frozenset({f"{name}:{port}" for name in own} | (own if port == 80 else set()))
