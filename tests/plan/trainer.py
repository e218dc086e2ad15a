"""Real steps of transformers' Trainer on the CPU, every storage counted."""

from __future__ import annotations

import gc
import os
import tempfile
from typing import Any


def trainer_peak(config: dict[str, Any], micro: int, length: int, bf16: bool) -> int:
    """Bytes at the peak of the second step, above what was alive before the model was made; runs on a rank."""
    import torch
    from accelerate.state import AcceleratorState
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from toolkit.planning.live import LiveBytes

    AcceleratorState._reset_state(reset_partial_state=True)
    for key in [key for key in os.environ if key.endswith(("RANK", "WORLD_SIZE"))]:
        del os.environ[key]  # a process that was not launched
    rows = [{"input_ids": torch.ones(length, dtype=torch.int64), "labels": torch.ones(length, dtype=torch.int64)}]
    with tempfile.TemporaryDirectory() as folder, LiveBytes() as tracker:

        class Reset(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                if state.global_step == 1:
                    gc.collect()
                    tracker.reset_peak()

        args = TrainingArguments(
            folder, use_cpu=True, bf16=bf16, max_steps=2, per_device_train_batch_size=micro, optim="adamw_torch_fused",
            gradient_accumulation_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, max_grad_norm=1.0,
        )  # fmt: skip
        own = dict(config)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(own.pop("model_type"), **own))
        Trainer(model, args, train_dataset=rows * 2 * micro, callbacks=[Reset()]).train()  # type: ignore[arg-type]
        peak = tracker.reset_peak()
    AcceleratorState._reset_state(reset_partial_state=True)
    return peak
