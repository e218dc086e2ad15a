"""Images and recordings: where a row keeps one, and from there to the features that a model takes.

A sample holds a reference: the path of a file, or the file's own bytes where the data contains them (Parquet, data sets
of the hub). Features are made when a micro-batch is, by the loader's workers.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.rows import Row
from toolkit.data.text import kind_of
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of

if TYPE_CHECKING:
    from toolkit.tasks.base import Features, Media, Task

_PATH, _BYTES = b"p", b"b"
TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")
"""Arguments of models that want to know which tokens stand for images."""
_OF_TOKENS = ("input_ids", "attention_mask", *TOKEN_KINDS)


class MediaReader:
    """Decodes what samples refer to, and gives it to the model's processor. Picklable, for workers."""

    def __init__(self, media: Media, processor: Any) -> None:
        self.media, self._whole = media, processor
        inside = getattr(processor, "image_processor", None) or getattr(processor, "feature_extractor", None)
        self.processor: Any = inside or processor

    def checked(self, row: Row, field: str, value: Any) -> bytes:
        """The reference of a row's image or recording; raises InputError at the row if it cannot be opened.

        ``value``: a path (relative to the data file), bytes, or ``{"bytes": ..., "path": ...}`` as datasets keeps it.
        """
        found = reference(row, field, value)
        try:
            _OPEN[self.media.kind](_stream(found))
        except ImportError as error:
            raise row.error(field, _install(self.media.kind, error)) from None
        except Exception as error:  # a decoder fails in the ways of its format
            what = f"{value}: " if isinstance(value, str) else ""
            raise row.error(field, f"{what}not a readable {_NAMES[self.media.kind]}: {_reason(error)}") from None
        return found

    def decode(self, found: bytes) -> Any:
        """The image, or the samples of the recording, of a reference. Raises InputError if it can no longer be read."""
        try:
            return _DECODE[self.media.kind](_stream(found), self.processor)
        except Exception as error:  # it could be opened when the data was; a decoder fails in the ways of its format
            what = found[1:].decode() if found[:1] == _PATH else "the data"
            message = f"not a readable {_NAMES[self.media.kind]}: {_reason(error)}"
            raise InputError(f"{what}: {message}; restore the file, or remove its sample") from None

    def features(self, media: Sequence[bytes], ids: Sequence[int] = ()) -> Features:
        """What the processor makes of one sample's ``media``: float32 or int64 arrays by their names. ``ids``: the
        sample's tokens, where its model has any."""
        decoded = [self.decode(one) for one in media]
        if self.media.tokens:
            found = token_kinds(self._kinds, self._whole.image_token_ids, ids)
            if decoded:
                text = self._whole.image_token * len(decoded)
                # As torch's tensors: Llama 4's are bf16, which numpy does not have (transformers 5.23.0).
                made = self._whole(text=[text], images=decoded, return_tensors="pt")
                self._check_places(media, ids, made["input_ids"][0].tolist())
                found |= _arrays({name: value for name, value in made.items() if name not in _OF_TOKENS})
            return found
        options: dict[str, Any] = {"return_tensors": "np"}
        if self.media.kind == "audio":
            options["sampling_rate"] = self.processor.sampling_rate
        return _arrays(self.processor(decoded, **options))

    def _check_places(self, media: Sequence[bytes], ids: Sequence[int], own: Sequence[int]) -> None:
        """Raise InputError if an image has another size than when its sample was tokenised (and cached)."""
        image = set(self._whole.image_token_ids)
        there, wanted = (sum(int(token) in image for token in tokens) for tokens in (ids, own))
        if there != wanted:
            names = ", ".join(one[1:].decode() for one in media if one[:1] == _PATH) or "an image of the data"
            raise InputError(
                f"{names}: takes {wanted} tokens now and took {there} when its sample was tokenised; set data.cache to "
                "another folder, or to false"
            )

    @functools.cached_property
    def _kinds(self) -> tuple[str, ...]:
        return tuple(name for name in TOKEN_KINDS if name in self._whole.model_input_names)


def _arrays(made: Any) -> Features:
    import numpy as np

    found: Features = {}
    for name, value in made.items():
        array = np.asarray(value.float() if str(getattr(value, "dtype", "")) == "torch.bfloat16" else value)
        found[name] = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    return found


