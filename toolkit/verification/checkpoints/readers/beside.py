"""Files beside a checkpoint that describe its run: the Trainer's state and arguments, a schedule, a model's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    elif (folder / "adapter_config.json").is_file():
        found.config = _config_of_base(load_json(folder / "adapter_config.json").get("base_model_name_or_path"))


def _config_of_base(name: Any) -> Path | None:
    """The config.json of an adapter's base, from its folder or the hub's local cache; nothing is downloaded."""
    if not isinstance(name, str) or not name:
        return None
    if (Path(name) / "config.json").is_file():
        return Path(name) / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


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
