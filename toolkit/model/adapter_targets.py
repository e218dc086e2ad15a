"""What the names in a recipe's ``adapter`` section stand for in a model: every name has to match something, and what
PEFT makes of a name (the experts' one tensor in place of a projection) is said."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.schema import Adapter

if TYPE_CHECKING:
    from peft import PeftConfig

ALL_LINEAR = "all-linear"


def names_something(adapter: Adapter) -> bool:
    """Whether the recipe names layers or weights of the model."""
    named = adapter.target_modules not in (None, ALL_LINEAR) or adapter.modules_to_save
    return bool(named or any(adapter.options.get(key) for key in ("target_parameters", *_PATTERNS, "exclude_modules")))


def check_targets(model: nn.Module, adapter: Adapter, config: PeftConfig | None, source: str) -> None:
    """Raise InputError with every name of the recipe that matches nothing in ``model``, which has no adapter yet: PEFT
    leaves such a name out without a word where another one matches. ``config``: PEFT's of the recipe; None for an
    adapter that is read from a folder."""
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    problems = []
    for wanted in adapter.modules_to_save:
        if not _among(wanted, modules):
            problems.append(
                f"{source}: adapter.modules_to_save: no module is named {wanted!r}" + _candidates(model, wanted)
            )
        elif METHODS[adapter.method].peft_type != "LORA" and _is_tied(model, wanted):
            problems.append(
                f"{source}: adapter.modules_to_save: {wanted} shares its weight with another module, and under "
                f"{adapter.method} PEFT would train a copy of one of them; remove it, or use adapter.method: lora"
            )
    problems += _unmatched(model, adapter.target_modules, config, f"{source}: adapter.target_modules")
    problems += _not_linear(model, adapter.target_modules, f"{source}: adapter.target_modules")
    for wanted in adapter.options.get("target_parameters") or []:
        if not _among(wanted, parameters):
            problems.append(
                f"{source}: adapter.options.target_parameters: {wanted!r} matches no parameter" + _fused(model)
            )
    problems += _patterns(adapter, [*modules, *parameters], source)
    excluded = adapter.options.get("exclude_modules")
    for wanted in [excluded] if isinstance(excluded, str) else excluded or []:
        if not _among(wanted, modules) and not (excluded is wanted and _matches(wanted, modules)):
            problems.append(
                f"{source}: adapter.options.exclude_modules: {wanted!r} matches no module" + _candidates(model, wanted)
            )
    if problems:
        raise InputError(*problems)


def _unmatched(model: nn.Module, targets: Any, config: PeftConfig | None, key: str) -> list[str]:
    """What is wrong with ``target_modules``: names of a list, or a pattern, that match nothing."""
    if targets in (None, ALL_LINEAR):
        return []
    modules = [name for name, _ in model.named_modules() if name]
    in_force: Any = None if config is None else _in_force(config, model, key)
    if isinstance(targets, list):
        rewritten = set() if in_force is None else set(targets) - set(in_force.target_modules)
        missing = [name for name in targets if name not in rewritten and not _among(name, modules)]
        if not missing:
            return []
        verb = "match" if len(missing) > 1 else "matches"
        return [f"{key}: {', '.join(map(repr, missing))} {verb} no module" + _candidates(model, *missing)]
    if in_force is None or in_force.target_modules == targets:
        matching = _matches(_compiled(targets, key).pattern, modules)
    else:
        matching = bool(in_force.target_parameters) or any(_among(name, modules) for name in in_force.target_modules)
    if matching:
        return []
    plain = f"; a list, [{targets}], matches the ends of names" if re.fullmatch(r"[\w.]+", targets) else ""
    return [f"{key}: {targets!r} is a pattern for whole names, and matches no module{plain}" + _candidates(model)]


def _not_linear(model: nn.Module, targets: Any, key: str) -> Iterator[str]:
    """Names of a list that stand for layers which no adapter can stand beside."""
    others = other_products(model) if isinstance(targets, list) else {}
    for wanted in targets if others else []:
        if kinds := sorted({kind for name, kind in others.items() if _among(wanted, [name])}):
            yield (
                f"{key}: {wanted!r} names layers of class {', '.join(kinds)}, which multiply otherwise than a linear "
                "layer, so that no adapter can stand beside them; leave it out, or set all-linear, which does"
            )


_PATTERNS = ("rank_pattern", "alpha_pattern")


def _patterns(adapter: Adapter, names: list[str], source: str) -> Iterator[str]:
    """Ranks and scales for names that no layer has, which PEFT warns of in a log."""
    for key in _PATTERNS:
        for pattern in adapter.options.get(key) or {}:
            found = _compiled(rf"(.*\.)?({pattern})", f"{source}: adapter.options.{key}")
            if not any(found.fullmatch(name) for name in names):
                yield f"{source}: adapter.options.{key}: {pattern!r} matches no module" + _near(
                    pattern, {name.rpartition(".")[2] for name in names}
                )


def experts_notes(adapted: Any, adapter: Adapter) -> list[str]:
    """What became of weights that are one tensor for all experts, where the recipe does not say it in so many words:
    what PEFT adapts in place of layers that were named, and what stays frozen under all-linear."""
    wrapped = {(id(m.get_base_layer()), m.parameter_name) for m in adapted.modules() if _wraps_parameter(m)}
    frozen = {name: p for name, p in adapted.named_parameters() if not p.requires_grad}
    covered = {name for name in frozen if _owner(adapted, name) in wrapped}
    asked = [".".join(name.split(".")[-2:]) for name in adapter.options.get("target_parameters") or []]
    added = sorted({end for end in map(_end, covered) if not any(_among(one, [end]) for one in asked)})
    targets = adapter.target_modules
    notes = []
    names = sorted(set(targets) - set(adapted.active_peft_config.target_modules)) if isinstance(targets, list) else None
    every = names is not None or targets == ALL_LINEAR
    left = sorted(_end(name) for name in _linear_without(adapted, names)) if added and every else []
    frozen_too = f"; linear layers stay frozen ({', '.join(dict.fromkeys(left))})" if left else ""
    if added and names is not None:
        notes.append(
            f"adapter.target_modules: {', '.join(names)}: the experts of a layer are one tensor in this model, and "
            f"PEFT adapts {', '.join(added)}{frozen_too}"
        )
    elif added:
        notes.append(
            f"adapter.target_modules: {targets}: PEFT adapts {', '.join(added)} too, which are no linear layers in "
            f"this model{frozen_too}"
        )
    experts = {name: p for name, p in _stacked(adapted) if name in frozen and name not in covered}
    if experts and targets == ALL_LINEAR:
        share = sum(p.numel() for p in experts.values()) / sum(p.numel() for p in adapted.parameters())
        ends = ", ".join(sorted(set(map(_end, experts))))
        notes.append(
            f"adapter.target_modules: all-linear adapts linear layers, and the experts ({ends}: {share:.0%} of the "
            f"parameters) are none: they stay frozen. adapter.options: {{target_parameters: [{ends}]}} adapts them"
        )
    return notes


def _linear_without(adapted: Any, names: Sequence[str] | None) -> Iterator[str]:
    """The linear layers without an adapter, but the head and what the recipe excludes: of ``names``, or all of them."""
    excluded = adapted.active_peft_config.exclude_modules or []
    head = adapted.get_base_model().get_output_embeddings()
    for name, module in adapted.named_modules():
        own = name.removeprefix("base_model.model.")
        if not is_linear(module) or module is head or "lora_" in own or own.endswith("base_layer"):
            continue
        left_out = _matches(excluded, [own]) if isinstance(excluded, str) else _among_any(excluded, own)
        if not left_out and (names is None or _among_any(names, own)):
            yield own


def _wraps_parameter(module: nn.Module) -> bool:
    return type(module).__name__ == "ParamWrapper"


def _owner(adapted: Any, name: str) -> tuple[int, str]:
    owner, _, attribute = name.rpartition(".")
    return id(adapted.get_submodule(owner)), attribute


def _end(name: str) -> str:
    """The last two parts of a weight's name, without what PEFT puts around its module."""
    return ".".join([part for part in name.split(".") if part != "base_layer"][-2:])


