"""The page of the Python API, from the signatures and docstrings of the names that ``toolkit`` exports."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

import toolkit
from toolkit.errors import ToolkitError

_HEAD = """\
# Python API

Every command is a function of the package `toolkit`:

```python
from toolkit import load_recipe, train, verify

recipe = load_recipe("recipe.yaml", ["strategy.name=fsdp2"])
assert verify(recipe).verdict == "equivalent"
print(train(recipe).final_loss)
```

`recipe` is a path or a `Recipe`; `overrides` are `section.key=value` texts, as on the command line. A result has
`to_json()`, equal to the command's `--json`, and `exit_code`, equal to the command's exit status. `import toolkit`
imports nothing else: each name is imported when it is first used.

`train` starts processes of its own, and `verify` and `bench` start worker processes. In a script, call them under
`if __name__ == "__main__":`.
"""
# In the order of use. tests/docs/test_site.py checks that nothing that toolkit exports is left out.
SECTIONS = {
    "Recipes": ("load_recipe", "resolve", "write_config", "Recipe"),
    "Data": ("inspect_data",),
    "Training": ("train", "import_checkpoint", "export"),
    "Verification": ("verify", "compare_checkpoints", "record", "prove", "Recorder"),
    "Memory and speed": ("plan", "bench"),
    "Configuration files": ("lint", "migrate", "import_config"),
    "Errors": ("ToolkitError", "InputError", "RunFailed", "Stopped"),
}
_WIDTH = 100


def pages() -> dict[str, str]:
    """Markdown by path within the site. Imports torch for the recorder."""
    parts = [_HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_entry(name) for name in names]
    return {"reference/api.md": "\n".join(parts)}


def _entry(name: str) -> str:
    thing = getattr(toolkit, name)
    head = f"### {name} {{: #{name} }}\n"
    if inspect.isfunction(thing):
        return "\n".join([head, _code(_signature(name, thing)), _text(thing), *_result(thing)])
    if issubclass(thing, ToolkitError):
        status = {"Stopped": "128 plus the signal's number"}.get(name, str(thing.exit_code))
        return f"{head}\n{_text(thing)}\nExit status: {status}.\n"
    if name == "Recipe":
        return (
            f"{head}\n{_text(thing)}\n[Every key](../recipe.md). `Recipe.model_validate(dict)` checks a dictionary.\n"
        )
    methods = [
        f"{_code(_signature(method, function))}\n{_text(function)}"
        for method, function in vars(thing).items()
        if inspect.isfunction(function) and not method.startswith("_")
    ]
    return "\n".join([head, _code(_signature(name, thing.__init__)), _text(thing), *methods])


def _signature(name: str, function: Any) -> str:
    """``name(parameters) -> result``, on one line where it fits, else with a line for each parameter."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.name != "self"]
    result = "" if signature.return_annotation in ("None", inspect.Signature.empty) else signature.return_annotation
    arrow = f" -> {result}" if result else ""
    parts = []
    for position, parameter in enumerate(shown):
        first_by_name = parameter.kind is parameter.KEYWORD_ONLY and (
            position == 0 or shown[position - 1].kind is not parameter.KEYWORD_ONLY
        )
        parts += ["*"] * first_by_name + [_parameter(parameter)]
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){arrow}"])


def _parameter(parameter: inspect.Parameter) -> str:
    text = f"{parameter.name}: {parameter.annotation}".replace("PathLike", "str | Path")
    if parameter.default is parameter.empty:
        return text
    default = "<function>" if callable(parameter.default) else repr(parameter.default)
    return f"{text} = {default}"


def _result(function: Any) -> list[str]:
    """What the result of a function offers beyond ``to_json`` and ``exit_code``."""
    found = result_class(function)
    if found is None or not hasattr(found, "to_json"):
        return []
    rows = [f"| `{name}` | {_cell(doc)} |" for name, doc in _attributes(found).items() if doc]
    if not rows:
        return [f"`{found.__name__}`: {_text(found)}"]
    return ["\n".join([f"`{found.__name__}` has:\n", "| attribute | |", "| --- | --- |", *rows]) + "\n"]


def result_class(function: Any) -> type[Any] | None:
    """The class that a function's annotation names; None for names that no module of the toolkit defines."""
    name = str(inspect.signature(function).return_annotation)
    module = sys.modules[function.__module__]
    if hasattr(module, name):
        return getattr(module, name)
    source = inspect.getsource(module)
    under = re.search(rf"^    from (toolkit\.[\w.]+) import .*\b{name}\b", source, re.MULTILINE)
    return getattr(importlib.import_module(under.group(1)), name) if under else None


def _attributes(found: type[Any]) -> dict[str, str]:
    """Fields of the class itself with the text below each, and its properties with their docstrings."""
    below = _texts_below(found)
    named = {field.name: below.get(field.name, "") for field in fields(found)} if is_dataclass(found) else {}
    inherited = {"document", "exit_code"}
    properties = {
        name: inspect.getdoc(value) or "" for name, value in vars(found).items() if isinstance(value, property)
    }
    return {name: doc for name, doc in {**named, **properties}.items() if name not in inherited}


def _texts_below(found: type[Any]) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    texts = {}
    nodes = body.body if isinstance(body, ast.ClassDef) else []
    for pair in itertools.pairwise(nodes):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def _text(thing: Any) -> str:
    """A docstring as Markdown: names in two backticks become code, the rest stays."""
    doc = inspect.getdoc(thing) or ""
    return re.sub(r"``([^`]+)``", r"`\1`", doc) + "\n"


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _cell(text: str) -> str:
    return " ".join(re.sub(r"``([^`]+)``", r"`\1`", text).split()).replace("|", "\\|")
