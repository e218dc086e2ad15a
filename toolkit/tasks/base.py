"""What a task is: one file in this package says it all, and nothing else names a task.

A file ``some_task.py`` defines ``TASK``, and the recipe's ``model.task: some-task`` finds it. It imports nothing heavy:
recipes are checked without torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from toolkit.tasks.labels import Labels

if TYPE_CHECKING:
    from numpy.typing import NDArray

Encoded = tuple[list[int], list[int] | int]
"""Input ids and labels of a sample, before it is cut."""
Features = dict[str, "NDArray[Any]"]
"""What a model takes of one sample beside tokens, by the names of its forward's arguments. The first axis counts
samples, or images, or patches: those of a micro-batch follow one another in it."""


class Maker(Protocol):
    """What a format makes samples with: the tokenizer, and the rules that all formats share."""

    tokenizer: Any
    chat: Any
    """How conversations are encoded; None for other formats."""

    def encode(self, text: str) -> list[int]:
        """The tokenizer's own encoding, with its special tokens."""

    def once(self, ids: list[int]) -> list[int]:
        """``ids`` as the tokenizer encodes a text, without special tokens that the text has written as well."""

    def ending(self, ids: list[int]) -> list[int]:
        """``ids`` with end-of-sequence behind them, where the tokenizer has one and they do not end with it."""

    def ended(self, ids: list[int], skip: Callable[[int], bool] = ...) -> bool:
        """Whether they do."""

    def pair(self, prompt: str, completion: str) -> tuple[list[int], int]:
        """Ids of both as one text, and the place of the completion's first token."""

    def words(self, row: Any, words: list[str]) -> tuple[list[int], list[int | None]]:
        """Ids of ``words``, and of each the number of its word, None for special tokens; raises InputError."""

    def label(self, row: Any, value: int | str) -> int:
        """The class of a label; raises InputError at the row."""

    def target(self, text: str) -> list[int]:
        """Ids that a decoder learns to write for ``text``, without the token that it starts from."""


@dataclass(frozen=True)
class Format:
    """One layout of the data: the fields that a row needs, and how they become a sample."""

    fields: tuple[str, ...]
    build: Callable[[Maker, Any, Mapping[str, Any]], Encoded]
    """Takes the maker, the row (for errors) and its fields by their canonical names."""
    media: str | None = None
    """The field that holds the sample's image or recording."""


@dataclass(frozen=True)
class Drawn:
    """What ``Task.draw`` may use: the ids to choose from, the longest sample, the classes, and the data's format."""

    draw: random.Random
    ids: Sequence[int]
    longest: int
    classes: int
    form: str


@dataclass(frozen=True)
class Media:
    """Images or recordings that a model takes beside tokens, or instead of them.

    ``kind``: how they are decoded. ``processor``: the auto class of transformers that makes features of them. ``main``:
    the forward's argument. ``tokens``: whether the forward takes input ids too. ``draw``: random features of one
    sample, of the shapes that a model of this config takes, for ``verify`` and ``plan``.
    """

    kind: Literal["image", "audio"]
    processor: str
    main: str
    tokens: bool
    draw: Callable[[Mapping[str, Any], random.Random], Features]
    in_text: Callable[[Mapping[str, Any], int], list[int]] | None = None
    """The ids that stand for so many images in a text, for a model of this config."""
    row: Callable[[Mapping[str, Any], int, tuple[int, int] | None], tuple[list[int], Features]] | None = None
    """Ids and features of so many images in a row, of this height and width in pixels, for ``plan``; None: as large as
    ``draw`` makes them."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """Raises InputError for a model, by its config file, whose images the task does not know; so do the others."""


@dataclass(frozen=True)
class Task:
    """``auto_class``: of transformers. ``peft_type``: PEFT's ``TaskType``, or None where PEFT has none.
    ``pipeline``: the hub's tag for what the model does. ``draw``: labels of a random sample of these ids, for
    ``verify``. ``classes``: labels are classes, whose number is ``model.num_labels``. ``validated``: `plan` was
    compared with real training of it under every strategy. ``numbers``: labels are numbers (``labels.number_bits``),
    the model has one output, and the loss is the squared error. ``packs``: a row may hold several
    samples that do not see each other. ``masks``: labelled tokens are hidden at random. ``media``: what the model takes
    beside tokens. ``heads``: names of heads that
    PEFT trains whole beside an adapter, and that "all-linear" must not include. ``why_format``: what its formats are
    for, in words, for the error about another one.
    """

    name: str
    auto_class: str
    peft_type: str | None
    pipeline: str
    labels: Labels
    formats: Mapping[str, Format]
    draw: Callable[[Drawn, list[int]], list[int] | int]
    classes: bool = False
    numbers: bool = False
    validated: bool = False
    packs: bool = False
    masks: bool = False
    media: Media | None = None
    heads: tuple[str, ...] = ()
    why_format: str = ""

    @property
    def metrics(self) -> tuple[str, ...]:
        """What an evaluation measures, and ``run.metric`` can name; of all but the loss, larger is better."""
        if self.classes:
            return ("eval_loss", "accuracy", "f1")
        return ("eval_loss", "pearson") if self.numbers else ("eval_loss",)
