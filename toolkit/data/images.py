"""Images in conversations: from the parts of a message to the place where the chat template writes them, and to their
tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


Span = tuple[int, int]


def encode_with_images(
    processor: Any, text: str, images: list[Any], spans: Sequence[Span]
) -> tuple[list[int], list[bool], list[Span]]:
    """Ids of ``text``, in which the processor writes the tokens of each image in the place of its own token; for each
    id whether it is within ``spans`` (characters of ``text``) and of no image; and where the tokens of each image are,
    first and behind the last. Raises what the processor raises."""
    made = processor(
        text=[text], images=images, add_special_tokens=False, return_offsets_mapping=True,
        return_text_replacement_offsets=True,
    )  # fmt: skip
    replaced = made["text_replacement_offsets"][0]
    moved = [(_moved(start, replaced), _moved(end, replaced)) for start, end in spans]
    inserted = [one["new_span"] for one in replaced]
    offsets: list[Span] = [(int(start), int(end)) for start, end in made["offset_mapping"][0]]
    within = [_touches(at, moved) and not _touches(at, inserted) for at in offsets]
    places = []
    for span in inserted:
        mine = [index for index, at in enumerate(offsets) if _touches(at, [span])]
        places.append((mine[0], mine[-1] + 1))
    return [int(one) for one in made["input_ids"][0]], within, places  # Pixtral's processor makes tensors of them


def _touches(at: Span, spans: Sequence[Span]) -> bool:
    return any(at[0] < end and at[1] > start for start, end in spans)


def _moved(place: int, replaced: Sequence[dict[str, Any]]) -> int:
    """A place in the text, in the text where images have been written."""
    moved = place
    for one in replaced:
        end = one["span"][1]
        if end <= place:
            moved = place - end + one["new_span"][1]
    return moved
