"""Whether the disk has room for a checkpoint: estimated before the first step, not found out after hours."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch

from toolkit.errors import InputError
from toolkit.optimizers import optimizer_kind
from toolkit.rooms import state_bytes
from toolkit.training.session import Session


def checkpoint_bytes(session: Session) -> int:
    """Bytes of a checkpoint of all ranks, without its indexes: trained weights, what options keep of them, optimizer
    state."""
    resolved, engine = session.resolved, session.engine
    size = getattr(torch, resolved.precision.trainable).itemsize
    kind = optimizer_kind(resolved.recipe.optimizer.name)
    found = 0.0
    for name, shape in engine.shapes.items():
        elements = math.prod(shape)
        # 8-bit moments are saved in the trained dtype.
        packed = 2.0 * elements * size
        found += elements * size + state_bytes(resolved.recipe, elements)
        found += packed if kind.packed else kind.state(shape, name in engine.matrices, size)
    return round(found)


def check_room(session: Session, folder: Path) -> None:
    """Raise InputError on rank 0, which needs the whole folder, where a checkpoint does not fit into what is free. An
    earlier checkpoint is deleted only when a new one is complete."""
    run = session.resolved.recipe.run
    if not run.save_every or not session.accelerator.is_main_process:
        return
    needed, free = checkpoint_bytes(session), shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{session.resolved.source}: run.output_dir: a checkpoint takes about {_told(needed)} (trained weights and "
            f"optimizer state), and the disk of {folder} has {_told(free)} free; free some, set another "
            "run.output_dir, or run.save_every: 0"
        )


def _told(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
