"""Token ids of a text: ``tokenizer(text)["input_ids"]`` without masks and offsets."""

from __future__ import annotations

from typing import Any


class Encoder:
    """Encode one text, with the tokenizer's special tokens. Thread-safe after the first call.

    A tokenizer that uses transformers' own call on a `tokenizers` backend returns the ids of the backend's
    ``encode_batch_fast``, which computes no offsets; others are called themselves.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._rust, self._called = tokenizer, rust_tokenizer(tokenizer), False

    def __call__(self, text: str) -> list[int]:
        rust = self._rust
        # The first call of transformers turns off the truncation and padding of tokenizer.json.
        if rust is None or not self._called or rust.truncation is not None or rust.padding is not None:
            found = self._tokenizer(text, verbose=False)["input_ids"]
            self._called = True
            return list(found)
        [encoding] = rust.encode_batch_fast([text])
        ids: list[int] = encoding.ids
        return ids


def rust_tokenizer(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` behind a tokenizer; None if there is none, or if the tokenizer overrides encoding."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if not isinstance(tokenizer, Fast) or kind.__call__ is not Fast.__call__:
        return None
    return tokenizer.backend_tokenizer if kind._encode_plus is Fast._encode_plus else None
