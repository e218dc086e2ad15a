"""A row of data as a recipe reads it, for messages about data that is not there."""

from __future__ import annotations

import json
from collections.abc import Mapping

_VALUES = {
    "text": "What is 1 plus 1? 2",
    "prompt": "What is 1 plus 1?",
    "completion": " 2",
    "messages": [{"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "2"}],
    "tokens": ["New", "York"],
    "labels": ["city", "city"],
    "label": "city",
    "number": 0.5,
    "image": "picture.png",
    "audio": "speech.wav",
}
"""By a field's canonical name."""


def example_row(needed: Mapping[str, str]) -> str:
    """A line of a JSONL file. ``needed``: the fields of a row, the data's own names by the canonical ones."""
    return json.dumps({own: _VALUES[name] for name, own in needed.items()})
