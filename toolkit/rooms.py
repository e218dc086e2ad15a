"""Rooms: what an option of training offers to the rest of the toolkit, and the registry that finds them.

A room is a folder of ``toolkit/options/`` with modules of fixed names: ``spec.py`` (a subclass of ``Option``; imports
neither torch nor anything that trains), and those it needs of ``apply.py``, ``reference.py``, ``evidence.py``,
``faults.py`` and ``names.py``. Nothing imports them but this registry, by name: without the folder the option is gone,
and nothing else. An option of somebody else is a module of the same kind, or a single file that overrides the methods
(`toolkit/plugins.py` says how it is found); its keys stand under ``options.NAME``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from toolkit.errors import InputError
from toolkit.plugins import load_plugins

REGISTERED: dict[str, Option] = {}
ATTENTION = "model.attention"
"""The typed key of options that bring an attention."""


class Keys(BaseModel):
    """Base of an option's keys: unknown ones are errors, and types are strict."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Shadow(NamedTuple):
    """A second set of the trained weights that an option keeps through a run, in float32 and sharded as they are. A
    checkpoint has them beside the moments, as tensors WEIGHT.OPTION. An export may have them in place of the weights.
    """

    noun: str
    """What one tensor is, ``average``: the kind of its comparisons in `verify` too."""
    title: str
    """What it is compared with: ``the moving average of the weights``."""
    exported: str
    """What an export of them has, for its card: ``averaged weights``."""
    wrong: str
    """The diagnosis where they are wrong after an update; its facts are ``count`` and ``first``."""
    lost: str
    """The diagnosis where a resume does not restore them; its fact is ``differing``."""


