"""A worker reads the given folders and nothing else, whatever it is asked to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("launches")
_TRY = """
import os, sys
from pathlib import Path
from toolkit.studio.sandbox import Sandbox
own, inside, cache, network, *tries = sys.argv[1:]
Sandbox(Path(own), (Path(inside),), Path(cache), network == "yes").enter()
for code in tries:
    try:
        print("done", repr(eval(code)), flush=True)
    except Exception as error:
        print("refused", type(error).__name__, flush=True)
"""


@pytest.fixture
def tried(tmp_path: Path, place: Path):
    """What becomes of expressions in a worker: for each `done` and its value, or `refused` and the error."""
    own, cache = tmp_path / "own", tmp_path / "cache"
    own.mkdir()
    cache.mkdir()

    def run(*tries: str, network: bool = False) -> list[str]:
        names = {"INSIDE": place, "OUTSIDE": place.parent, "OWN": own, "CACHE": cache}
        for name, path in names.items():
            tries = tuple(code.replace(name, str(path)) for code in tries)
        command = [sys.executable, "-c", _TRY, str(own), str(place), str(cache), "yes" if network else "no", *tries]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert len(done.stdout.splitlines()) == len(tries), done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


MAY = [
    "open('INSIDE/note.txt').read()",
    "os.listdir('INSIDE')",
    "Path('INSIDE/note.txt').is_file()",
    "open('OWN/new', 'w').close()",
    "__import__('transformers').__version__",
    "__import__('shutil').rmtree('OWN/x', ignore_errors=True)",
]
MAY_NOT = [
    "open('OUTSIDE/secret.json').read()",
    "open('INSIDE/../secret.json').read()",
    "open('INSIDE/link.json').read()",
    "open('INSIDE/linked/secret.json').read()",
    "os.open('/etc/passwd', os.O_RDONLY)",
    "open(b'/etc/passwd').read()",
    "Path('/etc/passwd').read_text()",
    "os.listdir('OUTSIDE')",
    "list(os.scandir('/etc'))",
    "open('INSIDE/note.txt', 'a')",
    "open('INSIDE/new', 'x')",
    "open('CACHE/new', 'w')",
    "os.remove('INSIDE/note.txt')",
    "os.rename('INSIDE/note.txt', 'OWN/note.txt')",
    "os.system('true')",
    "__import__('subprocess').run(['true'])",
    "os.fork()",
    "os.execv('/bin/true', ['true'])",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "__import__('socket').create_connection(('127.0.0.1', 1))",
    "os.stat('OUTSIDE/secret.json')",
    "open('/proc/1/environ', 'rb').read()",
    "open('/proc/self/root/etc/passwd', 'rb').read()",
    "open('/proc/self/cwd/../../etc/passwd', 'rb').read()",
]


def test_what_it_may(tried) -> None:
    answers = dict(zip(MAY, tried(*MAY), strict=True))
    assert {code: a for code, a in answers.items() if not a.startswith("done") or "False" in a} == {}


def test_what_it_may_not(tried) -> None:
    answers = dict(zip(MAY_NOT, tried(*MAY_NOT), strict=True))
    assert {code: answer for code, answer in answers.items() if not answer.startswith("refused")} == {}


def test_a_file_outside_looks_as_if_it_did_not_exist(tried) -> None:
    paths = ("Path('OUTSIDE/secret.json').is_file()", "Path('OUTSIDE/secret.json').exists()")
    assert tried(*paths, "os.path.exists('/etc/passwd')") == ["done False"] * 3


def test_the_hubs_cache_is_written_to_with_a_network(tried) -> None:
    assert tried("open('CACHE/new', 'w').close()", network=True) == ["done None"]


def test_settings_survive_their_text(tmp_path: Path) -> None:
    from toolkit.studio.worker import Settings

    settings = Settings(tmp_path, (tmp_path / "a b",), True, False, tmp_path / "hub")
    assert Settings.of(json.dumps(json.loads(settings.to_text()))) == settings
