"""A model of the hub: downloaded once for all ranks, and one message for each thing that goes wrong with it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants, errors

from cases import every_case
from hub_server import hub_of
from signalled import TOOLKIT
from tiny import LLAMA, make_tokenizer, recipe_dict
from toolkit.model import processor
from toolkit.recipe import hub
from toolkit.recipe.hub import hub_problem
from toolkit.recipe.schema import Recipe


def http_error(kind: type[errors.HfHubHTTPError], status: int = 401) -> Exception:
    """What transformers raises after an answer of the hub: an OSError of its own, with the cause inside."""
    cause = kind.__new__(kind)
    Exception.__init__(cause, f"{status} Client Error")
    cause.response = type("Answer", (), {"status_code": status})()
    outer = OSError("You are trying to do something at https://huggingface.co")
    outer.__cause__ = cause
    return outer


@every_case(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError), "me/x is gated: accept its conditions at https://hub/me/x, then run"),
        (http_error(errors.RepositoryNotFoundError), "no folder me/x here, and https://hub has no such repository, or"),
        (http_error(errors.RevisionNotFoundError), "me/x has no branch, tag or commit of this name at https://hub"),
        (http_error(errors.HfHubHTTPError, 503), "me/x: https://hub answered 503; try again"),
        (ConnectionResetError("reset by peer"), "me/x: a download from https://hub was interrupted (reset by peer)"),
        (ValueError("another"), None),
    ],
    ids=["gated", "missing", "revision", "server", "interrupted", "another"],
)  # fmt: skip
def test_each_problem_has_its_message(error: Exception, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub")
    found = hub_problem("me/x", error)
    assert found is None if message is None else str(found).startswith(message)


def test_offline_says_who_turned_the_network_off(monkeypatch: pytest.MonkeyPatch) -> None:
    error = errors.LocalEntryNotFoundError("not cached")
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub")
    for here, expected in ((False, "HF_HUB_OFFLINE is set"), (True, "https://hub cannot be reached")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(hub, "_set_here", here)
        found = hub_problem("me/x", error)
        assert found == f"no folder me/x here, its files are not in the hub's cache, and {expected}"


def test_the_tokenizer_is_of_the_models_revision(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def loaded(path: str, **options: Any) -> object:
        asked.append((path, options.get("revision")))
        return object()

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", loaded)
    recipe = recipe_dict(tiny_root, model={"path": "./model", "config": None, "revision": "v1"})
    for tokenizer in ({}, {"path": str(tiny_root)}):
        processor.load_tokenizer(Recipe.model_validate(recipe | {"tokenizer": tokenizer}))
    assert asked == [("./model", "v1"), (str(tiny_root), None)]


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
def test_a_run_with_a_hub_downloads_once_and_says_what_is_wrong(
    subtests: pytest.Subtests, tiny_root: Path, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = tmp_path / "model"
    make_tokenizer(model)
    torch.manual_seed(0)
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(model)

    def train(repo: str, endpoint: str, **environment: str) -> subprocess.CompletedProcess[str]:
        name = repo.replace("/", "-")
        recipe = recipe_dict(tiny_root, model={"path": repo, "config": None}, run={"output_dir": f"run-{name}"})
        del recipe["tokenizer"]
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
        given = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        given |= {"HF_HOME": str(tmp_path / name), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"} | environment
        return subprocess.run(
            [*TOOLKIT, "train", "r.yaml"],
            cwd=tmp_path,
            env=given | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    with hub_of(model) as (endpoint, asked):
        with subtests.test("small"):
            done = train("me/small", endpoint)
            assert done.returncode == 0, done.stderr
            weights = [line for line in asked if line.startswith("GET") and line.endswith("model.safetensors")]
            assert len(weights) == 1, "two ranks wait for one download"
        expected = {
            "me/gated": (f"r.yaml: model.path: me/gated is gated: accept its conditions at {endpoint}/me/gated", True),
            "me/missing": (
                f"r.yaml: model.path: no folder me/missing here, and {endpoint} has no such repository",
                True,
            ),
            "me/torn": (f"r.yaml: model.path: me/torn: a download from {endpoint} was interrupted (peer closed", False),
        }
        for repo, (message, early) in expected.items():
            with subtests.test(repo):
                done = train(repo, endpoint)
                assert (done.returncode, done.stdout) == (2, ""), done.stderr
                assert done.stderr.startswith(message), done.stderr
                assert done.stderr.count("\n") == 1
                assert not early or not (tmp_path / f"run-{repo.replace('/', '-')}").exists()
    with subtests.test("offline"):
        done = train("me/new", endpoint)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert (
            f"no folder me/new here, its files are not in the hub's cache, and {endpoint} cannot be reached"
            in done.stderr
        )
