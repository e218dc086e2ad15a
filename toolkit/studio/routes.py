"""Requests that the pages make."""

from __future__ import annotations

import asyncio
import io
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from toolkit.errors import InputError
from toolkit.studio import jobs
from toolkit.studio.folders import Folders, shown
from toolkit.studio.form import text_keys
from toolkit.studio.payload import Payload
from toolkit.studio.reports import find_reports
from toolkit.watching.runs import Run, Step, find_runs, read_log, read_run

if TYPE_CHECKING:
    from toolkit.studio.app import Answer, Studio


def build_routes(studio: Studio) -> dict[str, Answer]:
    """The page Build: a recipe, its plan, its archive. By the last part of their address."""
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


TARGETS = ("zero1", "zero2", "zero3", "fsdp2")


def check_routes(studio: Studio) -> dict[str, Answer]:
    """The page Check: lint, fix, explain, migrate, import. By the last part of their address."""
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


_POINTS = 1000
_ONLY = ("", "cut", "unsupervised", "duplicate")


def run_routes(studio: Studio) -> dict[str, Answer]:
    """The pages Data, Runs and Reports, only of a local server. By the last part of their address."""
    folders = studio.folders

    async def runs(payload: Payload, request: Request) -> dict[str, Any]:
        jobs.reap()
        found = await asyncio.to_thread(lambda: [path for root in folders.roots for path in find_runs(root)])
        listed = [path for path in jobs.failures() if any(root in path.parents for root in folders.roots)]
        failed = {path: {"failed": True} for path in listed}
        return {"runs": [{"name": str(path), "shown": _short(path, folders)} | failed.get(path, {})
                         for path in dict.fromkeys([*listed, *found])]}  # fmt: skip

    async def run(payload: Payload, request: Request) -> dict[str, Any]:
        jobs.reap()
        paths = [folders.inside(name) for name in payload.names("names", 12)]
        return {"runs": await asyncio.to_thread(lambda: [page_fields(read_run(path), folders) for path in paths])}

    async def log(payload: Payload, request: Request) -> dict[str, Any]:
        path, name = folders.inside(payload.text("name", 4096)), payload.text("log", 100)
        known = await asyncio.to_thread(read_run, path)
        if name == "screen":
            return {"text": await asyncio.to_thread(read_log, jobs.screen_of(path))}
        if name not in known.logs:
            raise InputError(f"{shown(name)}: the run has no such log")
        file = folders.inside(str(path / "logs" / name))
        return {"text": await asyncio.to_thread(read_log, file)}

    async def start(payload: Payload, request: Request) -> dict[str, Any]:
        return {"name": str(await asyncio.to_thread(jobs.start, folders, payload.text("text")))}

    async def stop(payload: Payload, request: Request) -> dict[str, Any]:
        return {"process": await asyncio.to_thread(jobs.stop, folders, payload.text("name", 4096))}

    async def resume(payload: Payload, request: Request) -> dict[str, Any]:
        return {"name": str(await asyncio.to_thread(jobs.resume, folders, payload.text("name", 4096)))}

    async def data(payload: Payload, request: Request) -> dict[str, Any]:
        only = payload.one_of("only", _ONLY) or None
        asked = {"text": payload.text("text"), "only": only, "evaluation": payload.flag("evaluation")}
        found = await studio.heavy.call("data", asked, studio.seconds[1], request.is_disconnected)
        return {"page": studio.keep(found["page"]), "refused": found["refused"]}

    async def reports(payload: Payload, request: Request) -> dict[str, Any]:
        return {"reports": await asyncio.to_thread(find_reports, folders)}

    async def open_recipe(payload: Payload, request: Request) -> dict[str, Any]:
        return {"text": await asyncio.to_thread(folders.text, payload.text("name", 4096), 1 << 20)}

    return {"runs": runs, "run": run, "log": log, "start": start, "stop": stop, "resume": resume, "data": data,
            "reports": reports, "open": open_recipe}  # fmt: skip


def page_fields(run: Run, folders: Folders) -> dict[str, Any]:
    """A run as the page draws it: at most ``_POINTS`` points a curve."""
    steps = _thinned(run.steps)
    last = run.last
    memory = run.result.get("peak_memory_bytes")
    return {
        "name": str(run.folder),
        "shown": _short(run.folder, folders),
        "state": "failed" if run.state == "empty" and jobs.failed(run.folder) else run.state,
        "total": run.total,
        "strategy": run.strategy,
        "left": run.seconds_left,
        "last": None if last is None else asdict(last),
        "steps": {
            key: [getattr(step, key) for step in steps]
            for key in ("step", "loss", "lr", "grad_norm", "tokens_per_second")
        },
        "evaluations": run.evaluations[-_POINTS:],
        "sampled": run.sampled,
        "samples": run.samples,
        "checkpoints": run.checkpoints[-100:],
        "memory": [int(m) for m in memory[:1024] if isinstance(m, int)] if isinstance(memory, list) else [],
        "logs": run.logs[:1024],
        "notes": run.notes,
    }


def _thinned(steps: list[Step]) -> list[Step]:
    """Every nth step, with the last one: enough points for a screen."""
    each = -(-len(steps) // _POINTS) or 1
    kept = steps[::each]
    return kept if not steps or kept[-1] is steps[-1] else [*kept, steps[-1]]


def _short(path: Path, folders: Folders) -> str:
    for root in folders.roots:
        if path != root and root in path.parents:
            return str(path.relative_to(root))
    return path.name or str(path)
