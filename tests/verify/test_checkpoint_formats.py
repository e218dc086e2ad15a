"""Checkpoints as the real packages write them, against a plain PyTorch loop's own and against each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nights import nightly_but
from toolkit.errors import InputError
from toolkit.verification.checkpoints.command import CheckpointComparison, compare_two
from toolkit.verification.checkpoints.find import places, read

STAGES = ["step", "names", "weights", "optimizer-state", "schedule"]
TENSORS = 21
Written = Callable[..., Path]


def proven(a: Path, b: Path, limit: float = 1e-5) -> CheckpointComparison:
    """Both compared in every stage, to ``limit``, and equivalent."""
    found = compare_two(a, b)
    assert found.verdict == "equivalent", found.to_json()["first_difference"]
    assert found.exit_code == 0
    last = found.steps[-1]
    assert [stage.name for stage in last.stages] == STAGES
    assert all(stage.measures for stage in last.stages if stage.name in ("step", "names", "weights"))
    moments = last.stage("optimizer-state")
    assert {m.name for m in moments.measures if m.kind == "moment"} == set(last.weights)
    assert moments.detection_limit is not None
    assert moments.detection_limit < limit
    return found


@pytest.mark.parametrize("stage", nightly_but([1, 2, 3], 2, 3))
def test_deepspeed_engine(stage: int, written: Written) -> None:
    found = proven(written("plain"), written(f"zero{stage}"))
    assert found.steps[-1].b.format == f"DeepSpeed ZeRO-{stage}, 2 ranks"
    assert found.steps[-1].b.compute == "float32"
    assert len(found.steps[-1].weights) == TENSORS
    assert found.steps[-1].stage("schedule").measures


@pytest.mark.parametrize("stage", [2, 3])
def test_the_assembly_is_that_of_deepspeed(stage: int, written: Written) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = written(f"zero{stage}", sub_groups=stage == 3)
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    ours = read(places(str(folder))[0])
    assert ours.weights.keys() == theirs.keys()
    assert all(torch.equal(ours.weights[name].read(), tensor) for name, tensor in theirs.items())
    proven(written("plain"), folder)  # moments have the same layout


@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_is_what_it_was_made_of(stage: int, written: Written, tmp_path: Path) -> None:
    """By DeepSpeed's own script, which changes no bit."""
    source, made = written(f"zero{stage}"), written(f"universal{stage}")
    [place] = places(str(made))
    assert (place.path.name, place.number) == ("global_step3_universal", 3)
    found = compare_two(source, made)
    assert found.verdict == "equivalent", found.to_json()["first_difference"]
    last = found.steps[-1]
    assert found.to_json()["bit_equal"]
    assert (len(last.weights), len(last.moments["exp_avg"])) == (TENSORS, TENSORS)
    proven(written("plain"), made)
    frozen = compare_two(written("plain", frozen=True), written(f"universal{stage}", frozen=True))
    assert frozen.verdict == "equivalent", frozen.to_json()["first_difference"]
    shutil.copytree(made, tmp_path / "made")
    lost = tmp_path / "made/global_step3_universal/zero/lm_head.weight/exp_avg.pt"
    lost.unlink()
    with pytest.raises(InputError, match=r"lm_head\.weight/exp_avg\.pt: missing; copy the whole folder"):
        compare_two(source, tmp_path / "made")


@pytest.mark.parametrize("stage", nightly_but([2, 3], 3))
def test_frozen_and_tied_weights_under_deepspeed(stage: int, written: Written) -> None:
    for options in ({"frozen": True}, {"tied": True}):
        found = compare_two(written("plain", **options), written(f"zero{stage}", **options))
        assert found.verdict == "equivalent", found.to_json()["first_difference"]
        last = found.steps[-1]
        assert len(last.weights) == (TENSORS if "frozen" in options else TENSORS - 1)
        assert len(last.moments["exp_avg"]) == TENSORS - 1


@pytest.mark.parametrize("kind", nightly_but(["accelerate-fsdp2", "accelerate-fsdp2-full"], "accelerate-fsdp2"))
def test_fsdp2_by_accelerate(kind: str, written: Written) -> None:
    found = proven(written("plain"), written(kind))
    assert found.steps[-1].b.format.startswith("FSDP, ")
    proven(written("zero3"), written(kind))


def test_a_planted_scale_is_found_across_formats(written: Written) -> None:
    for kind in ("zero2", "zero3", "accelerate-fsdp2"):
        found = compare_two(written("plain"), written(kind, scale=2.0))
        assert (found.verdict, found.exit_code) == ("different", 1)
        assert found.diagnosis is not None
        assert found.diagnosis.id == "moments-scaled"
        assert found.diagnosis.facts["factor"] == pytest.approx(2.0, rel=1e-2)
        assert found.diagnosis.facts["square"] == pytest.approx(4.0, rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("zero2", "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3", "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("accelerate-fsdp2", "optimizer_0/__1_0.distcp"),
        ("accelerate-fsdp2", "pytorch_model_fsdp_0/__0_0.distcp"),
    ],
)
@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_lost_shard_is_named(kind: str, file: str, how: str, written: Written, tmp_path: Path) -> None:
    shutil.copytree(written(kind), tmp_path / kind)
    shard = tmp_path / kind / file
    if how == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-3000])
    with pytest.raises(InputError, match=f"{file}: .*(missing|truncated)"):
        compare_two(written("plain"), tmp_path / kind)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["accelerate-plain", "accelerate-zero2", "accelerate-zero3", "accelerate-fsdp1"])
def test_accelerate(kind: str, written: Written) -> None:
    proven(written("plain"), written(kind))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["trainer-zero2", "trainer-zero3", "trainer-fsdp1", "trainer-fsdp2"])
def test_trainer(kind: str, written: Written) -> None:
    found = proven(written("plain", constant=True), written(kind))
    assert "Trainer" in found.steps[-1].b.format
    single = proven(written("trainer-single"), written(kind))
    assert single.steps[-1].a.numbered is not None
    assert single.steps[-1].step == 3


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_bf16(kind: str, written: Written) -> None:
    """Autocast over float32 weights, against a 16-bit copy."""
    found = proven(written("plain", bf16=True), written(kind, bf16=True), limit=0.1)
    assert found.steps[-1].compute == "bfloat16"
    scaled = compare_two(written("plain", bf16=True), written(kind, bf16=True, scale=2.0))
    assert scaled.diagnosis is not None
    assert scaled.diagnosis.id == "moments-scaled"


@pytest.mark.nightly
def test_bf16_that_no_file_says(written: Written) -> None:
    """FSDP's files have float32 weights and no word on the forward pass: float32 is assumed, and the hint says so."""
    a, b = written("plain", bf16=True), written("accelerate-fsdp2", bf16=True)
    found = compare_two(a, b)
    assert found.diagnosis is not None
    assert found.diagnosis.id == "sixteen-bits-not-said"
    assert compare_two(a, b, tolerance=found.diagnosis.facts["tolerance"]).verdict == "equivalent"
