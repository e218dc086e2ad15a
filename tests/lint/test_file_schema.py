"""JSON schemas of configuration files: what editors accept is what the packages and the linter accept."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from cases import every_case
from toolkit.cli import app
from toolkit.linting.examples import args, ds, fsdp1, fsdp2, lora, multi_gpu, zero
from toolkit.linting.file_schema import KINDS, file_schema
from toolkit.linting.model import Files
from toolkit.linting.registry import all_rules

_NAMES = {
    "accelerate.yaml": "accelerate",
    "ds.json": "deepspeed",
    "args.json": "arguments",
    "adapter_config.json": "adapter",
}


@functools.cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = file_schema(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def content(files: Files) -> list[tuple[str, object]]:
    read = {
        name: json.loads(t) if name.endswith("json") else yaml.safe_load(t)
        for name, t in files.items()
        if name in _NAMES
    }
    return [(_NAMES[name], value) for name, value in read.items()]


@pytest.mark.parametrize("kind", KINDS)
def test_is_a_schema(kind: str) -> None:
    schema = validator(kind).schema
    assert schema["$schema"].endswith("2020-12/schema")
    assert kind in schema["title"].lower() or kind in ("arguments", "adapter")


# The example of KY102 is about the byte-order mark.
@every_case("code", [code for code, rule in all_rules().items() if set(rule.passes) & set(_NAMES) and code != "KY102"])
def test_every_passing_example_is_valid(code: str) -> None:
    for kind, value in content(all_rules()[code].passes):
        validator(kind).validate(value)


@every_case(
    "files",
    [
        ds(zero={"reduce_bucket_size": 0}),
        ds(zero={"overlap_com": True}),
        ds(zero={"offload_param": {"device": "disk"}}),
        ds(bf16=True),
        ds(gradient_accumulation_steps="4"),
        ds(4),
        multi_gpu("num_machine: 1"),
        fsdp2("fsdp_backward_prefech: BACKWARD_PRE"),
        fsdp1("fsdp_sharding_strategy: FULL"),
        zero("zero_stge: 3"),
        args(learning_rate="2e-4"),
        args(optim="adamw_tor"),
        lora(task_type="CAUSAL"),
        lora(peft_type="LORAA"),
    ],
    ids=range(14),
)
def test_what_the_packages_reject_is_not(files: Files) -> None:
    ((kind, value),) = content(files)
    with pytest.raises(jsonschema.ValidationError):
        validator(kind).validate(value)


def test_values_of_auto_are_valid() -> None:
    automatic = ds(2, zero={"reduce_bucket_size": "auto"}, bf16={"enabled": "auto"}, gradient_clipping="auto")
    ((kind, value),) = content(automatic)
    validator(kind).validate(value)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    assert json.loads(run.invoke(app, ["schema", "--for", "deepspeed"]).output) == file_schema("deepspeed")
    assert run.invoke(app, ["schema", "--for", "accelerate", "-o", "a.json"]).exit_code == 0
    assert json.loads(Path("a.json").read_text()) == file_schema("accelerate")
    assert run.invoke(app, ["schema", "--for", "nothing"]).exit_code == 2
