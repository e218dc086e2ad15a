"""Images in planned rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.recipe.resolve import Resolved
from toolkit.tasks import task_of
from toolkit.tasks.image_shapes import Size, image_shape, image_token, size_step

if TYPE_CHECKING:
    import torch

_LARGE = 1024


@dataclass(frozen=True)
class Images:
    """What each row has: ``count`` images, of ``size`` (height and width in pixels) where the model takes any.

    ``size`` None: 1,024 pixels square, or the largest square whose tokens fit into the row. An image that a processor
    cuts into tiles counts as so many.
    """

    count: int = 1
    size: Size | None = None

    @classmethod
    def of(cls, resolved: Resolved, count: int | None, size: Size | None) -> Images | None:
        """Those of a recipe's rows, with the command's values; None where its model takes no images within texts.

        Raises InputError if values are given that the model does not take.
        """
        media = task_of(resolved.recipe.model.task).media
        if media is None or media.row is None:
            if count is not None or size is not None:
                task = resolved.recipe.model.task
                raise InputError(f"--images, --image-size: for model.task: image-text-to-text, not {task}")
            return None
        return cls(1 if count is None else count, size)

    def in_row(self, config: Mapping[str, Any], task: str, length: int) -> tuple[list[int], dict[str, Any]]:
        """Ids and features of one row's images. Raises InputError if their tokens do not fit into ``length``."""
        media = task_of(task).media
        assert media is not None
        assert media.row is not None
        step = size_step(config)
        if self.size is not None and step is None:
            raise InputError("--image-size: this model's images all have the size of its config; leave it out")
        ids, features = media.row(config, self.count, self.size or _fitting(config, step, self.count, length))
        if len(ids) >= length:
            own, least = len(ids) // self.count, image_shape(config).tokens
            smaller = ", or lower --image-size" if step and self.count * (least + 2) < length else ""
            raise InputError(
                f"data.max_length: {length} tokens do not hold {self.count} x {own} tokens of images and one of text; "
                f"raise it{smaller}"
            )
        return ids, features

    def batch(self, config: Any, task: str, micro: int, length: int) -> dict[str, torch.Tensor]:
        """A micro-batch of rows of ``length`` tokens that begin with the images, without mask and labels: int64
        (micro, length), float32 features as the processor makes them."""
        import torch

        from toolkit.data.media import kinds_of_config

        values = config.to_dict()
        ids, features = self.in_row(values, task, length)
        token = image_token(values)
        rows = torch.tensor([ids + [0 if token else 1] * (length - len(ids))]).repeat(micro, 1)
        tensors = {name: torch.cat([torch.from_numpy(array)] * micro) for name, array in features.items()}
        kinds = {name: (rows == token).long() for name in kinds_of_config(task_of(task), config)}
        return {"input_ids": rows} | tensors | kinds

    def describe(self, config: Mapping[str, Any], task: str, length: int) -> str:
        """In words, for the plan's assumptions."""
        ids, _ = self.in_row(config, task, length)
        seen = image_shape(config, self.size or _fitting(config, size_step(config), self.count, length)).size
        size = "" if seen is None else f" of {seen[1]} x {seen[0]} pixels"
        images = "1 image" if self.count == 1 else f"{self.count} images"
        return f"every row has {images}{size}, {len(ids):,} of its {length:,} tokens (--images, --image-size)"


def _fitting(config: Mapping[str, Any], step: int | None, count: int, length: int) -> Size | None:
    """The largest square, up to 1,024 pixels, of which so many fit into a row; the smallest if none does."""
    if step is None:
        return None
    sides = range(max(step, _LARGE // step * step), 0, -step)
    # Two tokens frame an image.
    found = (side for side in sides if count * (image_shape(config, (side, side)).tokens + 2) < length)
    return (next(found, sides[-1]),) * 2
