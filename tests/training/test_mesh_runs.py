"""Rows, layers, blocks and experts divided over ranks (`strategy.mesh`): the plain loop's weights, held-out losses of
the whole model, and checkpoints that any mesh and strategy resumes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from families import EVERY_FAMILY
from jobs import Run, assert_weights, eval_job, loader_for, plain_run, resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved

Axes = dict[str, int] | None
ROWS = 4
"""Of all data-parallel ranks together in a micro-batch: every recipe takes the same samples in a step."""
LORA = {"r": 4, "dropout": 0.0}
ON_EXPERTS = {"r": 4, "dropout": 0}
"""PEFT puts adapters on each expert's matrices, too."""
MIXTRAL = EVERY_FAMILY["mixtral"]["config"] | {"vocab_size": 300}
MODEL = LLAMA | {"num_hidden_layers": 4}
TIED = MODEL | {"tie_word_embeddings": True}


def run_of(root: Path, name: str, mesh: Axes, ranks: int, **sections: Any) -> Resolved:
    divided = math.prod((mesh or {}).get(axis, 1) for axis in ("context", "tensor", "pipeline"))
    values = recipe_dict(
        root,
        strategy={"name": name, "mesh": mesh},
        machine={"processes": ranks},
        batch={"micro_size": ROWS * divided // ranks, "accumulation": 3},
        run={"max_steps": 20},
    )
    for key, value in sections.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    return resolved_from(values)


@dataclass(frozen=True)
class Training:
    """``others``: strategies and meshes whose runs go on with its checkpoints, and it with theirs."""

    name: str
    mesh: dict[str, int]
    model: dict[str, Any]
    others: Sequence[tuple[str, Axes]]
    adapter: dict[str, Any] | None = None
    packed: bool = False

    @property
    def id(self) -> str:
        axes = "-".join(axis if size == 2 else f"{axis}{size}" for axis, size in self.mesh.items())
        return f"{axes}-{self.name}-{'full' if self.adapter is None else 'lora'}"

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def of(self, root: Path, name: str, mesh: Axes, ranks: int) -> Resolved:
        data = {"packing": self.packed}
        return run_of(root, name, mesh, ranks, model={"config": self.model}, adapter=self.adapter, data=data)


DEFAULT = [
    Training("fsdp2", {"context": 2}, LLAMA, [("ddp", None)], packed=True),
    Training("fsdp2", {"tensor": 2}, LLAMA, [("zero3", None)], packed=True),
    Training("ddp", {"pipeline": 2}, TIED, [("zero3", None)]),
    Training("fsdp2", {"expert": 2}, MIXTRAL, [("ddp", None)], ON_EXPERTS),
]


def _nightly() -> Iterator[Training]:
    square, rows, pair = {"tensor": 2, "shard": 2}, {"context": 2, "tensor": 2}, {"expert": 2, "replicate": 2}
    full, lora, on_experts = (None,), (None, LORA), (None, ON_EXPERTS)
    unmeshed: list[tuple[str, Axes]] = [("ddp", None), ("fsdp2", None), ("fsdp1", None), ("zero1", None)]
    everything: list[tuple[str, Axes]] = [
        *unmeshed, ("ddp", {"pipeline": 4}), ("fsdp2", {"pipeline": 2, "shard": 2}),
        ("fsdp2", square), ("fsdp2", {"replicate": 2, "shard": 2}),
    ]  # fmt: skip
    table: Sequence[tuple[str, dict[str, int], dict[str, Any], Sequence[Any], Sequence[tuple[str, Axes]], bool]] = (
        ("zero3", {"context": 2}, LLAMA, full, [("ddp", None)], True),
        ("ddp", {"pipeline": 2}, TIED, full, [("zero3", None)], True),
        ("fsdp2", {"expert": 2}, MIXTRAL, on_experts, [("ddp", None), ("fsdp2", None), ("zero3", None)], False),
        ("fsdp2", square, LLAMA, lora, [("zero2", None), ("fsdp2", None)], True),
        ("ddp", {"pipeline": 2, "replicate": 2}, TIED, lora, everything, True),
        ("ddp", {"pipeline": 4}, TIED, full, everything, True),
        ("fsdp2", {"pipeline": 2, "shard": 2}, TIED, full, everything, True),
        ("fsdp2", rows, MODEL, lora, [("fsdp2", square), ("ddp", {"pipeline": 4}), ("zero3", None)], False),
        ("fsdp2", pair, MIXTRAL | {"num_hidden_layers": 4}, on_experts,
         [("fsdp2", {"expert": 2, "shard": 2}), ("fsdp2", {"expert": 4}), ("ddp", {"pipeline": 4}), ("zero3", None)],
         False),
    )  # fmt: skip
    for names, mesh, model, adapters, others, packed in table:
        for name in names.split():
            yield from (Training(name, mesh, model, others, adapter, packed) for adapter in adapters)


def held_out(group: WorkerGroup, resolved: Resolved) -> float:
    """The loss of the first samples; more batches than a first stage may be ahead, each counts once."""
    batches = [[micro for window in islice(loader_for(resolved, rank), 3) for micro in window]
               for rank in range(resolved.world_size)]  # fmt: skip
    losses = group.run(eval_job, resolved, batches)
    assert len(set(losses)) == 1
    return float(losses[0])


def check(training: Training, group: WorkerGroup, root: Path, folder: Path) -> None:
    """Weights of 20 steps within 1e-5 of one process's with the same samples in the same steps; a run that others take
    over, and that takes over theirs, is the run without interruption."""
    divided = training.of(root, training.name, training.mesh, training.ranks)
    run: Run = group.run(train_job, divided, 20)[0]
    plain = plain_run(training.of(root, "single", None, 1), 20)
    assert run.tokens == plain.tokens
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert_weights(run, plain)
    whole = training.of(root, "ddp", None, training.ranks)
    assert held_out(group, divided) == pytest.approx(held_out(group, whole), rel=1e-6)
    straight: Run = group.run(train_job, divided, 4, None, None, 4)[0]
    group.run(train_job, divided, 2, str(folder / "here"), None, 4)
    for at, (name, mesh) in enumerate(training.others):
        other = training.of(root, name, mesh, training.ranks)
        group.run(train_job, other, 2, str(folder / str(at)), None, 4)
        for then, first in ((other, folder / "here"), (divided, folder / str(at))):
            after: Run = group.run(train_job, then, 2, None, str(next(first.iterdir())), 4)[0]
            assert after.losses == pytest.approx(straight.losses[2:], rel=1e-5), (name, mesh, first)
            assert_weights(after, straight, 1e-6, (name, mesh, first))


@pytest.mark.parametrize("training", DEFAULT, ids=lambda training: training.id)
def test_a_run_of_each_axis(training: Training, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    check(training, group, tiny_root, tmp_path)


def _of(ranks: int) -> list[Any]:
    return [pytest.param(one, id=one.id) for one in _nightly() if one.ranks == ranks]


@pytest.mark.nightly
@pytest.mark.parametrize("training", _of(2))
def test_a_run_on_two_ranks(training: Training, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    check(training, group, tiny_root, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("training", _of(4))
def test_a_run_on_four_ranks(training: Training, tiny_root: Path, tmp_path: Path, four: WorkerGroup) -> None:
    check(training, four, tiny_root, tmp_path)


# ------------------------------------------------------------------ experts that no token is sent to


@contextlib.contextmanager
def first_pair_routes_to_the_first_expert() -> Iterator[None]:
    """Of four ranks the first two. Of the two that have the second half of the experts, one then has no token at all,
    and the other one has some."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    right = MixtralTopKRouter.forward

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        logits, scores, index = right(self, hidden)
        return logits, scores, torch.zeros_like(index) if torch.distributed.get_rank() < 2 else index

    MixtralTopKRouter.forward = forward
    try:
        yield
    finally:
        MixtralTopKRouter.forward = right


def lopsided_job(resolved: Resolved, steps: int) -> Run | None:
    with first_pair_routes_to_the_first_expert():
        return train_job(resolved, steps)


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", ["grouped_mm", "eager"])
def test_a_rank_whose_experts_no_token_has_chosen(kernel: str, tiny_root: Path, four: WorkerGroup) -> None:
    """It takes part in exchanges and in the sum of their gradients, for which the others wait."""
    model = {"config": MIXTRAL | {"experts_implementation": kernel}}
    runs = []
    for mesh in ({"expert": 2, "replicate": 2}, {"expert": 2, "shard": 2}):
        runs.append(four.run(lopsided_job, run_of(tiny_root, "fsdp2", mesh, 4, model=model), 3)[0])
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-6)
    assert_weights(runs[1], runs[0], 1e-6)


# ------------------------------------------------------------------ files


def _saved(config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The recipe's model of safetensors files, and the size of each weight."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    made.save_pretrained(folder)
    return {"path": str(folder), "config": None}, {name: p.numel() for name, p in made.named_parameters()}


def read_job(resolved: Resolved) -> tuple[int, str | None]:
    """Elements that this rank read while a session opened, and why it loaded the whole model, if it did."""
    from toolkit.model import sources
    from toolkit.training.session import open_session

    read: list[int] = []
    right = sources.Cast.fill

    def fill(self: Any, into: torch.Tensor, start: int) -> None:
        read.append(into.numel())
        right(self, into, start)

    sources.Cast.fill = fill  # type: ignore[method-assign]
    try:
        session = open_session(resolved)
    finally:
        sources.Cast.fill = right  # type: ignore[method-assign]
    return sum(read), session.loaded_whole


def test_each_stage_reads_its_own_blocks(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    """And no weight of another stage."""
    model, sizes = _saved(MODEL, tmp_path / "model")
    for stage, (elements, why_whole) in enumerate(
        group.run(read_job, run_of(tiny_root, "ddp", {"pipeline": 2}, 2, model=model))
    ):
        inner = ("embed",) if stage == 0 else ("norm.weight", "lm_head")
        own = [size for name, size in sizes.items()
               if any(f".layers.{at}." in name for at in (2 * stage, 2 * stage + 1))
               or (".layers." not in name and any(part in name for part in inner))]  # fmt: skip
        assert why_whole is None
        assert elements == sum(own) < 0.6 * sum(sizes.values())


def test_each_rank_reads_its_own_experts(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    """And no expert of another rank, where the files have a layer's experts in one tensor."""
    model, sizes = _saved(EVERY_FAMILY["gpt_oss"]["config"] | {"vocab_size": 300}, tmp_path / "model")
    experts = sum(size for weight, size in sizes.items() if ".experts." in weight)
    rest = sum(sizes.values()) - experts
    for elements, why_whole in group.run(read_job, run_of(tiny_root, "fsdp2", {"expert": 2}, 2, model=model)):
        assert why_whole is None
        assert elements == experts // 2 + rest // 2


@pytest.mark.nightly
def test_sharded_parts_of_layers_are_read_from_files(tiny_root: Path, tmp_path: Path, four: WorkerGroup) -> None:
    """Columns of a matrix, and rows of those: two steps are those of whole weights."""
    model, _ = _saved(LLAMA, tmp_path / "model")
    parts = run_of(tiny_root, "fsdp2", {"tensor": 2, "shard": 2}, 4, model=model)
    whole = run_of(tiny_root, "ddp", None, 4, model=model)
    ran, right = (four.run(train_job, one, 2)[0] for one in (parts, whole))
    assert ran.losses == pytest.approx(right.losses, rel=1e-5)
    assert_weights(ran, right, 1e-6)
