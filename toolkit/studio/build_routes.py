"""Requests of the page Build: a recipe, its plan, its archive."""

from __future__ import annotations

import asyncio
import io
import zipfile
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from toolkit.errors import InputError
from toolkit.studio.form import text_keys
from toolkit.studio.payload import Payload

if TYPE_CHECKING:
    from toolkit.studio.app import Answer, Studio


def build_routes(studio: Studio) -> dict[str, Answer]:
    """By the last part of their address."""
    quick, long = studio.seconds
    as_text = text_keys()

    async def answer_for(text: str, edits: list[list[str | None]]) -> dict[str, Any]:
        asked = {"text": text, "edits": edits, "as_text": as_text}
        found = await studio.light.call("recipe", asked, quick)
        if studio.public and found["model"] and found["model"][0]:
            path, revision = found["model"]
            if await asyncio.to_thread(studio.configs.fetch, path, revision):
                found = await studio.light.call("recipe", asked, quick)
        return found

    async def recipe(payload: Payload, request: Request) -> dict[str, Any]:
        return await answer_for(payload.text("text"), payload.edits())

    async def plan(payload: Payload, request: Request) -> dict[str, Any]:
        asked = {
            "text": payload.text("text"),
            "gpu": payload.maybe("gpu", 60),
            "memory": payload.number("memory", 0.1, 100_000),
        }
        return await studio.heavy.call("plan", asked, long, request.is_disconnected)

    async def archive(payload: Payload, request: Request) -> Response:
        found = await answer_for(payload.text("text"), [])
        if not found["files"]:
            raise InputError(*(problem["message"] for problem in found["problems"]))
        return Response(packed(found["files"]), media_type="application/zip")

    return {"recipe": recipe, "plan": plan, "archive": archive}


def packed(files: dict[str, str]) -> bytes:
    """A zip archive; scripts can be executed, and equal files give equal bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if name.endswith((".sh", ".sbatch")) else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text.encode("utf-8"))
    return made.getvalue()
