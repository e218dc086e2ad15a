"""`toolkit export --format`: from a checkpoint of the toolkit's to a folder of another tool's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from toolkit.checkpoint_export.contents import Contents, read_contents
from toolkit.checkpoint_export.dcp import write_dcp
from toolkit.checkpoint_export.universal import write_universal
from toolkit.errors import InputError, RunFailed
from toolkit.launch.identity import saved_recipe
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import resolve
from toolkit.training.export import alone, empty_target, with_checkpoint
from toolkit.training.finding import whole_manifest
from toolkit.training.manifest import Damaged

E = TypeVar("E", bound=BaseException)

FORMATS: dict[str, tuple[str, Callable[[Contents, Path], None]]] = {
    "deepspeed-universal": ("DeepSpeed universal checkpoint", write_universal),
    "torch": ("torch.distributed.checkpoint", write_dcp),
}


def export_state(source: Path, output: Path, form: str, *, best: bool = False) -> tuple[str, Resolved, Contents]:
    """Write weights, moments and counts as ``form``; returns its name, the recipe and what was written.

    Raises InputError if the checkpoint or the folder cannot be used, RunFailed if it cannot be written. Nothing is left
    then.
    """
    if form not in FORMATS:
        raise InputError(f"--format {form}: not known; use transformers, {', '.join(FORMATS)}")
    empty_target(output)
    kind = FORMATS[form][0]
    resolved, contents = with_checkpoint(source, lambda folder: _export(folder, output, form), best=best)
    return kind, resolved, contents


def _export(folder: Path, output: Path, form: str) -> tuple[Resolved, Contents]:
    manifest = whole_manifest(folder, when_read=True)
    resolved = resolve(alone(saved_recipe(folder, manifest)), str(folder), device="cpu")
    contents = read_contents(folder, manifest, resolved)
    writing = output.with_name(f".{output.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir(parents=True)
        FORMATS[form][1](contents, writing)
        if output.exists():
            output.rmdir()
        writing.rename(output)
    except BaseException as error:  # torch.distributed.checkpoint's is no Exception
        if (damaged := _cause(error, Damaged)) is not None:
            raise damaged from None
        if (failed := _cause(error, OSError)) is None:
            raise
        reason = failed.strerror or str(failed)
        raise RunFailed(f"{output}: cannot be written: {reason}; free space there, or set another folder") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return resolved, contents


def _cause(error: BaseException | None, kind: type[E]) -> E | None:
    """The first error of a kind among those that led to one: torch.save raises another error while it handles that
    one, and torch.distributed.checkpoint gathers those of all ranks."""
    while error is not None:
        if isinstance(error, kind):
            return error
        failures = getattr(error, "failures", {})
        for inner, *_ in failures.values():
            if (found := _cause(inner, kind)) is not None:
                return found
        error = error.__cause__ or error.__context__
    return None
