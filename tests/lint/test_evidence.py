"""What rules state is read from the source of the installed packages, which may be another version's."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from tests.lint.folder import put
from toolkit.linting import evidence as reading
from toolkit.linting import explain
from toolkit.linting.evidence_table import TABLE
from toolkit.linting.installed import installed
from toolkit.linting.model import Files
from toolkit.linting.registry import all_rules

_REPOSITORY = Path(__file__).resolve().parents[2]
_LAYERS = "fsdp2_apply_ac"


@pytest.mark.upstream
def test_the_installed_packages_show_every_fact_of_the_table() -> None:
    unconfirmed = {
        (code, each.place): reading.standing(code, each)
        for code, evidence in TABLE.items()
        for each in evidence
        if reading.standing(code, each) != "shown"
    }
    assert unconfirmed == {}


def test_the_table_has_rules_alone_and_every_fact_has_its_versions() -> None:
    compared = json.loads((files("toolkit.linting.keys") / "evidence.json").read_text(encoding="utf-8"))
    assert set(TABLE) <= set(all_rules())
    assert set(compared) == set(TABLE), "run python -m tools.lint_evidence"
    for code, evidence in TABLE.items():
        assert set(compared[code]) == {each.package for each in evidence}, code
        assert all(versions["shown"] for versions in compared[code].values()), code


@pytest.mark.upstream
def test_the_installed_versions_are_among_the_compared_ones() -> None:
    compared = json.loads((files("toolkit.linting.keys") / "evidence.json").read_text(encoding="utf-8"))
    for code, packages in compared.items():
        for package, versions in packages.items():
            assert installed(package) in versions["shown"], f"{code}: run python -m tools.lint_evidence"


def install(package: str, version: str, sources: Files) -> None:
    """A package of these sources in `site/`. It cannot be imported: reading its source is all that works."""
    put({f"site/{package}/__init__.py": "raise SystemExit('imported')\n"})
    put({f"site/{package}/{name}": text for name, text in sources.items()})
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    put({f"site/{package}-{version}.dist-info/METADATA": metadata})


def linted(code: str) -> list[dict]:
    """The findings of a rule on its failing example, by a linter that sees the packages in `site/` first."""
    names = put(all_rules()[code].fails)
    path = os.pathsep.join([str(Path("site").resolve()), str(_REPOSITORY)])
    command = [sys.executable, "-m", "toolkit.linting", *names, "--select", code, "--json", "-"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr + done.stdout
    return json.loads(done.stdout)["findings"]


def checkpointing(call: str) -> Files:
    return {"utils/fsdp_utils.py": f"def {_LAYERS}(accelerator, model):\n    for layer in model:\n        {call}\n"}


@pytest.mark.usefixtures("launches")
def test_a_fact_that_the_installed_source_shows_is_reported_as_it_is() -> None:
    install("accelerate", "1.16.0", checkpointing("checkpoint_wrapper(layer, preserve_rng_state=False)"))
    [finding] = linted("FS410")
    assert finding["severity"] == "error"
    assert "not confirmed" not in finding["message"]


@pytest.mark.usefixtures("launches")
def test_a_fact_that_the_installed_source_refutes_is_not_reported() -> None:
    install("accelerate", "1.16.0", checkpointing("checkpoint_wrapper(layer, preserve_rng_state=True)"))
    assert linted("FS410") == []


@pytest.mark.usefixtures("launches")
def test_a_fact_that_the_installed_source_no_longer_shows_is_a_warning_that_says_so() -> None:
    install("accelerate", "1.16.0", checkpointing("checkpointed(layer)"))
    [finding] = linted("FS410")
    assert finding["severity"] == "warning"
    assert finding["message"].endswith(
        "; not confirmed: accelerate 1.16.0 differs here from the versions that were checked"
    )


@pytest.mark.usefixtures("launches")
def test_a_fact_that_came_with_a_version_is_not_reported_for_one_before_it() -> None:
    source = "class TrainingArguments:\n    def __post_init__(self):\n        pass\n"
    install("transformers", "5.17.0", {"training_args.py": source})
    assert linted("TA103") == []


@pytest.mark.usefixtures("launches")
def test_the_same_source_in_a_newer_version_is_not_taken_for_an_older_one() -> None:
    source = "class TrainingArguments:\n    def __post_init__(self):\n        pass\n"
    install("transformers", "99.0.0", {"training_args.py": source})
    [finding] = linted("TA103")
    assert "not confirmed: transformers 99.0.0" in finding["message"]


@pytest.mark.upstream
def test_explain_says_what_was_checked_and_for_which_versions_it_holds() -> None:
    text, result = explain.code("FS410", 1000)
    version = importlib.metadata.version("accelerate")
    assert f"checked against accelerate {version}'s source (utils/fsdp_utils.py:{_LAYERS}); holds for " in text
    assert result["checked"][0] in text


def test_explain_says_where_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "folder_of", lambda package: None)
    [checked] = explain.code("FS410", 1000)[1]["checked"]
    assert checked.startswith("not checked: accelerate is not installed here; holds for accelerate 1.8.1 to ")
    stated = explain.code("LR802", 1000)[1]["checked"]
    assert stated[0].startswith("stated for peft 0.21.2; ")
    assert stated[0].endswith("; its source is not checked")
