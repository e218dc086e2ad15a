"""Blocks compiled one by one: few graphs for ragged batches, the same result, refused or reported where it cannot be.

Graphs are captured, differentiated and run as they are under the compiler, but not turned into machine code, which
takes minutes; the last tests do that too, in one process group: torch keeps what it has once compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import Run, resolved_from, train_job, worst
from tiny import make_llama, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.launch.job import check_machine
from toolkit.model import compiling
from toolkit.model.checkpointing import checkpoint_blocks
from toolkit.recipe import compilable
from toolkit.recipe.resolve import Resolved
from toolkit.verification.compare.engagement import _compiled
from toolkit.verification.record.trace import RankTrace
from toolkit.verification.run import verify

RAGGED = [(2, 17), (2, 23), (3, 9), (4, 31)]
"""One row of each is padded (where it has three tokens or more)."""


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    yield
    torch._dynamo.reset()


def _gradients(model: Any, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, shape, generator=torch.Generator().manual_seed(sum(shape)))
    mask = torch.ones_like(ids)
    mask[0, -(shape[1] // 3) or shape[1] :] = 0
    model.zero_grad()
    model(input_ids=ids, attention_mask=mask).logits.pow(2).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def _dropout_gradient(p: float, dtype: torch.dtype, compiled: bool) -> torch.Tensor:
    """Of what goes through GELU and dropout, as between two linear layers of a block."""
    x = torch.linspace(-2, 2, 512).to(dtype).requires_grad_()

    def between(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.nn.functional.gelu(x), p)

    torch.manual_seed(0)
    (torch.compile(between, dynamic=True) if compiled else between)(x).backward(torch.linspace(1, 2, 512).to(dtype))
    assert x.grad is not None
    return x.grad.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.usefixtures("launches")
def test_compiled_dropout_has_the_gradient_of_its_forward(dtype: torch.dtype) -> None:
    compiling._configure()
    for p in (0.1, 0.3):
        plain, compiled = (_dropout_gradient(p, dtype, one) for one in (False, True))
        assert (plain == 0).float().mean() > 0.05
        assert worst({"": plain}, {"": compiled})[0] < 1e-5  # a rounding of float32 before one to 16 bits


@pytest.mark.usefixtures("launches")
def test_torch_scales_the_gradient_of_compiled_dropout_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why ``_same_dropout_both_ways`` is there; without this defect it can go."""
    from torch._inductor.decomposition import decompositions

    compiling._configure()
    backward = torch.ops.aten.native_dropout_backward.default
    monkeypatch.setitem(decompositions, backward, torch._decomp.decomposition_table[backward])
    with torch.compiler.config.patch(cache_key_tag="as torch has it"):  # type: ignore[attr-defined]
        plain, compiled = (_dropout_gradient(0.1, torch.bfloat16, one) for one in (False, True))
    kept = plain != 0
    assert (compiled[kept] / plain[kept]).mean().item() == pytest.approx((1 / 0.9) / 1.109375, rel=3e-4)


@pytest.mark.parametrize(
    ("kind", "shapes", "graphs"),
    [
        ("full", RAGGED, 1),
        # Without a mask, where nothing is padded; one row; one token: 1 is a case of its own.
        pytest.param("none", [*RAGGED, (2, 2), (1, 9), (1, 13), (2, 1)], 4, marks=pytest.mark.nightly),
    ],
)
def test_ragged_batches_do_not_compile_anew(captured: None, kind: Any, shapes: Any, graphs: int) -> None:
    (plain, _), (model, blocks) = make_llama(), make_llama()
    compiling.compile_blocks(blocks)
    checkpoint_blocks(blocks, kind)
    for shape in shapes:
        found, right = _gradients(model, shape), _gradients(plain, shape)
        # Capture changes no arithmetic but the order of a few sums: some roundings of float32, 6e-8 each, which grow
        # where a sum is small beside its parts.
        whole = torch.cat([g.flatten() for g in right.values()]).norm()
        assert max((found[name] - right[name]).norm() / whole for name in right) < 1e-5
    seen = compiling.compilation()
    assert seen.fell_back is None
    assert seen.breaks == 0
    assert seen.graphs == graphs
    times = 2 if kind == "full" else 1
    assert seen.calls == seen.runs == times * len(blocks) * len(shapes)
    assert seen.seconds > 0


def test_a_compiler_that_fails_is_reported_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        def compile_nothing(graph: Any, inputs: Any) -> Any:
            raise RuntimeError("no compiler here")

        return compile_nothing

    monkeypatch.setattr(torch._dynamo, "lookup_backend", broken)
    (plain, _), (model, blocks) = make_llama(), make_llama()
    compiling.compile_blocks(blocks)
    found, right = _gradients(model, (2, 9)), _gradients(plain, (2, 9))
    assert all(found[name].equal(right[name]) for name in right)
    seen = compiling.compilation()
    assert "no compiler here" in (seen.fell_back or "")
    assert "run uncompiled, the compiler failed" in compiling.describe(seen)
    torch._dynamo.reset()


