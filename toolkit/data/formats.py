"""From a row to the token ids and labels of one sample.

The rule for every task and format: a sample is the tokenizer's own encoding with its own special
tokens, then the end-of-sequence token where the tokenizer has one and the encoding has not already
ended with it, the whole cut at ``max_length``. So a cut sample does not end in end-of-sequence, but where the model
reads the sample at that token (``recipe/pooling.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.data.encode import Encoder, rust_tokenizer
from toolkit.data.fields import canonical_row, needed_fields, optional_fields
from toolkit.data.masking import masking_of
from toolkit.data.media import MediaReader, reader_of
from toolkit.data.row_limits import RowLimits
from toolkit.data.rows import Row
from toolkit.data.unread import Unread
from toolkit.errors import InputError
from toolkit.recipe.model_facts import model_facts
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.base import Features
from toolkit.tasks.labels import IGNORED, Labels


@dataclass(frozen=True)
class Example:
    """One sample, ready for the model.

    ``input_ids``: at most ``max_length`` ids. ``labels``: for causal-lm as many as input_ids, not
    shifted, IGNORED where there is no loss; for seq2seq-lm the target's ids; for
    sequence-classification the class, for sequence-regression the number's bits. ``cut``: something
    was left out at ``max_length``. ``media``: its images or recordings, as ``media.reference`` writes
    them; ``features``: what the processor made of them.
    """

    input_ids: list[int]
    labels: list[int] | int
    cut: bool = False
    media: tuple[bytes, ...] = ()
    features: Features = field(default_factory=dict)
    places: tuple[tuple[int, int], ...] = ()
    """Where the tokens of each image are: first and behind the last."""


def supervised_tokens(example: Example, task: str) -> int:
    """Number of predictions of this sample with loss."""
    return task_of(task).labels.supervised(example.labels)


def row_without_loss(task: str, pad_id: int, ends: Sequence[int] = ()) -> Example:
    """What a rank without samples computes, of a model of tokens. ``ends``: tokens that the model looks for in every
    row, as many as the others have."""
    ids = [filler(pad_id, *ends), *(ends or [filler(pad_id)])]
    return Example(ids, IGNORED if task_of(task).labels is Labels.SAMPLE else [IGNORED] * len(ids))


def filler(*taken: int) -> int:
    """A token, none of ``taken``, that is attended to, without loss, where there is none. Not padding: the row of an
    embedding's ``padding_idx`` is zero in a model that was never trained, and a hidden state that is zero throughout
    has no gradient where a model takes the root of its squares (Gemma 3n): NaN, which a loss of zero does not hide."""
    return next(token for token in range(len(taken) + 1) if token not in taken)


class Formatter:
    """Turns rows into Examples as the recipe's task and format say.

    ``label_names``: the names of classes in order, where labels are strings. Raises InputError if
    the task has no such format, or the tokenizer no chat template that ``messages`` needs.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: Any, label_names: list[str] | None = None, limits: RowLimits | None = None
    ) -> None:
        """``limits``: other than those of the recipe's model."""
        self._limits = limits or RowLimits.of(recipe, model_facts(recipe.model))
        self.pooled = self._limits.pooled
        self.needed, self.optional = needed_fields(recipe), optional_fields(recipe)
        # A processor has a tokenizer inside where its model reads or writes text.
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.encode = Encoder(self.tokenizer)
        self._eos = getattr(self.tokenizer, "eos_token_id", None)
        self._special = frozenset(getattr(self.tokenizer, "all_special_ids", ()))
        self.pad_id = padding_id(self.tokenizer)
        self.reader: MediaReader | None = reader_of(recipe, tokenizer)
        self._recipe = recipe
        self.max_length = recipe.data.max_length
        self._num_labels = recipe.model.num_labels
        self._label_names = label_names
        if label_names and self._num_labels is not None and len(label_names) > self._num_labels:
            raise InputError.at(
                None,
                "model.num_labels",
                f"the model has {self._num_labels} classes, and data.train has {len(label_names)} labels "
                f"({_shown(label_names)}); set it to {len(label_names)}",
            )
        self.chat: Any = None
        if recipe.data.format == "messages":
            from toolkit.data.chat import Chat

            data = recipe.data
            processor = None if self.reader is None else tokenizer
            self.chat = Chat(self.tokenizer, data.chat_template, data.turns, data.chat_template_kwargs, processor)
        self.masking = masking_of(recipe, tokenizer)
        self._format = task_of(recipe.model.task).formats[recipe.data.format]

    @property
    def threaded(self) -> bool:
        """Whether ``examples`` is thread-safe and faster on threads. Chat templates are not thread-safe: compiled
        templates share an ``AssistantTracker`` (transformers 5.23.0)."""
        return self.chat is None and self.reader is None and rust_tokenizer(self.tokenizer) is not None

    def examples(self, row: Row) -> list[Example]:
        """The samples of ``row``: one, but of a conversation maybe several. Raises InputError at the row."""
        return [self.build(row, fields) for fields in self.fields(row)]

    def fields(self, row: Row) -> list[dict[str, Any]]:
        """What ``build`` makes each sample of ``row`` from, checked, not tokenised; raises InputError at the row."""
        fields = canonical_row(row, self.needed, self.optional)
        if self.chat is None:
            if "messages" in fields:
                raise row.error(
                    self.needed["prompt"],
                    "is a list of messages; this task or the first row takes text (data.format: messages reads "
                    "conversations)",
                )
            return [fields]
        found = [{"piece": piece} for piece in self.chat.pieces(row, fields)]
        return found if self.reader is None else [one | {"images": fields["images"]} for one in found]

    def about_turns(self, rows: Sequence[Row]) -> list[str]:
        """How the chat template treats these conversations, in a line; nothing for other formats."""
        if self.chat is None:
            return []
        counts = []
        for row in rows:
            with contextlib.suppress(InputError):  # refused where it is read, with all others
                counts.append((len(self.fields(row)), _assistant_turns(row, self.needed, self.optional)))
        return self.chat.about(counts)

    def notes(self) -> list[str]:
        """What it has found in the texts so far."""
        if not self.encode.doubled:
            return []
        return [
            f"{self.encode.doubled:,} texts write special tokens that the tokenizer adds at the beginning or the end "
            "as well; each is there once"
        ]

    def unread(self) -> Unread:
        """A count of what it does not read of rows."""
        return Unread(self.needed, self.optional, "" if self.chat is None else self.chat.template)

    def build(self, row: Row, fields: dict[str, Any]) -> Example:
        """Tokenise one sample of ``fields``, and cut it at ``max_length``. Raises InputError at the row if the model's
        positions or embeddings do not hold it."""
        example = self.cut(self.whole(row, fields))
        self.check(row, example, self.main_field)
        return example

    def check(self, row: Row, example: Example, field: str | None) -> None:
        """Raise InputError at the row if the model's positions or embeddings do not hold the sample."""
        if (problem := self._limits.problem(example, self.name_of)) is not None:
            raise row.error(field, problem)

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end an answer: end-of-sequence, and what the chat template writes behind a turn."""
        return frozenset(token for token in (self._eos, self.chat and self.chat.closing_id) if token is not None)

    def name_of(self, token: int) -> str:
        """The token of an id, as the vocabulary has it."""
        return str(self.tokenizer.convert_ids_to_tokens(token))

    @property
    def main_field(self) -> str:
        """The field that messages about a whole sample name: its text, where it has one."""
        return self.needed.get("text") or next(iter(self.needed.values()))

    def whole(self, row: Row, fields: dict[str, Any]) -> Example:
        """Tokenise one sample of ``fields``, of any length."""
        if self.reader is not None and self.chat is not None:
            return self._with_images(row, fields)
        example = Example(*self._format.build(self, row, fields))
        if self._format.media is None:
            return example
        field = self.needed[self._format.media]
        assert self.reader is not None
        return replace(example, media=(self.reader.checked(row, field, fields[self._format.media]),))

    def _with_images(self, row: Row, fields: dict[str, Any]) -> Example:
        assert self.reader is not None
        piece, field = fields["piece"], self.optional["images"]
        # A sample of a conversation's first turns has their images alone.
        count = piece.text.count(self.chat.image_token)
        media = tuple(self.reader.checked(row, field, value) for value in fields["images"][:count])
        decoded = [self.reader.decode(one) for one in media]
        ids, supervised, places = self.chat.encode_with_images(row, piece, decoded)
        ids, labels = self._format.build(self, row, fields | {"encoded": (ids, supervised)})
        return Example(ids, labels, media=media, places=tuple(places))

    def cut(self, whole: Example) -> Example:
        """``whole`` without what is behind ``max_length``; a target is cut like an input. An image is not cut: where
        its tokens do not all fit, the sample ends before them."""
        ids, labels, most = whole.input_ids, whole.labels, self.max_length
        if len(ids) <= most and (isinstance(labels, int) or len(labels) <= most):
            return whole
        outside = [start for start, end in whole.places if end > most]
        most = min([most, *outside])
        kept = len(whole.media) - len(outside)
        return replace(
            whole,
            input_ids=ids[:most] if self.pooled is None else [*ids[: most - 1], self.pooled],
            labels=labels if isinstance(labels, int) else labels[:most],
            cut=True,
            media=whole.media[:kept],
            places=whole.places[:kept],
        )

    def words(self, row: Row, words: list[str]) -> tuple[list[int], list[int | None]]:
        """Ids of ``words``, and of each the number of its word, None for special tokens; raises InputError."""
        if not self.tokenizer.is_fast:
            name = type(self.tokenizer).__name__
            raise row.error(
                self.needed["tokens"], f"{name} is not a fast tokenizer, so tokens cannot be assigned to words"
            )
        encoded = self.tokenizer(words, is_split_into_words=True, verbose=False)
        return list(encoded["input_ids"]), encoded.word_ids()

    def label(self, row: Row, label: int | str) -> int:
        """The class of a label; raises InputError at the row."""
        field = self.needed["label" if "label" in self.needed else "labels"]
        if isinstance(label, str):
            if self._label_names is None:
                raise row.error(field, f"is the string {label!r}, but other labels are integers")
            if label not in self._label_names:
                raise row.error(field, f"{label!r} is not a label of data.train ({_shown(self._label_names)})")
            return self._label_names.index(label)
        if self._label_names is not None:
            raise row.error(field, f"is the number {label}, but other labels are strings")
        if label < 0 or (self._num_labels is not None and label >= self._num_labels):
            top = "" if self._num_labels is None else f" to {self._num_labels - 1} (model.num_labels)"
            raise row.error(field, f"{label} is not a class; classes are the integers from 0{top}")
        return label

    @functools.cached_property
    def _decoder_start(self) -> int | None:
        return (model_facts(self._recipe.model).config or {}).get("decoder_start_token_id")

    def target(self, text: str) -> list[int]:
        """Ids that a decoder learns to write for ``text``, without the token that it starts from (Whisper's tokenizer
        writes it, and transformers' model puts it before the labels)."""
        ids = self.ending(self.encode(text))
        return ids[1:] if ids and ids[0] == self._decoder_start else ids

    def pair(self, prompt: str, completion: str) -> tuple[list[int], int]:
        """``encode_pair`` with the recipe's tokenizer."""
        return self.encode.pair(prompt, completion)

    def once(self, ids: list[int]) -> list[int]:
        """``ids`` as the tokenizer encodes a text, without special tokens that the text has written as well."""
        return self.encode.once(ids)

    def ending(self, ids: list[int]) -> list[int]:
        """``ids`` with end-of-sequence behind them, where the tokenizer has one and they do not end with it."""
        if self._eos is None or self.ended(ids):
            return ids
        return [*ids, self._eos]

    def ended(self, ids: list[int], skip: Callable[[int], bool] = lambda _: False) -> bool:
        """Whether the ids already end with end-of-sequence, or the tokenizer has none.

        Special tokens behind it (a language code) do not hide it, nor what ``skip`` says.
        """
        if self._eos is None:
            return True
        for token in reversed(ids):
            if token == self._eos:
                return True
            if token not in self._special and not skip(token):
                return False
        return False


def _assistant_turns(row: Row, needed: dict[str, str], optional: dict[str, str]) -> int:
    messages = canonical_row(row, needed, optional)["messages"]
    return sum(message["role"] == "assistant" for message in messages)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def padding_id(tokenizer: object) -> int:
    """The tokenizer's padding id, else end-of-sequence, else 0; the attention mask hides it anyway."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return int(token)
    return 0


def label_names(labels: set[int | str], key: str) -> list[str] | None:
    """The classes of string labels, sorted; None if labels are integers. Raises InputError if ``labels`` mixes both."""
    names = sorted(label for label in labels if isinstance(label, str))
    if names and len(names) < len(labels):
        number = next(label for label in labels if not isinstance(label, str))
        raise InputError.at(None, key, f"labels are strings ({names[0]!r}) and numbers ({number}); use only one kind")
    return names or None