class Option:
    """An option of training. A subclass with a ``name`` registers itself.

    ``settings`` below is what the recipe has under the option's key: the value of a typed key, or an instance of
    ``keys``. The methods that return nothing here have their parts in the modules of the room.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """What it does, in one line; for messages and the docs."""
    typed_key: ClassVar[str] = ""
    """Its key in the schema, `section.key`; empty: `options.NAME`, with ``keys``."""
    off_value: ClassVar[Any] = None
    """What a typed key has where the option is off."""
    by_model: ClassVar[bool] = False
    """Whether it is active in every model with layers that it replaces, its key set or not: ``settings`` then never are
    None. On one rank it computes what the model's own do: plans and other tools go by those."""
    on_value: ClassVar[Any] = None
    """The value of a typed key that is the option, where others belong to none; None: all but ``off_value`` are."""
    keys: ClassVar[type[Keys]] = Keys
    """What `options.NAME` takes."""
    axes: ClassVar[frozenset[str]] = frozenset()
    """Axes of `strategy.mesh`, of context, tensor, expert and pipeline, that it has been verified with."""
    claim: ClassVar[tuple[str, str] | None]
    """Of the evidence that it is active: an id, and what is counted (`embeddings with noise`). None: what `verify`
    compares of it is the evidence, as a ``shadow``."""
    missing: ClassVar[str]
    """The diagnosis where that evidence is missing; one of ``diagnoses``."""
    adds_loss: ClassVar[bool] = False
    """Whether it adds ``loss_term`` to the loss of training; `loss: fused` has no logits for it, and is refused."""
    shadow: ClassVar[Shadow | None] = None
    """The weights that it keeps beside those that train."""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            return
        if lacking := [name for name in ("title", "claim", "missing") if not hasattr(cls, name)]:
            raise TypeError(f"option {cls.name!r} has no {lacking[0]} (toolkit/rooms.py: Option)")
        known = REGISTERED.get(cls.name)
        if known is not None and type(known).__module__ != cls.__module__:
            raise ValueError(f"option {cls.name!r} is defined by {type(known).__module__} and by {cls.__module__}")
        REGISTERED[cls.name] = cls()

    @property
    def key(self) -> str:
        """Its key in the recipe."""
        return self.typed_key or f"options.{self.name}"

    def settings(self, recipe: Any) -> Any:
        """What the recipe asks of it; None: it is off."""
        if not self.typed_key:
            values = recipe.options.get(self.name)
            return None if values is None else self.keys.model_validate(values)
        value = functools.reduce(getattr, self.typed_key.split("."), recipe)
        on = value != self.off_value if self.on_value is None else value == self.on_value
        return value if on else None

    def remove(self, values: dict[str, Any]) -> None:
        """Turn it off in a recipe's ``values``, in place."""
        *sections, last = self.key.split(".")
        for section in sections:
            values = values.get(section) or {}
        values.pop(last, None)

    # ------------------------------------------------------------------ of a recipe; imports nothing heavy

    @property
    def turned_off(self) -> str:
        """How a message says what to do without it."""
        return "remove it" if self.off_value is None else f"set {self.key}: {str(self.off_value).lower()}"

    def refusals(self, settings: Any, recipe: Any) -> list[str]:
        """What the recipe has that it cannot be with: a sentence each, `key: why; what to set instead`."""
        return []

    def decision(self, settings: Any) -> tuple[Any, str] | None:
        """A line of `config --explain`: the value in force, and which of the files cannot hold it."""
        return settings, "not in training_args.json: the Trainer has no such option"

    def explained(self, settings: Any, recipe: Any, facts: Any) -> tuple[Any, str] | None:
        """``decision``, where it depends on more of the recipe, or on the ``facts`` of its model."""
        return self.decision(settings)

    def training_args(self, settings: Any) -> dict[str, Any]:
        """Its arguments of the transformers Trainer."""
        return {}

    def trainer_arguments(self, settings: Any, resolved: Any) -> dict[str, Any]:
        """``training_args``, where they depend on more of the resolved recipe."""
        return self.training_args(settings)

    def names(self, tool: str) -> Mapping[str, Any]:
        """Rules for the keys of another tool (`toolkit/importing/table.py`), by key. ``tool``: the id of
        its table, for example ``axolotl``; ``trainer`` for scripts of transformers' Trainer."""
        module = self._part("names")
        return {} if module is None else module.RULES.get(tool, {})

    # ------------------------------------------------------------------ of a run; imports torch

    def apply(self, model: Any, settings: Any) -> None:
        """Change ``model`` in place: adapted, of its final dtypes, not yet compiled, checkpointed or wrapped."""
        self._needed("apply").apply(model, settings)

    def calls(self, model: Any) -> int:
        """How many forwards in training mode it has been active in, in this process."""
        return int(self._needed("apply").calls(model))

    def loss_term(self, settings: Any) -> Any:
        """What it adds to the loss: a function of logits (tokens, classes), float32, and of their targets (tokens,), to
        a sum over the tokens whose target is not -100."""
        return self._needed("apply").loss_term(settings)

    def plain(self, settings: Any) -> Any:
        """Its part of the plain loop, written independently of ``apply``: a PlainOption (toolkit/reference)."""
        return self._needed("reference").plain(settings)

    def faults(self) -> Sequence[Any]:
        """Known ways in which it goes wrong: classes of ``toolkit.verification.faults.base.Fault``."""
        module = self._part("faults")
        return [] if module is None else module.FAULTS

    def diagnoses(self) -> Mapping[str, Any]:
        """By id what `verify` can say of it: ``toolkit.verification.diagnose.known.Known``."""
        module = self._part("faults")
        return {} if module is None else module.DIAGNOSES

    # ------------------------------------------------------------------ of what the model, device and mesh can have

    def why_not(self, settings: Any, recipe: Any, facts: Any, blocks: tuple[str, ...], device: str) -> str | None:
        """Why the recipe's model cannot have it on ``device`` (cuda or cpu, on any machine), and what to set instead;
        None if it can. ``facts``: of the model's config (toolkit/recipe/model_facts.py); ``blocks``: class names of its
        blocks."""
        return None

    def why_not_axis(self, axis: str) -> str:
        """Why `strategy.mesh.AXIS`, none of ``axes``, cannot divide the model with it, and what to set instead."""
        return f"has not been verified with {self.key}; {self.turned_off}"

    def why_not_here(self, settings: Any, device: str) -> str | None:
        """What this machine lacks to train with it on ``device``, and what to set instead; None if nothing."""
        return None

    def check_device(self, settings: Any, resolved: Any) -> None:
        """Raise InputError if the device of this process cannot run it. May import torch."""

    def notes(self, settings: Any, device: str) -> list[str]:
        """What `train` says of it when a run begins."""
        return []

    def headline(self, settings: Any, device: str) -> str:
        """What the first line of `verify` has of it; empty: nothing."""
        return ""

    needs_gpu: ClassVar[str] = ""
    """What `verify` says on a CPU, where it leaves the option out; empty: it runs on a CPU too."""
    packages: ClassVar[Mapping[str, str]] = {}
    """Optional packages that it needs, by distribution, and what `doctor` says that they are for."""
    unmeasured: ClassVar[str] = ""
    """What of it a plan neither traces nor has been compared with; empty: `plan` traces the model with it."""

    def cell(self, recipe: Any) -> dict[str, Any]:
        """Fields of each cell of `bench`, whether it is on or off."""
        return {}

    # ------------------------------------------------------------------ of the attention that a model is built with

    unmasked: ClassVar[str] = ""
    """What a plan assumes of packed rows whose samples it keeps apart without a mask of each row's square; empty: it
    does not keep them apart."""

    def attention(self, settings: Any, resolved: Any, *, traced: bool) -> str | None:
        """transformers' name of the attention that it brings, registered; None: it brings none. ``traced``: for a plan,
        whose tensors have no values. Raises InputError if the device cannot run it."""
        return None

    # ------------------------------------------------------------------ of how a strategy distributes the model

    whole_blocks: ClassVar[bool] = False
    """Whether its typed key, of the section `strategy`, is the number of blocks, from the first, whose frozen weights
    every process keeps whole, beside what is sharded. `plan` tries as many as fit, and calls them NAME blocks."""
    not_split: ClassVar[str] = ""
    """Why transformers, where it splits a model itself, cannot have it; empty if that does not matter."""

    def why_not_strategy(self, settings: Any, resolved: Any) -> str | None:
        """Why the recipe's strategy cannot have it, and what to set instead; None if it can."""
        return None

    # ------------------------------------------------------------------ of layers and operators that are replaced

    before_adapters: ClassVar[bool] = False
    """Whether ``prepare`` changes the model before adapters wrap its layers, and not after its final dtypes."""
    rounds: ClassVar[bool] = False
    """Whether it rounds operands to fewer bits than the recipe's precision has. `verify` measures what other roundings
    of its operands change, and reports how far it takes a step from one without it."""
    reorders: ClassVar[str] = ""
    """Why it may sum in another order than the plain loop; empty if it may not."""
    fuses: ClassVar[bool] = False
    """Whether its kernels compute several operations of a block at once, which then round otherwise. `verify` measures
    what other roundings of a block's operations change."""
    seen_by: ClassVar[Literal["calls", "operators", "store", "evidence"]] = "calls"
    """How `verify` knows that it is active: ``calls`` in each forward, its ``operators`` in one step, what its
    ``store`` counts, or ``evidence`` of the model alone."""
    operators: ClassVar[tuple[str, ...]] = ()
    """How names of torch's operators begin that it runs."""
    compared_claims: ClassVar[tuple[str, ...]] = ()
    """Ids of claims of ``evidence`` that ``engaged`` holds against the plain loop."""

    def in_float32(self, device: str) -> bool:
        """Whether it computes in float32 on ``device``; `verify` leaves it out of the pass in float32 if not."""
        return not self.rounds

    def prepare(self, model: Any, settings: Any, resolved: Any) -> Any:
        """``apply``, where it needs to know more of the recipe. What it returns is given to ``evidence``."""
        own = getattr(self._part("apply"), "prepare", None)
        return self.apply(model, settings) if own is None else own(model, settings, resolved)

    def evidence(self, model: Any, prepared: Any) -> list[Any]:
        """Claims (toolkit/strategies/engines/claims.py) about the ``model`` that an engine has wrapped. ``prepared``:
        what ``prepare`` returned. A run whose claims fail does not begin."""
        return []

    def engaged(self, ranks: Sequence[Any], resolved: Any, counted: Any) -> list[Any]:
        """Claims about a recorded run that is ``seen_by`` operators or a store: ``ranks`` are its RankTraces,
        ``counted`` what the plain loop counted (``PlainOption.count``), or of each block whether a backward reaches
        it."""
        return list(self._needed("evidence").engaged(ranks, resolved, counted))

    def watching(self, model: Any, here: Any) -> Any:
        """A context manager that holds each product against its definition while it runs, and gives a list of
        ``Product`` (toolkit/verification/record/trace.py) that grows; None: it has no such products. ``here()`` is
        the step and micro-batch that is looked at, or None."""
        return self._evidence("watching", model, here)

    def stage(self, ranks: Sequence[Any]) -> Any:
        """The stage `products` of `verify`, from what ``watching`` saw; None: it has no such products."""
        return self._evidence("stage", ranks)

    def kinds(self) -> Mapping[str, tuple[str, str]]:
        """By kind of its comparisons: what was compared, and what was observed (verification/compare/wording.py)."""
        kinds: Mapping[str, tuple[str, str]] = getattr(self._part("evidence"), "KINDS", {})
        shadow = self.shadow
        return kinds if shadow is None else {**kinds, shadow.noun: (f"{{name}} {shadow.noun}", shadow.title)}

    def diagnose(self, stage: Any, measure: Any) -> Any:
        """The likely cause of a difference in a ``stage``, a comparison of ``kinds``: a Diagnosis, or None."""
        return self._evidence("diagnose", stage, measure)

    def _evidence(self, function: str, *arguments: Any) -> Any:
        """What a function of the room's ``evidence`` says; None where there is none."""
        found = getattr(self._part("evidence"), function, None)
        return None if found is None else found(*arguments)

    # ------------------------------------------------------------------ of where what blocks keep is stored

    free: ClassVar[bool] = False
    """Whether a resumed run may have it otherwise, and an export leaves it out: it says how a run computes, not what is
    trained."""
    host_value: ClassVar[Any] = None
    """The value of its typed key, of the recipe's top level, with which ``store`` is host memory; None: it has no such
    value. `plan` counts what blocks keep there, but for what is on its way, and tries it where nothing else fits."""

    def store(self, settings: Any) -> Any:
        """Where what checkpointed blocks keep waits for their backward: a Store (toolkit/model/checkpointing.py); None:
        where it is."""
        return None

    # ------------------------------------------------------------------ of state beside the weights, through a run

    def keep(self, engine: Any, settings: Any) -> Any:
        """Begin to keep ``shadow`` of an engine's weights: ShadowWeights (toolkit/training/shadow.py)."""
        return self._needed("apply").keep(engine, settings)

    def state_bytes(self, settings: Any, elements: int) -> int:
        """Bytes that it keeps of so many trained elements: on the device, and in a checkpoint."""
        return 4 * elements if self.shadow else 0

    def fit_twin(self, values: dict[str, Any]) -> None:
        """Change its settings in a recipe's ``values``, in place, for a model of few blocks."""

    def shorten(self, values: dict[str, Any]) -> None:
        """Change its settings in a recipe's ``values``, in place, so that the few steps of `verify` exercise it."""

    def _needed(self, part: str) -> Any:
        module = self._part(part)
        if module is None:
            raise NotImplementedError(f"option {self.name}: {type(self).__module__} has no {part}")
        return module

    def _part(self, part: str) -> Any:
        """A module beside this room's ``spec``; None if there is none."""
        package, _, own = type(self).__module__.rpartition(".")
        name = f"{package}.{part}"
        return importlib.import_module(name) if own == "spec" and importlib.util.find_spec(name) else None


