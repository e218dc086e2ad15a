"""Resolve the recipe's data to local files, or to a hub id. Standard library only."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import InputError
from toolkit.recipe.load import did_you_mean

ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
SUFFIXES = (*ROW_SUFFIXES, ".txt")
_READABLE = "supported: " + ", ".join(SUFFIXES)


class NoSuchData(InputError):
    """There is neither a file nor a folder of that name, and none that is called almost so."""


def local_files(spec: str, key: str) -> list[Path] | None:
    """The data files of ``spec``, sorted by name; None if it may be a hub data set.

    A folder means every data file in it and in its subfolders, except hidden ones. ``key`` is the recipe's key
    (data.train), for messages. Raises InputError for paths that do not exist, are empty or have no known suffix.
    """
    if not spec.strip():
        raise _problem(key, "is empty; expected a file, a folder or a hub id")
    path = Path(spec).expanduser()
    try:
        if path.is_dir():
            return _folder(path, spec, key)
        if path.exists():
            return [_file(path, spec, key)]
    except OSError as error:
        raise _problem(key, f"{spec} cannot be read: {error.strerror or error}") from None
    if not is_local(spec):
        return None
    nearby = _nearby(path)
    kind = InputError if "did you mean" in nearby else NoSuchData
    raise kind.at(None, key, f"{spec} does not exist{nearby}")


def is_local(spec: str) -> bool:
    """Whether a missing name can only be a file or folder, not a hub id."""
    return spec.endswith(SUFFIXES) or spec.startswith(("/", "./", "../", "~")) or spec.count("/") > 1


def suffix(path: Path) -> str | None:
    """The known suffix that ``path`` ends in, in lower case."""
    name = path.name.lower()
    return next((s for s in SUFFIXES if name.endswith(s)), None)


def _file(path: Path, spec: str, key: str) -> Path:
    if suffix(path) is None:
        raise _problem(key, f"{spec} is not a supported data file; {_READABLE}")
    if path.stat().st_size == 0:
        raise _problem(key, f"{spec} is empty")
    return path


def _folder(folder: Path, spec: str, key: str) -> list[Path]:
    if (folder / "state.json").exists() and (folder / "dataset_info.json").exists():
        raise _problem(key, f"{spec} was written by save_to_disk; save it as Parquet (dataset.to_parquet)")
    inside = sorted(path for path in folder.rglob("*") if _visible(path.relative_to(folder)) and path.is_file())
    if not inside:
        raise _problem(key, f"the folder {spec} is empty")
    files = [path for path in inside if suffix(path) is not None]
    if not files:
        raise _problem(key, f"the folder {spec} has no data file ({_READABLE}); it has {_some(inside)}")
    texts = [path for path in files if suffix(path) == ".txt"]
    if texts and len(texts) < len(files):
        # A licence or a read-me beside the rows would become a sample silently.
        rows = [path for path in files if suffix(path) != ".txt"]
        raise _problem(
            key,
            f"the folder {spec} has text files ({_some(texts)}) and row files ({_some(rows)}); "
            "set one file, or remove one kind",
        )
    if not any(path.stat().st_size for path in files):
        raise _problem(key, f"every data file in the folder {spec} is empty")
    return [path for path in files if path.stat().st_size]


def _visible(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def _some(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths[:3]) + (", ..." if len(paths) > 3 else "")


def _nearby(path: Path) -> str:
    """The closest name in the same folder, or the first missing folder of the path."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    if missing != path:
        return f" (there is no folder {missing})"
    try:
        near = did_you_mean(path.name, (entry.name for entry in path.parent.iterdir()))
    except OSError:
        near = ""
    return near or f" (resolved to {path.absolute()})"


def _problem(key: str, message: str) -> InputError:
    return InputError.at(None, key, message)
