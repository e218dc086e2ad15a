"""Any loop can be recorded and judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

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


def test_a_loop_under_fsdp1(group: WorkerGroup, tmp_path: Path) -> None:
    group.run(loops.fsdp1_loop, str(tmp_path))
    (found,) = verify_recording(tmp_path)
    assert found.outcome.verdict == "equivalent", found.outcome.difference
    assert found.facts.strategy == "fsdp1"


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


def small(folder: Path, **ways: Any) -> tuple[Recorder, Any]:
    """Three steps of two micro-batches in plain torch, right but for ``ways``."""
    model, batches = loops.model_and_batches(8)
    recorder = Recorder(folder, model)
    ways.get("before", lambda model: None)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder.attach(model, optimizer)
    ways.get("attached", lambda optimizer: None)(optimizer)
    for step in range(ways.get("steps", 3)):
        window = [batches[at] for at in ways.get("samples", (2 * step, 2 * step + 1))]
        tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        for batch in window:
            given = {name: one for name, one in batch.items() if name in ways.get("given", batch)}
            logits, labels = model(**given).logits.float(), batch["labels"]
            rows, targets = (logits, labels) if ways.get("unshifted") else (logits[:, :-1], labels[:, 1:])
            loss = functional.cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss * ways.get("factor", 1.0) / tokens).backward()
        clipped = [*model.parameters()][: ways.get("clipped")]
        torch.nn.utils.clip_grad_norm_(clipped, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return recorder, model


def halve(optimizer: torch.optim.Optimizer) -> None:
    """Gradients, after the recorder has read them, as code that clips by hand does."""
    parameters = optimizer.param_groups[0]["params"]
    optimizer.register_step_pre_hook(lambda *_: [p.grad.mul_(0.5) for p in parameters] and None)


@pytest.mark.parametrize(
    ("ways", "stage", "diagnosis"),
    [
        ({"factor": 0.7}, "gradient", "uniform-scale"),
        ({"factor": 2.0}, "gradient", "accumulation-summed"),
        ({"unshifted": True}, "gradient", None),
        ({"samples": (1, 1)}, "ledger", None),
        ({"before": lambda model: model.lm_head.weight.data.add_(0.01)}, "forward", "initial-weights-differ"),
        ({"clipped": 3}, "clip", "norm-of-one-shard"),
        ({"attached": halve}, "clip", None),
    ],
)
def test_what_a_loop_does_otherwise_is_found(
    ways: dict[str, Any], stage: str, diagnosis: str | None, tmp_path: Path
) -> None:
    small(tmp_path, **ways)
    found = verify_trace(tmp_path)
    assert found.difference is not None
    assert found.difference[1].name == stage
    assert (found.diagnosis.id if found.diagnosis else None) == diagnosis


def test_a_right_loop_in_plain_torch_lets_go_of_everything(tmp_path: Path) -> None:
    before = torch.autograd.backward, torch.nn.utils.clip_grad_norm_, torch.optim.Optimizer.__init__
    _, model = small(tmp_path)
    assert verify_trace(tmp_path).verdict == "equivalent"
    assert before == (torch.autograd.backward, torch.nn.utils.clip_grad_norm_, torch.optim.Optimizer.__init__)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_without_labels_a_loop_is_compared_from_its_outputs(tmp_path: Path) -> None:
    small(tmp_path, given=("input_ids", "attention_mask"), factor=0.7)
    found = verify_trace(tmp_path)
    assert found.verdict == "equivalent"
    assert any("called without labels" in note for note in found.notes)
    assert any("the loss is 0.7 times the mean" in note for note in found.notes)


def test_a_recording_in_the_same_folder_takes_the_place_of_the_last(tmp_path: Path) -> None:
    small(tmp_path, factor=0.7)
    (tmp_path / "0/rank1.pt").write_bytes(b"of an earlier loop with more processes")
    small(tmp_path)
    assert verify_trace(tmp_path).verdict == "equivalent"
    small(tmp_path, steps=2)
    with pytest.raises(InputError, match="contains no trace"):
        verify_trace(tmp_path)


def test_two_recorders_at_once(tmp_path: Path) -> None:
    models = [loops.model_and_batches(3)[0] for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for at, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        Recorder(tmp_path / str(at), model, steps=2 + at).attach(model, optimizer)
    for batch in loops.model_and_batches(3)[1]:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for at in (0, 1):
        found = verify_trace(tmp_path / str(at))
        assert found.verdict == "equivalent"
        assert len(found.passes[0].ranks[0].run.steps) == 2 + at


def test_every_rank_with_the_same_samples_is_found(group: WorkerGroup, tmp_path: Path) -> None:
    group.run(loops.same_samples, str(tmp_path))
    found = verify_trace(tmp_path)
    assert found.difference is not None
    assert found.difference[1].name == "ledger"
    assert found.diagnosis is not None
    assert found.diagnosis.id == "same-samples-on-every-rank"


def test_an_adapter_put_on_later_is_refused(tmp_path: Path) -> None:
    model, _ = loops.model_and_batches(1)
    recorder = Recorder(tmp_path, model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="model with its adapter"):
        recorder.attach(adapted, torch.optim.AdamW(adapted.parameters()))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no trace"):
        verify_trace(tmp_path)
