"""A DeepSpeed universal checkpoint, as `ds_to_universal.py` writes it (deepspeed 0.19.8, deepspeed/checkpoint).

``zero/NAME/`` has ``fp32.pt``, ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``. ZeRO-1 and 2 read ``step.pt`` and the
groups of ``optimizer_state.pt``; ZeRO-3 reads the step and the first group of ``optimizer_state_dict`` there. The files
of the model's states have another name under ZeRO-3, so that there are two.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint_export.contents import Contents
from toolkit.errors import InputError
from toolkit.optimizers.base import ADAM

VERSION = "0.19.8"
"""Of the deepspeed whose layout this is; DeepSpeed compares it with the oldest that it reads."""
UNIVERSAL_VERSION = 0.4


def write_universal(contents: Contents, folder: Path) -> None:
    """Write ``folder``, for ``engine.load_checkpoint(folder)`` with ``checkpoint: {load_universal: true}``.

    Memory: one tensor. Raises InputError if not every weight had the same number of updates: DeepSpeed has one count.
    """
    counts = set(contents.counts.values())
    if len(counts) > 1:
        few = min(contents.counts, key=contents.counts.__getitem__)
        raise InputError(
            f"--format deepspeed-universal: {few} had {contents.counts[few]} updates, others {max(counts)}; DeepSpeed "
            "has one number for all: use --format torch"
        )
    [count] = counts
    tag = f"global_step{contents.step}_universal"
    target = folder / tag
    for name in contents.names:
        place = target / "zero" / name
        place.mkdir(parents=True)
        for key in ("fp32", *ADAM):
            _save({"cat_dim": 0, "param": contents.read(name, key)}, place / f"{key}.pt")
        _save(torch.tensor(float(count)), place / "step.pt")  # as torch.optim.AdamW has it
    _save(_optimizer(contents, count), target / "zero" / "optimizer_state.pt")
    model = _model(contents)
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        _save(model, target / file)
    (folder / "latest_universal").write_text(tag, encoding="utf-8")


def _save(value: Any, path: Path) -> None:
    with path.open("wb") as file:  # of a path torch says nothing of why it could not be written
        torch.save(value, file)


def _optimizer(contents: Contents, count: int) -> dict[str, Any]:
    """DeepSpeed sets each group of the run from the group here at the same place, under ZeRO-3 all from the first;
    groups that have none are not restored. So every group has the settings that all weights share, and there are as
    many as there can be: what differs, as weight decay does, stays as the run has it.

    ZeRO-3 gives the object that is ``step`` to every sub-group: each would count up the one tensor. DeepSpeed's own
    optimizers have a number there; torch's need a tensor for each."""
    first, *others = contents.groups
    shared = {key: value for key, value in first.items() if all(one[key] == value for one in others) and key != "names"}
    groups = [shared | {"params": []} for _ in contents.names]
    return {
        "zero_stage": 3,
        "ds_version": VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": count}}, "param_groups": groups},
    }


def _model(contents: Contents) -> dict[str, Any]:
    """What DeepSpeed reads of the model's states in a universal checkpoint: counts, and the schedule's state."""
    recipe = contents.resolved.recipe
    compute = contents.resolved.precision.compute
    return {
        # Without values, as under ZeRO-3: weights are read from zero/.
        "module": OrderedDict((name, torch.empty(0)) for name in contents.names),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in contents.shapes.items())],
        "frozen_param_shapes": {},
        "shared_params": {},
        "frozen_param_fragments": {},
        "lr_scheduler": _schedule(contents),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": contents.step - contents.updates,
        "global_steps": contents.step,
        "global_samples": contents.step * contents.resolved.global_size,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {
            "bf16": {"enabled": compute == "bfloat16"},
            "fp16": {"enabled": compute == "float16"},
            "gradient_clipping": recipe.optimizer.max_grad_norm or 0.0,
        },
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }


def _schedule(contents: Contents) -> dict[str, Any]:
    """The position that torch's schedules, LambdaLR among them, and DeepSpeed's own take over. Rates are the run's."""
    return {"last_epoch": contents.updates, "_step_count": contents.updates + 1, "lr_lambdas": [],
            "last_batch_iteration": contents.updates}  # fmt: skip
