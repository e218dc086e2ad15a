"""Four ways to train the same thing, side by side: ``python -m benchmarks.peers`` (``--shape 1b`` and others on a GPU).

The same model, data, LoRA adapter, precision and samples per optimizer step, in one process, in turns. Padded batches
are the same for all, in the order of the data: how much of a batch is padding differs more than peers do.

- ``bare``: a loop written by hand, torch and PEFT alone, padded batches;
- ``trainer``: the transformers Trainer, padded batches;
- ``sft``, ``sft-packing``: TRL's SFTTrainer, where trl can be imported;
- ``toolkit``, ``toolkit-packing``: this toolkit's loop.

It prints supervised tokens per second, as medians over turns, by the clock on the wall and by the processor's time: on
a machine that others use too, the second is the one to compare. Lengths are log-normal (median 70, sigma 0.6).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import statistics
import sys
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

from benchmarks.peer_shapes import SHAPES, Shape, samples, tiny

LR = 2e-4


@dataclass
class Timed:
    """One turn: wall and processor seconds of its timed steps, and the supervised tokens in them."""

    wall: float
    cpu: float
    tokens: int
    peak: int | None = None
    """Bytes that CUDA's allocator held at most, the making of the model among it."""


class Clock:
    """Starts after the warm-up's last step, stops after the last."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.last = warmup, warmup + steps
        self.done = 0
        self.tokens: Any = 0
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
            self.tokens = self.tokens + (labels[:, 1:] != -100).sum()  # to ask a GPU for it would wait

    def timed(self) -> Timed:
        return Timed(self.ended[0] - self.started[0], self.ended[1] - self.started[1], int(self.tokens))


def now() -> tuple[float, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def lora(shape: Shape) -> dict[str, Any]:
    return {"r": shape.lora, "lora_alpha": 2 * shape.lora, "lora_dropout": 0.0, "target_modules": "all-linear",
            "task_type": "CAUSAL_LM"}  # fmt: skip


def adapted(shape: Shape) -> Any:
    """The model with its adapter, the same for every peer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if shape.bf16 else torch.float32
    with torch.device(shape.device):
        config = AutoConfig.for_model(**shape.model)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
        model.config.use_cache = False
        return get_peft_model(model, LoraConfig(**lora(shape)))


