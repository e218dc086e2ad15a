"""Conversations through a chat template, and which of their tokens the assistant wrote.

One rule for every template: at each of its turns the assistant learns what it would have generated there, given what
the template would have shown it. Where a template writes earlier turns otherwise than at their own time (without their
reasoning, say), such a turn is learned in a sample of its own, which ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from toolkit.data.chat_template import ChatTemplate
from toolkit.data.images import encode_with_images
from toolkit.data.rows import Row
from toolkit.data.spans import Marks, agreed, common, first_lost
from toolkit.data.template_dialect import Message

Turns = Literal["auto", "all", "last", "each"]

_REMEDY = (
    "set a template that marks the assistant's turns with {% generation %} ... {% endgeneration %} "
    "in data.chat_template"
)
_OPENS_REASONING = re.compile(r"\s*<think>\s*\Z")


@dataclass(frozen=True)
class Piece:
    """One sample of a conversation, not yet tokenised.

    ``spans``: characters of ``text`` that the assistant would have generated; None: what the template marks.
    ``ends``: a supervised turn is last. ``marked``: messages, tools and template arguments whose ``{% generation %}``
    mask counts, if the template has one.
    """

    text: str
    spans: tuple[tuple[int, int], ...] | None
    ends: bool
    marked: tuple[tuple[Message, ...], Any, Any] | None = None
    turns: tuple[int, ...] = ()
    """By span, the message that it is."""

    def words(self, index: int) -> str | None:
        """What the assistant would have generated as message ``index``; None where it is not learned here."""
        if self.spans is None:
            return self.text
        found = [
            self.text[start:end] for (start, end), turn in zip(self.spans, self.turns, strict=True) if turn == index
        ]
        return found[0] if found else None


@dataclass(frozen=True)
class _Turn:
    """One assistant turn. ``prompt``: what it would have been shown; ``text``: the same with the turn written."""

    index: int
    prompt: str | None
    text: str


class Chat:
    """A tokenizer with its chat template, or the one in ``template_file``; InputError if there is none.

    ``turns``: which assistant turns are learned, see ``data.turns``. ``options``: arguments of the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_file: str | None,
        turns: Turns = "auto",
        options: dict[str, Any] | None = None,
        processor: Any = None,
    ) -> None:
        """``processor``: of a model that takes images."""
        self._tokenizer, self._turns, self._processor = tokenizer, turns, processor
        self._template = ChatTemplate(tokenizer, template_file, options or {}, processor)
        # A template's marks are followed by the tokenizer, which knows nothing of images.
        self._has_marks, self._dialect = self._template.marks_turns and processor is None, self._template.dialect
        self._blank: dict[int, bool] = {}
        self._special = Marks(tokenizer)
        # A turn that nothing ends is learned with the end of its own sample, unless the template says otherwise.
        self._open_ended = self._has_marks or turns == "all"
        self._closes = bool(self._dialect.behind.strip())
        self._closing = self._special.first(self._dialect.behind)

    @property
    def template(self) -> str:
        """The template's text."""
        return self._template.text

    @property
    def closing_id(self) -> int | None:
        """The id of the token that ends a turn; None where the template writes none."""
        return None if self._closing is None else int(self._tokenizer.convert_tokens_to_ids(self._closing))

    def prompt(self, row: Row, fields: dict[str, Any]) -> list[int]:
        """Ids of a conversation that the assistant is to go on with; ``fields`` as in ``pieces``. Raises InputError at
        the row where the template refuses it."""
        text = self._template.render(row, fields, len(fields["messages"]), add_generation_prompt=True)
        return self._tokenise(text, ())[0]

    # ---- samples of a conversation

    def pieces(self, row: Row, fields: dict[str, Any]) -> list[Piece]:
        """The samples of a conversation, as many as the template needs to show each turn in its own context.

        ``fields``: as ``canonical_row`` gives them. Raises InputError at the row where the template refuses it or
        leaves some of its text out.
        """
        if (image := self._template.image) is not None:
            written = [m | {"content": image.written(m["content"])} for m in fields["messages"]]
            fields = fields | {"messages": written}
        learned = [i for i, m in enumerate(fields["messages"]) if m["role"] == "assistant" and m.get("weight") != 0]
        if self._turns == "last":
            learned = learned[-1:]
        whole = self._template.render(row, fields, len(fields["messages"]))
        turns = {index: self._turn(row, fields, index) for index in learned}
        found = self._split(row, fields, whole, turns)
        self._check_lost(row, fields, found, learned)
        return found

    def about(self, counts: Sequence[tuple[int, int]]) -> list[str]:
        """What a user should know of how turns become samples. ``counts``: by conversation, samples and assistant
        turns."""
        several = [(samples, turns) for samples, turns in counts if turns > 1]
        notes = []
        if self._turns == "auto" and any(samples > 1 for samples, _ in several):
            notes.append(
                f"the chat template {self._why_several()}, so such turns become samples of their own: "
                f"{sum(s for s, _ in counts)} samples from the first {len(counts)} conversations (data.turns: auto)"
            )
        if several and self._turns == "last":
            notes.append("only the last assistant turn of a conversation is learned (data.turns: last)")
        if self._dialect.wrote_reasoning:
            notes.append("the chat template has no place for reasoning: it is written as <think>...</think> before the "
                         "answer")  # fmt: skip
        return notes

    def _why_several(self) -> str:
        if self._closes:
            return "rewrites earlier assistant turns"
        return "writes nothing at the end of an assistant turn"

    def _split(self, row: Row, fields: dict[str, Any], whole: str, turns: dict[int, _Turn]) -> list[Piece]:
        assistants = sum(message["role"] == "assistant" for message in fields["messages"])
        left = dict(turns)
        found: list[tuple[int, Piece]] = []
        if self._turns != "each":
            shown = self._covered(whole, left.values())
            if self._turns == "all" and len(shown) < len(left):
                index = next(index for index in left if index not in shown)
                raise row.error(
                    f"messages[{index}]",
                    "the chat template writes this turn differently within the whole conversation than at its end; "
                    "data.turns: auto makes it a sample of its own",
                )
            if self._has_marks and len(shown) == len(left) == assistants:
                return [self._marked(fields, len(fields["messages"]), whole)]
            if shown:
                found.append((max(shown), self._piece(fields, len(fields["messages"]), whole, shown)))
                left = {index: turn for index, turn in left.items() if index not in shown}
        while left:
            last = left.pop(max(left))
            mine = self._covered(last.text, [last])
            if not mine:
                found.append((last.index, self._rebuilt(row, fields, last)))
                continue
            if self._turns != "each":
                mine |= self._covered(last.text, left.values())
            found.append((last.index, self._piece(fields, last.index + 1, last.text, mine)))
            left = {index: turn for index, turn in left.items() if index not in mine}
        return [piece for _, piece in sorted(found, key=lambda pair: pair[0])]

    def _turn(self, row: Row, fields: dict[str, Any], index: int) -> _Turn:
        text = self._template.render(row, fields, index + 1)
        if index:
            prompt = self._template.render(row, fields, index, add_generation_prompt=True)
            thinks = self._dialect.reasoning_of(fields["messages"][index])
            if thinks and not text.startswith(prompt) and self._template.switches_thinking(fields):
                # A header that says «no reasoning» is not the one that this turn was generated from.
                other = self._template.render(row, fields, index, add_generation_prompt=True, enable_thinking=True)
                prompt = other if text.startswith(other) else prompt
            header = self._dialect.header
            if header and text.startswith(prompt + header):  # written by the turn, where the prompt has none
                prompt += header
            return _Turn(index, prompt, text)
        # No template renders a conversation of no turns: this turn's own words, and what ends it.
        words = fields["messages"][0]["content"].strip()
        start = text.rfind(words) if words else -1  # a system prompt of the template's own may hold them, too
        return _Turn(index, text[:start] if start >= 0 else None, text)

    def _covered(self, base: str, turns: Any) -> dict[int, tuple[int, int]]:
        """The turns that ``base`` shows as they would have been generated, and where."""
        found = {}
        for turn in turns:
            if turn.prompt is None:
                continue
            end = agreed(base, turn.prompt, turn.text, self._special, closes=self._closes, open_ended=self._open_ended)
            if end is not None:
                found[turn.index] = (len(turn.prompt), end)
        return found

    def _piece(self, fields: dict[str, Any], count: int, text: str, shown: dict[int, tuple[int, int]]) -> Piece:
        spans = tuple(self._ended(text, shown[index]) for index in sorted(shown))
        if self._has_marks:
            return self._marked(fields, count, text, spans, tuple(sorted(shown)))
        return Piece(text, spans, max(shown) == count - 1, turns=tuple(sorted(shown)))

    def _ended(self, text: str, span: tuple[int, int]) -> tuple[int, int]:
        """A turn's span without what the template writes behind the token that ends it."""
        start, end = span
        return start, start + self._special.turn_end(text[start:end], self._closing)

    def _marked(
        self, fields: dict[str, Any], count: int, text: str, spans: Any = None, turns: tuple[int, ...] = ()
    ) -> Piece:
        messages = tuple(fields["messages"][:count])
        given = (messages, fields["tools"], fields["chat_template_kwargs"])
        return Piece(text, spans, messages[-1]["role"] == "assistant", given, turns)

    def _rebuilt(self, row: Row, fields: dict[str, Any], turn: _Turn) -> Piece:
        """A turn that does not begin with the header that it is generated from: because the header opens a block of
        reasoning (``<think>``), and the turn is written without one, or with an empty one."""
        prompt, text = turn.prompt, turn.text
        if prompt is not None:
            at = common(prompt, text, self._special)
            header, rest = prompt[at:], text[at:]
            if not header.strip():  # the block is opened by what both have; what the turn writes closes it
                span = self._ended(prompt + rest, (len(prompt), len(prompt) + len(rest)))
                return Piece(prompt + rest, (span,), True, turns=(turn.index,))
            if _OPENS_REASONING.match(header):
                reasoning = self._dialect.reasoning_of(fields["messages"][turn.index])
                written = f"{reasoning.strip()}\n</think>\n\n{rest.lstrip()}"
                written = written if reasoning.strip() else f"\n</think>\n\n{rest.lstrip()}"
                span = self._ended(prompt + written, (len(prompt), len(prompt) + len(written)))
                return Piece(prompt + written, (span,), True, turns=(turn.index,))
        if self._has_marks:
            return self._marked(fields, turn.index + 1, text)
        raise row.error(
            f"messages[{turn.index}]",
            "the chat template does not begin this turn with the header that it is generated from, so the assistant's "
            f"words cannot be distinguished; {_REMEDY}",
        )

    def _check_lost(self, row: Row, fields: dict[str, Any], found: Sequence[Piece], learned: Sequence[int]) -> None:
        texts = [piece.text for piece in found]
        for index, message in enumerate(fields["messages"][: learned[-1] + 1]):
            if message["role"] == "assistant" and index not in learned:
                continue
            places = texts
            if message["role"] == "assistant":  # in its own turn: a tool's name is in the list of tools as well
                places = [words for piece in found if (words := piece.words(index)) is not None]
            for key, text in self._dialect.texts(message):
                if first_lost(text, places):
                    problem = f"the chat template leaves this text out: {text[:60]!r}"
                    raise row.error(f"messages[{index}].{key}", problem)
        for index, tool in enumerate(fields["tools"] or ()):
            if first_lost(tool["function"]["name"], texts):
                raise row.error(f"tools[{index}]", "the chat template leaves tools out; use one that shows them")

    # ---- tokens

    def encode(self, row: Row, piece: Piece) -> tuple[list[int], list[bool]]:
        """A piece's ids, and for each whether the assistant wrote it; both of one length.

        The template writes the special tokens; the tokenizer adds none. A token with characters of both sides of a
        span's edge counts as the assistant's.
        """
        if piece.marked is None:
            return self._tokenise(piece.text, piece.spans or ())
        messages, offered, options = piece.marked
        fields = {"messages": list(messages), "tools": offered, "chat_template_kwargs": options}
        ids, mask = self._template.tokens(row, fields)
        if piece.spans is None:
            return ids, self._to_its_end(ids, mask)
        within = self._tokenise(piece.text, piece.spans)[1]
        return ids, [on and here for on, here in zip(mask, within, strict=True)]

    def _to_its_end(self, ids: list[int], mask: list[bool]) -> list[bool]:
        """What a template marks, without the white space that it has marked behind the token that ends a turn."""
        found = list(mask)
        for end in range(len(ids), 0, -1):
            if not found[end - 1] or (end < len(ids) and found[end]):
                continue  # no end of a stretch
            at = end
            while at and found[at - 1] and self.is_blank(ids[at - 1]):
                at -= 1
            if at and found[at - 1] and self._special.has(self._tokenizer.decode([ids[at - 1]])):
                found[at:end] = [False] * (end - at)
        return found

    @property
    def image_token(self) -> str:
        """What stands for an image in a piece's text."""
        return str(self._processor.image_token)

    def encode_with_images(
        self, row: Row, piece: Piece, images: list[Any]
    ) -> tuple[list[int], list[bool], list[tuple[int, int]]]:
        """``encode`` of a piece with ``images``, and where the tokens of each are: first and behind the last. None of
        them is supervised. Raises InputError at the row if text and images do not match."""
        token = self.image_token
        if (places := piece.text.count(token)) != len(images):
            raise row.error("messages", f"{token} is in its text {places} times, for {len(images)} images")
        if not images:
            return *self._tokenise(piece.text, piece.spans or ()), []
        try:
            return encode_with_images(self._processor, piece.text, images, piece.spans or ())
        except (ValueError, TypeError, IndexError) as error:
            raise row.error("messages", f"the processor rejects this sample: {str(error).splitlines()[0]}") from None

    def is_blank(self, token: int) -> bool:
        """Whether a token is only white space, as templates write after a turn."""
        if token not in self._blank:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._blank[token] = bool(text) and not text.strip()
        return self._blank[token]

    def _tokenise(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
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
