"""Ids of texts: what ``tokenizer(text)["input_ids"]`` is, without what else that makes."""

from __future__ import annotations

from typing import Any


class Encoder:
    """Encodes one text at a time, with the tokenizer's special tokens; threads may share it.

    transformers' call also makes masks and the offset of each token in the text, in half of its time. Where the call
    is transformers' own for a tokenizer of the package `tokenizers`, its ids are those of ``encode_batch_fast``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._rust, self._called = tokenizer, rust_tokenizer(tokenizer), False

    def __call__(self, text: str) -> list[int]:
        rust = self._rust
        # transformers turns off what the tokenizer's file says of truncation and padding in its first call.
        if rust is None or not self._called or rust.truncation is not None or rust.padding is not None:
            found = self._tokenizer(text, verbose=False)["input_ids"]
            self._called = True
            return list(found)
        [encoding] = rust.encode_batch_fast([text])
        ids: list[int] = encoding.ids
        return ids


def rust_tokenizer(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` that makes all of a tokenizer's ids; None if it has none, or code of its own."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if not isinstance(tokenizer, Fast) or kind.__call__ is not Fast.__call__:
        return None
    return tokenizer.backend_tokenizer if kind._encode_plus is Fast._encode_plus else None
