"""``adapter.options``: the fields of PEFT's config class of the method, read from its source; PEFT is not imported.

The types are PEFT's annotations. What they do not say (a number's range, options that exclude each other) PEFT checks
when the adapter is created.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from toolkit.recipe.adapter_methods import DATA_FIRST, METHODS, REBUILT, Method

if TYPE_CHECKING:
    from toolkit.recipe.schema import Adapter

Problem = tuple[tuple[str, ...], str]
"""Path of the key in the recipe, and what is wrong with it."""

_OF_PEFT = frozenset(
    {
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode",
    }
)  # fmt: skip
"""Fields of every config, which PEFT or the toolkit sets."""
_BASES = ("PeftConfig", "PeftConfigMixin")


@dataclass(frozen=True)
class Option:
    """One field of a config class: its annotation and default, as PEFT's source has them."""

    annotation: str
    default: str


@cache
def options_of(name: str) -> dict[str, Option]:
    """The options that a method takes, by name; {} if PEFT is not installed."""
    method = METHODS[name]
    kept = {
        key: option
        for key, option in _fields(method.peft_type.lower()).items()
        if key not in {*_OF_PEFT, *method.keys.values(), *method.fixed, *method.refused}
    }
    if method.peft_type == "LORA":
        kept.pop("use_dora", None)
        kept.pop("ensure_weight_tying", None)
    return kept


def adapter_problems(adapter: Adapter) -> list[Problem]:
    """What is wrong with a recipe's ``adapter``: keys that the method does not take, and options."""
    method = METHODS[adapter.method]
    at = ("adapter",)
    if method.why_not is not None:
        return [((*at, "method"), f"{method.name} {method.why_not}")]
    found: list[Problem] = []
    for key in ("r", "alpha", "dropout", "target_modules", "modules_to_save"):
        value = getattr(adapter, key)
        if key not in method.keys and value is not None and value != []:
            takes = ", ".join([*method.keys, "options"])
            found.append(((*at, key), f"{method.name} has no such setting; remove it ({method.name} takes {takes})"))
    if adapter.path is not None and not method.starts_from:
        message = (
            f"a saved {method.name} adapter holds the virtual tokens without the encoder that trains them; remove it"
        )
        found.append(((*at, "path"), message))
    if adapter.path is None:
        for key, example in method.required.items():
            if key not in adapter.options:
                message = f"{method.name} requires {key}, for example {{{key}: {example}}}"
                found.append(((*at, "options"), message))
    if adapter.options.get("target_parameters") and adapter.dropout:
        message = (
            "is not possible with options.target_parameters: PEFT adapts the weight itself, not its input; set it to 0"
        )
        found.append(((*at, "dropout"), message))
    if adapter.options.get("layers_to_transform") is not None and isinstance(adapter.target_modules, str):
        message = (
            "with options.layers_to_transform PEFT requires a list of names, for example [q_proj, v_proj]; here it is "
            f"{adapter.target_modules!r}"
        )
        found.append(((*at, "target_modules"), message))
    known = options_of(method.name)
    for key, value in adapter.options.items():
        why = _problem(method, key, value, known)
        if why is not None:
            found.append(((*at, "options", key), why))
    return found


def _problem(method: Method, key: str, value: Any, known: dict[str, Option]) -> str | None:
    own = {its: ours for ours, its in method.keys.items()}
    if key in own:
        return f"is set by adapter.{own[key]}; remove it here"
    if method.name == "qlora" and key == "use_dora":
        return "DoRA reads the base weights, which qlora packs in 4 bits; use adapter.method: dora, or qlora without it"
    if key in method.fixed or (method.peft_type == "LORA" and key == "use_dora"):
        return f"is set by adapter.method ({'lora or dora' if method.peft_type == 'LORA' else method.name}); remove it"
    if key in method.refused:
        return f"{method.refused[key]}; remove it"
    if key not in known:
        if not known:
            return None  # without PEFT its config cannot be read; training is refused for that
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{method.name} has no option {key}{hint}; its options: {', '.join(sorted(known))}"
    if key == "init_lora_weights" and (reason := _bad_start(method, value)) is not None:
        return reason
    return _mistyped(known[key].annotation, value)


def _bad_start(method: Method, value: Any) -> str | None:
    if value in ("eva", "corda", "lora_ga"):
        return f"{value} {DATA_FIRST}; use pissa or olora"
    if value == "loftq":
        return "loftq quantises the base in another way than adapter.method: qlora does; use qlora without it"
    if method.name == "qlora" and isinstance(value, str) and value.startswith(REBUILT):
        return f"{value} changes the base weights, which qlora stores in 4 bits; use gaussian, or adapter.method: lora"
    return None


def _mistyped(annotation: str, value: Any) -> str | None:
    """What is wrong with ``value`` by PEFT's annotation, or None."""
    patterns = re.findall(r"'([^']*?)\[[^']*\]'", annotation)  # 'pissa_niter_[number of iters]'
    if isinstance(value, str) and any(value.startswith(start) for start in patterns):
        return None
    try:
        _checker(annotation).validate_python(value)
    except ValidationError:
        return f"{value!r} is not {_describe(annotation)}"
    return None


@cache
def _checker(annotation: str) -> TypeAdapter[Any]:
    """A strict check of a type; names that are not types of Python (PEFT's own classes) allow anything."""
    names = {node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)}
    plain = {"str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict, "tuple": tuple}
    typed = {"Optional": typing.Optional, "Union": typing.Union, "Literal": typing.Literal, "Any": Any}
    scope = {name: (plain | typed).get(name, Any) for name in names}
    hint = eval(annotation, {"__builtins__": {}}, scope)  # PEFT's own source, names only
    return TypeAdapter(hint, config=ConfigDict(strict=True))


def _describe(annotation: str) -> str:
    return annotation.replace("Optional", "optional ").replace("Union", "one of ").replace("Literal", "")


@cache
def _fields(folder: str) -> dict[str, Option]:
    classes = _classes(folder)
    ours = [node for node in classes.values() if _is_config(node)]
    if not ours:
        return {}
    found: dict[str, Option] = {}
    node = ours[-1]
    for base in (ast.unparse(base) for base in node.bases):
        found |= _inherited(base)
    return found | _own(node)


def _inherited(base: str) -> dict[str, Option]:
    known = {"LoraConfig": "lora", "PromptTuningConfig": "prompt_tuning"}
    if base in known:
        return _fields(known[base])
    files = {"PromptLearningConfig": "config.py", "LycorisConfig": "tuners/lycoris_utils.py"}
    if base not in files or (root := _root()) is None:
        return {}
    tree = ast.parse((root / files[base]).read_text(encoding="utf-8"))
    return next((_own(node) for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base), {})


def _is_config(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("Config") for base in node.bases)


def _own(node: ast.ClassDef) -> dict[str, Option]:
    found = {}
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found[part.target.id] = Option(ast.unparse(part.annotation), _default(part.value))
    return found


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call):
        given = {word.arg: word.value for word in value.keywords}
        value = given.get("default", given.get("default_factory"))
    return "" if value is None else ast.unparse(value)


@cache
def _classes(folder: str) -> dict[str, ast.ClassDef]:
    root = _root()
    file = root / "tuners" / folder / "config.py" if root is not None else None
    if file is None or not file.is_file():
        return {}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def _root() -> Path | None:
    spec = importlib.util.find_spec("peft")  # finds, does not import
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
