"""The same training as a bare loop, by the transformers Trainer, by TRL and by the toolkit, on rows without padding.

Each function trains a `Work` on every process that calls it, and calls ``after`` at the end of each optimizer step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

LR = 1e-4
After = Callable[[], None]


def llama(layers: int, width: int, vocabulary: int = 512, length: int = 512) -> dict[str, Any]:
    """A Llama whose feed-forward is 8/3 as wide as the model, in heads of at most 64."""
    heads = max(2, width // 64)
    return {"model_type": "llama", "hidden_size": width, "intermediate_size": max(16, width * 8 // 3 // 16 * 16),
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
            "vocab_size": vocabulary, "max_position_embeddings": length, "tie_word_embeddings": False,
            "pad_token_id": 0}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What is trained: ``rows`` of ``length`` random tokens in a micro-batch, in fp32 or under bf16 autocast."""

    model: dict[str, Any] = field(default_factory=lambda: llama(12, 32))
    rows: int = 1
    length: int = 32
    accumulation: int = 2
    lora: bool = False
    bf16: bool = False
    processes: int = 1
    compiled: bool = False
    """The toolkit's blocks, by torch.compile."""
    strategy: dict[str, Any] | None = None
    """``strategy`` of the toolkit's recipe; None: ``single``, or ``ddp`` for several processes."""

    def recipe(self, steps: int) -> dict[str, Any]:
        """The toolkit's recipe of it."""
        strategy = self.strategy or {"name": "single" if self.processes == 1 else "ddp"}
        return {
            "model": {"config": self.model},
            "tokenizer": {"path": "none"},
            "strategy": strategy,
            "data": {"train": "built-in", "max_length": self.length, "workers": 0},
            "batch": {"micro_size": self.rows, "accumulation": self.accumulation},
            "optimizer": {"lr": LR},
            "schedule": {"name": "constant"},
            "precision": "bf16" if self.bf16 else "fp32",
            "activation_checkpointing": "none",
            "compile": self.compiled,
            "machine": {"device": "cpu", "processes": self.processes},
            "run": {"max_steps": steps, "save_every": 0},
        } | ({"adapter": {"r": 8, "alpha": 16, "dropout": 0.0}} if self.lora else {})  # fmt: skip

    def batch(self, draw: torch.Generator) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, self.model["vocab_size"], (self.rows, self.length), generator=draw)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def made(self) -> Any:
        """The model, with its adapter."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(**self.model)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        model.config.use_cache = False
        if not self.lora:
            return model
        from peft import LoraConfig, get_peft_model

        if self.bf16:  # the toolkit's base has 16 bits, and adapters 32
            model = model.to(torch.bfloat16)
        adapter = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, adapter)


def bare(work: Work, steps: int, after: After) -> None:
    """Written by hand: torch, transformers' model and PEFT alone."""
    model: Any = work.made().train()
    if work.processes > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, fused=True)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for micro in range(work.accumulation):
            batch = work.batch(draw)
            wait = work.processes > 1 and micro < work.accumulation - 1
            with model.no_sync() if wait else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=work.bf16):
                    loss = model(**batch).loss
                (loss / work.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after()


def toolkit(work: Work, steps: int, after: After) -> None:
    """This toolkit's session and loop."""
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training import loop
    from toolkit.training.session import engage

    resolved = resolve(Recipe.model_validate(work.recipe(steps)), "floor", device="cpu")
    session = engage(resolved, make_accelerator(resolved), None, 0)
    loop.train(session, _windows(work), steps, loop.Progress(), lambda pending: after())


def compiled(work: Work, steps: int, after: After) -> None:
    """This toolkit's session and loop, with ``compile``."""
    toolkit(replace(work, compiled=True), steps, after)


def _windows(work: Work) -> Iterator[list[Any]]:
    from toolkit.data.collate import MicroBatch

    draw = torch.Generator().manual_seed(0)
    step = 0
    while True:
        supervised = work.rows * (work.length - 1)
        yield [
            MicroBatch(work.batch(draw), list(range(work.rows)), supervised, 0, step, micro, work.accumulation)
            for micro in range(work.accumulation)
        ]
        step += 1


def trainer(work: Work, steps: int, after: After) -> None:
    """The transformers Trainer."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**_arguments(work, steps, folder), remove_unused_columns=False)
        _run(
            Trainer(model=work.made(), args=arguments, train_dataset=_rows(work, steps), data_collator=_stacked), after
        )


def sft(work: Work, steps: int, after: After) -> None:
    """TRL's SFTTrainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,import-untyped,unused-ignore]

    words = Tokenizer(models.WordLevel({str(i): i for i in range(work.model["vocab_size"])}, unk_token="2"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(**_arguments(work, steps, folder), max_length=work.length)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
        rows = Dataset.from_dict({"input_ids": [row.tolist() for row in _rows(work, steps)]})
        _run(SFTTrainer(model=work.made(), args=arguments, train_dataset=rows, processing_class=tokenizer), after)


def _arguments(work: Work, steps: int, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": work.rows, "max_steps": steps, "learning_rate": LR,
        "gradient_accumulation_steps": work.accumulation, "weight_decay": 0.0, "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "report_to": [], "save_strategy": "no",
        "logging_strategy": "no", "use_cpu": True, "disable_tqdm": True, "seed": 0, "dataloader_num_workers": 0,
        "bf16": work.bf16, "ddp_find_unused_parameters": False,
    }  # fmt: skip


def _rows(work: Work, steps: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    count = steps * work.accumulation * work.rows * work.processes
    return list(torch.randint(3, work.model["vocab_size"], (count, work.length), generator=draw))


def _stacked(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.stack(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _run(trainer: Any, after: After) -> None:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            after()

    trainer.add_callback(Watch())
    trainer.train()


LOOPS: dict[str, Callable[[Work, int, After], None]] = {
    "bare": bare, "toolkit": toolkit, "toolkit compiled": compiled, "trainer": trainer, "sft": sft,
}  # fmt: skip
