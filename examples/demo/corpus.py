"""Real text that every machine has: the source and docstrings of Python's standard library."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

QUESTION = "Write the docstring of this Python function."
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


def write_conversations(folder: Path, training: int = 300, held_out: int = 32) -> dict[str, int]:
    """Write conversations.jsonl and conversations-held-out.jsonl; returns their numbers of rows.

    A row has one question, a short function without its docstring, and one answer, the docstring's first paragraph.
    The rows are spread over all modules; a module is held out whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers: dict[str, dict[str, str]] = {"conversations": {}, "conversations-held-out": {}}
    for module in _modules():
        part = "conversations-held-out" if _held_out(module.name) else "conversations"
        answers[part] |= dict(_questions(module))
    counts = {}
    for (name, pairs), limit in zip(answers.items(), (training, held_out), strict=True):
        chosen = sorted(pairs, key=lambda question: hashlib.sha256(question.encode()).digest())[:limit]
        rows = [
            [{"role": "user", "content": question}, {"role": "assistant", "content": pairs[question]}]
            for question in chosen
        ]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8"
        )
        counts[name] = len(rows)
    return counts


def _questions(module: Path) -> Iterator[tuple[str, str]]:
    """Short functions as questions, each with its docstring on one line."""
    text = module.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        first = node.body[0]
        code = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno or first.lineno : node.end_lineno]
        source = textwrap.dedent("".join(code)).strip()
        if 20 <= len(docstring) <= 120 and len(source) <= 300:
            yield f"{QUESTION}\n\n{source}", docstring


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
