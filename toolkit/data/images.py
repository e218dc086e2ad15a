"""Images in conversations: from the parts of a message to the place where the chat template writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.data.rows import Row

MARK = "\ufffc"
"""Stands for an image in the text of a message (Unicode's object replacement character)."""
_WRITTEN = "<image>"
"""What data of LLaVA's and LLaMA-Factory's form has in a message, for an image of the row's list."""
_KEYS = ("image", "path", "url", "bytes", "base64", "data")
_FIRST, _LAST = "zqxfirst", "zqxlast"


def place_images(row: Row, messages: list[dict[str, Any]], own: str) -> list[Any]:
    """The images of a conversation in their order; ``messages`` then have a ``MARK`` for each.

    An image is a part of a message (``{type: image, image: ...}``), or one of the row's list ``own``, whose place is a
    part without an image, or ``<image>`` in the text; without such places they come before the first user's words.
    Raises InputError at the row if places and images do not match.
    """
    listed = row.value.get(own)
    listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
    inside = [image for message in messages for image in message.pop("images", ())]
    if listed and not inside:
        for message in messages:
            message["content"] = message["content"].replace(_WRITTEN, MARK)
        places = sum(message["content"].count(MARK) for message in messages)
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        if not places:
            first["content"] = MARK * len(listed) + first["content"]
        inside = [None] * (places or len(listed))
    missing = sum(image is None for image in inside)
    if missing != len(listed):
        raise row.error(own, f"{len(listed)} images for {missing} places in the conversation")
    rest = iter(listed)
    return [next(rest) if image is None else image for image in inside]


def image_of_part(part: dict[str, Any]) -> Any:
    """The image of a message's part; None: the next of the row's list."""
    if isinstance(part.get("image_url"), dict):
        return part["image_url"].get("url")
    return next((part[key] for key in (*_KEYS, "image_url") if part.get(key) is not None), None)


class ImageText:
    """How a chat template writes an image: ``text``, in its place or before all of the message's words."""

    def __init__(self, render: Callable[..., str]) -> None:
        parts = [{"type": "text", "text": _FIRST}, {"type": "image"}, {"type": "text", "text": _LAST}]
        shown = render([{"role": "user", "content": parts}])
        bare = render([{"role": "user", "content": [parts[0], parts[2]]}])
        between = shown[shown.index(_FIRST) + len(_FIRST) : shown.index(_LAST)]
        usual = bare[bare.index(_FIRST) + len(_FIRST) : bare.index(_LAST)]
        self.leads = between == usual
        """Images come before the words of their message, wherever their parts are."""
        if self.leads:
            self.text = shown[bare.index(_FIRST) : shown.index(_FIRST)]
        else:
            self.text = between.removesuffix(usual) if usual else between

    def written(self, content: str) -> str:
        """``content`` with the template's text for every ``MARK``."""
        if self.leads:
            return self.text * content.count(MARK) + content.replace(MARK, "")
        return content.replace(MARK, self.text)
