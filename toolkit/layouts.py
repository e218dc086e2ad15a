"""Layouts: what the ranks of an axis of ``strategy.mesh`` divide, and what that changes anywhere else.

A layout is an option (``toolkit/rooms.py``) whose key is ``strategy.mesh.NAME`` and whose value is a number of ranks.
Its refusals, its part of the plain loop, its faults and its diagnoses are an option's. The toolkit's own layouts are
folders of ``toolkit/strategies/layouts``. One of somebody else is a single file: consecutive ranks train on the same
samples, and each has a part of some weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from toolkit.plugins import named
from toolkit.rooms import Option, all_options, option_named

if TYPE_CHECKING:
    from toolkit.recipe.mesh import Mesh
    from toolkit.recipe.schema import MeshAxes, Recipe
    from toolkit.recipe.traits import Traits


class Layout(Option):
    """An axis of the mesh. A subclass with a ``name`` registers itself. ``settings`` of the methods that it has as an
    option is the axis's size."""

    off_value: ClassVar[Any] = 1
    claim: ClassVar[tuple[str, str] | None] = None  # of the engine and the collectives, which every layout has
    missing: ClassVar[str] = "mesh-not-active"
    what: ClassVar[str] = "weights"
    """What its ranks divide, as messages say it: ``layers``."""
    exchange: ClassVar[str] = "add up hidden states"
    """What its consecutive ranks do so often that they have to be on one node; empty: they need not be."""
    collective: ClassVar[str] = "all-reduce"
    """What `verify` must see along the axis."""
    moved: ClassVar[Literal["exchanged", "summed"]] = "summed"
    passes: ClassVar[int] = 2
    """How often what a plan's trace has of ``moved`` (``planning.segments.Segment``) goes around the ring of its ranks
    in a micro-batch: what is added up, twice."""
    engine: ClassVar[str] = "toolkit.strategies.layouts.tensor.engine:Layers"
    """``module:class`` that comes before the strategy's engine among the base classes, and reads, writes and measures
    whole weights; empty: no weight is divided."""
    ranks: ClassVar[str] = "toolkit.model.tensor:own_ranks"
    """``module:function`` that makes of the resolved recipe what ``divide`` is given in a run."""
    acted: ClassVar[str] = "toolkit.planning.parts:acted_ranks"
    """``module:function`` that makes of the axis's size what ``divide`` is given in a plan."""
    like: ClassVar[str] = "tensor"
    """The one of a strategy's ``Traits.layouts`` that it needs: with ``tensor`` the engine takes a part of a weight for
    a weight. Empty: it needs none."""
    apart: ClassVar[Mapping[str, str] | None] = None
    """Other axes that it does not work beside, and why; None: it has been verified beside none."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            cls.typed_key = f"strategy.mesh.{cls.name}"
        super().__init_subclass__()

    def settings(self, recipe: Recipe) -> int | None:
        mesh = recipe.strategy.mesh
        return None if mesh is None else mesh.axes.get(self.name)

    def decision(self, settings: int) -> None:
        """``reason`` is said where all axes of the mesh are."""

    def prepare(self, model: Any, settings: int, resolved: Any) -> None:
        """``spread`` comes later: when it is known what trains, in which dtype."""

    def plain(self, settings: int) -> Any:
        """Where it computes in another order than the plain loop, that order: a PlainOption with ``orders``."""
        return named("toolkit.reference.option:PlainOption")()

    # ------------------------------------------------------------------ of a recipe; imports nothing heavy

    def under(self, traits: Traits) -> bool:
        """Whether a strategy with these traits can have it."""
        return not self.like or self.like in traits.layouts

    def apart_from(self, others: Sequence[str]) -> tuple[str, str] | None:
        """The first of a mesh's ``others`` that it does not work beside, and why; None if it works beside all."""
        apart = dict.fromkeys(others, "it has not been verified") if self.apart is None else self.apart
        return next(((other, why) for other, why in apart.items() if other in others), None)

    def reason(self, mesh: Mesh) -> str:
        """Why the axis has its size, for `config --explain`; also where that is 1."""
        return self.title

    # ------------------------------------------------------------------ of a run; imports torch

    def spread(self, prepared: Any) -> None:
        """Have a Prepared model compute this rank's part, before its strategy wraps it. Every rank calls it."""
        ranks = named(self.ranks)(prepared.resolved)
        prepared.divisions = self.divide(prepared.model, ranks, prepared.resolved.source)

    def divide(self, model: Any, ranks: Any, source: str) -> Mapping[str, Any]:
        """Leave this rank's part in each weight of ``model`` that is divided; by name how (``Division``). Adapters are
        there already, and values may be missing (``model/sources.py``). Raises InputError, which begins with
        ``source``, for a model that cannot be divided."""
        return {}


def layouts() -> dict[str, Layout]:
    """Every layout by name; those of installed packages too."""
    return {name: option for name, option in all_options().items() if isinstance(option, Layout)}


def check_layouts(axes: Mapping[str, int]) -> None:
    """Refuse axes that are no layout's, as unknown keys; for pydantic."""
    if unknown := [name for name in axes if layout_named(name) is None]:
        errors = [InitErrorDetails(type="extra_forbidden", loc=(name,), input=axes[name]) for name in unknown]
        raise ValidationError.from_exception_data("mesh", errors)


def list_layouts(schema: dict[str, Any]) -> None:
    """Put the layouts that have no key of their own into the JSON schema of a mesh; for pydantic."""
    schema["additionalProperties"] = False
    for name, layout in layouts().items():
        schema["properties"].setdefault(
            name, {"default": 1, "description": layout.title, "minimum": 1, "type": "integer"}
        )


def layout_named(name: str) -> Layout | None:
    """The layout of that name; None if there is none."""
    found = option_named(name)
    return found if isinstance(found, Layout) else None


def layouts_of(mesh: Mesh | MeshAxes | None) -> list[tuple[Layout, int]]:
    """Those that ``mesh`` asks for, in the order of its keys, and their sizes."""
    axes = {} if mesh is None else mesh.axes
    return [(layout, size) for name, size in axes.items() if (layout := layout_named(name)) is not None]
