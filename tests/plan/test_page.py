"""The page of a plan: whole, loading nothing, its bars as long as what they stand for."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from plan.test_command import BIG
from toolkit.errors import InputError
from toolkit.planning.command import Request, plan_command
from toolkit.planning.scale import fastest_of_each

VOID = {"meta", "br"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "config.json").write_text(json.dumps(BIG))
    plan_command(
        Request(str(folder / "config.json"), memory=4.5, gpus=2, micro=4, length=1024, scale=True,
                page=str(folder / "new" / "plan.html"), json_target=str(folder / "plan.json"))
    )  # fmt: skip
    return (folder / "new" / "plan.html").read_text(), json.loads((folder / "plan.json").read_text())


def test_the_page_is_whole_and_loads_nothing(planned: tuple[str, dict]) -> None:
    reader = _Reader()
    reader.feed(planned[0])
    assert reader.open == []
    assert reader.loads == []
    assert "@import" not in planned[0]
    assert "url(" not in planned[0]
    for word in (
        "does not fit",
        "To make it fit",
        "Simplest that fits (times are unknown)",
        "of each strategy the smallest mesh",
        "Assumptions",
    ):
        assert word in reader.text
    best = fastest_of_each(planned[1]["scale"])
    meshes = {row["strategy"].partition(" ")[2] for row in best}
    assert len(meshes) > 2
    assert all(mesh in reader.text for mesh in meshes)
    for row in best:
        assert f"{row['peak_bytes'] / 2**30:.1f}" in reader.text


def test_a_bar_is_as_long_as_its_terms(planned: tuple[str, dict]) -> None:
    page, result = planned
    asked = result["candidates"][0]
    bars = re.findall(r"<div class='bar( cut)?'>(.*?)</div>", page)
    sizes = re.findall(r"<div class='size[^']*'>[^<\d]*([\d.]+) GiB", page)
    assert len(bars) == len(sizes) >= 6
    capacity = float(re.findall(r"<i style='left:([\d.]+)%' title='the device'", page)[0])
    for (cut, bar), size in zip(bars, sizes, strict=True):
        terms = re.sub(r"<span class='over'.*?</span>", "", bar)  # drawn over them
        width = sum(float(w) for w in re.findall(r"width:([\d.]+)%", terms))
        wanted = 100.0 if cut else capacity * float(size) / 4.5
        # Sizes are given to a tenth of a GiB; a whole bar has some 7.
        assert width == pytest.approx(wanted, abs=100 * 0.06 / 6)
    assert f"{asked['peak_bytes'] / 2**30:.1f} GiB" in page


def test_the_time_line_goes_from_left_to_right(planned: tuple[str, dict]) -> None:
    for points in re.findall(r"<polygon points='([^']*)'", planned[0]):
        x = [float(point.split(",")[0]) for point in points.split()]
        half = len(x) // 2
        assert x[:half] == sorted(x[:half])
        assert (x[0], x[half - 1]) == (52, pytest.approx(1000, abs=0.2))


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"plan\.html"):
        plan_command(Request(str(tmp_path / "config.json"), gpu="h100", page=str(tmp_path / "file" / "plan.html")))
