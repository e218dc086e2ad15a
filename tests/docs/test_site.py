"""The site without building it: the navigation is complete, links resolve, and what pages quote is so."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import toolkit
from cases import every_case
from docsite import api, check_links, mesh_pictures, rules, site
from docsite.messages import listed, messages, raised_as
from tiny import recipe_dict
from toolkit.cli import app
from toolkit.linting import registry
from toolkit.linting.engine import check, lint
from toolkit.linting.files.load import load
from toolkit.linting.fix import plan
from toolkit.plugins import VARIABLE
from toolkit.recipe.positions import parse
from toolkit.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / "README.md", *(ROOT / file for file in site.SHOWN)]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
# Made by generated_pages(): listed here, as making the page of faults imports torch.
MADE = {
    "reference/api.md",
    "reference/commands.md",
    "reference/faults.md",
    "reference/messages.md",
    "reference/rules/index.md",
    "tutorials/python-api.md",
}


def nav_files(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for item in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from nav_files(item)


def test_the_pictures_of_meshes_are_those_that_are_drawn_and_each_is_shown_with_a_description() -> None:
    page = (DOCS / "how-to" / "meshes.md").read_text()
    shown = dict(re.findall(r"!\[(.{80,})\]\(\.\./assets/meshes/(.+)\)", page))
    assert sorted(shown.values()) == sorted(mesh_pictures.PICTURES)
    for name, draw in mesh_pictures.PICTURES.items():
        assert (mesh_pictures.FOLDER / name).read_text(encoding="utf-8") == draw().svg(), name


def test_every_page_is_in_the_navigation_and_nothing_else_is() -> None:
    files = {str(page.relative_to(DOCS)) for page in PAGES}
    listed_files = list(nav_files(CONFIG["nav"]))
    assert len(listed_files) == len(set(listed_files))
    assert set(listed_files) == files | MADE | set(site.SHOWN.values())


def anchors(page: Path) -> set[str]:
    from markdown.extensions.toc import slugify

    text = re.sub(r"^(`{3,}).*?^\1`*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {slugify(re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading), "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)"', text))


@every_case("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"^(`{3,}).*?^\1`*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for match in site.LINK.finditer(text):
        target, fragment = match.group(2), (match.group(3) or "").removeprefix("#")
        if site.is_external(target) or "{" in target:
            continue
        assert not target.startswith("/"), f"{target}: links are relative"
        file = (page.parent / target).resolve() if target else page
        inside = str(file.relative_to(DOCS)) if file.is_relative_to(DOCS) else ""
        if inside in MADE or (inside.startswith("reference/rules/") and file.stem in registry.all_rules()):
            continue
        assert file.is_file(), f"{target} does not exist"
        assert not fragment or file.suffix != ".md" or fragment in anchors(file), f"no heading {fragment} in {target}"


def test_links_to_sources_become_pages_of_the_site() -> None:
    text = "[a](../toolkit/reference/loop.py) [b](../CHANGELOG.md#unreleased) [c](speed.md) [d](https://x.org/y)"
    assert site.rewritten(text, DOCS / "verify.md", "verify.md") == (
        "[a](source/toolkit/reference/loop.py.md) [b](changelog.md#unreleased) [c](speed.md) [d](https://x.org/y)"
    )
    assert site.rewritten("[a](../../examples/x.py)", DOCS / "how-to/a.md", "how-to/a.md") == (
        "[a](../source/examples/x.py.md)"
    )


def test_every_rule_has_a_page_with_what_the_linter_prints() -> None:
    made = rules.pages()
    for code, rule in registry.all_rules().items():
        assert rules.family(code) in rules.FAMILIES
        page = made[f"reference/rules/{code}.md"]
        assert f" {rule.severity} {code}  " in page or f"{code}  " in page, code
        assert f"[{code}]({code}.md)" in made["reference/rules/index.md"]


ENTRIES = list(listed((DOCS / "troubleshooting.md").read_text()))


@every_case("entry", ENTRIES)
def test_a_message_of_the_troubleshooting_page_is_raised_somewhere(entry: str) -> None:
    known = messages()
    if not raised_as(entry, known):
        near = difflib.get_close_matches(entry, [message.text for message in known], 1, 0.3)
        pytest.fail(f"no source raises it; the nearest now: {near}")


def test_messages_are_read_from_the_sources() -> None:
    found = {message.text: message.status for message in messages()}
    assert len(found) > 120
    assert found["set exactly one of `path` and `config`"] == 2
    assert next(status for text, status in found.items() if "is not active" in text) == 1
    assert len(ENTRIES) > 50


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """The blocks of code of a language: their title and text."""
    for head, body in re.findall(rf"^```{language}([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        title = re.search(r'title="([^"]+)"', head)
        yield (title.group(1) if title else ""), body


def test_commands_of_the_pages_exist() -> None:
    group: Any = typer.main.get_command(app)
    lines = [line for page in [*PAGES, *OTHERS] for _, body in blocks(page, "sh") for line in body.splitlines() if line]
    assert sum(line.startswith("toolkit ") for line in lines) > 30
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["toolkit"]:
            words = words[: words.index("--")] if "--" in words else words  # what follows is another command's
            command = group.commands[words[1]]
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words[2:] if word.startswith("-")} <= known, line


def test_recipes_of_the_pages_are_valid() -> None:
    found = [body for page in [*PAGES, *OTHERS] for title, body in blocks(page, "yaml") if title == "recipe.yaml"]
    assert len(found) >= 3
    for body in found:
        Recipe.model_validate(parse(body, "recipe.yaml").value)


def test_the_page_of_the_python_api_has_every_exported_name() -> None:
    listed_names = [name for names in api.SECTIONS.values() for name in names]
    assert sorted(listed_names) == sorted(toolkit.__all__)
    entry = api._entry("train")
    assert "train(\n    recipe: RecipeLike," in entry
    assert "`resume`: resume from the latest valid checkpoint" in entry
    assert "| `final_loss` | Mean loss per supervised token" in entry
    assert "| `findings` | Code, severity, place, key" in api._entry("lint")
    assert "Exit status: 2." in api._entry("InputError")


@pytest.mark.usefixtures("launches")
def test_the_page_on_adding_a_strategy_adds_one(tmp_path: Path, tiny_root: Path) -> None:
    ((title, body),) = blocks(DOCS / "how-to/add-a-strategy.md", "python")
    (tmp_path / title).write_text(body)
    recipe = recipe_dict(tiny_root, strategy={"name": "mirrored"})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "toolkit", "config", "recipe.yaml", "--explain"]
    environment = os.environ | {VARIABLE: title, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    # Two processes get the same 2 samples, twice a step: a global batch of 4, not 8.
    assert re.search(r"^batch.global_size +4 ", done.stdout, re.MULTILINE), done.stdout


def test_the_page_on_adding_a_rule_adds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, body),) = blocks(DOCS / "how-to/add-lint-rule.md", "python")
    assert "TA190" not in registry.all_rules(), "the number is taken"  # fills the cache: no other test sees the rule
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    exec(compile(body, "the page", "exec"), {"__name__": "page"})  # as the file that it tells to write
    rule = registry._RULES["TA190"]
    monkeypatch.setattr("toolkit.linting.engine.all_rules", lambda: {"TA190": rule})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "args.json").write_text(rule.passes["args.json"])
    assert lint(["args.json"]).findings == []
    (tmp_path / "args.json").write_text(rule.fails["args.json"])
    assert [finding.key for finding in lint(["args.json"]).findings] == ["logging_steps"]
    fixed = plan(load(["args.json"]))
    assert fixed.changed
    (tmp_path / "args.json").write_text(fixed.after["args.json"])
    assert check(load(["args.json"])).findings == []


def test_the_link_checker_finds_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/index.html").write_text('<h1 id="top">a</h1><a href="../">home</a><a href="#top">top</a>')
    (tmp_path / "index.html").write_text('<a href="a/#top">a</a><a href="https://x.org">x</a><img src="gone.png">')
    assert check_links.broken(tmp_path) == (["index.html: gone.png"], 4)
    (tmp_path / "index.html").write_text('<a href="a/#gone">a</a>')
    assert check_links.broken(tmp_path)[0] == ["index.html: a/#gone"]
