"""Four ways to train the same thing, side by side: ``python -m benchmarks.peers``.

The same model, data, LoRA adapter, precision and samples per optimizer step, in one process, in turns. Padded batches
are the same for all, in the order of the data: how much of a batch is padding differs more than peers do.

- ``bare``: a loop written by hand, torch and PEFT alone, padded batches;
- ``trainer``: the transformers Trainer, padded batches;
- ``sft``, ``sft-packing``: TRL's SFTTrainer, where trl can be imported;
- ``toolkit``, ``toolkit-packing``: this toolkit's loop.

Told is supervised tokens per second, as medians over turns, by the clock on the wall and by the processor's time: on a
machine that others use too, the second is the one to compare. Lengths are log-normal (median 70, sigma 0.6).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 2048
MODEL = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
         "tie_word_embeddings": False, "pad_token_id": 0}  # fmt: skip
LONGEST = 512
ROWS = 8
"""Samples per optimizer step of padded batches."""
PACKED_ROWS = 2
"""Rows of LONGEST tokens per step of packed ones: about as many tokens as ROWS samples have with their padding."""
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
LR = 2e-4


@dataclass
class Timed:
    """One turn: wall and processor seconds of its timed steps, and the supervised tokens in them."""

    wall: float
    cpu: float
    tokens: int


class Clock:
    """Starts after the warm-up's last step, stops after the last."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.last = warmup, warmup + steps
        self.done = self.tokens = 0
        self.started = self.ended = (0.0, 0.0)
        if not warmup:
            self.started = now()

    def step(self) -> None:
        """One optimizer step has ended."""
        self.done += 1
        if self.done == self.warmup:
            self.started = now()
        if self.done == self.last:
            self.ended = now()

    def count(self, labels: torch.Tensor) -> None:
        """The labels of a micro-batch, not shifted; one that is fetched ahead of the last step does not count."""
        if self.warmup <= self.done < self.last:
            self.tokens += int((labels[:, 1:] != -100).sum())

    def timed(self) -> Timed:
        return Timed(self.ended[0] - self.started[0], self.ended[1] - self.started[1], self.tokens)


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def samples(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids, log-normal in length."""
    draw = random.Random(seed)
    lengths = [min(LONGEST, max(4, round(draw.lognormvariate(4.2485, 0.6)))) for _ in range(count)]
    return [draw.choices(range(3, VOCABULARY), k=length) for length in lengths]


def adapted() -> Any:
    """The model with its adapter, the same for every peer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL), attn_implementation="sdpa")
    model.config.use_cache = False
    return get_peft_model(model, LoraConfig(**LORA))


def padded(rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def bare(data: list[list[int]], warmup: int, steps: int) -> Timed:
    """What one writes by hand."""
    model = adapted().train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, fused=True)
    clock = Clock(warmup, steps)
    for step in range(warmup + steps):
        batch = padded(data[step * ROWS : (step + 1) * ROWS])
        clock.count(batch["labels"])
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
    return clock.timed()


def _arguments(kind: Any, folder: str, rows: int, total: int, **more: Any) -> Any:
    return kind(
        output_dir=folder, per_device_train_batch_size=rows, max_steps=total, learning_rate=LR, weight_decay=0.0,
        max_grad_norm=1.0, lr_scheduler_type="constant", optim="adamw_torch_fused", report_to=[], save_strategy="no",
        logging_strategy="no", use_cpu=True, disable_tqdm=True, seed=0, dataloader_num_workers=0, **more,
    )  # fmt: skip


def _run(trainer: Any, clock: Clock) -> Timed:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            clock.step()

    right = trainer.compute_loss

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        clock.count(inputs["labels"])
        return right(model, inputs, *args, **kwargs)

    trainer.compute_loss = counted
    trainer._get_train_sampler = torch.utils.data.SequentialSampler
    trainer.add_callback(Watch())
    trainer.train()
    return clock.timed()


def trainer(data: list[list[int]], warmup: int, steps: int) -> Timed:
    """The transformers Trainer on padded batches."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(TrainingArguments, folder, ROWS, warmup + steps, remove_unused_columns=False)
        made = Trainer(model=adapted(), args=arguments, train_dataset=data, data_collator=padded)
        return _run(made, Clock(warmup, steps))


def sft(data: list[list[int]], warmup: int, steps: int, packing: bool = False) -> Timed:
    """TRL's SFTTrainer; with packing its batches are one row without padding."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with tempfile.TemporaryDirectory() as folder:
        rows = PACKED_ROWS if packing else ROWS
        arguments = _arguments(SFTConfig, folder, rows, warmup + steps, packing=packing, max_length=LONGEST, bf16=False,
                               gradient_checkpointing=False)  # fmt: skip
        made = SFTTrainer(
            model=adapted(),
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": data}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=_words(), pad_token="0", eos_token="1"),
        )
        return _run(made, Clock(warmup, steps))


def _words() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="2"))


