"""`toolkit verify --trace DIR`: a recorded loop, whoever wrote it, replayed through the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from toolkit.data.collate import MicroBatch
from toolkit.errors import InputError
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.reference.loop import PlainLoop, Window
from toolkit.strategies import resolve
from toolkit.verify.case import Case, compute_of
from toolkit.verify.causes import diagnose
from toolkit.verify.measure import Measure, Stage
from toolkit.verify.outcome import Outcome
from toolkit.verify.passes import Pass
from toolkit.verify.replay import Noise, Reference
from toolkit.verify.samples import RaggedSamples
from toolkit.verify.stages.across import cross_rank
from toolkit.verify.stages.backward import forward, gradient, replay
from toolkit.verify.stages.ledger import rows_of, supervised
from toolkit.verify.stages.step import optimizer_stages
from toolkit.verify.trace import RankTrace, load_traces


def verify_trace(folder: Path) -> Outcome:
    """Compare every recorded step; raises InputError where ``folder`` holds no trace."""
    files = sorted(folder.glob("rank*.pt"))
    if not files or not (folder / "model.pt").exists():
        raise InputError(f"--trace: {folder} holds no trace; toolkit.verify.recorder writes one")
    ranks = load_traces(folder, len(files))
    extras = [torch.load(folder / f"extra{rank.rank}.pt", weights_only=False) for rank in ranks]
    model = torch.load(folder / "model.pt", weights_only=False).float().train()
    resolved = _resolved(model, ranks, extras[0], str(folder))
    reference = RecordedReference(model, resolved, ranks, extras)
    samples = RaggedSamples([], resolved.recipe.model.task, 0)
    case = Case(resolved.recipe.model_dump(mode="json"), str(folder), "cpu", "logic", samples, folder, round_trip=False)
    found = Pass("recorded", ranks=ranks, reference=reference)
    replayed = found.replayed = replay(ranks, reference, None)
    stages = optimizer_stages(ranks, resolved, reference.decayed, len(ranks[0].run.steps), None)
    # The schedule is the loop's own; a clip that the recorder did not see happens in the loop's own way too.
    kept = [stage for stage in stages if stage.name != "schedule"]
    if not resolved.max_grad_norm:
        for stage in kept:
            stage.measures = [m for m in stage.measures if m.tensor != "gradient norm"]
    found.stages = [
        _ledger(ranks, reference),
        forward(ranks, reference, replayed),
        gradient(ranks, reference.noise, replayed, None),
        *kept,
        cross_rank(ranks),
    ]
    outcome = Outcome(resolved, resolved, [found])
    if found.different:
        outcome.diagnosis = diagnose(found, case)
    return outcome


class RecordedReference(Reference):
    """The plain loop on the model that the recorder kept, over the batches that it saw, with its random state."""

    def __init__(self, model: Any, resolved: Resolved, ranks: list[RankTrace], extras: list[dict[str, Any]]) -> None:
        self.resolved, self.device, self.tied = resolved, torch.device("cpu"), []
        self.decayed = frozenset(name for name, decay in extras[0]["decay"].items() if decay)
        seen = ranks[0].run.weights
        self.first = {
            name: _as_begun(p.detach().clone(), seen.get(name), extras[0].get("copy"))
            for name, p in model.named_parameters()
            if p.requires_grad
        }

        def seed(step: int, micro: int, rank: int) -> None:
            torch.set_rng_state(extras[rank]["rng"][step][micro])

        self.loop = PlainLoop(model, resolved, self.decayed, seed, compute_of(resolved))
        self.windows = [_window(ranks, step, resolved) for step in range(len(ranks[0].run.steps))]
        self.noise = Noise()


def _as_begun(weight: torch.Tensor, seen: torch.Tensor | None, copy: str | None) -> torch.Tensor:
    """DeepSpeed 0.19.8 makes its float32 masters from the 16-bit copy: a loop of its own starts from those."""
    if copy is None or seen is None:
        return weight
    rounded = weight.to(getattr(torch, copy)).to(weight.dtype)
    return rounded if torch.equal(rounded, seen) else weight


def _window(ranks: list[RankTrace], step: int, resolved: Resolved) -> Window:
    task = resolved.recipe.model.task
    count = max(len(rank.run.steps[step].micros) for rank in ranks)
    found = []
    for micro in range(count):
        for rank in ranks:
            micros = rank.run.steps[step].micros
            if micro < len(micros):
                tensors = micros[micro].tensors
                tokens = supervised(tensors, task)
                found.append((rank.rank, MicroBatch(tensors, [0], tokens, 0, step, micro, count)))
    return found


def _resolved(model: Any, ranks: list[RankTrace], extra: dict[str, Any], source: str) -> Resolved:
    """A recipe that says what the loop did, as far as replaying asks."""
    config = model.config
    labels = ranks[0].run.steps[0].micros[0].tensors["labels"]
    task = "seq2seq-lm" if config.is_encoder_decoder else "causal-lm" if labels.ndim == 2 else "sequence-classification"
    decays = {decay for decay in extra["decay"].values() if decay}
    half = extra.get("copy") or extra.get("autocast") or ""
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(half, "fp32")
    # ``zero2`` stands for all that compute in a 16-bit copy of the weights.
    strategy = "zero2" if extra.get("copy") else "single" if len(ranks) == 1 else "ddp"
    step = ranks[0].run.steps[0]
    recipe = Recipe.model_validate(
        {
            "model": {"config": {"model_type": config.model_type}, "task": task},
            "tokenizer": {"path": "none"},
            "data": {"train": "recorded", "format": "prompt-completion" if task == "seq2seq-lm" else "text"},
            "batch": {"micro_size": labels.shape[0], "accumulation": len(step.micros)},
            "optimizer": {
                "lr": max(max((lr for s in ranks[0].run.steps for lr in s.lr), default=0.0), 1e-30),
                "betas": extra["betas"],
                "eps": extra["eps"],
                "weight_decay": max(decays, default=0.0),
                "max_grad_norm": extra["limit"] or None,
            },
            "precision": precision,
            "strategy": {"name": strategy},
            "machine": {"processes": len(ranks), "device": "cpu"},
            "run": {"max_steps": len(ranks[0].run.steps)},
        }
    )
    return resolve(recipe, source, device="cpu")


def _ledger(ranks: list[RankTrace], reference: Reference) -> Stage:
    """The data is the loop's own; what can be said is that no sample was seen twice within a step."""
    stage = Stage("ledger", detection_limit=1.0)
    total = 0
    for step, window in enumerate(reference.windows):
        rows = [row for _, micro in window for row in rows_of(micro.tensors)]
        twice = len(rows) - len(set(rows))
        total += len(rows)
        stage.measures.append(Measure(step, "samples", twice, 0.0, said=f"{twice} samples seen twice in one step"))
    stage.summary = f"{total} samples"
    return stage
