"""The plan on terminals of 80 to 200 columns: whole words, heads, and a verdict that does not contradict itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from toolkit.planning.command import Planned, Request, make_plan
from toolkit.planning.screen import best_of_each, screen
from toolkit.report.plan_page import plan_page, plan_parts
from toolkit.terminal import timed

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000,
}  # fmt: skip
SCALED: list[dict[str, Any]] = [
    {"devices": count, "strategy": f"{name} mesh 128 x 8", "peak_bytes": 12 << 30, "seconds": 12.5, "waiting": 0.07,
     "bubble": 0.0, "samples_per_second": 900.0, "fastest": name == "zero2", "fits": name != "ddp"}
    for count in (1, 1024) for name in ("zero2", "fsdp2", "ddp")
]  # fmt: skip


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    file = tmp_path_factory.mktemp("plan") / "config.json"
    file.write_text(json.dumps(LLAMA))
    found = make_plan(Request(str(file), gpu="rtx4090", memory=2.0, lora=8, gpus=2, length=512, micro=2))
    assert not found.fits
    return found


def lines_of(found: Planned, columns: int, colour: bool = False) -> list[str]:
    return screen(found.search, found.candidates, found.chosen, found.change, Request("r"), SCALED, None,
                  columns=columns, colour=colour)  # fmt: skip


@pytest.mark.parametrize("columns", [80, 90, 100, 110, 200])
def test_every_line_fits_and_no_number_is_cut(tight: Planned, columns: int) -> None:
    lines = lines_of(tight, columns)
    assert max(map(len, lines)) <= columns
    head = next(at for at, line in enumerate(lines) if line.split()[:1] == ["GiB"])
    assert ("tok/s" in lines[head]) == (columns >= 90)
    rows = [line for line in lines[head + 1 :] if re.search(r"micro \d", line) and "█" in line]
    assert rows
    ends = lines[head].index("GiB") + 3
    assert all(re.search(r" \d+\.\d$", row[:ends]) for row in rows), rows


def test_the_bar_is_shorter_where_there_is_less_room(tight: Planned) -> None:
    bars = {columns: max(line.count("█") for line in lines_of(tight, columns)) for columns in (109, 110)}
    assert bars[109] < bars[110]


def test_what_does_not_fit_says_what_is_needed_and_what_is_usable(tight: Planned) -> None:
    reason = tight.candidates[0].reason
    found = re.match(
        r"needs ([\d.]+) GiB with the allocator's cache \(([\d.]+) without\), "
        r"([\d.]+) usable \(100 % of 2.0 GiB\), most of it \w+ [\d.]+",
        reason,
    )
    assert found, reason
    assert float(found[1]) > float(found[3])
    assert float(found[1]) > float(found[2])
    assert "over" not in reason
    assert any(reason[:30] in line for line in lines_of(tight, 200))


def test_what_nvidia_smi_will_show_is_told_of_what_fits(tight: Planned) -> None:
    """It cannot show more than there is."""
    assert not any("nvidia-smi" in line for line in lines_of(tight, 100))
    needed = tight.candidates[0].needed
    one = replace(tight.candidates[0], usable=needed * 2, capacity=needed * 3)
    loose = replace(tight, candidates=[one])
    assert one.fits
    assert any("nvidia-smi" in line for line in lines_of(loose, 100))


def test_what_is_over_by_less_than_a_tenth_is_shown_with_more_digits(tight: Planned) -> None:
    one = tight.candidates[0]
    close = replace(one, usable=one.needed - 2_000_000, capacity=int(one.needed * 1.05))
    found = re.match(r"needs (\d+\.\d{3}) GiB .*, (\d+\.\d{3}) usable", close.reason)
    assert found, close.reason
    assert float(found[1]) > float(found[2])


def test_the_page_marks_what_is_over_the_usable_memory(tight: Planned) -> None:
    text = plan_page(tight.search, tight.candidates, tight.chosen, tight.change, None, [])
    too_large = sum(not one.fits for one in best_of_each(tight.candidates, tight.chosen))
    assert text.count("<span class='over'") == too_large > 0


def test_the_step_that_is_drawn_is_the_recipes_everywhere(tight: Planned) -> None:
    """On a terminal, on the page of `--html`, and first in Studio, which has the recommended one folded below it."""
    asked, chosen = tight.candidates[0], tight.chosen
    assert chosen is not None
    assert asked.label != chosen.label
    assert f"one step of {asked.label}" in lines_of(tight, 100)
    text = plan_page(tight.search, tight.candidates, chosen, tight.change, None, [])
    step = plan_parts(tight.search, tight.candidates, chosen, tight.change, [])["step"]
    for drawn in (text[text.index("<h2>One step") :], step):
        assert 0 <= drawn.index(asked.label) < drawn.index(chosen.label)
    assert step.index("</h2>") < step.index("<details>")


def test_colour_is_only_where_it_is_asked_for(tight: Planned) -> None:
    assert "\x1b" not in "\n".join(lines_of(tight, 100))
    assert "\x1b[31m" in "\n".join(lines_of(tight, 100, colour=True))


def test_short_steps_are_in_milliseconds() -> None:
    assert [timed(s) for s in (0.0042, 0.0567, 0.9996, 1.5, 20.3, 1234.0)] == [
        "4.2 ms", "56.7 ms", "1.00 s", "1.50 s", "20.30 s", "1,234 s",
    ]  # fmt: skip
