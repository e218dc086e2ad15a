"""The model folder's own tokenizer as torchtune calls one."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer


class FolderTokenizer:
    """``encode`` adds end-of-sequence alone: the tiny tokenizer puts nothing first."""

    def __init__(self, path: str, max_seq_len: int | None = None) -> None:
        self.inner: Any = AutoTokenizer.from_pretrained(path)
        self.max_seq_len = max_seq_len
        self.pad_id = self.inner.pad_token_id

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        ids = list(self.inner(text)["input_ids"])
        return [*ids, self.inner.eos_token_id] if add_eos else ids
