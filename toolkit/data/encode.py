"""Token ids of a text: ``tokenizer(text)["input_ids"]`` without masks and offsets, and no special token twice."""

from __future__ import annotations

import functools
import threading
from typing import Any


class Encoder:
    """Encode one text, with the tokenizer's special tokens. Thread-safe after the first call.

    A tokenizer that uses transformers' own call on a `tokenizers` backend returns the ids of the backend's
    ``encode_batch_fast``, which computes no offsets; others are called themselves.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._rust, self._called = tokenizer, rust_tokenizer(tokenizer), False

    def __call__(self, text: str) -> list[int]:
        return self.once(self._encode(text))

    @functools.cached_property
    def _once(self) -> _Once:
        return _Once(self._tokenizer)

    @property
    def doubled(self) -> int:
        """Texts that had written special tokens of the tokenizer themselves."""
        return self._once.texts if "_once" in vars(self) else 0

    def once(self, ids: list[int]) -> list[int]:
        """``ids`` of a text as the tokenizer encodes it, without special tokens that are there twice."""
        return self._once.of(ids)[0]

    def open(self, text: str) -> list[int]:
        """The ids of a text that goes on: without the special tokens that the tokenizer adds behind it."""
        return self._once.open(self(text))

    def pair(self, prompt: str, completion: str) -> tuple[list[int], int]:
        """``encode_pair``."""
        ids, start = encode_pair(self._tokenizer, prompt, completion)
        ids, before = self._once.of(ids)
        return ids, min(max(0, start - before), len(ids))

    def _encode(self, text: str) -> list[int]:
        rust = self._rust
        # The first call of transformers turns off the truncation and padding of tokenizer.json.
        if rust is None or not self._called or rust.truncation is not None or rust.padding is not None:
            found = self._tokenizer(text, verbose=False)["input_ids"]
            self._called = True
            return list(found)
        [encoding] = rust.encode_batch_fast([text])
        ids: list[int] = encoding.ids
        return ids


class _Once:
    """Takes out special tokens that a text has written at its edge and the tokenizer has added once more."""

    def __init__(self, tokenizer: Any) -> None:
        self.texts = 0
        self._lock = threading.Lock()
        self._before: list[int] = []
        self._behind: list[int] = []
        if not getattr(tokenizer, "all_special_ids", None):
            return  # it has none to add
        added = list(tokenizer("", verbose=False)["input_ids"])
        text = "a"
        bare = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        whole = list(tokenizer(text, verbose=False)["input_ids"])
        at = next((at for at in range(len(whole)) if bare and whole[at : at + len(bare)] == bare), None)
        self._before, self._behind = ([], []) if at is None or not added else (whole[:at], whole[at + len(bare) :])

    def open(self, ids: list[int]) -> list[int]:
        """``ids`` without what the tokenizer adds behind a text."""
        back = len(self._behind)
        return ids[:-back] if back and ids[-back:] == self._behind else ids

    def of(self, ids: list[int]) -> tuple[list[int], int]:
        """``ids`` without repetitions of what the tokenizer adds, and how many were taken out at the front."""
        front, back = len(self._before), len(self._behind)
        first = front if front and ids[:front] == self._before == ids[front : 2 * front] else 0
        last = back if back and ids[-back:] == self._behind == ids[-2 * back : -back] else 0
        if not first and not last:
            return ids, 0
        with self._lock:
            self.texts += 1
        return ids[first : len(ids) - last], first


def encode_pair(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], int]:
    """The ids of prompt and completion as one text, and the index of the completion's first token.

    The joined text is tokenised once, as it will be at generation time; a token that holds characters
    of both counts as completion. A tokenizer without offsets (not a fast one) tokenises in two pieces.
    """
    if not tokenizer.is_fast:
        first, second = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (prompt, completion))
        body = [*first, *second]
        ids = list(tokenizer.build_inputs_with_special_tokens(body))
        before = next(at for at in range(len(ids)) if ids[at : at + len(body)] == body)
        return ids, before + len(first)
    encoding = tokenizer(prompt + completion, return_offsets_mapping=True, verbose=False)
    ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
    # Special tokens have the offsets (0, 0): those before the text fall before `start`, those after, after.
    for index, (_, end) in enumerate(offsets):
        if end > len(prompt):
            return ids, index
    # The tokenizer drops every character of the completion: only what follows the prompt's last token.
    last = max((index for index, (_, end) in enumerate(offsets) if end), default=-1)
    return ids, last + 1


def rust_tokenizer(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` behind a tokenizer; None if there is none, or if the tokenizer overrides encoding."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if not isinstance(tokenizer, Fast) or kind.__call__ is not Fast.__call__:
        return None
    # Fast's own method of that name is private in transformers 5; subclasses override it under whatever name it has.
    overridden = (name for one in kind.__mro__[: kind.__mro__.index(Fast)] for name in vars(one))
    return None if any(name.endswith("encode_plus") for name in overridden) else tokenizer.backend_tokenizer
