"""Names for the moments of an optimizer whose parameters are numbered.

An optimizer numbers its parameters group by group, each group in the order in which it was given its parameters. The
order is that of the model, and the groups are those of a known rule; names are accepted only if the number of
parameters and every shape fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.verification.checkpoints.contents import MOMENTS, Checkpoint, Numbered
from toolkit.verification.checkpoints.names import canonical

Shape = tuple[int, ...]
Rule = tuple[str, Callable[[str, Shape], bool]]
"""How groups are divided, in words, and whether a parameter is in the first group."""

_ONE: Rule = ("one group", lambda name, shape: True)
_MATRICES: Rule = ("matrices, then the rest", lambda name, shape: len(shape) > 1)
_NORMS: Rule = ("norms and biases last", lambda name, shape: "norm" not in name and "bias" not in name)
_RULES = [_ONE, _MATRICES, _NORMS]
_ADAPTER = ("lora_", "ia3_", "vera_", "oft_", "boft_", "hada_")


def name_moments(checkpoint: Checkpoint, other: Checkpoint) -> None:
    """Name the numbered moments of ``checkpoint``, or add a note why they cannot be named.

    Sources of the order, the first that fits: names that the optimizer recorded, the model's config.json, the file's
    own order of tensors, the order of the ``other`` checkpoint.
    """
    numbered = checkpoint.numbered
    if numbered is None or checkpoint.has_moments:
        return
    for source, order, rules in _orders(checkpoint, other):
        for rule in rules:
            names = _fits(numbered, order, rule)
            if names is not None:
                _take(checkpoint, numbered, names)
                checkpoint.notes.append(f"{checkpoint.path}: moments are named by the order of {source} ({rule[0]})")
                return
    count = sum(map(len, numbered.groups))
    checkpoint.notes.append(
        f"{checkpoint.path}: moments could not be named: {count} numbered parameters, and no known order fits "
        "their shapes; save beside them the model's config.json, or the optimizer with named_parameters()"
    )


def _orders(checkpoint: Checkpoint, other: Checkpoint) -> Iterator[tuple[str, list[tuple[str, Shape]], list[Rule]]]:
    numbered = checkpoint.numbered
    assert numbered is not None
    shapes = {name: one.shape for name, one in checkpoint.weights.items()}
    theirs = {name: one.shape for name, one in other.weights.items()}
    if numbered.names:
        found, _ = canonical(numbered.names.values())
        inside = [name for group in numbered.groups for name in (found[numbered.names[n]] for n in group)]
        if all(name in shapes for name in inside):
            yield "the optimizer's own names", [(name, shapes[name]) for name in inside], [_ONE]
    for config in filter(None, (checkpoint.config, other.config)):
        built = _built(config)
        if built is not None:
            order, decayed = built
            rule: Rule = ("the Trainer's decay groups", partial(_decays, decayed))
            where = f"{config.name}'s model"
            yield where, [(name, shapes.get(name, shape)) for name, shape in order], [rule, _ONE, _MATRICES]
            yield where, _adapters([name for name, _ in order], shapes), _RULES
    for where, names in (("its own tensors", checkpoint.order), (f"the tensors in {other.path}", other.order)):
        known = [(name, shapes.get(name) or theirs[name]) for name in names if name in shapes or name in theirs]
        yield where, known, _RULES
        yield where, [one for one in known if one[0] in other.moments["exp_avg"]], _RULES
        yield where, [one for one in known if _is_adapter(one[0])] or _adapters(names, shapes), _RULES


def _is_adapter(name: str) -> bool:
    return any(mark in name for mark in _ADAPTER)


def _adapters(bases: Sequence[str], shapes: dict[str, Shape]) -> list[tuple[str, Shape]]:
    """Adapter tensors in the order of the base's weights that they are added to; none if a base is not known."""
    place = {base.removesuffix(".weight"): at for at, base in enumerate(bases)}
    found = []
    for name, shape in shapes.items():
        if _is_adapter(name):
            layer = re.split("|".join(rf"\.{mark}" for mark in _ADAPTER), name)[0]
            if layer not in place:
                return []
            found.append((place[layer], name, shape))
    return [(name, shape) for _, name, shape in sorted(found)]


def _decays(decayed: frozenset[str], name: str, shape: Shape) -> bool:
    return name in decayed


def _fits(numbered: Numbered, order: Sequence[tuple[str, Shape]], rule: Rule) -> dict[int, str] | None:
    """Names by number, if the parameters that ``rule`` divides fill the groups and have the moments' shapes."""
    numbers = [number for group in numbered.groups for number in group]
    if len(order) != len(numbers):
        return None
    first = [one for one in order if rule[1](*one)]
    rest = [one for one in order if not rule[1](*one)]
    groups = [group for group in numbered.groups if group]
    sizes = [len(part) for part in (first, rest) if part]
    if rule is not _ONE and [len(group) for group in groups] != sizes:
        return None
    names = {}
    for number, (name, shape) in zip(numbers, [*first, *rest], strict=True):
        if any(moment.shape != shape for moment in numbered.states.get(number, {}).values()):
            return None
        names[number] = name
    return names


def _take(checkpoint: Checkpoint, numbered: Numbered, names: dict[int, str]) -> None:
    for number, state in numbered.states.items():
        for moment in MOMENTS:
            if moment in state and number in names:
                checkpoint.moments[moment][names[number]] = state[moment]
    for group, decay in zip(numbered.groups, numbered.decay, strict=False):
        if decay is not None:
            checkpoint.decay |= {names[number]: decay for number in group}


def _built(config: Path) -> tuple[list[tuple[str, Shape]], frozenset[str]] | None:
    """Parameters of the model of a config.json, in its order and without memory, and those that the Trainer decays."""
    import torch
    import transformers
    from transformers import AutoConfig, Trainer

    try:
        described: Any = AutoConfig.from_pretrained(config.parent, trust_remote_code=False)
        kind = getattr(transformers, (described.architectures or [""])[0])
        with torch.device("meta"):
            model = kind(described)
        model.tie_weights()
        decayed = frozenset(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type,unused-ignore]
    except Exception:  # another version's model, code of its own, a damaged config: other sources are left
        return None
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()], decayed
