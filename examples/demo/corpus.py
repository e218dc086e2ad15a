"""Real text that every machine has: the source and docstrings of Python's standard library."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

_HELD_OUT = 20  # one module in so many is never trained on


def write_corpus(folder: Path) -> dict[str, int]:
    """Write source.jsonl and docstrings.jsonl with their held-out parts; returns their numbers of samples.

    A sample of the first is one function or class as it is written, of the second its signature as the prompt
    and the first paragraph of its docstring as the completion. A module is held out whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    lines: dict[str, list[str]] = {}
    for module in _modules():
        part = "-held-out" if _held_out(module.name) else ""
        for source, prompt, completion in _functions(module):
            lines.setdefault(f"source{part}", []).append(json.dumps({"text": source}))
            if completion:
                pair = {"prompt": prompt, "completion": completion}
                lines.setdefault(f"docstrings{part}", []).append(json.dumps(pair))
    for name, samples in lines.items():
        if name.endswith("held-out"):
            samples = samples[:: max(1, len(samples) // 200)]  # enough for three digits of a mean loss
        (folder / f"{name}.jsonl").write_text("\n".join(samples) + "\n", encoding="utf-8")
        counts[name] = len(samples)
    return counts


def _modules() -> list[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = ("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging")
    more = ("multiprocessing", "unittest", "urllib", "xml", "wsgiref", "sqlite3", "tkinter")
    found = sorted(library.glob("*.py"))
    for package in packages + more:
        found += sorted((library / package).rglob("*.py"))
    return found


def _held_out(module: str) -> bool:
    return hashlib.sha256(module.encode()).digest()[0] % _HELD_OUT == 0


def _functions(module: Path) -> Iterator[tuple[str, str, str]]:
    text = module.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines(keepends=True)
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        # ast.get_source_segment splits the whole file again for every function
        source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
        documentation = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        prompt = f'def {node.name}({ast.unparse(node.args)}):\n    """'
        yield source, prompt, f'{documentation}"""' if documentation else ""
