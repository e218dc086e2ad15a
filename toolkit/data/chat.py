"""Apply a chat template to conversations, and find the tokens that the assistant wrote."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from toolkit.data.preflight import read_template
from toolkit.data.rows import Row
from toolkit.errors import InputError, Place

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = (
    "set a template that marks the assistant's turns with {% generation %} ... {% endgeneration %} "
    "in data.chat_template"
)
# What a template may raise by itself: its own raise_exception, or a message that it cannot handle.
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)


class Chat:
    """A tokenizer with its chat template, or the one in ``template_file``; InputError if there is none."""

    def __init__(self, tokenizer: Any, template_file: str | None) -> None:
        self._tokenizer = tokenizer
        self._blank: dict[int, bool] = {}
        if template_file is not None:
            self._template = read_template(template_file)
        else:
            try:
                self._template = tokenizer.get_chat_template()
            except ValueError:
                raise InputError.at(
                    None,
                    "data.format",
                    "messages needs a chat template, but this tokenizer has none; "
                    "set data.chat_template to a Jinja file, or a tokenizer.path with a template",
                ) from None
        self._marks = _GENERATION.search(self._template) is not None
        self._source = Place(template_file) if template_file else None

    def encode(self, row: Row, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """The conversation's ids, and for each whether the assistant wrote it; both of one length.

        The template writes the special tokens; the tokenizer adds none. With ``{% generation %}`` in
        the template its mask counts, else the spans between «the conversation so far, with the
        assistant's header» and «the conversation with this turn». Raises InputError at the row.
        """
        if self._marks and self._tokenizer.is_fast:
            return self._marked(row, messages)
        text = self._render(row, messages)
        return self._tokenise(text, self._spans(row, messages, text))

    def is_blank(self, token: int) -> bool:
        """Whether a token is only white space, as templates write after a turn."""
        if token not in self._blank:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._blank[token] = bool(text) and not text.strip()
        return self._blank[token]

    def _marked(self, row: Row, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        encoding = self._apply(row, messages, tokenize=True, return_assistant_tokens_mask=True)
        return list(encoding["input_ids"]), [bool(on) for on in encoding["assistant_masks"]]

    def _spans(self, row: Row, messages: list[dict[str, Any]], whole: str) -> list[tuple[int, int]]:
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            turn = self._render(row, messages[: index + 1])
            if index == 0:
                # No template renders a conversation of no turns: this turn's own words, and what ends it.
                words = (message.get("content") or "").strip()
                start = turn.find(words) if words else -1
            else:
                head = self._render(row, messages[:index], add_generation_prompt=True)
                start = len(head) if turn.startswith(head) else -1
            if start < 0 or not whole.startswith(turn):
                raise row.error(
                    f"messages[{index}]",
                    "the chat template writes this turn differently within the whole conversation "
                    f"than at its end, so the assistant's words cannot be told apart; {_REMEDY}",
                )
            spans.append((start, len(turn)))
        return spans

    def _tokenise(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        if self._tokenizer.is_fast:
            encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            inside = [
                any(start < span_end and end > span_start for span_start, span_end in spans)
                for start, end in encoding["offset_mapping"]
            ]
            return list(encoding["input_ids"]), inside
        ids: list[int] = []
        supervised: list[bool] = []
        cuts = [0, *(at for span in spans for at in span), len(text)]
        for number, (start, end) in enumerate(pairwise(cuts)):
            piece = self._tokenizer(text[start:end], add_special_tokens=False)["input_ids"] if start < end else []
            ids += piece
            supervised += [number % 2 == 1] * len(piece)
        return ids, supervised

    def _render(self, row: Row, messages: list[dict[str, Any]], **options: Any) -> str:
        return self._apply(row, messages, tokenize=False, **options)

    def _apply(self, row: Row, messages: list[dict[str, Any]], **options: Any) -> Any:
        if options.get("tokenize"):
            options |= {"return_dict": True, "tokenizer_kwargs": {"verbose": False}}
        try:
            return self._tokenizer.apply_chat_template(messages, chat_template=self._template, **options)
        except _TEMPLATE_FAULTS as error:
            source = f"the chat template {self._source}" if self._source else "the tokenizer's chat template"
            raise row.error("messages", f"{source} rejects this conversation: {error}") from None
