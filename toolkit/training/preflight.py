"""The preflight of a run: what the model, the tokenizer and the data show before the first step, in seconds.

What is known without them is asked of ``toolkit/recipe/preflight.py``, here with the built model's own config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.data.extremes import ends_in, extreme, has_most, largest_id, largest_label, longest, longest_target
from toolkit.data.row_limits import RowLimits
from toolkit.data.samples import MapSamples, MixedSamples, Samples
from toolkit.model.built import Built
from toolkit.model.load import build_config, set_padding
from toolkit.model.padding import pools_by_padding
from toolkit.model.processor import pad_token_of
from toolkit.recipe.limits import Limit
from toolkit.recipe.model_facts import ModelFacts, model_sources
from toolkit.recipe.preflight import Check, embedding_rows, id_problem, known_checks, refuse
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels

if TYPE_CHECKING:
    from toolkit.training.session import Session

_SHOWN = 20
"""Samples whose text is looked at for a template's tokens."""


def preflight(session: Session, samples: Samples, *, resumed: bool = False) -> list[Check]:
    """Every check of a run's samples against its model; raises InputError with all that would fail. ``resumed``: a run
    that has trained with a template's tokens in pieces goes on."""
    resolved, built = session.resolved, session.built
    facts = ModelFacts(built.config, resolved.facts.folder)
    whole = replace(resolved, facts=facts)
    checks = [*known_checks(whole), *sample_checks(resolved, built, session.tokenizer, samples)]
    if resumed:
        checks = [check for check in checks if check.claim != _WHOLE_TOKENS or check.ok]
    refuse(checks, resolved)
    return checks


def without_model(resolved: Resolved, processor: Any) -> Built | None:
    """What samples are checked against where no model is built: by its config alone; None where that is not known."""
    if resolved.facts.config is None:
        return None
    config, pad = build_config(resolved), pad_token_of(processor)
    if pad is not None:
        set_padding(config, pad, resolved)
    return Built(config.to_dict(), None if added_tokens(resolved.recipe) else embedding_rows(resolved.facts), None)


def sample_checks(resolved: Resolved, built: Built, processor: Any, samples: Samples) -> list[Check]:
    """Those of ``preflight`` that the samples decide."""
    whole = replace(resolved, facts=ModelFacts(built.config, resolved.facts.folder))
    return [*_Looks(whole, built, processor, samples).checks()]


_WHOLE_TOKENS = "tokens that the chat template writes are whole"


