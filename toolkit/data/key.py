"""The key of a cached tokenisation: a hash of everything that determines its samples."""

from __future__ import annotations

import datetime
import hashlib
import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from toolkit.data.sources import Source
from toolkit.recipe.model_facts import model_facts
from toolkit.recipe.pooling import pooled_token
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_file

READ_WHOLE = 64 * 2**20
"""Data files up to this size are hashed by content, larger ones by path, size and times."""
_ENCODING = (
    "formats.py", "encode.py", "chat.py", "chat_template.py", "spans.py", "template_dialect.py", "messages.py",
    "text.py", "fields.py", "rows.py", "files.py", "sources.py", "columns.py", "images.py", "media.py",
    "unread.py", "turn_marks.py", "samples.py", "fingerprint.py", "held_out.py",
)  # fmt: skip
_DAY = "strftime_now"


def cache_key(recipe: Recipe, source: Source, tokenizer: Any, label_names: list[str] | None) -> str | None:
    """The key, or None if the state of the data is not known (it is then not cached)."""
    if not source.files and source.fingerprint is None:
        return None
    parts: dict[str, Any] = {
        "data": [_file(path, source.size <= READ_WHOLE) for path in source.files] or source.fingerprint,
        "part": source.part,
        "task": recipe.model.task,
        "format": recipe.data.format,
        "fields": dict(sorted(recipe.data.fields.items())),
        "max_length": recipe.data.max_length,
        "pooled": pooled_token(recipe, model_facts(recipe.model)),
        "num_labels": recipe.model.num_labels,
        "label_names": label_names,
        "template": _template(recipe, tokenizer),
        "template_kwargs": recipe.data.chat_template_kwargs,
        "turns": recipe.data.turns,
        "tokenizer": _tokenizer(tokenizer),
        "tokenizer_options": recipe.tokenizer.options,
        "versions": _versions(),
        "encoding": [_hash((Path(__file__).parent / name).read_bytes()) for name in _ENCODING],
        "samples": _hash(task_file(recipe.model.task).read_bytes()),
    }
    return _hash(json.dumps(parts, sort_keys=True).encode())[:40]


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def _file(path: Path, whole: bool) -> list[Any]:
    if whole:
        return [path.name, _hash(path.read_bytes())]
    about = path.stat()
    # The time of the last change of the inode cannot be set back, as that of the content can.
    return [str(path.resolve()), about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]


def _template(recipe: Recipe, tokenizer: Any) -> list[Any] | None:
    if recipe.data.format != "messages":
        return None
    from toolkit.data.preflight import read_template

    # Of a model that sees, the processor has the template; its tokenizer may have one, too.
    own = getattr(tokenizer, "tokenizer", tokenizer)
    text = getattr(tokenizer, "chat_template", None) if own is not tokenizer else None
    if recipe.data.chat_template:
        text = read_template(recipe.data.chat_template)
    text = text or own.get_chat_template()
    # Such a template writes the day into every sample.
    return [text, datetime.date.today().isoformat() if _DAY in text else None]


def _tokenizer(tokenizer: Any) -> list[Any]:
    """The files that the tokenizer would save, and its code if that is not transformers'."""
    kind = type(tokenizer)
    found: list[Any] = [kind.__module__, kind.__qualname__]
    with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                found.append([path.name, _hash(path.read_bytes())])
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("transformers", "builtins"):
            try:
                found.append(_hash(inspect.getsource(sys.modules[base.__module__]).encode()))
            except (OSError, TypeError):
                found.append(base.__module__)
    return found


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("transformers", "tokenizers", "jinja2")}
