"""Whole tensors for `verify`: only rank 0 copies them to the host. A checkpoint's pieces: each rank copies its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jobs import loader_for, resolved_from
from nights import nightly_but
from tiny import LLAMA, recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.planning.predict import Planner
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of
from toolkit.strategies.engines.base import MOMENTS, on_host
from toolkit.training.loop import Progress, train
from toolkit.training.session import open_session

SPREAD = ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"]
LARGEST = "model.embed_tokens.weight"
WIDE = LLAMA | {"vocab_size": 4096, "tie_word_embeddings": True}
WHOLE = 4 * 4096 * 32
SMALL = 4096
"""Bytes of the counts and sizes that ranks exchange."""


class Made(TorchDispatchMode):
    """``bytes``: of all memory that operators made for their results, on the host, which is the device here too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(map(_memory, tree_leaves((args, kwargs))))
        answer = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(answer):
            if (memory := _memory(tensor)) is not None and memory not in given:
                self.bytes += tensor.untyped_storage().nbytes()
        return answer


def _memory(tensor: Any) -> int | None:
    real = isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return tensor.untyped_storage().data_ptr() if real and tensor.device.type == "cpu" else None


@dataclass
class Read:
    """What one rank saw of the largest weight and of its moments."""

    shapes: list[tuple[int, ...]]
    dtypes: set[str]
    devices: set[str]
    made: int
    """Bytes that were made while the weight was put together for rank 0, the answer included."""
    held: int
    """Elements of this rank's own slice of the weight."""
    pieces: int
    """Bytes that were made while this rank's piece of the weight was found and copied to the host."""
    own: int
    """Bytes of that piece."""
    same: bool
    """Whether what rank 0 reads alone is what all ranks read."""


def read_job(resolved: Resolved) -> Read:
    session = open_session(resolved)
    engine = session.engine
    train(session, loader_for(resolved, session.accelerator.process_index), 1, Progress(), lambda pending: None)
    everyone, state = engine.full_weight(LARGEST), engine.full_state(LARGEST)
    with Made() as made:
        weight = engine.full_weight(LARGEST, main_only=True)
    with Made() as pieces:
        copies = [on_host(values) for _, values in engine.pieces(LARGEST).weight]
    alone = engine.full_state(LARGEST, main_only=True)
    assert state is not None
    assert alone is not None
    assert alone.step == state.step == 1
    tensors = [weight, *(alone.moments[key] for key in MOMENTS)]
    wholes = [everyone, *(state.moments[key] for key in MOMENTS)]
    parameter: Any = engine.parameters[LARGEST]
    return Read(
        [tuple(tensor.shape) for tensor in tensors],
        {str(tensor.dtype) for tensor in tensors},
        {tensor.device.type for tensor in tensors},
        made.bytes,
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel(),
        pieces.bytes,
        sum(copy.numel() * copy.element_size() for copy in copies),
        not session.accelerator.is_main_process or all(map(torch.equal, tensors, wholes)),
    )


@pytest.mark.parametrize("strategy", nightly_but(SPREAD, "zero1", "zero3", "fsdp1", "fsdp2"))
def test_only_rank_0_copies_whole_tensors_to_the_host(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": strategy}, model={"config": WIDE}))
    main, other = group.run(read_job, resolved, timeout=240)
    assert main.same
    assert main.shapes == other.shapes == [(4096, 32)] * 3
    assert main.dtypes == other.dtypes == {"torch.float32"}
    assert (main.devices, other.devices) == ({"cpu"}, {"meta"})
    on_device = 0 if strategy == "ddp" else WHOLE
    # FSDP1 on a CPU returns what it put together; elsewhere the host's copy is of the same memory here.
    on_host = 0 if strategy == "fsdp1" else WHOLE
    assert abs(main.made - on_device - on_host) <= SMALL
    arriving = 4 * main.held if strategy == "fsdp1" else on_device
    assert abs(other.made - arriving) <= SMALL


@pytest.mark.parametrize("strategy", nightly_but(SPREAD, "zero1", "zero3", "fsdp1", "fsdp2"))
def test_a_checkpoint_gathers_nothing(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": strategy}, model={"config": WIDE}))
    reads = group.run(read_job, resolved, timeout=240)
    assert sum(read.own for read in reads) == WHOLE
    for read in reads:
        assert read.own < 0.6 * WHOLE
        # torch 2.13.0 numbers a DTensor's rows to say where it begins (distributed/tensor/_utils.py): 8 bytes for each
        # of 2,048, for the weight and two moments.
        numbers = 3 * 8 * 2048 if strategy == "fsdp2" else 0
        assert read.own <= read.pieces <= read.own + numbers + SMALL, "one copy of what it owns, and nothing else"
    planned = strategy_of(resolved).memory_model()(Planner.of(resolved, 48).skeleton.holdings, resolved).saving()
    assert planned == 0


def test_adamw8bit_unpacks_a_moment_where_it_is_read(tiny_root: Path, group: WorkerGroup) -> None:
    recipe = recipe_dict(tiny_root, strategy={"name": "ddp"}, model={"config": WIDE}, optimizer={"name": "adamw8bit"})
    main, other = group.run(read_job, resolved_from(recipe), timeout=240)
    assert main.same
    assert main.shapes == other.shapes
    assert main.dtypes == other.dtypes
    assert (main.devices, other.devices) == ({"cpu"}, {"meta"})
