"""Conversations that call tools, in the format of OpenAI's fine-tuning files: one JSON object a line.

    python examples/tool_calling/make_data.py data --rows 2000

writes data/train.jsonl and data/eval.jsonl. Each conversation has a system message, the schemas of three tools, a call
with its arguments as a JSON string, the tool's result, and an answer; some ask for two calls, some for none.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CITIES = ["Paris", "Lagos", "Lima", "Osaka", "Oslo", "Quito", "Pune", "Turin"]
PRODUCTS = ["kettle", "lamp", "bicycle", "backpack", "keyboard", "tent"]


def function(name: str, description: str, **properties: str) -> dict[str, Any]:
    """The JSON schema of a tool whose arguments are all strings."""
    schema = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    function("get_weather", "Current weather of a city", city="name of the city"),
    function("get_price", "Price of a product", product="name of the product"),
    function("convert", "Convert an amount of money", amount="the amount", currency="target currency, as ISO 4217"),
]


def conversation(draw: random.Random) -> dict[str, Any]:
    """One row."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Use the tools. Answer in one sentence."}]
    for _ in range(draw.choice([1, 1, 2])):
        messages += draw.choice([weather, price, small_talk])(draw)
    return {"messages": messages, "tools": TOOLS}


def weather(draw: random.Random) -> list[dict[str, Any]]:
    city, degrees = draw.choice(CITIES), draw.randint(-5, 38)
    sky = draw.choice(["sunny", "cloudy", "raining"])
    result = json.dumps({"temperature": degrees, "sky": sky})
    return [
        {"role": "user", "content": f"What is the weather like in {city}?"},
        *call(draw, "get_weather", {"city": city}, result),
        {"role": "assistant", "content": f"In {city} it is {sky} at {degrees} degrees."},
    ]


def price(draw: random.Random) -> list[dict[str, Any]]:
    product, euros = draw.choice(PRODUCTS), draw.randint(5, 400)
    dollars = round(euros * 1.08, 2)
    return [
        {"role": "user", "content": f"How much is a {product}, in dollars?"},
        *call(draw, "get_price", {"product": product}, json.dumps({"price": euros, "currency": "EUR"})),
        *call(draw, "convert", {"amount": str(euros), "currency": "USD"}, json.dumps({"amount": dollars})),
        {"role": "assistant", "content": f"A {product} costs {dollars} dollars."},
    ]


def small_talk(draw: random.Random) -> list[dict[str, Any]]:
    name = draw.choice(["Ada", "Grace", "Alan", "Emmy"])
    return [
        {"role": "user", "content": f"Hello, I am {name}."},
        {"role": "assistant", "content": f"Hello {name}, how can I help?"},
    ]


def call(draw: random.Random, name: str, arguments: dict[str, str], result: str) -> list[dict[str, Any]]:
    """A call and its result."""
    key = f"call_{draw.getrandbits(32):08x}"
    made = {"id": key, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": key, "name": name, "content": result},
    ]


def rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(seed)
    return (conversation(draw) for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", options.rows, 0), ("eval", max(1, options.rows // 20), 1)):
        lines = (json.dumps(row) + "\n" for row in rows(count, seed))
        (options.folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{options.folder}: train.jsonl, eval.jsonl")


if __name__ == "__main__":
    main()
