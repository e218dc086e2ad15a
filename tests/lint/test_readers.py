"""Reading keeps places, takes what the packages take, and says where a file cannot be used."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import every_case
from toolkit.errors import InputError
from toolkit.linting.files.json_reader import parse_json
from toolkit.linting.files.load import load
from toolkit.linting.files.shell_reader import parse_commands
from toolkit.linting.files.text import read_text
from toolkit.linting.files.tree import Source
from toolkit.linting.files.yaml_reader import parse_yaml

ODD_YAML = """# head
base: &b {one: 1, 'two': "zwei"}
here:
  <<: *b
  one: 2   # again
list:
- a
- {b: [c, ~]}
no: no
text: |
  several
  lines
tagged: !!str 12
"é ü": 1_000
"""


def test_odd_but_valid_yaml_reads_as_pyyaml_reads_it() -> None:
    ours, theirs = parse_yaml(ODD_YAML, "f").plain(), yaml.safe_load(ODD_YAML)
    assert ours["here"] == theirs["here"]
    assert ours["list"] == theirs["list"]
    assert ours["text"] == theirs["text"]
    assert ours["tagged"] == "12"
    assert ours["é ü"] == 1000
    assert ours["no"] is False


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_yaml_places(newline: str) -> None:
    text = ODD_YAML.replace("\n", newline)
    source = Source("f", "accelerate", text, parse_yaml(text, "f"))
    entry = source.entry("here.one")
    assert entry is not None
    place = source.place(entry.start)
    assert (place.line, place.column) == (5, 3)
    assert text[entry.node.start : entry.node.end] == "2"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_json_reads_as_json_reads_it(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=3, ensure_ascii=False)):
        try:
            text.encode()
        except UnicodeEncodeError:
            continue
        assert json.dumps(parse_json(text, "f").plain()) == json.dumps(json.loads(text))


@every_case(
    ("text", "place", "message"),
    [
        ('{"a": 1,\n  "b" 2}', "f.json:2:7", 'expected ":"'),
        ('{"a": 1,}', "f.json:1:9", "comma before a closing brace"),
        ('{\n  // note\n  "a": 1}', "f.json:2:3", "no comments"),
        ('{"a": tru}', "f.json:1:7", "expected a value"),
        ('{"a": "x', "f.json:1:7", "not closed"),
        ("{" * 100, "", "double quotes"),
        ("[" * 100, "", "nested"),
    ],
)
def test_json_mistakes_have_a_place(text: str, place: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(text, "f.json")
    assert place in str(caught.value)
    assert message in str(caught.value)


def test_shell_script(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\npip install deepspeed\nCUDA_VISIBLE_DEVICES=0,1 accelerate launch \\\n"
        "  --num_processes=2 --mixed_precision bf16 train.py --output_dir out --bf16 "
        "--learning_rate $LR # end\n"
    )
    sources = load([str(script)]).sources
    assert [source.kind for source in sources] == ["launch", "args"]
    assert sources[0].root.plain() == {"num_processes": 2, "mixed_precision": "bf16"}
    assert sources[1].root.plain() == {"output_dir": "out", "bf16": True}
    entry = sources[1].entry("bf16")
    assert entry is not None
    assert sources[1].place(entry.start).line == 4


def test_what_is_no_launch_command() -> None:
    assert parse_commands("pip install accelerate deepspeed\necho deepspeed train.py\n") == []


def _bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join(lines)


@every_case(
    "text",
    [
        _bomb(),
        "[" * 50_000,
        "- " * 5_000 + "x",
        "{a: " * 5_000,
        "? " * 3_000,
        "a: &a [*a]",
        "!!python/object:os.system x",
        "a: 0x" + "f" * 9999,
        "1" * 100_000,
        "a: !!int x",
        "a: 2020-99-99",
        "? [a]\n: b",
    ],
    ids=range(12),
)
def test_hostile_yaml_ends_in_a_message(text: str) -> None:
    started = time.process_time()
    with contextlib.suppress(InputError):
        parse_yaml(text, "f").plain()
    assert time.process_time() - started < 30, "it all but hangs"


def test_files_that_are_no_files(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    os.mkfifo(tmp_path / "pipe.yaml")
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(100 << 20)
    (tmp_path / "wide.yaml").write_bytes("distributed_type: NO".encode("utf-16"))
    (tmp_path / "null.yaml").write_bytes(b"a: \0")
    started = time.process_time()
    for name in ("loop.yaml", "pipe.yaml", "huge.json", "wide.yaml", "null.yaml", "", "gone.yaml", "a\0b"):
        with pytest.raises(InputError):
            read_text(tmp_path / name)
    assert time.process_time() - started < 30, "it all but hangs"
