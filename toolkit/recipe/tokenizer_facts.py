"""What a tokenizer's files say of its special tokens, without importing torch or transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.recipe.hub import cached_file
from toolkit.recipe.schema import Recipe

ROLES = ("eos_token", "pad_token")
"""Tokens that samples get: the one ends them, the other fills up their rows."""


def special_ids(recipe: Recipe) -> dict[str, tuple[str, int]]:
    """By role the token and its id, for those of ``ROLES`` that the recipe's tokenizer has and its files number."""
    place = recipe.tokenizer.path or recipe.model.path
    if place is None:
        return {}
    config = _read(_file(place, "tokenizer_config.json"))
    named = config | {key: value for key, value in recipe.tokenizer.options.items() if key in ROLES}
    ids = dict(_numbered(place, config))
    found = {}
    for role in ROLES:
        token = named.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token not in ids and role in recipe.tokenizer.options:
            ids = _vocabulary(place) or {}  # a word of the vocabulary may have the role, too
        if isinstance(token, str) and token in ids:
            found[role] = (token, ids[token])
    return found


def added_tokens(recipe: Recipe) -> list[str]:
    """Tokens that the model gets rows for, in the order of their ids: those that ``tokenizer.options`` give a role and
    the tokenizer's files do not have, which transformers adds as it loads them, then those that the recipe adds."""
    asked = recipe.tokenizer
    roles = [key for key in sorted(asked.options) if key.endswith(("_token", "_tokens"))]
    given = [token for key in roles for token in _texts(asked.options[key])]
    if not given:
        return asked.added
    known = _vocabulary(asked.path or recipe.model.path)
    fresh = [] if known is None else [token for token in dict.fromkeys(given) if token not in known]
    return list(dict.fromkeys([*fresh, *asked.added]))


def _texts(value: Any) -> list[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


@functools.lru_cache(maxsize=8)
def _vocabulary(place: str | None) -> dict[str, int] | None:
    """Every token of a tokenizer.json with its id; None where there is no such file."""
    file = None if place is None else _file(place, "tokenizer.json")
    if file is None:
        return None
    whole = _read(file)
    vocabulary = (whole.get("model") or {}).get("vocab") or {}
    if not isinstance(vocabulary, dict):  # pairs of a token and its score, in the order of ids
        vocabulary = {str(pair[0]): number for number, pair in enumerate(vocabulary) if pair}
    return vocabulary | dict(_numbered(str(place), {}))


def _numbered(place: str, config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Tokens that the files list apart from the vocabulary, as they do all special ones."""
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        if isinstance(token, dict) and str(number).isdigit():
            yield str(token.get("content")), int(number)
    for token in _listed(_file(place, "tokenizer.json")):
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            yield str(token.get("content")), token["id"]


_HEAD = 1 << 20
"""Bytes of a tokenizer.json in which the list of added tokens is: it comes before the vocabulary, of many more."""


def _listed(file: Path | None) -> list[Any]:
    if file is None:
        return []
    with file.open(encoding="utf-8", errors="replace") as opened:
        head = opened.read(_HEAD)
    _, key, rest = head.partition('"added_tokens"')
    try:
        listed = json.JSONDecoder().raw_decode(rest.lstrip().removeprefix(":").lstrip())[0] if key else []
    except ValueError:
        return []
    return listed if isinstance(listed, list) else []


def _file(place: str, name: str) -> Path | None:
    folder = Path(place).expanduser()
    if folder.is_dir():
        file = folder / name
        return file if file.is_file() else None
    return cached_file(place, name)


def _read(file: Path | None) -> dict[str, Any]:
    try:
        content = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # reported where the tokenizer is loaded
    return content if isinstance(content, dict) else {}