def _among_any(wanted: Iterable[str], name: str) -> bool:
    return any(_among(one, [name]) for one in wanted)


def _stacked(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Floating parameters of three dimensions by name, those of convolutions left out: the experts of a layer in one
    tensor."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d)
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and parameter.is_floating_point() and not isinstance(module, convolutions):
                yield f"{name}.{own}", parameter


def _in_force(config: PeftConfig, model: nn.Module, key: str) -> Any:
    """``config`` as PEFT rewrites it for a model of which transformers keeps several layers in one tensor (peft
    0.21.2): names of projections become ``target_parameters``. Raises InputError where it cannot."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # another version, which may do it elsewhere, or not
        return config
    changed = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(changed, model, None)
    except ValueError as error:  # one of two projections that are one tensor
        raise InputError(f"{key}: {error}") from None
    return changed


def _compiled(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"{key}: {pattern!r} is no regular expression: {error}") from None


def _among(wanted: str, names: Iterable[str]) -> bool:
    return any(name == wanted or name.endswith(f".{wanted}") for name in names)


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for name in names)


def _is_tied(model: nn.Module, wanted: str) -> bool:
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return any(
        owners[id(parameter)] > 1
        for name, module in model.named_modules()
        if name == wanted or name.endswith(f".{wanted}")
        for parameter in module.parameters()
    )


def _candidates(model: nn.Module, *wanted: str) -> str:
    ends = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if is_linear(module)}
    experts = sorted({_end(name) for name, _ in _stacked(model)})
    near = "".join(_near(name, ends) for name in wanted if not _among(name, experts))
    stacked = f"; its experts are one tensor: adapter.options.target_parameters: [{', '.join(experts)}]"
    return f"{near}; linear layers of this model: {', '.join(sorted(ends))}" + stacked * bool(experts)


_ALIKE = 0.8
"""difflib's ratio: q_prj and q_proj have 0.91, up_proj and v_proj, which are other layers, 0.77."""


def _near(wanted: str, names: set[str]) -> str:
    close = difflib.get_close_matches(wanted.rpartition(".")[2], sorted(names), n=1, cutoff=_ALIKE)
    return f"; did you mean {close[0]}?" if close else ""


def _fused(model: nn.Module) -> str:
    """The weights of experts that are one tensor, by the last parts of their names."""
    ends = {_end(name) for name, _ in _stacked(model)}
    return f"; weights of three dimensions in this model: {', '.join(sorted(ends)) or 'none'}"


def is_linear(module: nn.Module) -> bool:
    """Whether PEFT takes a module for a linear layer: torch's, or GPT-2's."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def other_products(model: nn.Module) -> dict[str, str]:
    """The layers by name, with their class, that PEFT takes for linear ones and that do not make (..., out_features) of
    (..., in_features): routers that return scores and choices (Llama 4, Phi-MoE), products by groups (DeepSeek V4). An
    adapter beside one ends its first forward with an error."""
    others = {}
    multiplies: dict[type, bool] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, nn.Linear) and kind.__module__.startswith(_OF_MODELS) and "forward" in vars(kind):
            if kind not in multiplies:
                multiplies[kind] = _multiplies(module)
            if not multiplies[kind]:
                others[name] = kind.__name__
    return others


_OF_MODELS = ("transformers.models.", "transformers_modules.")


def _multiplies(layer: nn.Linear) -> bool:
    """Whether a layer's own forward is a linear layer's, tried without values."""
    without = {name: torch.empty_like(p, device="meta") for name, p in layer.named_parameters()}
    given = torch.empty(1, 2, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        product = torch.func.functional_call(layer, without, (given,))
    except Exception:  # whatever a model's own code raises at such an input
        return False
    return isinstance(product, torch.Tensor) and product.shape == (1, 2, layer.out_features)