def captured_job(resolved: Resolved) -> tuple[Run | None, compiling.Compilation]:
    compiling.BACKEND = "aot_eager"
    try:
        return train_job(resolved, 3), compiling.compilation()
    finally:
        compiling.BACKEND = "inductor"
        torch._dynamo.reset()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp2"])
def test_every_strategy_that_bears_it(group: WorkerGroup, tiny_root: Path, strategy: str) -> None:
    sections: dict[str, Any] = {"strategy": {"name": strategy}, "activation_checkpointing": "full"}
    plain = group.run(train_job, resolved_from(recipe_dict(tiny_root, **sections)), 3)[0]
    resolved = resolved_from(recipe_dict(tiny_root, compile=True, **sections))
    ranks = group.run(captured_job, resolved, timeout=1200)
    for _, seen in ranks:
        assert seen.fell_back is None
        assert seen.runs >= seen.calls > 0
        assert seen.graphs <= 4
    run = ranks[0][0]
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    # Adam's first steps divide a gradient by its own size: a rounding of a gradient near zero becomes one of lr.
    assert worst(run.weights, plain.weights)[0] < 1e-4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"strategy": {"name": "zero3"}}, "compile: is not supported with zero3, .* fsdp2 shards as much"),
        ({"strategy": {"name": "fsdp1"}}, "compile: is not supported with fsdp1: .* fsdp2 supports it"),
        ({"activation_checkpointing": "selective"}, "compile: selects itself which activations"),
    ],
)
def test_refused_where_it_cannot_be(tiny_root: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved_from(recipe_dict(tiny_root, compile=True, **sections))


def test_refused_without_a_compiler(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, compile=True))  # of files for another machine nothing is known
    monkeypatch.setattr(compilable.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)  # peft 0.21.2 sets it in this process where BOFT is used
    with pytest.raises(InputError, match=r"compile: needs a C\+\+ compiler; g\+\+"):
        check_machine(resolved)


def test_it_counts_as_exercised_only_where_compiled_code_ran(tiny_root: Path) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, compile=True, activation_checkpointing="full"))

    def claims(**seen: Any) -> list[bool]:
        whole = {"blocks": 2, "graphs": 1, "runs": 12, "calls": 12} | seen
        trace = RankTrace(0, forwards=3, compiled=compiling.Compilation(**whole))
        return [claim.ok for claim in _compiled([trace], resolved)]

    assert claims() == [True]
    assert claims(runs=0) == claims(graphs=0) == claims(fell_back="why") == claims(calls=6, runs=6) == [False]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "sections",
    [
        {"adapter": {"method": "qlora", "r": 4}},  # compiled code checks the shapes that other libraries' kernels give
        # Evaluated between two steps: more calls than forwards.
        {"optimizer": {"name": "schedule-free", "lr": 1e-3}, "schedule": {"name": "constant"}},
    ],
    ids=["qlora", "schedule-free"],
)
def test_options_verified_with_machine_code(group: WorkerGroup, tiny_root: Path, sections: dict[str, Any]) -> None:
    recipe = recipe_dict(tiny_root, compile=True, precision="bf16", strategy={"name": "ddp"}, **sections)
    outcome = verify(resolved_from(recipe), group=group)
    assert outcome.verdict == "equivalent", outcome.fields()["first_difference"] or outcome.failure or outcome.unproven


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("checkpointing", ["full", "none"])
@pytest.mark.parametrize("adapter", [{"r": 4, "dropout": 0.1}, None], ids=["lora", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp2"])
def test_verified_with_machine_code(
    group: WorkerGroup, tiny_root: Path, strategy: str, adapter: dict[str, Any] | None, checkpointing: str
) -> None:
    """Of bf16 `verify` holds the logic in fp32, then the precision: both are compiled."""
    resolved = resolved_from(
        recipe_dict(tiny_root, compile=True, precision="bf16", strategy={"name": strategy}, adapter=adapter,
                    activation_checkpointing=checkpointing)
    )  # fmt: skip
    outcome = verify(resolved, group=group)
    assert outcome.verdict == "equivalent", outcome.fields()["first_difference"] or outcome.failure or outcome.unproven
    assert [one.name for one in outcome.passes] == ["logic", "precision"]
    for one in outcome.passes:
        ran = [claim for claim in one.claims if claim.claim == "blocks run compiled"]
        assert ran
        assert all(claim.ok and " 0 breaks" in claim.seen for claim in ran)
