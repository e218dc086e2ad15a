"""What an import says of columns beside the turns, and of turns' ends that another tool does not learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit import import_config
from toolkit.importing.llamafactory_data import _beside


@pytest.mark.parametrize(
    ("columns", "fields"),
    [
        ({"system": "s", "history": "past", "tools": "t"}, {"system": "s", "history": "past", "tools": "t"}),
        ({"system": "system", "history": "history", "messages": "m"}, {}),
        (None, {}),
    ],
)
def test_columns_of_dataset_info_that_have_names_of_their_own(
    columns: dict[str, str] | None, fields: dict[str, str]
) -> None:
    assert _beside(columns) == fields


@pytest.mark.parametrize("eot", [None, ["<end_of_turn>"]])
def test_axolotl_without_eot_tokens_learns_less(eot: list[str] | None, tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    text = f"""base_model: {tmp_path}
datasets: [{{path: x.jsonl, type: chat_template}}]
chat_template: tokenizer_default
sequence_len: 64
micro_batch_size: 1
num_epochs: 1
learning_rate: 0.0002
"""
    file.write_text(text + (f"eot_tokens: {eot}\n" if eot else ""))
    document = import_config([str(file)]).to_json()
    found = [one for one in document["keys"] if one["key"] == "eot_tokens"]
    assert [(one["outcome"], one["line"]) for one in found] == [("differs", 8 if eot else None)]
    assert ("learns the token that ends a turn only where" in found[0]["reason"]) == (eot is None)