def padded(rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def bare(shape: Shape, data: list[list[int]], warmup: int, steps: int) -> Timed:
    """What one writes by hand."""
    model = adapted(shape).train()
    if shape.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, fused=True)
    clock = Clock(warmup, steps)
    for step in range(warmup + steps):
        batch = padded(data[step * shape.rows : (step + 1) * shape.rows])
        if shape.device == "cuda":
            batch = {name: tensor.pin_memory().to("cuda", non_blocking=True) for name, tensor in batch.items()}
        clock.count(batch["labels"])
        with torch.autocast(shape.device, dtype=torch.bfloat16, enabled=shape.bf16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
    return clock.timed()


def _arguments(shape: Shape, kind: Any, folder: str, rows: int, total: int, **more: Any) -> Any:
    return kind(
        output_dir=folder, per_device_train_batch_size=rows, max_steps=total, learning_rate=LR, weight_decay=0.0,
        max_grad_norm=1.0, lr_scheduler_type="constant", optim="adamw_torch_fused", report_to=[], save_strategy="no",
        logging_strategy="no", use_cpu=shape.device == "cpu", disable_tqdm=True, seed=0, dataloader_num_workers=0,
        bf16=shape.bf16, gradient_checkpointing=shape.checkpointing, **more,
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


def trainer(shape: Shape, data: list[list[int]], warmup: int, steps: int) -> Timed:
    """The transformers Trainer on padded batches."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        total = warmup + steps
        arguments = _arguments(shape, TrainingArguments, folder, shape.rows, total, remove_unused_columns=False)
        made = Trainer(model=adapted(shape), args=arguments, train_dataset=data, data_collator=padded)
        return _run(made, Clock(warmup, steps))


def sft(shape: Shape, data: list[list[int]], warmup: int, steps: int, packing: bool = False) -> Timed:
    """TRL's SFTTrainer; with packing its batches are one row without padding."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with tempfile.TemporaryDirectory() as folder:
        rows = shape.packed_rows if packing else shape.rows
        arguments = _arguments(
            shape, SFTConfig, folder, rows, warmup + steps, packing=packing, max_length=shape.longest
        )
        words = _words(shape.vocabulary)
        made = SFTTrainer(
            model=adapted(shape),
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": data}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
        )
        return _run(made, Clock(warmup, steps))


def _words(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="2"))


class _Samples:
    """In place of a run's tokenised data."""

    streamed, task, pad_id, masking = False, "causal-lm", 0, None
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


def toolkit(
    shape: Shape, data: list[list[int]], warmup: int, steps: int, packing: bool = False, loss: str = "plain"
) -> Timed:
    """This toolkit's session and loop."""
    from toolkit.data.loader import TrainLoader
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training import loop
    from toolkit.training.session import engage

    recipe = Recipe.model_validate({
        # Every peer with its defaults, but the attention that is for packed rows on a machine without a GPU.
        "model": {"config": shape.model, "attention": "varlen" if packing and shape.device == "cpu" else None},
        "tokenizer": {"path": "none"},
        "adapter": {"r": shape.lora, "alpha": 2 * shape.lora, "dropout": 0.0},
        "data": {"train": "built-in", "max_length": shape.longest, "workers": 0, "packing": packing,
                 "shuffle": packing},
        "batch": {"micro_size": shape.packed_rows if packing else shape.rows, "accumulation": 1},
        "optimizer": {"lr": LR},
        "schedule": {"name": "constant"},
        "loss": loss,
        "precision": "bf16" if shape.bf16 else "fp32",
        "activation_checkpointing": "full" if shape.checkpointing else "none",
        "machine": {"device": shape.device, "processes": 1},
        "run": {"max_steps": warmup + steps, "save_every": 0},
    })  # fmt: skip
    resolved = resolve(recipe, "peers", device=shape.device)
    with _quickly_made(shape):
        session = engage(resolved, make_accelerator(resolved), None, 0)
    clock = Clock(warmup, steps)
    loader: Any = TrainLoader(
        _Samples(data),  # type: ignore[arg-type]
        recipe,
        micro_size=resolved.micro_size,
        accumulation=1,
        data_size=1,
        data_rank=0,
        device_type=shape.device,
    )

    def counted() -> Iterator[Any]:
        for at, window in enumerate(loader):  # by its place: a GPU's are read a step ahead
            if clock.warmup <= at < clock.last:
                clock.tokens += sum(micro.supervised for micro in window)
            yield window

    def after(pending: Any) -> None:
        clock.step()

    loop.train(session, counted(), warmup + steps, loop.Progress(), after)
    return clock.timed()


def _quickly_made(shape: Shape) -> contextlib.AbstractContextManager[None]:
    """The toolkit draws weights on the host, where a billion of them take their time and no step depends on which they
    are; the others draw theirs on the GPU."""
    if shape.device == "cpu":
        return contextlib.nullcontext()
    from benchmarks.gpu_evidence.train import cheap_weights

    return cheap_weights()


Peer = Callable[[Shape, list[list[int]], int, int], Timed]


def peers() -> dict[str, Peer]:
    """Those that can run here."""
    found: dict[str, Peer] = {"bare": bare, "trainer": trainer}
    if not missing():
        found |= {"sft": sft, "sft-packing": partial(sft, packing=True)}
    found |= {
        "toolkit": toolkit,
        "toolkit-fused": partial(toolkit, loss="fused"),
        "toolkit-packing": partial(toolkit, packing=True),
    }
    return found


def missing() -> dict[str, str]:
    """Those that cannot, and why."""
    gone = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    reason = f"{' and '.join(gone)} not installed"
    return {"sft": reason, "sft-packing": reason} if gone else {}


TARGETS = (("toolkit", "bare", 0.98), ("toolkit", "trainer", 1.0), ("toolkit", "sft", 1.0),
           ("toolkit-packing", "trainer", 1.5), ("toolkit-packing", "sft-packing", 1.0))  # fmt: skip


def _one(run: Peer, shape: Shape, data: list[list[int]], warmup: int, steps: int) -> Timed:
    """A turn of one peer, on a device that is as empty as it was."""
    if shape.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timed = run(shape, data, warmup, steps)
    if shape.device == "cuda":
        timed.peak = torch.cuda.max_memory_allocated()
    return timed


def measure(
    shape: Shape,
    turns: int,
    warmup: int,
    steps: int,
    only: Sequence[str],
    say: Callable[[str], None],
    command: str = "",
) -> dict[str, Any]:
    """Every peer ``turns`` times, in an order that turns round."""
    chosen = {name: run for name, run in peers().items() if not only or name in only}
    # A packed row holds a few samples; full rows are what they are.
    steps_rows = (warmup + steps) * shape.rows
    data = samples(shape, steps_rows if shape.median is None else max(2000, 8 * steps_rows))
    found: dict[str, list[Timed]] = {name: [] for name in chosen}
    for turn in range(turns):
        names = list(chosen)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        for name in names:
            timed = _one(chosen[name], shape, data, warmup, steps)
            found[name].append(timed)
            say(f"turn {turn + 1}/{turns}  {name:16} {timed.tokens / timed.wall:9,.0f} tokens/s of wall time, "
                f"{timed.tokens / timed.cpu:9,.0f} of processor time")  # fmt: skip
    result: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "shape": shape.described,
        "device": torch.cuda.get_device_name() if shape.device == "cuda" else "cpu",
        "load": os.getloadavg()[1] / (os.cpu_count() or 1),
        "threads": torch.get_num_threads(),
        "versions": {p: version(p) for p in ("torch", "transformers", "accelerate", "peft")}
        | ({} if missing() else {"trl": version("trl")}),
        "missing": missing(),
        "turns": turns, "warmup": warmup, "steps": steps,
        "wall": {name: statistics.median(t.tokens / t.wall for t in runs) for name, runs in found.items()},
        "processor": {name: statistics.median(t.tokens / t.cpu for t in runs) for name, runs in found.items()},
        "spread": {name: [min(t.tokens / t.cpu for t in runs), max(t.tokens / t.cpu for t in runs)]
                   for name, runs in found.items()},
        "peak_allocated_bytes": {name: max((t.peak for t in runs if t.peak is not None), default=None)
                                 for name, runs in found.items()},
    }  # fmt: skip
    result["ratios"] = [
        # The median of ratios within a turn: what slows a whole turn slows both.
        {"of": one, "to": other, "target": target,
         **{clock: statistics.median((a.tokens / getattr(a, clock)) / (b.tokens / getattr(b, clock))
                                     for a, b in zip(found[one], found[other], strict=True))
            for clock in ("wall", "cpu")}}
        for one, other, target in TARGETS
        if one in found and other in found and (shape.median is not None or "packing" not in one)
    ]  # fmt: skip
    return result