@dataclass(frozen=True)
class _Looks:
    resolved: Resolved
    built: Built
    processor: Any
    samples: Samples

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    def checks(self) -> Iterator[Check]:
        media = task_of(self.resolved.recipe.model.task).media
        tokens = media is None or media.tokens
        yield from self._rows()
        if tokens and self.tokenizer is not None:
            yield from self._padding()
            yield from self._masks()
            yield from self._template()
        yield from self._decoder()
        if media is not None:
            yield from self._media()

    # ---- rows

    def _rows(self) -> Iterator[Check]:
        recipe, samples = self.resolved.recipe, self.samples
        limits = RowLimits.of(recipe, self.resolved.facts, ids=self.built.ids, written=self._written())
        task = task_of(recipe.model.task)
        ways = [
            ("largest token id within the embedding", largest_id, None if limits.ids is None else limits.ids - 1),
            ("longest row within the model's positions", longest, _tokens(limits.rows)),
        ]
        if task.labels is Labels.TARGET:
            most = None if limits.written is None else limits.written - 1
            ways += [
                ("longest target within the decoder's positions", longest_target, _tokens(limits.targets)),
                ("largest target id within the decoder's head", largest_label, most),
            ]
        if isinstance(samples, MapSamples | MixedSamples):
            for claim, find, limit in ways:
                part, index, value = extreme(samples, find)
                problem = place = None
                if limit is not None and value > limit:
                    problem = limits.problem(part.bare(index), self._name_of)
                    place = part.place(index) if problem else None
                key = "data.max_length" if "position" in claim else self._tokenizer_key()
                yield Check(claim, value, limit, key, problem, place)
            if limits.pooled is not None:
                yield self._pooled(samples, limits)
            if task.classes:
                yield self._classes(samples)

    def _pooled(self, samples: MapSamples | MixedSamples, limits: RowLimits) -> Check:
        token = limits.pooled
        assert token is not None
        least, fewest, less = extreme(samples, has_most(token, fewest=True))
        part, index, most = extreme(samples, has_most(token))
        problem = place = None
        if most == 0 or less == 0:
            problem, place = limits.problem(least.bare(fewest), self._name_of), least.place(fewest)
        elif most != -less:
            place = part.place(index)
            problem = (
                f"the sample has {self._name_of(token)!r} {most} times, and others have it {-less}: the model "
                "classifies by its hidden state, and takes rows that all have as many; write the texts without it, or "
                "set data.max_length so that none is cut"
            )
        claim = "every row has the token at which the model classifies, and as many"
        return Check(claim, most, -less, "data.train", problem, place)

    def _written(self) -> int | None:
        return self.built.written if task_of(self.resolved.recipe.model.task).labels is Labels.TARGET else None

    def _classes(self, samples: MapSamples | MixedSamples) -> Check:
        part, index, value = extreme(samples, largest_label)
        count = int(self.built.config.get("num_labels") or len(self.built.config.get("id2label") or ()) or 2)
        problem = None
        if value >= count:
            problem = f"label {value} is not one of the model's {count} classes, from 0; set it to {value + 1} or more"
        claim = "largest label within the model's classes"
        return Check(claim, value, count - 1, "model.num_labels", problem, part.place(index) if problem else None)

    def _name_of(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def _tokenizer_key(self) -> str:
        return "tokenizer.path" if self.resolved.recipe.tokenizer.path else "model.path"

    # ---- special tokens

    def _padding(self) -> Iterator[Check]:
        pad, rows = self.samples.pad_id, self.built.ids
        if rows is not None:
            what = f"the padding token {self._name_of(pad)!r} has the id {pad:,}"
            problem = None if 0 <= pad < rows else id_problem(what, rows)
            yield Check("padding token within the embedding", pad, rows - 1, "tokenizer.options", problem)
        if not pools_by_padding(self.resolved.recipe):
            return
        own, problem = self.tokenizer.pad_token_id, None
        if own is None and self.resolved.micro_size > 1 and self._pools():
            problem = (
                "the tokenizer has no padding token, and none of its special tokens can pad: each may end a text. A "
                f"classifier needs one to find the last token of each row; {_NEW_PADDING}"
            )
        yield Check("a classifier's rows can be padded", own, None, "tokenizer.options", problem)
        if own is None or not self._pools() or not isinstance(self.samples, MapSamples | MixedSamples):
            return
        part, index, ends = extreme(self.samples, ends_in(own))
        problem = place = None
        if ends:
            place = part.place(index)
            problem = (
                f"the sample ends with {self._name_of(own)!r}, which pads rows as well, so that the model pools at the "
                f"token before it; {_NEW_PADDING}"
            )
        yield Check("no sample ends with the padding token", own, None, "tokenizer.options", problem, place)

    def _pools(self) -> bool:
        """Whether the model's code looks for the padding token to find the last token of a row."""
        sources = model_sources(ModelFacts(self.built.config, self.resolved.facts.folder))
        texts = [source.read_text(encoding="utf-8") for source in sources]
        return any("GenericForSequenceClassification" in text or "last_non_pad_token" in text for text in texts)

    def _masks(self) -> Iterator[Check]:
        masking, rows = self.samples.masking, self.built.ids
        if masking is None or rows is None:
            return
        problem = None
        if masking.mask_id >= rows:
            what = f"the mask token {self._name_of(masking.mask_id)!r} has the id {masking.mask_id:,}"
            problem = id_problem(what, rows)
        elif masking.vocabulary > rows:
            what = f"hidden tokens become random ones of the tokenizer's {masking.vocabulary:,}"
            problem = id_problem(what, rows)
        claim = "the mask token and random tokens within the embedding"
        yield Check(claim, max(masking.mask_id, masking.vocabulary - 1), rows - 1, self._tokenizer_key(), problem)

    def _template(self) -> Iterator[Check]:
        recipe = self.resolved.recipe
        if recipe.data.format != "messages" or not isinstance(self.samples, MapSamples | MixedSamples):
            return
        known = set(self.tokenizer.get_vocab())
        parts = [self.samples] if isinstance(self.samples, MapSamples) else self.samples.parts
        shown = [part.bare(index) for part in parts for index in range(min(_SHOWN, len(part)))]
        texts = [self.tokenizer.decode(one.input_ids) for one in shown]
        template = _template_of(recipe, self.processor)
        written = [mark for mark in dict.fromkeys(_MARK.findall(template)) if any(mark in text for text in texts)]
        lacking = [mark for mark in written if mark not in known]
        problem = None
        if lacking:
            listed = ", ".join(f'"{mark}"' for mark in lacking)
            problem = (
                f"the template writes {listed}, which the tokenizer has not, and splits into pieces: no model would "
                f"end its turn by them; set tokenizer.add_special_tokens: [{listed}], or use the template of this "
                "tokenizer"
            )
        key = "data.chat_template" if recipe.data.chat_template else self._tokenizer_key()
        yield Check(_WHOLE_TOKENS, len(written) - len(lacking), len(written), key, problem)

    # ---- other inputs

    def _decoder(self) -> Iterator[Check]:
        if task_of(self.resolved.recipe.model.task).labels is not Labels.TARGET:
            return
        config = self.built.config
        keys = ("decoder_start_token_id", "pad_token_id")
        start = next((config[key] for key in keys if config.get(key) is not None), None)
        problem = None
        if start is None:
            problem = (
                "the model's config has neither decoder_start_token_id nor pad_token_id, so there is no token for its "
                "decoder to start from; set decoder_start_token_id there"
            )
        elif self.built.written is not None and not 0 <= start < self.built.written:
            problem = id_problem(f"the decoder's first token has the id {start:,}", self.built.written)
        key = "model.config" if self.resolved.recipe.model.config else "model.path"
        yield Check("the decoder has a first token", start, self.built.written, key, problem)

    def _media(self) -> Iterator[Check]:
        """The shapes of one sample's features against those that the model was made for."""
        key, blank = self._tokenizer_key(), self.samples.blank
        if blank is None:
            return
        config = self.built.config
        image_token = getattr(self.processor, "image_token_id", None)
        told = config.get("image_token_id", config.get("image_token_index"))
        if image_token is not None and told is not None:
            problem = None
            if image_token != told:
                problem = (
                    f"images are the token {image_token:,} ({self._name_of(image_token)!r}) to the processor and "
                    f"{told:,} to the model's config; use the model's own processor"
                )
            yield Check("the processor and the model mean the same token by an image", image_token, told, key, problem)
        for feature, axis, name, what in _SHAPES:
            values, wanted = blank.features.get(feature), _of_config(config, name)
            if values is None or wanted is None or values.ndim < 3:
                continue
            value = int(values.shape[axis])
            problem = None
            if value != wanted:
                problem = (
                    f"the processor makes {value} {what}, and the model takes {wanted} ({name}); use the model's own "
                    "processor"
                )
            yield Check(f"{what} as the model takes them", value, wanted, key, problem)
        yield from self._image_size(blank.features, key)

    def _image_size(self, features: Any, key: str) -> Iterator[Check]:
        pixels, wanted = features.get("pixel_values"), self.built.config.get("image_size")
        if pixels is None or pixels.ndim != 4 or not isinstance(wanted, int | list | tuple):
            return
        sources = model_sources(ModelFacts(self.built.config, self.resolved.facts.folder))
        if not any("doesn't match model" in source.read_text(encoding="utf-8") for source in sources):
            return  # it takes any size
        size = list(pixels.shape[-2:])
        sides = [wanted, wanted] if isinstance(wanted, int) else list(wanted)
        problem = None
        if size != sides:
            problem = (
                f"the processor makes images of {size[1]} x {size[0]} pixels, and the model takes {sides[1]} x "
                f"{sides[0]} (image_size); set tokenizer.options: {{size: {{height: {sides[0]}, width: {sides[1]}}}}}"
            )
        yield Check("images have the size that the model takes", size, sides, key, problem)


_SHAPES = (
    ("input_features", 1, "num_mel_bins", "mel bins"),
    ("pixel_values", 1, "num_channels", "channels"),
)
"""Of a feature: the axis whose size the config names."""

_NEW_PADDING = (
    'set tokenizer.options: {pad_token: "<|pad|>"} (a token that is new to the tokenizer gets a row of the embedding)'
)
_MARK = re.compile(r"<\|[^|<>{}\s'\"]{1,40}\|>")
"""How templates write tokens that are no text."""


def _tokens(limit: Limit | None) -> int | None:
    return None if limit is None else limit.tokens


def _of_config(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _template_of(recipe: Any, processor: Any) -> str:
    if recipe.data.chat_template is not None:
        from toolkit.data.preflight import read_template

        return read_template(recipe.data.chat_template)
    own = getattr(processor, "chat_template", None) or getattr(
        getattr(processor, "tokenizer", None), "chat_template", None
    )
    return own if isinstance(own, str) else " ".join(map(str, own.values())) if isinstance(own, dict) else ""