class Asked(NamedTuple):
    """An option that a recipe asks for, and how."""

    option: Option
    settings: Any


def all_options() -> dict[str, Option]:
    """Every option by name; those of installed packages too."""
    load_plugins()
    return dict(sorted(REGISTERED.items()))


def option_named(name: str) -> Option | None:
    """The option of that name; None if there is none."""
    load_plugins(installed=False)
    if name not in REGISTERED:
        load_plugins()
    return REGISTERED.get(name)


def asked_options(recipe: Any) -> list[Asked]:
    """What ``recipe`` asks for by its keys, by name."""
    return [one for one in active_options(recipe) if not one.option.by_model]


def active_options(recipe: Any) -> list[Asked]:
    """What is active in models of ``recipe``: what it asks for, and what is active ``by_model``; by name."""
    load_plugins(installed=False)
    mesh = recipe.strategy.mesh
    named = {option_named(name) for name in (*recipe.options, *(() if mesh is None else mesh.axes))}
    options = {*filter(None, named), *(option for option in REGISTERED.values() if option.typed_key)}
    found = (Asked(option, option.settings(recipe)) for option in sorted(options, key=lambda one: one.name))
    return [one for one in found if one.settings is not None]


def shadowing_options(recipe: Any) -> list[Asked]:
    """Those of ``recipe`` that keep weights beside those that train, by name."""
    return [asked for asked in asked_options(recipe) if asked.option.shadow is not None]


