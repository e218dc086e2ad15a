"""Ledger: which samples, with which labels, each step consumed, derived from the tensors that the model was given."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from toolkit.data.collate import sample_spans
from toolkit.recipe.resolve import Resolved
from toolkit.reference.context import joined
from toolkit.reference.loop import Window
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED, Labels
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.record.trace import RankTrace, RunTrace

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""A sample as the model sees it: its attended ids (of images and recordings, a hash), and its labels to the last one
with loss."""
_BESIDE = ("input_ids", "attention_mask", "position_ids", "labels")


def rows_of(tensors: dict[str, torch.Tensor]) -> list[Row]:
    """The samples in a micro-batch's tensors; rows without a single label are padding, not samples."""
    found: list[Row] = []
    for ids, labels in _rows(tensors):
        kept = list(labels)
        while kept and kept[-1] == IGNORED:
            kept.pop()
        if kept:
            found.append((tuple(ids), tuple(kept)))
    return found


def _rows(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Ids and labels of each sample, apart."""
    if "input_ids" not in tensors:
        hashes = _hashes(tensors)
        for at, labels in enumerate(tensors["labels"].tolist()):
            yield [hashes[at]], labels if isinstance(labels, list) else [labels]
        return
    all_ids, all_labels = tensors["input_ids"].tolist(), tensors["labels"].tolist()
    if "attention_mask" not in tensors:
        for ids, labels, spans in zip(all_ids, all_labels, sample_spans(tensors["position_ids"]), strict=True):
            yield from ((ids[start:end], labels[start:end]) for start, end in spans)
        return
    for ids, mask, labels in zip(all_ids, tensors["attention_mask"].tolist(), all_labels, strict=True):
        kept = [i for i, m in zip(ids, mask, strict=True) if m]
        yield kept, labels if isinstance(labels, list) else [labels]


def _hashes(tensors: dict[str, torch.Tensor]) -> list[int]:
    """Of each sample's features."""
    features = {name: tensor for name, tensor in sorted(tensors.items()) if name not in _BESIDE}
    found = []
    for at in range(len(tensors["labels"])):
        content = hashlib.blake2b(digest_size=7)
        for name, tensor in features.items():
            content.update(name.encode() + tensor[at].contiguous().numpy().tobytes())
        found.append(int.from_bytes(content.digest(), "big"))
    return found


def supervised(tensors: dict[str, torch.Tensor], task: str, part: tuple[int, int] = (0, 1)) -> int:
    """Predictions with loss, in this part of each row."""
    labels = tensors["labels"]
    if task_of(task).labels is not Labels.NEXT:
        return int(labels.ne(IGNORED).sum())
    index, count = part
    length = labels.shape[1] // count
    return int(labels[:, index * length + 1 : (index + 1) * length + 1].ne(IGNORED).sum())


def ledger(ranks: Sequence[RankTrace], windows: Sequence[Window], resolved: Resolved) -> Stage:
    """Every step's samples, per data-parallel rank and micro-batch, and its supervised tokens."""
    stage = _compare([ranks[rank].run for rank in resolved.part_ranks], windows, resolved.recipe.model.task, 0)
    if resolved.ranks_per_part > 1:
        stage.measures += _shared(ranks, resolved)
    return stage


def _shared(ranks: Sequence[RankTrace], resolved: Resolved) -> list[Measure]:
    """Ranks of one data-parallel part get the same micro-batches."""
    found = []
    for step in range(len(ranks[0].run.steps)):
        seen = [[rows_of(m.tensors) for s in rank.run.steps[step : step + 1] for m in s.micros] for rank in ranks]
        odd = [at for at, rows in enumerate(seen) if rows != seen[resolved.part_ranks[resolved.token_rank(at)]]]
        found.append(Measure("samples-of-shared-part", step, len(odd), 0.0, facts={"ranks": odd}))
    return found


def resumed_ledger(runs: Sequence[RunTrace], windows: Sequence[Window], task: str, first: int) -> list[Measure]:
    """The same of a run that began at step ``first``."""
    return _compare(runs, windows, task, first).measures


def _compare(runs: Sequence[RunTrace], windows: Sequence[Window], task: str, first: int) -> Stage:
    stage = Stage("ledger", detection_limit=1.0)
    samples = tokens_in_all = 0
    for step in range(first, len(windows)):
        expected = [(rank, rows_of(micro.tensors)) for rank, micro in windows[step]]
        parts: list[tuple[int, tuple[int, int] | None]] = []
        seen: list[tuple[int, list[Row]]] = []
        tokens = 0
        for rank, run in enumerate(runs):
            if step - first < len(run.steps):
                for micro in run.steps[step - first].micros:
                    seen.append((rank, rows_of(micro.tensors)))
                    parts.append((rank, micro.part))
                    tokens += supervised(micro.tensors, task, micro.part or (0, 1))
        right_tokens = sum(micro.supervised for _, micro in windows[step])
        # Right samples that another rank or micro-batch consumed would still be another run: masks belong to places.
        stage.measures.append(_samples(step, expected, seen))
        asked = [(rank, (p.index, p.count) if (p := micro.part) else None) for rank, micro in windows[step]]
        other = sum(a != b for a, b in zip(sorted(asked, key=str), sorted(parts, key=str), strict=False))
        stage.measures.append(Measure("part-of-rows", step, other, 0.0, facts={"count": other}))
        counted = {"seen": tokens, "expected": right_tokens}
        stage.measures.append(Measure("supervised-tokens", step, abs(tokens - right_tokens), 0.0, facts=counted))
        samples += sum(len(rows_of(micro.tensors)) for _, micro in joined(windows[step]))
        tokens_in_all += right_tokens
    stage.summary = f"{samples} samples, {tokens_in_all:,} tokens"
    return stage


def _samples(step: int, expected: list[tuple[int, list[Row]]], seen: list[tuple[int, list[Row]]]) -> Measure:
    """Missing and unexpected samples; where there are none, ranks whose samples are in other places."""
    all_expected = Counter(row for _, rows in expected for row in rows)
    all_seen = Counter(row for _, rows in seen for row in rows)
    missing, extra = all_expected - all_seen, all_seen - all_expected
    facts = {
        "missing": missing.total(),
        "unexpected": extra.total(),
        "repeated": sum(count for row, count in extra.items() if row in all_expected),
        "relabelled": (
            Counter(ids for ids, _ in missing.elements()) & Counter(ids for ids, _ in extra.elements())
        ).total(),
    }
    if missing or extra:
        return Measure("samples", step, missing.total() + extra.total(), 0.0, facts=facts)
    by_rank = [[rows for rank, rows in side if rank == r] for side in (expected, seen) for r in range(len(expected))]
    half = len(by_rank) // 2
    moved = sum(a != b for a, b in zip(by_rank[:half], by_rank[half:], strict=True))
    if moved:
        return Measure("sample-places", step, moved, 0.0, facts={"ranks": moved})
    return Measure("samples", step, 0.0, 0.0, facts=facts)