class _Samples:
    """Stands where a run has its tokenised data."""

    streamed, task, pad_id = False, "causal-lm", 0
    label_names = None
    notes = ()

    def __init__(self, data: list[list[int]]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        from toolkit.data.formats import Example

        return Example(self.data[index], list(self.data[index]))

    def lengths(self) -> Any:
        import numpy as np

        return np.array([len(row) for row in self.data])


def toolkit(data: list[list[int]], warmup: int, steps: int, packing: bool = False, loss: str = "plain") -> Timed:
    """This toolkit's session and loop."""
    from toolkit.data.loader import TrainLoader
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training import loop
    from toolkit.training.session import engage

    recipe = Recipe.model_validate({
        "model": {"config": MODEL},
        "tokenizer": {"path": "none"},
        "adapter": {"r": LORA["r"], "alpha": LORA["lora_alpha"], "dropout": 0.0},
        "data": {"train": "built-in", "max_length": LONGEST, "workers": 0, "packing": packing, "shuffle": packing},
        "batch": {"micro_size": PACKED_ROWS if packing else ROWS, "accumulation": 1},
        "optimizer": {"lr": LR},
        "schedule": {"name": "constant"},
        "loss": loss,
        "machine": {"device": "cpu"},
        "run": {"max_steps": warmup + steps, "save_every": 0},
    })  # fmt: skip
    resolved = resolve(recipe, "peers")
    session = engage(resolved, make_accelerator(resolved), None, 0)
    clock = Clock(warmup, steps)
    loader: Any = TrainLoader(
        _Samples(data),  # type: ignore[arg-type]
        recipe,
        micro_size=resolved.micro_size,
        accumulation=1,
        world_size=1,
        rank=0,
        device_type="cpu",
    )

    def counted() -> Iterator[Any]:
        for window in loader:
            if clock.warmup <= clock.done < clock.last:
                clock.tokens += sum(micro.supervised for micro in window)
            yield window

    def after(pending: Any) -> None:
        clock.step()

    loop.train(session, counted(), warmup + steps, loop.Progress(), after)
    return clock.timed()


def peers() -> dict[str, Callable[[list[list[int]], int, int], Timed]]:
    """Those that can run here."""
    found: dict[str, Callable[[list[list[int]], int, int], Timed]] = {"bare": bare, "trainer": trainer}
    if importlib.util.find_spec("trl") is not None:
        found |= {"sft": sft, "sft-packing": partial(sft, packing=True)}
    found |= {
        "toolkit": toolkit,
        "toolkit-fused": partial(toolkit, loss="fused"),
        "toolkit-packing": partial(toolkit, packing=True),
    }
    return found


TARGETS = (("toolkit", "bare", 0.98), ("toolkit", "trainer", 1.0), ("toolkit", "sft", 1.0),
           ("toolkit-packing", "trainer", 1.5), ("toolkit-packing", "sft-packing", 1.0))  # fmt: skip


def measure(turns: int, warmup: int, steps: int, only: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Every peer ``turns`` times, in an order that turns round."""
    chosen = {name: run for name, run in peers().items() if not only or name in only}
    data = samples(max(2000, (warmup + steps) * 60))
    found: dict[str, list[Timed]] = {name: [] for name in chosen}
    for turn in range(turns):
        names = list(chosen)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        for name in names:
            timed = chosen[name](data, warmup, steps)
            found[name].append(timed)
            say(f"turn {turn + 1}/{turns}  {name:16} {timed.tokens / timed.wall:9,.0f} tokens/s of wall time, "
                f"{timed.tokens / timed.cpu:9,.0f} of processor time")  # fmt: skip
    result: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.peers --turns {turns} --warmup {warmup} --steps {steps}",
        "load": os.getloadavg()[1] / (os.cpu_count() or 1),
        "threads": torch.get_num_threads(),
        "versions": {p: version(p) for p in ("torch", "transformers", "accelerate", "peft")}
        | ({"trl": version("trl")} if "sft" in peers() else {}),
        "turns": turns, "warmup": warmup, "steps": steps,
        "wall": {name: statistics.median(t.tokens / t.wall for t in runs) for name, runs in found.items()},
        "processor": {name: statistics.median(t.tokens / t.cpu for t in runs) for name, runs in found.items()},
        "spread": {name: [min(t.tokens / t.cpu for t in runs), max(t.tokens / t.cpu for t in runs)]
                   for name, runs in found.items()},
    }  # fmt: skip
    result["ratios"] = [
        # The median of ratios within a turn: what slows a whole turn slows both.
        {"of": one, "to": other, "target": target,
         **{clock: statistics.median((a.tokens / getattr(a, clock)) / (b.tokens / getattr(b, clock))
                                     for a, b in zip(found[one], found[other], strict=True))
            for clock in ("wall", "cpu")}}
        for one, other, target in TARGETS
        if one in found and other in found
    ]  # fmt: skip
    return result


def page(result: dict[str, Any]) -> str:
    """The measurement as it is kept."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        "# Peers on a CPU", "",
        f"`{result['command']}` · {result['started']} · {versions} · {result['threads']} thread(s)", "",
        "Small Llama, LoRA on all linear layers, fp32, log-normal lengths (median 70, sigma 0.6); supervised tokens "
        f"per second, medians of {result['turns']} turns of {result['steps']} steps. Where others use "
        f"the machine too, compare by processor time. Load over five minutes: {result['load']:.1f} a core.", "",
        "| | of processor time | lowest, highest | of wall time |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, rate in result["processor"].items():
        low, high = result["spread"][name]
        lines.append(f"| {name} | {rate:,.0f} | {low:,.0f}, {high:,.0f} | {result['wall'][name]:,.0f} |")
    lines += ["", "| ratio | processor | wall | target |", "| --- | --- | --- | --- |"]
    for ratio in result["ratios"]:
        lines.append(
            f"| {ratio['of']} to {ratio['to']} | {ratio['cpu']:.3f} | {ratio['wall']:.3f} | {ratio['target']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="", help="peers by name, with commas between")
    parser.add_argument("--page", help="where to write the measurement, as Markdown")
    parser.add_argument("--json", help="where to write it as JSON")
    given = parser.parse_args()
    from toolkit.model.quiet import hush

    hush()
    only = [name for name in given.only.split(",") if name]
    result = measure(given.turns, given.warmup, given.steps, only, lambda line: print(line, flush=True))
    print(page(result))
    for target, text in ((given.page, page(result)), (given.json, json.dumps(result, indent=1) + "\n")):
        if target:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
