"""A chat template and the tokenizer that applies it: a conversation to its text, or to its tokens."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError

from toolkit.data.images import ImageText
from toolkit.data.preflight import read_template
from toolkit.data.rows import Row
from toolkit.data.template_dialect import Dialect, Message
from toolkit.errors import InputError, Place

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template may raise by itself: its own raise_exception, or a message that it cannot handle.
_FAULTS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)


class ChatTemplate:
    """The tokenizer's chat template, or the one in ``file``; InputError if there is none. ``options``: its arguments.

    ``marks_turns``: it marks the assistant's turns with ``{% generation %}``, and the tokenizer can follow the marks.
    ``dialect``: how it wants its messages. ``text``: the template.
    """

    def __init__(self, tokenizer: Any, file: str | None, options: dict[str, Any], processor: Any = None) -> None:
        """``processor``: of a model that takes images; its template then is the one, and ``image`` how it writes
        one."""
        self._tokenizer, self._options = tokenizer, options
        if file is not None:
            self.text = read_template(file)
        elif getattr(processor, "chat_template", None):
            self.text = processor.chat_template
        else:
            try:
                self.text = tokenizer.get_chat_template()
            except ValueError:
                raise InputError.at(
                    None,
                    "data.format",
                    "messages needs a chat template, but this tokenizer has none; "
                    "set data.chat_template to a Jinja file, or a tokenizer.path with a template",
                ) from None
        self._source = Place(file) if file else None
        self.marks_turns = _GENERATION.search(self.text) is not None and tokenizer.is_fast
        self.dialect = Dialect(self.text, self._probe)
        self.image = None if processor is None else self._image_text()

    def render(self, row: Row, fields: dict[str, Any], count: int, **options: Any) -> str:
        """The text of the first ``count`` messages. ``fields``: as ``canonical_row`` gives them; ``options``: further
        arguments of the template. Raises InputError at the row if the template rejects the conversation."""
        text: str = self._apply(row, fields, count, tokenize=False, **options)
        return text

    def tokens(self, row: Row, fields: dict[str, Any]) -> tuple[list[int], list[bool]]:
        """Token ids of all messages, and for each whether the template marks it as the assistant's; both of one length.
        Raises InputError like ``render``."""
        encoding = self._apply(
            row, fields, len(fields["messages"]),
            tokenize=True, return_assistant_tokens_mask=True, return_dict=True, tokenizer_kwargs={"verbose": False},
        )  # fmt: skip
        return list(encoding["input_ids"]), [bool(on) for on in encoding["assistant_masks"]]

    def switches_thinking(self, fields: dict[str, Any]) -> bool:
        """Whether the template reads ``enable_thinking`` and neither the recipe nor the row sets it."""
        return self.dialect.switches_thinking(self._options, fields)

    def _apply(self, row: Row, fields: dict[str, Any], count: int, **options: Any) -> Any:
        options = self._options | fields["chat_template_kwargs"] | options
        if fields["tools"]:
            options["tools"] = fields["tools"]
        try:
            return self.dialect.call(
                lambda messages: self._tokenizer.apply_chat_template(messages, chat_template=self.text, **options),
                fields["messages"][:count],
            )
        except _FAULTS as error:
            source = f"the chat template {self._source}" if self._source else "the tokenizer's chat template"
            raise row.error("messages", f"{source} rejects this conversation: {error}") from None

    def _image_text(self) -> ImageText:
        try:
            found = ImageText(self._probe)
        except _FAULTS:
            found = None
        if found is None or not found.text.strip():
            where = str(self._source) if self._source else "the processor's chat template"
            raise InputError.at(None, "data.chat_template", f"{where} does not write images")
        return found

    def _probe(self, messages: list[Message], **options: Any) -> str:
        """For the dialect's own questions; what a template raises is for it to handle."""
        options = self._options | options
        text: str = self._tokenizer.apply_chat_template(messages, chat_template=self.text, tokenize=False, **options)
        return text
