"""The JSON of a request, checked: a wrong type is refused before anything is done with it."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from toolkit.studio.gate import Refused

MAX_TEXT = 1 << 20
MAX_FILES = 40
MAX_EDITS = 200


class Payload:
    """One request's object."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @classmethod
    async def of(cls, request: Request) -> Payload:
        """Raises Refused for what is no JSON object of plain text."""
        try:
            found = json.loads(await request.body())
            json.dumps(found, ensure_ascii=False).encode()  # lone surrogates cannot be written anywhere
        except (ValueError, RecursionError):
            raise Refused(400, "The request is not JSON of plain text.") from None
        if not isinstance(found, dict):
            raise Refused(400, "A JSON object is expected.")
        return cls(found)

    def text(self, key: str, limit: int = MAX_TEXT) -> str:
        value = self._values.get(key)
        if not isinstance(value, str) or len(value) > limit:
            raise Refused(400, f"{key}: text of at most {limit:,} characters is expected.")
        return value

    def maybe(self, key: str, limit: int = 200) -> str | None:
        return None if self._values.get(key) in (None, "") else self.text(key, limit)

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Refused(400, f"{key}: a number from {low:g} to {high:g} is expected.")
        return float(value)

    def flag(self, key: str) -> bool:
        return self._values.get(key) is True

    def one_of(self, key: str, choices: tuple[str, ...]) -> str:
        value = self._values.get(key)
        if value not in choices or not isinstance(value, str):
            raise Refused(400, f"{key}: expected one of {', '.join(choices)}.")
        return value

    def files(self) -> dict[str, str]:
        """``files``: names and texts."""
        value = self._values.get("files")
        if not isinstance(value, dict) or not 0 < len(value) <= MAX_FILES:
            raise Refused(400, f"files: 1 to {MAX_FILES} files are expected.")
        if any(not isinstance(text, str) or len(text) > MAX_TEXT or len(name) > 500 for name, text in value.items()):
            raise Refused(400, "files: names and texts of at most 1 MiB are expected.")
        return value

    def names(self, key: str, limit: int = 20) -> list[str]:
        value = self._values.get(key)
        if not isinstance(value, list) or len(value) > limit or any(not isinstance(v, str) for v in value):
            raise Refused(400, f"{key}: a list of at most {limit} names is expected.")
        return value

    def edits(self) -> list[list[str | None]]:
        """``edits``: pairs of a key with dots and its value's text, null to remove it."""
        value = self._values.get("edits", [])
        if not isinstance(value, list) or len(value) > MAX_EDITS:
            raise Refused(400, f"edits: at most {MAX_EDITS} are expected.")
        for pair in value:
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or len(pair[0]) > 200:
                raise Refused(400, "edits: pairs of a key and a text are expected.")
            if not all(pair[0].split(".")) or not (pair[1] is None or isinstance(pair[1], str)):
                raise Refused(400, "edits: pairs of a key and a text are expected.")
        return value
