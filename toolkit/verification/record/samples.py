"""What the data code of a run makes of conversations and of several sources: recorded on a rank, compared elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.data.formats import Formatter
from toolkit.data.row_limits import RowLimits
from toolkit.data.rows import Row
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.verification.cases.conversations import ROWS, DataCase, tokenizer_of
from toolkit.verification.faults import find_fault


@dataclass
class SampleTrace:
    """One sample. ``row``: of ``ROWS``. ``text``: what was tokenised; ``labels``: as the model is given them."""

    row: int
    text: str
    ids: list[int]
    labels: list[int]


@dataclass
class DataTrace:
    """``refused``: rows that the chat template refuses, with its reason. ``drawn``: an epoch's samples by source."""

    samples: list[SampleTrace] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    drawn: list[list[int]] = field(default_factory=list)
    fault_reached: bool = False


def record_data(case: DataCase) -> DataTrace:
    """Run the data code over the built-in conversations and sources."""
    trace = DataTrace()
    fault = find_fault(case.fault)
    with fault.injected(case):
        if case.conversations:
            _conversations(case, trace)
        if case.shares:
            from toolkit.data import mixture

            weights, proportions = zip(*case.shares, strict=True)
            counts = mixture.epoch_counts(case.sizes, weights, proportions)
            part, index = mixture.chosen(case.sizes, counts, case.recipe["run"]["seed"])
            trace.drawn = [index[part == at].tolist() for at in range(len(case.sizes))]
    trace.fault_reached = fault.was_reached()
    return trace


def _conversations(case: DataCase, trace: DataTrace) -> None:
    own = case.recipe["data"]
    # Long enough for every row; the rows' own names.
    data = own | {"max_length": 10**6, "fields": {}, "train": "built-in", "eval": None, "eval_fraction": None}
    # Text alone goes through the same code for models that see; the built-in conversations have no images.
    model = case.recipe["model"] | {"task": "causal-lm"}
    recipe = Recipe.model_validate(case.recipe | {"data": data, "model": model})
    formatter = Formatter(recipe, tokenizer_of(case.recipe), limits=RowLimits())  # the twin's tokens are others
    for number, value in enumerate(ROWS):
        row = Row(value, "built-in", number + 1)
        try:
            pieces = formatter.fields(row)
        except InputError as error:
            trace.refused[number] = str(error)
            continue
        for fields in pieces:
            example = formatter.build(row, fields)
            assert isinstance(example.labels, list)
            trace.samples.append(SampleTrace(number, fields["piece"].text, example.input_ids, example.labels))
