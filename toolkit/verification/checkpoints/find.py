"""From a path to checkpoints: which format a folder has, and which steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import InputError
from toolkit.verification.checkpoints.contents import Checkpoint
from toolkit.verification.checkpoints.names import with_canonical_names
from toolkit.verification.checkpoints.readers.files import unreadable

_NUMBER = re.compile(r"(?:global_step|checkpoint[-_]|step[-_]?|epoch[-_]?)0*(\d+)(?:_universal)?$")
LOOKED_FOR = (
    "manifest.json (toolkit), *_optim_states.pt and zero/optimizer_state.pt (DeepSpeed), .metadata and "
    "pytorch_model_fsdp_0 (FSDP), "
    "model.safetensors, pytorch_model.bin, adapter_model.safetensors and their indexes, step-N, checkpoint-N and "
    "global_stepN"
)


@dataclass(frozen=True)
class Place:
    """Where one step of a run is saved. ``number``: that of the folder's name, None without one."""

    path: Path
    number: int | None = None


def places(path: str) -> list[Place]:
    """The checkpoints at ``path``: itself, or each step in it, in their order. Raises InputError if there are none."""
    target = Path(path)
    try:
        if target.is_file():
            return [_file(target)]
        if not target.is_dir():
            raise InputError(f"{path}: no such file or folder; expected a checkpoint")
        found = _in_folder(target)
    except OSError as error:
        raise unreadable(target, error) from None
    if not found:
        raise InputError(f"{path}: no checkpoint; looked for {LOOKED_FOR}")
    return found


def _file(file: Path) -> Place:
    from toolkit.verification.checkpoints.readers.plain import SUFFIXES, WEIGHTS

    if file.name in WEIGHTS and file.parent != Path():
        return Place(file)
    if file.suffix not in SUFFIXES:
        raise InputError(f"{file}: not a checkpoint; expected a folder, or a file {', '.join(SUFFIXES)}")
    return Place(file)


def _in_folder(folder: Path) -> list[Place]:
    if _format(folder):
        return [Place(folder, _number(folder))]
    steps = [
        Place(one, _number(one))
        for parent in (folder, folder / "checkpoints")  # accelerate's and the toolkit's run folders
        if parent.is_dir()
        for one in parent.iterdir()
        if one.is_dir() and _number(one) is not None and _format(one)
    ]
    if steps:
        return sorted(steps, key=lambda place: place.number or 0)
    tag = folder / _latest(folder)
    return [Place(tag, _number(tag))] if tag != folder and tag.is_dir() and _format(tag) else []


def _number(folder: Path) -> int | None:
    match = _NUMBER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def _latest(folder: Path) -> str:
    """The tag that DeepSpeed calls the latest."""
    file = folder / "latest"
    return Path(file.read_text(encoding="utf-8").strip()).name if file.is_file() else ""


def _format(folder: Path) -> str:
    """What wrote ``folder``: own, universal, zero, dcp, sharded, plain or file; empty for none that is known."""
    from toolkit.verification.checkpoints.readers import dcp, own, plain, universal, zero

    if own.is_own(folder):
        return "own"
    if universal.is_universal(folder):
        return "universal"
    if zero.is_zero(folder):
        return "zero"
    if dcp.is_dcp(folder):
        return "dcp"
    if dcp.has_dcp(folder):
        return "sharded"
    if _zero_inside(folder):
        return "zero-inside"
    return "plain" if plain.weights_file(folder) else ""


def _zero_inside(folder: Path) -> Path | None:
    """DeepSpeed's tag within a folder of the Trainer's or accelerate's."""
    from toolkit.verification.checkpoints.readers.plain import weights_file
    from toolkit.verification.checkpoints.readers.zero import is_zero

    beside = (folder / "trainer_state.json").is_file() or (folder / "pytorch_model").is_dir() or weights_file(folder)
    tag = folder / _latest(folder)
    return tag if beside and tag != folder and tag.is_dir() and is_zero(tag) else None


def read(place: Place) -> Checkpoint:
    """Open one checkpoint, under canonical names; its tensors are read later. Raises InputError."""
    try:
        found = _read(place.path)
    except OSError as error:
        raise unreadable(place.path, error) from None
    if found.step is None:
        found.step = place.number if place.path.name.startswith(("checkpoint-", "step-", "global_step")) else None
    if not found.weights:
        raise InputError(f"{place.path}: no tensors by name; expected weights")
    return with_canonical_names(found)


def _read(path: Path) -> Checkpoint:
    from toolkit.verification.checkpoints.readers import beside, dcp, own, plain, universal, zero

    if path.is_file():
        if path.name.endswith(".index.json"):
            return plain.read_plain(path.parent)
        return plain.read_file(path)
    match _format(path):
        case "own":
            return own.read_own(path)
        case "universal":
            return universal.read_universal(path)
        case "zero":
            return zero.read_zero(path)
        case "dcp":
            return dcp.read_dcp(path)
        case "sharded":
            found = dcp.read_sharded(path)
        case "zero-inside":
            tag = _zero_inside(path)
            assert tag is not None
            found = zero.read_zero(tag)
        case _:
            found = plain.read_plain(path)
    beside.add_beside(found, path)
    return found
