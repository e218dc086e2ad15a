"""Any loop can be recorded and judged."""

from __future__ import annotations

from pathlib import Path

import loops
import pytest
import torch
from peft import LoraConfig, get_peft_model

from nights import nightly_but
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.verification.loops.recorder import Recorder
from toolkit.verification.loops.verify_trace import verify_trace
from toolkit.verification.scripts.verify import verify_recording


def test_a_right_accelerate_loop(group: WorkerGroup, tmp_path: Path) -> None:
    group.run(loops.accelerate_loop, str(tmp_path), True)
    outcome = verify_trace(tmp_path)
    assert outcome.verdict == "equivalent", outcome.difference
    stages = {stage.name: stage for stage in outcome.passes[0].stages}
    assert (stages["gradient"].detection_limit or 1) < 1e-5
    assert "clipped" in stages["clip"].summary
    assert len(stages["update"].measures) == 3 * len(outcome.passes[0].ranks[0].trainable)


def test_the_usual_accelerate_loop_weighs_micro_batches_wrongly(group: WorkerGroup, tmp_path: Path) -> None:
    group.run(loops.accelerate_loop, str(tmp_path), False)
    outcome = verify_trace(tmp_path)
    assert outcome.verdict == "different"
    assert outcome.difference is not None
    assert outcome.difference[1].name == "gradient"
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "mean-per-micro-batch"


def test_transformers_trainer(tmp_path: Path) -> None:
    loops.trainer_loop(tmp_path)
    outcome = verify_trace(tmp_path)
    assert outcome.verdict == "equivalent", outcome.difference
    assert len(outcome.passes[0].ranks[0].run.steps) == 3


@pytest.mark.nightly
def test_transformers_trainer_under_deepspeed(group: WorkerGroup, tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    group.run(loops.trainer_loop, tmp_path, config)
    outcome = verify_trace(tmp_path)
    assert outcome.verdict == "equivalent", outcome.difference
    assert len(outcome.passes[0].ranks) == 2


def test_an_accelerate_loop_under_fsdp2(group: WorkerGroup, tmp_path: Path) -> None:
    group.run(loops.fsdp2_loop, str(tmp_path))
    outcome = verify_trace(tmp_path)
    assert outcome.verdict == "equivalent", outcome.difference
    assert len(outcome.passes[0].ranks) == 2
    assert "clipped" in next(stage for stage in outcome.passes[0].stages if stage.name == "clip").summary


@pytest.mark.parametrize(("stage", "bf16"), nightly_but([(1, False), (2, True), (3, False), (3, True)], (3, True)))
def test_an_accelerate_loop_under_deepspeed(stage: int, bf16: bool, group: WorkerGroup, tmp_path: Path) -> None:
    group.run(loops.zero_loop, str(tmp_path), stage, bf16)
    (found,) = verify_recording(tmp_path)
    assert found.outcome.verdict == "equivalent", found.outcome.difference
    one = found.outcome.passes[0]
    assert "clipped" in next(stage for stage in one.stages if stage.name == "clip").summary
    assert "none" not in one.ranks[0].run.steps[2].gradient_digests.values()
    assert found.facts.strategy == f"zero{stage}"
    assert found.facts.copy == ("bfloat16" if bf16 else None)


@pytest.mark.nightly
def test_the_usual_loop_under_deepspeed_weighs_micro_batches_wrongly(group: WorkerGroup, tmp_path: Path) -> None:
    group.run(loops.zero_loop, str(tmp_path), 2, False, False)
    outcome = verify_trace(tmp_path)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "mean-per-micro-batch"


def test_trl_sft_trainer(tmp_path: Path, tiny_root: Path) -> None:
    loops.sft_loop(tmp_path, str(tiny_root / "tokenizer"))
    outcome = verify_trace(tmp_path)
    assert outcome.verdict == "equivalent", outcome.difference
    trained = outcome.passes[0].ranks[0].trainable
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)


def test_an_adapter_put_on_later_is_refused(tmp_path: Path) -> None:
    model, _ = loops.model_and_batches(1)
    recorder = Recorder(tmp_path, model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="model with its adapter"):
        recorder.attach(adapted, torch.optim.AdamW(adapted.parameters()))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no trace"):
        verify_trace(tmp_path)
