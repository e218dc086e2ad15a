"""Formats of packed bases: options that keep the linear weights of a frozen base in fewer bits, and unpack them for
each product. Each is a folder of ``toolkit/options/`` as any other's; what the toolkit asks of one is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from toolkit.plugins import load_plugins
from toolkit.rooms import REGISTERED, Option


class BaseFormat(Option):
    """A format of a base's weights. ``adapter.method`` asks for it, or the model's files, which have it already. So it
    takes facts of the model to know: ``Resolved.base`` has the format, and no list of a recipe's options.

    ``stored`` is how the model's files have it (``Resolved.stored``); None: a plain base is packed once adapters wrap
    it. Of the methods of an option it needs ``decision``, ``why_not`` and ``why_not_here``, with ``stored`` as
    settings, and ``plain``. A packed layer is a ``PackedLayer`` (toolkit/model/packed_layers.py).
    """

    typed_key = "adapter.method"
    method: ClassVar[str]
    """The ``adapter.method`` that packs a plain base."""
    quant_method: ClassVar[str]
    """Of the ``quantization_config`` of files that it reads."""

    def settings(self, recipe: Any) -> None:
        """None: it is no option of a recipe alone, see ``asked_base``."""

    # ------------------------------------------------------------------ of the model's files; imports nothing heavy

    def stored(self, facts: Any) -> Any:
        """How files pack their weights in it, by facts of the model's config; as text for `config --explain`. None if
        they do not."""
        return None

    def why_not_read(self, facts: Any) -> str | None:
        """Why files of its ``quant_method`` cannot be trained on; None if they can."""
        return None

    def why_not_stored(self, recipe: Any) -> str | None:
        """Why the recipe cannot train on files that have it: the key, and what to set instead; None if it can."""
        return None

    def card(self, stored: Any) -> str:
        """Its name on the model card of an export."""
        return self.name

    # ------------------------------------------------------------------ of a run; imports torch

    def configure(self, config: Any, resolved: Any) -> None:
        """Change the transformers config of a model that is ``stored`` so, in place, before it is built."""
        self._needed("files").configure(config, resolved)

    def take(self, model: Any, resolved: Any, dtype: Any) -> None:
        """Have a ``model`` that is ``stored`` so hold packed weights as adapters can wrap them, in place: transformers
        has read it from files, or drawn it at random. ``dtype``: that of its weights if they were not packed."""
        self._needed("files").take(model, resolved, dtype)

    def linears(self, model: Any, resolved: Any) -> dict[str, Any]:
        """The linear layers of a model without adapters that are packed, or are to be, by name."""
        return dict(self._needed("apply").base_linears(model, resolved))

    def pack(self, model: Any, linears: Mapping[str, Any], resolved: Any, together: bool = False) -> None:
        """Replace ``linears`` of an adapted ``model`` by packed layers, in place. ``together``: every rank calls it, so
        that they can divide the work."""
        self._needed("apply").quantise_base(model, linears, resolved, together)

    def size(self, model: Any, linears: Mapping[str, Any], resolved: Any, double_quant: bool = True) -> None:
        """The same without values, for a plan. ``double_quant``: whether statistics are quantised too."""
        self._needed("apply").size_base(model, linears, resolved, double_quant)

    def claims(
        self, model: Any, bases: Mapping[str, int], resolved: Any, device: Any, blocks: Sequence[tuple[str, Any]]
    ) -> list[Any]:
        """Evidence that a ``model`` that an engine has wrapped has its ``bases`` (elements by name) packed. Every rank
        calls it; sums are made on ``device``. ``blocks``: name and module of the model's blocks."""
        return list(self._needed("evidence").base_claims(model, bases, resolved, device, blocks))


def base_formats() -> list[BaseFormat]:
    """Every format of a packed base."""
    load_plugins(installed=False)
    return [option for option in REGISTERED.values() if isinstance(option, BaseFormat)]


def asked_base(recipe: Any, facts: Any) -> tuple[BaseFormat | None, Any]:
    """The format that the base of ``recipe`` has or gets, and how the model's files have it; None for what there is
    not."""
    for base in base_formats():
        stored = base.stored(facts)
        if stored is not None or (recipe.adapter is not None and recipe.adapter.method == base.method):
            return base, stored
    return None, None
