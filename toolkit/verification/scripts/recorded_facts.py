"""What is known of a recorded model when its last step is over: devices, dtypes, the optimizer's groups, frozen weights
that changed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from toolkit.verification.scripts.facts import GroupFacts, ScriptFacts
from toolkit.verification.scripts.replay_device import device_name, float32_products
from toolkit.verification.scripts.watch import Watched, clean_name, plain_names, whole

if TYPE_CHECKING:
    from toolkit.verification.scripts.recording import Recording

ADAMW = ("AdamW", "FusedAdam", "DeepSpeedCPUAdam")
"""Their step is compared; Adam's too where nothing decays."""


def this_rank() -> int:
    """Of the process group, or of the launcher where there is none."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def ranks_here() -> int:
    """The number of ranks, as ``this_rank`` counts them."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def facts_of(recording: Recording) -> ScriptFacts:
    """What verifying asks of a recorded model besides its tensors; every rank calls it."""
    watched = recording.watched
    device = recording.calls.device
    copy = watched.copy_dtype if watched.copy_dtype != "float32" else None
    autocast = next((call.autocast for calls in recording.taken for call in calls if call.autocast), None)
    dtypes = {
        name: copy or _short(p.dtype) for name, p in plain_names(recording.model).items() if p.is_floating_point()
    }
    world = ranks_here()
    asked = [one for one in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{one}", "").lower() == "true"]
    live = dict(recording.model.named_buffers()) if recording.main else {}
    return ScriptFacts(
        device=device.type,
        device_name=device_name(device),
        float32_products=float32_products(device),
        computed=sorted({*dtypes.values(), *([autocast] if autocast else [])}),
        copy=copy,
        autocast=autocast,
        limit=recording.limit,
        steps=recording.taken,
        strategy=watched.strategy,
        world=world,
        averaged=world if watched.strategy not in ("single", "tensor") else 0 if world > 1 else 1,
        threads=torch.get_num_threads(),
        dtypes=dtypes,
        buffers={clean: whole(value) for clean, value in _clean_buffers(live).items()},
        frozen=_changed_frozen(recording) if recording.main else {},
        groups=groups_of(recording),
        optimizer=type(watched.optimizer).__name__,
        adam=_is_adam(watched),
        whole_clip=recording.whole_clip,
        after=recording.after,
        loaded=recording.loaded,
        launched=asked[0] if asked else None,
        connected=dist.is_initialized() or world == 1,
        reduce=watched.reduce,
        outside=sorted(recording.outside),
        notes=recording.notes,
        unseen=recording.calls.unseen,
        by_labels=recording.by_labels,
    )


def _is_adam(watched: Watched) -> bool:
    """Whether its step is AdamW's."""
    kind, group = type(watched.optimizer).__name__, watched.groups[0]
    return (kind in ADAMW or (kind == "Adam" and not any(g.get("weight_decay") for g in watched.groups))) and not (
        group.get("amsgrad") or group.get("maximize")
    )


def groups_of(recording: Recording) -> list[GroupFacts]:
    """The groups of an optimizer whose step is AdamW's; none of another."""
    watched = recording.watched
    if not _is_adam(watched):
        return []
    names = {id(p): name for name, p in watched.parameters.items()}
    return [
        GroupFacts(
            names=[names[id(p)] for p in params if id(p) in names],
            betas=[float(beta) for beta in group["betas"]],
            eps=float(group["eps"]),
            decay=float(group["weight_decay"]),
            lr=[lrs[at] for lrs in recording.lrs],
        )
        for at, (group, params) in enumerate(zip(watched.groups, watched.members(), strict=False))
    ]


def _changed_frozen(recording: Recording) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in plain_names(recording.model).items():
        plain = type(p) is nn.Parameter and not hasattr(p, "ds_id")
        if p.requires_grad or not plain or recording.kept is None or name not in recording.kept.tensors:
            continue
        before = recording.kept.tensors[name]
        if before.shape == p.shape and not torch.equal(before.to(p.dtype), p.detach().cpu()):
            found[name] = p.detach().cpu().clone()
    return found


def _clean_buffers(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {clean_name(name, set()): value for name, value in buffers.items()}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
