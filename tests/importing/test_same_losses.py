"""Imported recipes train as the tools' own runs do: the same losses, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from importing import run_text
from importing.inputs import make_inputs
from importing.trainers import losses_of
from jobs import resolved_from, train_job
from toolkit import import_config
from toolkit.launch.group import WorkerGroup

# fp32: two orders of the same sums differ by rounding, which grows over the steps through Adam's division.
FP32 = 1e-5
# bf16: products have 8 bits; the order of a sum decides about the last one.
BF16 = 2e-4

BASE = {
    "max_length": 32, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 5,
    "learning_rate": 5.0e-3, "use_cpu": True, "report_to": "none", "save_strategy": "no",
}  # fmt: skip
TRL_CASES: dict[str, tuple[dict[str, Any], float]] = {
    "text, cosine, bf16 by default": ({"lr_scheduler_type": "cosine", "warmup_steps": 1}, BF16),
    "prompts, LoRA, decay": (
        {
            "bf16": False, "use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0,
            "lora_target_modules": "all-linear", "weight_decay": 0.1, "max_grad_norm": 0.3, "data": "pairs.jsonl",
        },
        FP32,
    ),
    "text, Adam's betas, constant": (
        {"bf16": False, "adam_beta2": 0.95, "lr_scheduler_type": "constant", "optim": "adamw_torch", "seed": 7},
        FP32,
    ),
}  # fmt: skip


TRAINER_CASES: dict[str, tuple[str, float]] = {
    "linear, warm-up, clipping": ("--lr_scheduler_type linear --warmup_steps 2 --max_grad_norm 0.5", FP32),
    "bf16, recomputation": ("--bf16 --gradient_checkpointing --lr_scheduler_type cosine", BF16),
    "steps, Adam's numbers": ("--max_steps 5 --adam_beta1 0.8 --adam_epsilon 1e-6 --lr_scheduler_type constant", FP32),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("import"))


@pytest.fixture(scope="module")
def one() -> Any:
    with WorkerGroup(1) as group:
        yield group


def trained(one: Any, file: Path, *overrides: str) -> list[float]:
    """The losses of the recipe that is imported from ``file``."""
    made = import_config([file], overrides)
    assert made.exit_code == 0, [key.line() for key in made.lost]
    assert made.recipe is not None
    recipe = made.recipe.model_dump(mode="json", exclude_unset=True)
    steps = recipe["run"].get("max_steps") or recipe["run"]["epochs"]  # one step per epoch
    [run] = one.run(train_job, resolved_from(recipe), steps, None, None, steps)
    return run.losses


def compare(theirs: list[float], ours: list[float], tolerance: float) -> None:
    assert len(theirs) == len(ours) == 5
    worst = max(abs(a - b) / a for a, b in zip(theirs, ours, strict=True))
    print(f"losses {theirs[0]:.6f} to {theirs[-1]:.6f}, worst relative difference {worst:.1e}")
    assert ours == pytest.approx(theirs, rel=tolerance)
    assert abs(theirs[-1] - theirs[0]) > 20 * tolerance * theirs[0], "the steps must change the loss"


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", TRL_CASES)
def test_trl(case: str, inputs: Path, one: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from trl.scripts import sft

    settings, tolerance = TRL_CASES[case]
    settings = dict(settings)
    data = settings.pop("data", "text.jsonl")
    config = BASE | settings | {
        "model_name_or_path": str(inputs / "model"), "output_dir": str(tmp_path / "run"),
        "datasets": [{"path": "json", "data_files": str(inputs / data)}],
    }  # fmt: skip
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    ours = trained(one, file)
    compare(run_trl(sft, file), ours, tolerance)


def run_trl(sft: Any, file: Path) -> list[float]:
    """The losses of `trl sft --config FILE`."""
    import trl

    found: list[float] = []

    class Recorded(trl.SFTTrainer):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            if not found:
                self.train = super().train  # losses_of calls it
                found.extend(losses_of(self))

        def save_model(self, *args: Any, **kwargs: Any) -> None:
            """Nothing is saved."""

    parsed = sft.make_parser().parse_args_and_config(["--config", str(file)])
    original, trl.SFTTrainer = trl.SFTTrainer, Recorded
    try:
        sft.main(*parsed)
    finally:
        trl.SFTTrainer = original
    return found


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", TRAINER_CASES)
def test_a_script_around_the_trainer(case: str, inputs: Path, one: Any, tmp_path: Path) -> None:
    settings, tolerance = TRAINER_CASES[case]
    flags = (
        f"--model_name_or_path {inputs / 'model'} --train_file {inputs / 'text.jsonl'} --max_seq_length 32 --use_cpu "
        f"--output_dir {tmp_path / 'run'} --per_device_train_batch_size 4 --gradient_accumulation_steps 3 "
        f"--num_train_epochs 5 --learning_rate 5e-3 --report_to none --save_strategy no {settings}"
    )
    file = tmp_path / "train.sh"
    file.write_text(f"accelerate launch --num_processes 1 run_text.py {flags}\n", encoding="utf-8")
    ours = trained(one, file, "data.format=text")
    compare(run_text.main(flags.split()), ours, tolerance)
