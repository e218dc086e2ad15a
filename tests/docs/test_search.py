"""The site's search, asked as readers ask: the worker that runs in their browser, over the index of a real build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docsite.check_search import QUESTIONS, first_hits, main

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_the_first_hit_of_a_question_answers_it(
    tmp_path: Path, launches: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mkdocs", reason="the site's packages are not installed: make docs")
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, env=environment)
    assert first_hits(site) == QUESTIONS
    assert main(str(site)) == 0
    index = site / "search" / "search_index.json"
    index.write_text(index.read_text().replace("OOM", "memory"))
    capsys.readouterr()
    assert main(str(site)) == 1, "a question that is not answered is reported"
    assert "OOM: " in capsys.readouterr().out
