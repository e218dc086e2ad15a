"""`toolkit studio`, declared without importing anything heavy."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the toolkit's."""
    app.command()(studio)


def studio(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="folders that the page may read; default: the current one"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port")] = 8717,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    public: Annotated[
        bool, typer.Option("--public", help="only plan and lint: no token, no files, no runs, for a public server")
    ] = False,
) -> None:
    """Open a local page to build, check and watch. Needs the extra `studio`."""
    from toolkit.studio.command import Request, studio_command

    studio_command(Request(tuple(folders or ["."]), host, port, public))
