"""`toolkit schema --for KIND`: a JSON schema of a configuration file, from the keys that the packages read.

For editors: completion, types, choices and bounds while typing. What needs more than one key is for `toolkit lint`.
"""

from __future__ import annotations

from typing import Any

import toolkit
from toolkit.linting import keys
from toolkit.linting.keys import Key
from toolkit.linting.rules.deepspeed_keys import STRICT

KINDS = ("accelerate", "deepspeed", "arguments", "adapter")
_TITLES = {
    "accelerate": "accelerate config",
    "deepspeed": "DeepSpeed config",
    "arguments": "training arguments of transformers",
    "adapter": "adapter config of PEFT",
}
_PACKAGES = {"arguments": "transformers", "adapter": "peft"}
_JSON = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "dict": "object", "list": "array",
         "NoneType": "null"}  # fmt: skip
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
# Prefixes that accelerate launch puts before the keys of a section itself.
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
_COMMENTS: dict[str, Any] = {"^(//|_|#|\\$)": {}}


def file_schema(kind: str) -> dict[str, Any]:
    """The schema, JSON Schema draft 2020-12, of the newest known version of the package."""
    package = _PACKAGES.get(kind, kind)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"toolkit schema, version {toolkit.__version__}; {package} {keys.versions(package)[-1]}",
        "title": _TITLES[kind],
        "type": "object",
    }
    return head | _BUILDERS[kind]()


def _value(key: Key, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """The schema of one key; ``more``: texts that are accepted beside its type."""
    types = {_JSON.get(name, "string") for name in key.types} - {"null"}
    made: dict[str, Any] = {"type": sorted(types | {"null"})}
    if types & {"string", "object", "array"} or not types:
        made = {}  # the packages take more than the annotation says
    elif "integer" in types and "number" not in types:
        made["type"] = sorted((types | {"null"}) - {"integer"} | {"number"})
        made["multipleOf"] = 1  # 5e8 is a whole number, too
    if key.choices:
        whole = [int(choice) for choice in key.choices if choice.isdigit() and "int" in key.types]
        made = {"enum": [*whole, *key.choices, None]}
    made |= {_BOUNDS[name]: limit for name, limit in key.bounds}
    if more and made:
        made = {"anyOf": [made, {"enum": list(more)}]}
    return made | ({"default": key.default} if key.default is not None else {})


def _section(package: str, path: str, more: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    return {name: _value(key, more) for name, key in sorted(keys.section(package, path).items())}


def _deepspeed() -> dict[str, Any]:
    made: dict[str, Any] = {"properties": _section("deepspeed", "", ("auto",)), "patternProperties": _COMMENTS}
    for path in STRICT:
        parent, _, name = path.rpartition(".")
        owner = made["properties"][parent] if parent else made
        inner: dict[str, Any] = {
            "type": ["object", "null"],
            "properties": _section("deepspeed", path, ("auto",)),
            "additionalProperties": False,
        }
        if path == "zero_optimization":
            inner["type"] = ["object", "boolean"]
            inner["properties"]["stage"] = {"enum": [0, 1, 2, 3, "auto"]}
        if name == "offload_param" or name == "offload_optimizer":
            inner["properties"]["device"] = {"enum": ["none", "cpu", "nvme", "auto"]}
        owner.setdefault("properties", {})[name] = inner
    return made


def _accelerate() -> dict[str, Any]:
    top = {name: _loose(key) for name, key in keys.section("accelerate", "").items()}
    sections = [name for name in keys.package("accelerate")["sections"] if name.endswith("_config")]
    for name in sections:
        known = {key: _loose(fact) for key, fact in keys.section("accelerate", name).items()}
        prefix = _PREFIXES.get(name, "")
        known |= {key.removeprefix(prefix): value for key, value in known.items() if prefix and key.startswith(prefix)}
        top[name] = {
            "type": ["object", "null"],
            "properties": dict(sorted(known.items())),
            "additionalProperties": False,
        }
    return {"properties": dict(sorted(top.items())), "additionalProperties": False}


def _loose(key: Key) -> dict[str, Any]:
    """A value of an accelerate config: the launcher makes text of it, so a number or a truth may be quoted."""
    if not key.choices:
        return {}
    digits = {int(choice) for choice in key.choices if choice.isdigit()}
    texts = {text for choice in key.choices for text in (choice, choice.lower(), choice.upper())}
    numbered = {1, 2, 3, 4, 5} if "FULL_SHARD" in key.choices else set()
    return {"enum": [*sorted(digits | numbered), *sorted(texts | {str(n) for n in numbered}), None]}


def _arguments() -> dict[str, Any]:
    properties = _section("transformers", "") | _section("transformers", "seq2seq")
    return {"properties": properties, "patternProperties": _COMMENTS}


def _adapter() -> dict[str, Any]:
    methods = ["LORA", *(name for name in keys.package("peft")["sections"] if name not in ("", "task_types"))]
    properties = _section("peft", "") | {
        "peft_type": {"enum": sorted(methods)},
        "task_type": {"enum": [*keys.section("peft", "task_types"), None]},
    }
    lora_only = {"if": {"properties": {"peft_type": {"const": "LORA"}}}, "then": {"properties": properties}}
    return {"properties": {key: properties[key] for key in ("peft_type", "task_type")}, **lora_only}


_BUILDERS = {"accelerate": _accelerate, "deepspeed": _deepspeed, "arguments": _arguments, "adapter": _adapter}
