"""What pages said that was not so, each in Chromium on a real server: the form, pasted JSON, a server that is gone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from studio.test_browser import browser as browser
from studio.test_browser import serving, sync_api
from tiny import LLAMA
from toolkit.planning.command import Request, plan_command

expect = sync_api.expect

WAIT = 120_000
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
    expect(page.locator("#note")).to_be_visible(timeout=WAIT)
    method.select_option("none")
    expect(text).not_to_have_value(re.compile("adapter"), timeout=WAIT)
    assert method.evaluate("box => box.selectedOptions[0].textContent") == "none (default)"
    page.locator("[id='f-adapter.r']").fill("8")
    page.locator("[id='f-adapter.r']").blur()
    expect(page.locator("#text")).to_have_value(re.compile("adapter:"), timeout=WAIT)
    assert "r: 8" in text.input_value()
    assert method.evaluate("box => box.selectedOptions[0].textContent") == "lora (default)"
    assert "Random weights" in page.locator("#note").inner_text()
    page.get_by_role("button", name="Train it here").click()
    page.locator("#problems p").first.wait_for()
    assert "/build" in page.url, "what cannot be trained is said where it was asked for"


@pytest.mark.nightly
def test_what_is_typed_stays_when_an_earlier_change_is_answered(opened: tuple[Any, str, Any]) -> None:
    """The answer to one change emptied the field that was being filled: its value was lost without a word."""
    page, address, _ = opened
    page.goto(address)
    expect(page.locator("#note")).to_be_visible(timeout=WAIT)
    held: list[Any] = []
    page.route("**/api/recipe", lambda route: route.continue_() if held else held.append(route))
    page.locator("[data-key='data.max_length']").fill("512")
    page.locator("[data-key='data.max_length']").blur()
    seed = page.locator("[data-key='run.seed']")
    seed.evaluate("box => { for (let one = box; one; one = one.parentElement) if ('open' in one) one.open = true; }")
    assert seed.input_value() == "", "a key that the recipe does not have"
    seed.fill("7")
    while not held:
        page.wait_for_timeout(50)
    held[0].continue_()
    expect(page.locator("#text")).to_have_value(re.compile("max_length: 512"), timeout=WAIT)
    assert seed.input_value() == "7"
    seed.blur()
    expect(page.locator("#text")).to_have_value(re.compile("seed: 7"), timeout=WAIT)


@pytest.mark.nightly
def test_a_page_without_the_token_says_what_to_do_and_takes_it(opened: tuple[Any, str, Any]) -> None:
    page, address, _ = opened
    page.goto(address.partition("?")[0])
    expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("it has the token"))
    assert page.locator("main").evaluate("one => getComputedStyle(one).maxWidth") == "704px", "the product's style"
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("not this server's"))
    page.get_by_label("Token").fill(address.partition("token=")[2])
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#note")).to_be_visible(timeout=WAIT)
    assert "token" not in page.url


@pytest.mark.nightly
def test_pasted_json_is_json(opened: tuple[Any, str, Any]) -> None:
    page, address, _ = opened
    page.goto(address)
    page.goto(address.partition("?")[0] + "check")
    page.get_by_role("button", name="paste text").click()
    page.keyboard.insert_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero3.json\n")
    expect(page.locator("#sources textarea")).to_have_value(re.compile("zero3.json"))
    page.get_by_role("button", name="paste text").click()
    page.keyboard.insert_text(JSON)
    expect(page.locator("#sources input").last).to_have_value("zero3.json", timeout=WAIT)
    page.locator(".finding .where", has_text="zero3.json").first.wait_for()
    found = page.locator("#findings").inner_text()
    assert not {"KY103", "KY104"} & set(found.split())


@pytest.mark.nightly
def test_messages_say_what_is_so(opened: tuple[Any, str, Any]) -> None:
    """After a mistake the data page reads no longer; a config that is not JSON is told as that."""
    page, address, _ = opened
    page.goto(address)
    page.locator("#model").fill('{"model_type": "llama",, }')
    page.locator("#model").blur()
    expect(page.locator("#problems")).to_contain_text("not valid JSON")
    assert "valid dictionary" not in page.locator("#problems").inner_text()
    page.goto(address.partition("?")[0] + "data")
    recipe = "model: {path: nowhere}\ndata: {train: gone.jsonl}\n"
    write = "(box, text) => { box.value = text; box.dispatchEvent(new Event('input')); }"
    page.locator("#text").evaluate(write, recipe)
    page.get_by_role("button", name="Read the data").click()
    page.locator("#problems p").first.wait_for()
    assert "Reading" not in page.locator("main").inner_text()


@pytest.mark.nightly
def test_the_page_of_a_plan_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "plan.html"
    plan_command(Request(str(tmp_path / "config.json"), gpu="rtx4090", gpus=2, length=512, page=str(file)))
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(file.as_uri())
    assert page.locator("h1").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


@pytest.mark.nightly
def test_a_server_that_is_gone_is_said_on_top_and_what_is_shown_is_dimmed(opened: tuple[Any, str, Any]) -> None:
    page, address, server = opened
    page.goto(address)
    expect(page.locator("#text")).to_have_value(re.compile("adapter:"), timeout=WAIT)
    server.kill()
    server.wait()
    page.locator("[id='f-adapter.r']").fill("4")
    page.locator("[id='f-adapter.r']").blur()
    page.locator(".lost").wait_for()
    assert "does not answer" in page.locator(".lost").inner_text()
    assert float(page.locator(".answer").evaluate("box => getComputedStyle(box).opacity")) < 0.9