def shadows() -> dict[str, Shadow]:
    """Every option's ``shadow`` by the kind of its comparisons."""
    return {option.shadow.noun: option.shadow for option in all_options().values() if option.shadow is not None}


def state_bytes(recipe: Any, elements: int) -> int:
    """Bytes that the options of ``recipe`` keep of so many trained elements."""
    return sum(option.state_bytes(settings, elements) for option, settings in asked_options(recipe))


def host_options() -> list[Option]:
    """Those that can store in host memory what checkpointed blocks keep."""
    load_plugins(installed=False)
    return [option for option in REGISTERED.values() if option.host_value is not None]


def host_settings(recipe: Any) -> dict[str, Any]:
    """By key what ``recipe`` has of ``host_options``, on or off."""
    return {option.key: getattr(recipe, option.key) for option in host_options()}


def attentions() -> list[str]:
    """Values of ``ATTENTION`` that options bring."""
    load_plugins(installed=False)
    return sorted(option.on_value for option in REGISTERED.values() if option.typed_key == ATTENTION)


def attention_name(resolved: Any, *, traced: bool = False) -> str | None:
    """transformers' name of the attention that the recipe's model is built with; None where the recipe does not say.
    ``traced``: as an option's ``attention`` is asked."""
    found = (one.attention(settings, resolved, traced=traced) for one, settings in asked_options(resolved.recipe))
    return next((name for name in found if name is not None), resolved.recipe.model.attention)


