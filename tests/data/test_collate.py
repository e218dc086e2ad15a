"""Micro-batches as a model takes them."""

from __future__ import annotations

import pytest
import torch

from toolkit.data.collate import Slot, collate
from toolkit.data.formats import Example

I = -100  # noqa: E741


def slot(*ids: int) -> Slot:
    return Slot(list(ids), epoch=1, window=5, micro=2, micro_count=3)


def test_rows_are_padded_on_the_right_to_the_longest() -> None:
    batch = collate([Example([4, 5, 6], [I, 5, 6]), Example([7], [7])], slot(8, 9), "causal-lm", pad_id=0)
    assert {name: tensor.tolist() for name, tensor in batch.tensors.items()} == {
        "input_ids": [[4, 5, 6], [7, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[I, 5, 6], [7, I, I]],
    }
    assert {tensor.dtype for tensor in batch.tensors.values()} == {torch.int64}
    assert (batch.sample_ids, batch.supervised) == ([8, 9], 2)
    assert (batch.epoch, batch.window, batch.micro, batch.micro_count) == (1, 5, 2, 3)


def test_pad_to_multiple_of() -> None:
    batch = collate([Example([4, 5, 6], [4, 5, 6])], slot(0), "causal-lm", 1, pad_to_multiple_of=4)
    assert batch.tensors["input_ids"].tolist() == [[4, 5, 6, 1]]
    assert batch.tensors["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert batch.tensors["labels"].tolist() == [[4, 5, 6, I]]


def test_seq2seq_labels_have_their_own_length() -> None:
    batch = collate([Example([4], [5, 6, 2]), Example([4, 4], [2])], slot(0, 1), "seq2seq-lm", 0)
    assert batch.tensors["input_ids"].tolist() == [[4, 0], [4, 4]]
    assert batch.tensors["labels"].tolist() == [[5, 6, 2], [2, I, I]]
    assert batch.supervised == 4


def test_classification() -> None:
    batch = collate([Example([4], 1), Example([4, 5], 0)], slot(0, 1), "sequence-classification", 0)
    assert batch.tensors["labels"].tolist() == [1, 0]
    assert batch.supervised == 2


@pytest.mark.parametrize(("pad_id", "token"), [(3, 0), (0, 1)])
def test_a_rank_without_samples_gets_a_row_without_loss_and_without_padding(pad_id: int, token: int) -> None:
    batch = collate([], slot(), "causal-lm", pad_id)
    assert {name: tensor.tolist() for name, tensor in batch.tensors.items()} == {
        "input_ids": [[token, token]],
        "attention_mask": [[1, 1]],
        "labels": [[I, I]],
    }
    assert (batch.sample_ids, batch.supervised) == ([], 0)
    assert collate([], slot(), "sequence-classification", 0).tensors["labels"].tolist() == [I]
    assert collate([], slot(), "seq2seq-lm", 0).tensors["labels"].tolist() == [[I, I]]


def test_a_sample_that_encodes_to_nothing_still_attends() -> None:
    batch = collate([Example([], [])], slot(4), "causal-lm", 0)
    assert batch.tensors["input_ids"].tolist() == [[1]]
    assert batch.tensors["attention_mask"].tolist() == [[1]]
    assert batch.tensors["labels"].tolist() == [[I]]
    assert (batch.sample_ids, batch.supervised) == ([4], 0)


def test_to_moves_the_tensors_and_keeps_the_rest() -> None:
    batch = collate([Example([4], [4])], slot(4), "causal-lm", 0)
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in moved.tensors.values()} == {"meta"}
    assert moved.sample_ids == [4]
