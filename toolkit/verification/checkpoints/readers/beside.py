"""Files beside a checkpoint that describe its run: the Trainer's state and arguments, a schedule, a model's config."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import InputError
from toolkit.verification.checkpoints.contents import Checkpoint
from toolkit.verification.checkpoints.readers.files import foreign_classes, load_json, load_torch
from toolkit.verification.checkpoints.readers.optimizer import add_schedule, add_step

SCHEDULES = ("scheduler.pt", "scheduler.bin", "custom_checkpoint_0.pkl")
_KNOWN = ("transformers.", "accelerate.", "trl.", "torch.device")


def add_beside(found: Checkpoint, folder: Path) -> None:
    """Take over what ``folder`` says of the run and ``found`` does not know yet. Raises InputError for damaged JSON."""
    if (folder / "trainer_state.json").is_file():
        state = load_json(folder / "trainer_state.json")
        add_step(found, state.get("global_step") if isinstance(state.get("global_step"), int) else None)
        found.format += ", Trainer"
    for name in SCHEDULES:
        if (folder / name).is_file():
            try:
                add_schedule(found, load_torch(folder / name))
            except InputError as error:
                found.notes.append(str(error))
            break
    if (folder / "training_args.bin").is_file() and found.compute is None:
        found.compute = _compute(folder / "training_args.bin")
    if (folder / "config.json").is_file():
        found.config = folder / "config.json"


def _compute(file: Path) -> str | None:
    """The dtype that the Trainer's arguments ask for. Their classes are replaced by stubs: no code of the file runs."""
    names = foreign_classes(file)
    if not all(name.startswith(_KNOWN) for name in names):
        return None
    try:
        arguments = vars(load_torch(file, names))
    except (InputError, TypeError):
        return None
    return "bfloat16" if arguments.get("bf16") is True else "float16" if arguments.get("fp16") is True else "float32"