def in_host(recipe: Any) -> bool:
    """Whether what checkpointed blocks keep is in host memory."""
    return any(getattr(recipe, option.key) == option.host_value for option in host_options())


def whole_keys() -> list[str]:
    """Keys of the section `strategy` that options with ``whole_blocks`` have."""
    load_plugins(installed=False)
    return [option.typed_key.removeprefix("strategy.") for option in REGISTERED.values() if option.whole_blocks]


def asked_whole(recipe: Any) -> Asked | None:
    """The option with ``whole_blocks`` that ``recipe`` asks for; None if there is none."""
    return next((one for one in asked_options(recipe) if one.option.whole_blocks), None)


def check_whole(resolved: Any, blocks: int) -> None:
    """Raise InputError where more blocks are to be whole than the model's ``blocks``."""
    if (asked := asked_whole(resolved.recipe)) is not None and asked.settings > blocks:
        where = f"{resolved.source}: {asked.option.key}"
        raise InputError(f"{where}: {asked.settings}, but the model has {blocks} blocks; set at most that")


def store_of(recipe: Any) -> Any:
    """The ``store`` that an option of ``recipe`` has; None if none has one."""
    stores = (option.store(settings) for option, settings in asked_options(recipe))
    return next((store for store in stores if store is not None), None)


def prepare_options(model: Any, resolved: Any, *, before_adapters: bool, traced: bool = False) -> dict[str, Any]:
    """Have the options of a recipe change ``model``, those whose place it is; by name what ``evidence`` is given.
    ``traced``: the model of a plan."""
    options = asked_options if traced else active_options
    return {
        option.name: option.prepare(model, settings, resolved)
        for option, settings in options(resolved.recipe)
        if option.before_adapters is before_adapters and not (traced and option.unmeasured)
    }


def in_room(name: str, off: Any = None, on: Any = None) -> AfterValidator:
    """For the schema's key of an option: refuses it where the option's folder is not there; for pydantic. ``off``,
    ``on``: the option's ``off_value`` and ``on_value``."""

    def check(value: Any) -> Any:
        if (value != off if on is None else value == on) and option_named(name) is None:
            raise ValueError(f"this installation has no toolkit/options/{name}; remove the key")
        return value

    return AfterValidator(check)


def known_options(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Validate the section ``options`` by the keys that each option has; for pydantic."""
    for name, own in values.items():
        option = option_named(name)
        if option is None or option.typed_key:
            raise _unknown(name, own, option)
        try:
            option.keys.model_validate(own)
        except ValidationError as error:
            raise _below(name, error) from None
    return values


def _unknown(name: str, own: Any, option: Option | None) -> ValidationError:
    if option is not None:
        message = f"is {option.typed_key} of the recipe; write it there"
    else:
        others = ", ".join(one.name for one in all_options().values() if not one.typed_key) or "none"
        message = f"no module that is loaded defines this option (known: {others}); TOOLKIT_PLUGINS names such modules"
    problem = PydanticCustomError("value_error", "{error}", {"error": message})
    return ValidationError.from_exception_data("options", [InitErrorDetails(type=problem, loc=(name,), input=own)])


def _below(name: str, error: ValidationError) -> ValidationError:
    """``error`` of the keys of one option, as one of the section."""
    inner = [
        InitErrorDetails(type=one["type"], loc=(name, *one["loc"]), input=one["input"], ctx=one.get("ctx", {}))
        for one in error.errors()
    ]
    return ValidationError.from_exception_data("options", inner)
