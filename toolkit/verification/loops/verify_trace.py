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
from toolkit.strategies import resolve, simplest
from toolkit.verification.cases.case import Case, compute_of
from toolkit.verification.cases.samples import RaggedSamples
from toolkit.verification.compare.across import cross_rank
from toolkit.verification.compare.backward import forward, gradient, replay
from toolkit.verification.compare.ledger import rows_of, supervised
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import Noise
from toolkit.verification.compare.replay import Reference
from toolkit.verification.compare.step import optimizer_stages
from toolkit.verification.diagnose.find import diagnose
from toolkit.verification.loops.kept_model import KeptModel, rebuild
from toolkit.verification.loops.replay_device import multiplying, replay_device, set_generators
from toolkit.verification.outcome import Outcome
from toolkit.verification.passes import Pass
from toolkit.verification.record.plain_form import load_plain
from toolkit.verification.record.trace import LoopFacts, RankTrace, load_traces


def verify_trace(folder: Path, model: Any = None) -> Outcome:
    """Compare every recorded step, on a device of the kind that the loop ran on where this machine has one.

    ``model``: one of the recorded class, where that is not one of transformers' own; its values are replaced. Nothing
    in ``folder`` is unpickled: a trace of any origin can be given. Raises InputError where ``folder`` holds no trace
    that this version can read, or where the loop cannot be replayed on this machine.
    """
    files = sorted(folder.glob("rank*.pt"))
    if not files or not (folder / "model.pt").exists():
        raise InputError(f"--trace: {folder} contains no trace; record one with toolkit.Recorder")
    ranks = load_traces(folder, len(files))
    loops = [load_plain(folder / f"extra{rank.rank}.pt", LoopFacts) for rank in ranks]
    _check(ranks, loops, str(folder))
    device, note = replay_device(loops, str(folder))
    model = rebuild(load_plain(folder / "model.pt", KeptModel), model, str(folder / "model.pt")).to(device)
    resolved = _resolved(model, ranks, loops[0], str(folder), device)
    with multiplying(loops[0].float32_products, device):
        outcome = _compare(RecordedReference(model, resolved, ranks, loops, device), resolved, ranks, folder)
    outcome.notes = [note] if note else []
    return outcome


def _compare(reference: RecordedReference, resolved: Resolved, ranks: list[RankTrace], folder: Path) -> Outcome:
    samples = RaggedSamples([], resolved.recipe.model.task, 0)
    case = Case(resolved.recipe.model_dump(mode="json"), str(folder), resolved.device, "logic", samples, folder,
                round_trip=False)  # fmt: skip
    found = Pass("recorded", ranks=ranks, reference=reference)
    replayed = found.replayed = replay(ranks, reference, None)
    stages = optimizer_stages(ranks, resolved, reference.decayed, len(ranks[0].run.steps), None)
    # The schedule is the loop's own; a clip that the recorder did not see happens in the loop's own way too.
    kept = [stage for stage in stages if stage.name != "schedule"]
    if not resolved.max_grad_norm:
        for stage in kept:
            stage.measures = [m for m in stage.measures if m.kind != "gradient-norm"]
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

    def __init__(
        self, model: Any, resolved: Resolved, ranks: list[RankTrace], loops: list[LoopFacts], device: torch.device
    ) -> None:
        self.resolved, self.device, self.tied, self.blocks = resolved, device, [], []
        self.decayed = frozenset(name for name, decay in loops[0].decay.items() if decay)
        seen = ranks[0].run.weights
        self.first = {
            name: _as_begun(p.detach().cpu().clone(), seen.get(name), loops[0].copy)
            for name, p in model.named_parameters()
            if p.requires_grad
        }

        def seed(step: int, micro: int, rank: int) -> None:
            set_generators(loops[rank].rng[step][micro], device)

        self.loop = PlainLoop(model, resolved, self.decayed, seed, compute_of(resolved))
        self.windows = [
            [(rank, micro.to(device)) for rank, micro in _window(ranks, step, resolved)]
            for step in range(len(ranks[0].run.steps))
        ]
        self.noise = Noise(comparisons=sum(len(self.first) + len(window) for window in self.windows))
        self.measured_because = "the loop is not this toolkit's"


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


def _resolved(model: Any, ranks: list[RankTrace], loop: LoopFacts, source: str, device: torch.device) -> Resolved:
    """A recipe that says what the loop did, as far as replaying asks."""
    config = model.config
    labels = ranks[0].run.steps[0].micros[0].tensors["labels"]
    task = "seq2seq-lm" if config.is_encoder_decoder else "causal-lm" if labels.ndim == 2 else "sequence-classification"
    decays = {decay for decay in loop.decay.values() if decay}
    half = loop.copy or loop.autocast or ""
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(half, "fp32")
    strategy = simplest(
        lambda other: other.traits.autocast != bool(loop.copy) and (len(ranks) == 1 or other.traits.distributed)
    )
    step = ranks[0].run.steps[0]
    recipe = Recipe.model_validate(
        {
            "model": {"config": {"model_type": config.model_type}, "task": task},
            "tokenizer": {"path": "none"},
            "data": {"train": "recorded", "format": "prompt-completion" if task == "seq2seq-lm" else "text"},
            "batch": {"micro_size": labels.shape[0], "accumulation": len(step.micros)},
            "optimizer": {
                "lr": max(max((lr for s in ranks[0].run.steps for lr in s.lr), default=0.0), 1e-30),
                "betas": loop.betas,
                "eps": loop.eps,
                "weight_decay": max(decays, default=0.0),
                "max_grad_norm": loop.limit or None,
            },
            "precision": precision,
            "strategy": {"name": strategy},
            "machine": {"processes": len(ranks), "device": device.type},
            "run": {"max_steps": len(ranks[0].run.steps)},
        }
    )
    return resolve(recipe, source, device=device.type)


def _check(ranks: list[RankTrace], loops: list[LoopFacts], source: str) -> None:
    """Raise InputError where a trace lacks what is read of it below."""
    if [rank.rank for rank in ranks] != [*range(len(ranks))]:
        raise InputError(f"--trace: {source}: contains the same rank twice; record it again")
    for rank, loop in zip(ranks, loops, strict=True):
        steps = rank.run.steps
        seen = [len(step.micros) for step in steps]
        micros = [micro for step in steps for micro in step.micros]
        whole = all({"input_ids", "labels"} <= micro.tensors.keys() for micro in micros)
        if not seen or not all(seen) or not whole or [len(step) for step in loop.rng] != seen:
            raise InputError(f"--trace: {source}: rank {rank.rank} has no complete steps; record it again")
        if any(half not in (None, "bfloat16", "float16", "float32") for half in (loop.copy, loop.autocast)):
            raise InputError(f"--trace: {source}: computes in {loop.copy or loop.autocast}, which is not supported")


def _ledger(ranks: list[RankTrace], reference: Reference) -> Stage:
    """The data is the loop's own; what can be said is that no sample was seen twice within a step."""
    stage = Stage("ledger", detection_limit=1.0)
    total = 0
    for step, window in enumerate(reference.windows):
        rows = [row for _, micro in window for row in rows_of(micro.tensors)]
        twice = len(rows) - len(set(rows))
        total += len(rows)
        stage.measures.append(Measure("samples-once", step, twice, 0.0, facts={"repeated": twice}))
    stage.summary = f"{total} samples"
    return stage
