"""What pages said that was not so, each in Chromium on a real server: the form, pasted JSON, a server that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from studio.test_browser import WAIT, serving
from studio.test_browser import browser as browser

JSON = (
    '{\n  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},\n  "optimizer": {"params": {"lr": 2e-5}}\n}\n'
)


@pytest.fixture
def opened(browser: Any, tmp_path: Path, launches: None) -> Iterator[tuple[Any, str, Any]]:
    """A page, the server's address and its process."""
    with serving(tmp_path) as (address, server, _):
        page = browser.new_page()
        page.set_default_timeout(WAIT)
        yield page, address, server
        page.close()


@pytest.mark.nightly
def test_what_the_form_shows_is_what_is_trained(opened: tuple[Any, str, Any]) -> None:
    page, address, _ = opened
    page.goto(address)
    method = page.locator("[id='f-adapter.method']")
    text = page.locator("#text")
    page.wait_for_function("document.getElementById('text').value.includes('adapter:')")
    method.select_option("none")
    page.wait_for_function("!document.getElementById('text').value.includes('adapter')")
    assert method.evaluate("box => box.selectedOptions[0].textContent") == "none (default)"
    page.locator("[id='f-adapter.r']").fill("8")
    page.locator("[id='f-adapter.r']").blur()
    page.wait_for_function("document.getElementById('text').value.includes('adapter:')")
    assert "r: 8" in text.input_value()
    assert method.evaluate("box => box.selectedOptions[0].textContent") == "lora (default)"
    assert "Random weights" in page.locator("#note").inner_text()
    page.get_by_role("button", name="Train it here").click()
    page.locator("#problems p").first.wait_for()
    assert "/build" in page.url, "what cannot be trained is said where it was asked for"


@pytest.mark.nightly
def test_pasted_json_is_json(opened: tuple[Any, str, Any]) -> None:
    page, address, _ = opened
    page.goto(address)
    page.goto(address.partition("?")[0] + "check")
    page.get_by_role("button", name="paste text").click()
    page.keyboard.insert_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero3.json\n")
    page.locator(".finding").first.wait_for()
    page.get_by_role("button", name="paste text").click()
    page.keyboard.insert_text(JSON)
    page.wait_for_function("[...document.querySelectorAll('#sources input')].some((box) => box.value === 'zero3.json')")
    page.locator(".finding .where", has_text="zero3.json").first.wait_for()
    found = page.locator("#findings").inner_text()
    assert not {"KY103", "KY104"} & set(found.split())


@pytest.mark.nightly
def test_a_server_that_is_gone_is_said_on_top_and_what_is_shown_is_dimmed(opened: tuple[Any, str, Any]) -> None:
    page, address, server = opened
    page.goto(address)
    page.wait_for_function("document.getElementById('text').value.includes('adapter:')")
    server.kill()
    server.wait()
    page.locator("[id='f-adapter.r']").fill("4")
    page.locator("[id='f-adapter.r']").blur()
    page.locator(".lost").wait_for()
    assert "does not answer" in page.locator(".lost").inner_text()
    assert float(page.locator(".answer").evaluate("box => getComputedStyle(box).opacity")) < 0.9