def token_kinds(names: Sequence[str], image_ids: Sequence[int], ids: Sequence[int]) -> Features:
    """By each of ``names``: for each token 1 if it stands for an image, else 0; int64 (1, tokens)."""
    import numpy as np

    kinds = np.isin(np.asarray(ids, dtype=np.int64), list(image_ids)).astype(np.int64)[None]
    return dict.fromkeys(names, kinds)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config with the values that its file leaves out."""
    import transformers

    found: dict[str, Any] = transformers.AutoConfig.for_model(**config).to_dict()
    return found


def kinds_of_config(task: Task, config: Any) -> list[str]:
    """Which of ``TOKEN_KINDS`` the forward of a model of this transformers ``config`` takes."""
    import inspect

    import transformers

    # AutoModelForSpeechSeq2Seq: MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    words = re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[0-9])(?=[A-Z])", "_", task.auto_class.removeprefix("Auto"))
    kind = getattr(transformers, f"{words.upper()}_MAPPING")[type(config)]
    return [name for name in TOKEN_KINDS if name in inspect.signature(kind.forward).parameters]


def reader_of(recipe: Recipe, processor: Any) -> MediaReader | None:
    """The reader of the recipe's task; None if its samples are text."""
    media = task_of(recipe.model.task).media
    return None if media is None else MediaReader(media, processor)


def reference(row: Row, field: str, value: Any) -> bytes:
    """Where a row's image or recording is, as bytes that a sample can keep; raises InputError at the row."""
    if isinstance(value, dict) and value.get("bytes") is not None:
        value = value["bytes"]
    elif isinstance(value, dict) and "path" in value:
        value = value["path"]
    if isinstance(value, bytes):
        return _BYTES + value
    if isinstance(value, str):
        path = Path(row.file).parent / Path(value).expanduser()
        if not path.is_file():
            raise row.error(field, f"{value}: no such file (looked for {path})")
        return _PATH + str(path.absolute()).encode()
    encoded = _encoded(value)
    if encoded is None:
        raise row.error(field, f"must be a path or the bytes of a file, not {kind_of(value)}")
    return _BYTES + encoded


def _encoded(value: Any) -> bytes | None:
    """Of what datasets has decoded already: an image, or samples of a recording with their rate."""
    if hasattr(value, "save") and hasattr(value, "mode"):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return buffer.getvalue()
    if isinstance(value, dict) and {"array", "sampling_rate"} <= value.keys():
        import soundfile

        buffer = io.BytesIO()
        soundfile.write(buffer, value["array"], value["sampling_rate"], format="WAV", subtype="FLOAT")
        return buffer.getvalue()
    return None


def content(found: bytes) -> bytes:
    """The bytes of what a reference refers to."""
    with _stream(found) as stream:
        return stream.read()


def _stream(found: bytes) -> Any:
    return io.BytesIO(found[1:]) if found[:1] == _BYTES else open(found[1:].decode(), "rb")


def _open_image(stream: Any) -> None:
    from PIL import Image

    with stream, Image.open(stream) as image:
        image.verify()


def _image(stream: Any, processor: Any) -> Any:
    """RGB, turned as the camera was held (as datasets decodes images)."""
    from PIL import Image, ImageOps

    with stream, Image.open(stream) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def _open_audio(stream: Any) -> None:
    import soundfile

    with stream, soundfile.SoundFile(stream) as file:
        if not file.frames:
            raise ValueError("it is empty")


def _audio(stream: Any, processor: Any) -> Any:
    """float32 (samples,), one channel (the mean of all), at the rate that the processor takes."""
    import soundfile

    with stream:
        samples, rate = soundfile.read(stream, dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    if rate == processor.sampling_rate:
        return mono
    import soxr

    return soxr.resample(mono, rate, processor.sampling_rate)


_NAMES = {"image": "image", "audio": "recording"}
_OPEN = {"image": _open_image, "audio": _open_audio}
_DECODE = {"image": _image, "audio": _audio}
_PACKAGES = {"image": "pillow", "audio": "soundfile and soxr"}
_EXTRAS = {"image": "vision", "audio": "audio"}


def _install(kind: str, error: ImportError) -> str:
    package = "deepspeed-accelerate-toolkit"
    return f"reading it needs {_PACKAGES[kind]} ({error}); pip install '{package}[{_EXTRAS[kind]}]'"


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def missing_package(recipe: Recipe) -> None:
    """Raise InputError if the packages that decode the recipe's data are not installed."""
    import importlib.util

    media = task_of(recipe.model.task).media
    if media is None:
        return
    for name in {"image": ("PIL",), "audio": ("soundfile", "soxr")}[media.kind]:
        if importlib.util.find_spec(name) is None:
            raise InputError.at(None, "model.task", _install(media.kind, ImportError(f"no module {name}")))
