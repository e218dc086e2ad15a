"""Real steps of transformers' Trainer and of TRL's SFTTrainer on the CPU, every storage counted."""

from __future__ import annotations

import gc
import os
import tempfile
from typing import Any


def trainer_peak(
    config: dict[str, Any], micro: int, length: int, bf16: bool, trl: bool = False, dtype: str = "float32"
) -> int:
    """Bytes at the peak of the second step, above what was alive before the model was made; runs on a rank. ``trl``: of
    the SFTTrainer. ``dtype``: of the weights."""
    import torch
    from accelerate.state import AcceleratorState
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments

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

        chosen: Any = TrainingArguments
        if trl:
            from trl import SFTConfig

            chosen = SFTConfig
        args = chosen(
            folder, use_cpu=True, bf16=bf16, max_steps=2, per_device_train_batch_size=micro, optim="adamw_torch_fused",
            gradient_accumulation_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, max_grad_norm=1.0,
            gradient_checkpointing=False,
        )  # fmt: skip
        own = dict(config)
        made = AutoConfig.for_model(own.pop("model_type"), **own)
        model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, dtype))
        train(model, args, rows * 2 * micro, Reset())
        peak = tracker.reset_peak()
    AcceleratorState._reset_state(reset_partial_state=True)
    return peak


def train(model: Any, args: Any, rows: list[dict[str, Any]], callback: Any, **more: Any) -> None:
    """Train with the trainer that ``args`` is for, on rows that are also the held-out ones where it evaluates."""
    from transformers import Trainer

    evaluates = args.eval_strategy != "no"
    if type(args).__name__ != "SFTConfig":
        more |= {"eval_dataset": rows} if evaluates else {}
        Trainer(model, args, train_dataset=rows, callbacks=[callback], **more).train()  # type: ignore[arg-type]
        return
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), eos_token="a", pad_token="b"
    )
    given = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows])
    more |= {"eval_dataset": given} if evaluates else {}
    SFTTrainer(model, args, train_dataset=given, processing_class=tokenizer, callbacks=[callback], **more).train()


def trainer_evaluation(config: dict[str, Any], length: int, bf16: bool, rows: int, kept: int, trl: bool = False) -> int:
    """Bytes at the peak of an evaluation after a step of one row, above what was alive before the model was made; runs
    on a rank. ``kept``: batches of ``rows`` rows whose logits a metric is given; 0: three batches, of which the loss
    alone is wanted. ``trl``: of the SFTTrainer."""
    import torch
    from accelerate.state import AcceleratorState
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments

    from toolkit.planning.live import LiveBytes

    AcceleratorState._reset_state(reset_partial_state=True)
    for key in [key for key in os.environ if key.endswith(("RANK", "WORLD_SIZE"))]:
        del os.environ[key]  # a process that was not launched
    row = {"input_ids": torch.ones(length, dtype=torch.int64), "labels": torch.ones(length, dtype=torch.int64)}
    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as folder, LiveBytes() as tracker:

        class Reset(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                gc.collect()
                tracker.reset_peak()

            def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                peaks.append(tracker.reset_peak())

        chosen: Any = TrainingArguments
        if trl:
            from trl import SFTConfig

            chosen = SFTConfig
        args = chosen(
            folder, use_cpu=True, bf16=bf16, max_steps=2, per_device_train_batch_size=1, optim="adamw_torch_fused",
            report_to=[], save_strategy="no", disable_tqdm=True, eval_strategy="steps", eval_steps=2,
            per_device_eval_batch_size=rows, prediction_loss_only=not kept,
            gradient_checkpointing=False,
        )  # fmt: skip
        own = dict(config)
        made = AutoConfig.for_model(own.pop("model_type"), **own)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        metric = (lambda given: {"words": float(given.predictions.shape[-1])}) if kept else None
        train(model, args, [row] * (rows * (kept or 3)), Reset(), compute_metrics=metric)
    AcceleratorState._reset_state(reset_partial_state=True)
    return peaks[-1]
