"""Requests of the page Check: lint, fix, explain, migrate, import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from toolkit.studio.payload import Payload

if TYPE_CHECKING:
    from toolkit.studio.app import Answer, Studio

TARGETS = ("zero1", "zero2", "zero3", "fsdp2")


def check_routes(studio: Studio) -> dict[str, Answer]:
    """By the last part of their address."""
    quick, _ = studio.seconds

    def of_files(task: str) -> Answer:
        async def answer(payload: Payload, request: Request) -> dict[str, Any]:
            return await studio.light.call(task, {"files": payload.files()}, quick)

        return answer

    async def explain(payload: Payload, request: Request) -> dict[str, Any]:
        return await studio.light.call("explain", {"code": payload.text("code", 40)}, quick)

    async def migrate(payload: Payload, request: Request) -> dict[str, Any]:
        asked = {"files": payload.files(), "to": payload.one_of("to", TARGETS)}
        return await studio.light.call("migrate", asked, quick)

    return {"check": of_files("check"), "fix": of_files("fix"), "import": of_files("import"), "explain": explain,
            "migrate": migrate}  # fmt: skip