def page(result: dict[str, Any]) -> str:
    """The measurement as it is kept."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        f"# Peers on {'a CPU' if result['device'] == 'cpu' else result['device']}", "",
        f"`{result['command']}` · {result['started']} · {versions} · {result['threads']} thread(s)", "",
        f"{result['shape']}; supervised tokens per second, medians of {result['turns']} turns of {result['steps']} "
        f"steps. Where others use the machine too, compare by processor time. "
        f"Load over five minutes: {result['load']:.1f} a core.", "",
        "| | of processor time | lowest, highest | of wall time |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, rate in result["processor"].items():
        low, high = result["spread"][name]
        lines.append(f"| {name} | {rate:,.0f} | {low:,.0f}, {high:,.0f} | {result['wall'][name]:,.0f} |")
    lines += ["", *(f"{name}: {why}." for name, why in result["missing"].items())]
    peaks = {name: peak for name, peak in result["peak_allocated_bytes"].items() if peak is not None}
    lines += [f"Peak of {name}: {peak / 2**30:.2f} GiB." for name, peak in peaks.items()]
    lines += ["", "| ratio | processor | wall | target |", "| --- | --- | --- | --- |"]
    for ratio in result["ratios"]:
        lines.append(
            f"| {ratio['of']} to {ratio['to']} | {ratio['cpu']:.3f} | {ratio['wall']:.3f} | {ratio['target']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="cpu", help="all but cpu on a GPU")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, on a CPU: to try it out")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="", help="peers by name, with commas between")
    parser.add_argument("--page", help="where to write the measurement, as Markdown")
    parser.add_argument("--json", help="where to write it as JSON")
    given = parser.parse_args()
    from toolkit.model.silence import silence_libraries

    silence_libraries()
    only = [name for name in given.only.split(",") if name]
    shape = tiny(SHAPES[given.shape]) if given.tiny else SHAPES[given.shape]
    if shape.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--shape {given.shape} runs on a GPU, and none was found; --tiny tries it out without")
    command = "python -m benchmarks.peers " + " ".join(sys.argv[1:])
    say = lambda line: print(line, flush=True)  # noqa: E731
    result = measure(shape, given.turns, given.warmup, given.steps, only, say, command.strip())
    print(page(result))
    for target, text in ((given.page, page(result)), (given.json, json.dumps(result, indent=1) + "\n")):
        if target:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
