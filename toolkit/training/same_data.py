"""Whether a run that is resumed has the rows that its checkpoint was made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.data.fingerprint import change
from toolkit.data.samples import Samples
from toolkit.errors import InputError

_FOLLOWS = (
    "the samples of each step from here on are drawn from the rows as they are now: within the current epoch some are "
    "seen again and some not at all, and the run is no longer the one that its recipe describes"
)


def check_rows(manifest: dict[str, Any], samples: Samples, *, go_on: bool, source: str, folder: Path) -> str | None:
    """Compare the rows with those of the checkpoint ``folder``; returns a note, or None if they are the same, or the
    checkpoint is of a version that did not record them. ``go_on``: other rows are no error. ``source``: the recipe's
    file.

    Raises InputError that names the change.
    """
    saved = manifest.get("rows")
    if saved is None:
        return None
    if len(saved) != len(samples.prints):
        changes = [f"{len(samples.prints)} sources instead of {len(saved)}"]
    else:
        changes = []
        for number, (old, new) in enumerate(zip(saved, samples.prints, strict=True)):
            if old["order"] == new["order"] and old["rows"] == new["rows"]:
                continue
            found = change(old, new, samples.orders(number, {at for at, _ in old["marks"]} | {old["rows"]}))
            if found is not None:
                changes.append(f"{new['source']}: {found}" if len(saved) > 1 else found)
    if not changes:
        return None
    if go_on:
        return f"data.train: {'; '.join(changes)}; {_FOLLOWS}"
    raise InputError(
        *(f"{source}: data.train: not the rows of {folder}: {one}" for one in changes),
        "Restore them to continue this run as it was, start a new run in another run.output_dir, or add "
        f"--changed-data: {_FOLLOWS}",
    )
