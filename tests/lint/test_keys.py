"""The data files of keys are what the installed packages have."""

from __future__ import annotations

import importlib.metadata
import json
from importlib.resources import files

import pytest

from cases import every_case
from toolkit.linting import keys
from tools.lint_keys.build import encode
from tools.lint_keys.build_all import build_all


@pytest.fixture(scope="module")
def built() -> dict:
    return build_all()


@pytest.mark.upstream
@every_case("name", keys.PACKAGES)
def test_file_of_the_installed_version_is_current(name: str, built: dict) -> None:
    version = importlib.metadata.version(name)
    file = files(keys) / f"{name}-{version}.json"
    assert file.is_file(), f"no keys of {name} {version}: run python -m tools.lint_keys"
    written = file.read_text(encoding="utf-8")
    assert written == encode(built[name]), "out of date: run python -m tools.lint_keys"
    assert json.loads(written) == json.loads(json.dumps(built[name]))


def test_a_key_that_came_between_two_versions() -> None:
    assert keys.section("transformers", "")["activation_checkpointing"].since == "5.23.0"
    assert keys.section("transformers", "")["output_dir"].since is None


def test_keys_that_the_launcher_never_reads_are_marked() -> None:
    raw = keys.package("accelerate")["sections"]
    assert raw["deepspeed_config"]["offload_param_nvme_path"]["read"] is False
    assert raw[""]["enable_cpu_affinity"]["read"] is False
    assert "read" not in raw["deepspeed_config"]["zero_stage"]
