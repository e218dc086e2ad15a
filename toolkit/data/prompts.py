"""``run.sample_prompts`` as rows, whose messages are checked like those of the data."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.data.messages import unanswered
from toolkit.data.rows import Row
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe


@dataclass(frozen=True)
class _Prompt(Row):
    """A prompt as a row; ``number`` is its place in the list, from 0."""

    def error(self, field: str | None, message: str) -> InputError:
        inside = (field or "").removeprefix("messages")
        return InputError.at(None, f"run.sample_prompts[{self.number}]{inside}", message)


def prompt_rows(recipe: Recipe) -> list[Row]:
    """A row with ``messages`` for each prompt: a text is what the user says."""
    prompts = recipe.run.sample_prompts
    turns = [one if isinstance(one, list) else [{"role": "user", "content": one}] for one in prompts]
    return [_Prompt({"messages": messages}, "", at) for at, messages in enumerate(turns)]


def prompt_problems(recipe: Recipe) -> list[str]:
    """What is wrong with the conversations among the prompts."""
    found: list[str] = []
    for row in prompt_rows(recipe) if recipe.data.format == "messages" else ():
        try:
            unanswered(row, "messages")
        except InputError as error:
            found += error.problems
    return found
