"""Within an optimizer step the host asks the device for nothing, but where a reason stands here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.host_reads import HostReads
from cases import every_case
from jobs import loader_for, resolved_from
from nights import nightly_but
from tiny import recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.training import loop
from toolkit.training.guard import LossGuard
from toolkit.training.loop import Progress, train
from toolkit.training.metrics import MetricsLog, Pending
from toolkit.training.session import open_session
from toolkit.training.stop import Stop

STOP = ("toolkit/training/stop.py", ["tolist"])
"""On a GPU the flags lie in pinned host memory, and what is waited for is the begin of the step."""

OPTIONS: dict[str, Any] = {
    "label_smoothing": 0.1, "z_loss": 1e-3, "model": {"neftune_alpha": 5.0, "freeze": ["embed_tokens"]},
}  # fmt: skip

LORA: dict[str, Any] = {"adapter": {"r": 4, "dropout": 0.1}, "precision": "bf16", "activation_checkpointing": "full"}


def reads_of_a_step(
    resolved: Resolved, plant: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    guard: LossGuard | None = None,
) -> HostReads:  # fmt: skip
    """What the second step asks the device for: the first makes moments and more. With ``stop``, as `train` runs."""
    reads, inside = HostReads(), contextlib.ExitStack()
    session = open_session(resolved)

    def after(pending: Pending) -> None:
        inside.close()
        if pending.step == 1:
            inside.enter_context(plant())
            inside.enter_context(reads.watching())

    windows = list(islice(loader_for(resolved, session.accelerator.process_index), 2))  # reading is the loader's
    with inside:
        train(session, windows, 2, Progress(), after, stop=Stop(), guard=guard)
    return reads


def reads_job(resolved: Resolved) -> HostReads:
    return reads_of_a_step(resolved)


@pytest.fixture
def single(tiny_root: Path) -> Callable[..., Resolved]:
    def make(**sections: Any) -> Resolved:
        return resolved_from(recipe_dict(tiny_root, strategy={"name": "single"}, machine={"processes": 1}, **sections))

    return make


@every_case(
    "sections",
    [
        LORA,
        {},
        {"data": {"packing": True}, **LORA},
        {"activation_checkpointing": "selective"},
        {"precision": "bf16", "fp8": True},
        {"optimizer": {"max_grad_norm": 0.0}},
        OPTIONS,
        {"data": {"packing": True}, **OPTIONS},
    ],
)
def test_nothing_in_a_step_waits(single: Callable[..., Resolved], sections: dict[str, Any]) -> None:
    reads = reads_of_a_step(single(**sections))
    assert reads.of("toolkit/") == dict([STOP])
    # The watch sees what others ask for: torch's mask of padded rows.
    assert "packing" in sections.get("data", {}) or any("masking_utils" in file for file in reads.of("transformers/"))


@every_case(
    ("sections", "why"),
    [
        # The next learning rate depends on whether this step counts: once, when all of the step is queued.
        ({"precision": "fp16"}, {"toolkit/strategies/engines/base.py": ["_local_scalar_dense"]}),
        # A CPU leaves tokens without loss out; a GPU does not (linear_cross_entropy).
        ({"loss": "fused"}, {"toolkit/model/head_loss.py": ["nonzero"]}),
        # Its count of steps is kept on the host.
        ({"optimizer": {"name": "adamw8bit"}}, {"toolkit/optim/adamw8bit.py": ["_local_scalar_dense", "cpu"]}),
    ],
)
def test_what_waits_has_a_reason(single: Callable[..., Resolved], sections: Any, why: Any) -> None:
    assert reads_of_a_step(single(**sections)).of("toolkit/") == {**why, **dict([STOP])}


def test_skipping_a_bad_loss_is_what_costs_a_wait(single: Callable[..., Resolved]) -> None:
    resolved = single(run={"on_bad_loss": "skip"})
    found = reads_of_a_step(resolved, guard=LossGuard(resolved.recipe.run, [])).of("toolkit/")
    assert found == {
        "toolkit/strategies/engines/base.py": ["_local_scalar_dense"],  # is the norm finite
        "toolkit/training/loop.py": ["tolist"],  # is the loss, and of how many tokens
        **dict([STOP]),
    }


@pytest.mark.parametrize(
    "strategy", nightly_but(["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"], "ddp", "zero2", "fsdp2")
)
def test_nor_under_a_strategy(group: WorkerGroup, tiny_root: Path, strategy: str) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": strategy}, **LORA))
    for reads in group.run(reads_job, resolved):
        assert reads.of("toolkit/") == dict([STOP])
        if strategy == "ddp":
            assert not reads.of("accelerate/")
        # DeepSpeed's own: what it decides on the host stands in docs/speed.md.
        assert bool(reads.of("deepspeed/")) == strategy.startswith("zero")


@every_case(
    "planted",
    [
        lambda loss: loss.item(),
        lambda loss: float(loss),
        lambda loss: bool(loss > 0),
        lambda loss: loss.reshape(1)[loss.reshape(1) > 0],
        lambda loss: (loss.reshape(1) > 0).nonzero(),
        lambda loss: loss.tolist(),
        lambda loss: loss.detach().cpu(),
        lambda loss: torch.tensor(1.0, device=loss.device),
        lambda loss: loss.to(loss.device),
        lambda loss: f"{loss:.3f}",
    ],
)
def test_a_wait_that_is_planted_is_found(single: Callable[..., Resolved], planted: Any) -> None:
    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        right = loop.loss_sum

        def asks(*args: Any) -> torch.Tensor:
            loss = right(*args)
            planted(loss)
            return loss

        # As if the line stood in the toolkit's own file.
        code = asks.__code__.replace(co_filename=loop.__file__)
        asks.__code__ = code
        loop.loss_sum = asks
        planted.__code__ = planted.__code__.replace(co_filename=loop.__file__)
        try:
            yield
        finally:
            loop.loss_sum = right

    assert "toolkit/training/loop.py" in reads_of_a_step(single(), plant).of("toolkit/")


def test_telling_steps_is_one_read_of_the_sums(tmp_path: Path) -> None:
    reads = HostReads()
    recorder = MetricsLog(None, lambda tensor: tensor)
    for step in range(3):
        one = torch.ones(())
        with reads.watching():
            recorder.add(Pending(step, one, one, one, 0.1, False))
    assert not reads.lines
    with reads.watching():
        assert len(recorder.flush()) == 3
    assert sum(count for (_, what), count in reads.lines.items() if what == "tolist") == 1
