"""Weights that no output of a model depends on: they would get no gradient.

Models of images have them: a mask token of another task, the layers of a vision tower behind the one whose output is
taken (LLaVA takes the last but one), a pooling head. So have encoder-decoders whose embeddings are not tied: BART keeps
the table that both sides would have shared. So has an adapter on a layer whose weight the model reads past the layer.
DDP would end the run, ZeRO would let them decay.

Other weights get a gradient from some rows alone: DeepSeek V4's compressors from long ones, an expert from those that
are routed to it. Ranks that sum the gradients of what they reached, each its own, exchange unequal lengths.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from toolkit.errors import InputError, first_line
from toolkit.model.empty import Values, empty_weights, shapes_alone
from toolkit.recipe.limits import limits_of
from toolkit.recipe.resolve import PRECISIONS, Resolved
from toolkit.tasks import task_of
from toolkit.tasks.base import Task
from toolkit.upstream.transformers import attention_of

_SHORT, _LONGER, _LONG = 3, 160, 1024
"""Tokens of a sample."""


OWN_FUNCTIONS = {"_Exchange", "_Moved", "_OfNothing", "_Entering", "_Leaving", "_Product"}
"""The toolkit's own functions in Python, which take every weight that they use as an input; options add theirs."""


_DECIDES_BY_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")
"""Names of what torch raises in a forward without values where the model's code asks for one: experts that take the
tokens routed to them, one expert after another."""


class Hidden(Exception):
    """A graph does not say what it depends on."""


class Reach(NamedTuple):
    """What gradients a forward gives."""

    never: list[str]
    """Names of trainable weights that no output depends on."""
    by_row: tuple[str, ...] = ()
    """Names of some that one sample reaches and another does not."""
    by_values: tuple[str, ...] = ()
    """Names of modules that run as often as values say (what LongCat's experts call, the norm of blocks of keys in
    Qwen4's indexer)."""
    unsure: bool = False
    """Whether there may be more of both: the model's code decides by values which weights it uses, or does not run
    without them."""


def unreached(model: nn.Module, resolved: Resolved) -> list[str]:
    """Names of trainable weights that no output depends on: ``never`` of ``reach``."""
    return reach(model, resolved).never


def reach(model: nn.Module, resolved: Resolved, *, sampled: bool = False) -> Reach:
    """Which trainable weights the output for one random sample depends on.

    A forward without values, on a copy of the model, and no backward: what the output depends on is read off its graph.
    Where a model's code asks for values of activations, it runs with the weights on the CPU if ``_often_unreached``;
    of other models every weight is taken to be reached. ``sampled``: of these, two samples are run so, and what one of
    them alone reaches is ``by_row``. Raises InputError if the model's own forward does not accept such a sample.
    """
    like = _likeness(model, resolved)
    if like in _KNOWN:
        return _KNOWN[like]._replace(never=[*_KNOWN[like].never])
    try:
        found = _by_graph(model, resolved)
        _KNOWN[like] = found
        if len(_KNOWN) > _MOST:
            del _KNOWN[next(iter(_KNOWN))]
        return found
    except Exception as error:  # whatever a model's own code, or an operator without values, raises
        never = _with_values(model, resolved) if _often_unreached(model, resolved) else []
        if task_of(resolved.recipe.model.task).media is not None:
            return Reach(never)
        by_values = type(error).__name__ in _DECIDES_BY_VALUES
        found = Reach(
            never,
            by_values=_weights_beside_calls(model) if by_values else (),
            unsure=not isinstance(error, Hidden),
        )
    if not (sampled and found.unsure):
        return found
    ran: list[Counter[str]] = [Counter(), Counter(), Counter()]
    try:
        samples = [set(_with_values(model, resolved, first, ran=ran[at])) for at, first in enumerate((5, 40))]
        _with_values(model, resolved, length=_longer(resolved), ran=ran[2])
    except InputError:  # kernels of its own may run on another device alone
        return found
    # Experts that run one by one here alone call activations; what holds weights runs as in training.
    holding = {name for name, module in model.named_modules() if any(True for _ in module.parameters())}
    often = [name for name in ran[2] if name in holding and len({times[name] for times in ran}) > 1]
    by_row = tuple(sorted(samples[0] ^ samples[1]))
    return found._replace(by_row=by_row, by_values=tuple(dict.fromkeys([*found.by_values, *often])))


_MOST = 16
_KNOWN: dict[str, Reach] = {}
"""What graphs said, by the likeness of their models: a process builds the same model for every pass of a verdict."""


def _likeness(model: nn.Module, resolved: Resolved) -> str:
    """The same for two models whose forwards reach the same weights: with the same config, modules and parameters, by
    name, class, shape and whether they train, of one task."""
    config: Any = model.config
    parts: list[Any] = [_SHORT, _LONGER, _LONG, resolved.recipe.model.task, resolved.recipe.adapter is not None]
    parts += [sorted(config.to_dict().items(), key=repr), attention_of(config)]
    parts += [(name, str(type(one)), id(type(one)), "forward" in vars(one)) for name, one in model.named_modules()]
    first: dict[int, str] = {}  # by what it is, the first name of a parameter that several modules share
    for name, p in model.named_parameters(remove_duplicate=False):
        parts.append((name, first.setdefault(id(p), name), tuple(p.shape), p.requires_grad))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _weights_beside_calls(model: nn.Module) -> tuple[str, ...]:
    """Names of modules without weights that one with weights of its own calls. In a model that decides by values these
    are activations of experts that run one after another, called for each with tokens: how often differs from rank to
    rank. Other such models (JetMoE, BLT) call every module once."""
    return tuple(
        f"{name}.{child}"
        for name, module in model.named_modules()
        for child, _ in module.named_children()
        if any(True for _ in module.parameters(recurse=False))
        and any(True for _ in module.children())
        and not any(True for child in module.children() for _ in child.parameters())
    )


def _by_graph(model: nn.Module, resolved: Resolved) -> Reach:
    """Of an adapted model of text as it trains, where that needs no values: Gemma 3n then reads a weight past its
    layer, which it calls in evaluation."""
    if resolved.recipe.adapter is not None and task_of(resolved.recipe.model.task).media is None:
        with contextlib.suppress(Exception):  # layers that are left out at random; Reformer's lengths
            return _of_mode(model, resolved, training=True)
    return _of_mode(model, resolved, training=False)


def _of_mode(model: nn.Module, resolved: Resolved, training: bool) -> Reach:
    ran: Counter[str] = Counter()
    names = _without_values(model, resolved, _SHORT, training, ran)
    # Some weights have nothing to do in a short row: DeepSeek V4's compressors.
    never = _of_longer(model, _LONG, lambda n: _without_values(model, resolved, n, training)) if names else []
    by_row = tuple(name for name in names if name not in never)
    try:
        return Reach(never, by_row, _run_by_length(model, resolved, training, ran))
    except Exception:  # whatever a model's own code raises at a longer row: what it runs there is not known
        return Reach(never, by_row, unsure=True)


def _of_longer(model: nn.Module, length: int, forward: Callable[[int], list[str]]) -> list[str]:
    """``forward`` of a row of ``length`` tokens; where a table of positions is shorter, of half of it, of which some
    models set a few aside."""
    config: Any = model.config
    try:
        return forward(length)
    except Exception:  # whatever a model's own code raises at a row that is too long for it
        return forward(config.get_text_config().max_position_embeddings // 2)


def _longer(resolved: Resolved) -> int:
    """Tokens of a row that is longer than a few, and not longer than the model's positions."""
    most = limits_of(resolved.recipe, resolved.facts).rows
    return _LONGER if most is None else min(_LONGER, most.tokens)


def _run_by_length(model: nn.Module, resolved: Resolved, training: bool, ran: Counter[str]) -> tuple[str, ...]:
    """Names of modules that run another number of times in a longer row than in one where they ``ran`` so often (LED's
    embedding, once more where rows are not as long as its window's multiple). It is not looked for where every module
    with weights ran once."""
    if all(ran[name] == 1 for name, module in model.named_modules() if any(True for _ in module.parameters(False))):
        return ()
    longer: Counter[str] = Counter()
    _without_values(model, resolved, _longer(resolved), training, longer)
    return tuple(name for name, times in longer.items() if times != ran[name] and max(times, ran[name]) > 1)


def _without_values(
    model: nn.Module, resolved: Resolved, length: int, training: bool = False, ran: Counter[str] | None = None
) -> list[str]:
    task = task_of(resolved.recipe.model.task)
    # A forward may leave tensors behind, which would have no values: it runs on other modules around the same weights.
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin: Any = copy.deepcopy(model, held).train(training)
    # One dtype, the only one that grouped products without values take: what depends on what is the same in each.
    with shapes_alone(), empty_weights(twin, PRECISIONS["bf16-pure"], autocast=False):
        with torch.enable_grad(), Values(), _counted(twin, ran):
            inputs = _sample(model, task, twin.config, length)
            media = {name: t.to(torch.bfloat16) for name, t in inputs.items() if t.is_floating_point()}
            output = twin(**inputs | media)
        asked = {name: p for name, p in twin.named_parameters() if p.requires_grad}
        reached = leaves_of(output.logits, whole=True)
    missed = [name for name, p in asked.items() if id(p) not in reached]
    if len(missed) == len(asked):  # a function of somebody else's below which nothing asks for a gradient
        raise Hidden(type(output).__name__)
    return missed


def _often_unreached(model: nn.Module, resolved: Resolved) -> bool:
    """Whether a model is of a kind that has such weights: one that sees, an encoder-decoder with untied embeddings."""
    config: Any = model.config
    untied = config.is_encoder_decoder and not getattr(config, "tie_word_embeddings", True)
    return untied or task_of(resolved.recipe.model.task).media is not None


def _with_values(
    model: nn.Module, resolved: Resolved, first: int = 5, length: int = _SHORT, ran: Counter[str] | None = None
) -> list[str]:
    """``first``: the first token of the sample. ``ran``: is told how often each module runs."""
    task, config = task_of(resolved.recipe.model.task), cast(Any, model.config)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in _sample(model, task, config, length).items()}
    if task.media is None:
        inputs["input_ids"][0, 0] = first
    model.eval()
    # An adapter is float32 over a base in 16 bits, and no strategy has cast either yet.
    asked = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Of a model that is loaded by part there are no values: which weights an output depends on needs none of its own.
    draw = torch.Generator().manual_seed(0)
    without = {name: _windows(p, draw) for name, p in model.named_parameters() if p.is_meta}
    leaves = asked | {name: without[name].requires_grad_() for name in asked.keys() & without.keys()}
    whole: Any = model
    base = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    experts = _experts_one_by_one(base) if without else contextlib.nullcontext()
    mixed = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    with torch.enable_grad(), mixed, experts, _counted(model, ran):
        try:
            output = torch.func.functional_call(model, without, (), inputs)
        except Exception as error:  # whatever a model's own code raises
            kind = type(base).__name__
            message = f"{resolved.source}: model: the forward of {kind} fails on one small sample: {first_line(error)}"
            raise InputError(f"{message}; check the sizes in its config") from error
    model.train()
    reached = leaves_of(output.logits)
    return [name for name in asked if id(leaves[name]) not in reached]


def _windows(like: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Random values of a tensor's shape and dtype in the memory of a row and a column: each row is the one before,
    moved by one. Tokens differ, and go to different experts."""
    if not like.is_floating_point() or not like.numel():
        return torch.zeros((), dtype=like.dtype).expand(like.shape)
    size = 1 + sum(length - 1 for length in like.shape)
    drawn = torch.randn(size, generator=draw).mul_(0.02).to(like.dtype)
    return drawn.as_strided(like.shape, (1,) * like.ndim)


@contextlib.contextmanager
def _counted(model: nn.Module, ran: Counter[str] | None) -> Iterator[None]:
    if ran is None:
        yield
        return
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: ran.update([name]))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _experts_one_by_one(model: Any) -> Iterator[None]:
    """The grouped product of transformers' experts refuses weights whose elements share memory (torch 2.13.0:
    «Invalid strides/sizes»), as stand-ins' do."""
    before = model.get_experts_implementation()
    if not isinstance(before.get(""), str):
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def freeze(model: nn.Module, names: list[str]) -> None:
    """Do not train these; they keep the dtype of what trains, since the model still computes with them."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def _sample(model: nn.Module, task: Task, config: Any, length: int) -> dict[str, torch.Tensor]:
    if task.media is None:
        end = getattr(config, "eos_token_id", None)  # classifiers of encoder-decoders read the state at the last one
        end = end[0] if isinstance(end, list) else end
        special = {value for key, value in config.to_dict().items() if "token" in key and isinstance(value, int)}
        rows = min(70, getattr(config.get_text_config(), "vocab_size", 70))
        ids = [one for one in range(6, rows) if one not in special] or [6]  # experts take different ones
        body = [ids[at % len(ids)] for at in range(length - 2)]
        sample = torch.tensor([[5, *body, 7 if end is None else end]])
        return {"input_ids": sample, "attention_mask": torch.ones_like(sample)} | _decoder(config)
    values = config.to_dict()
    found = {name: torch.from_numpy(one) for name, one in task.media.draw(values, random.Random(0)).items()}
    if task.media.in_text is not None:
        from toolkit.data.media import kinds_of_config, token_kinds

        framed = task.media.in_text(values, 1)
        image, ids = max(set(framed), key=framed.count), [5, *framed, 6, 7]
        found |= {
            name: torch.from_numpy(one)
            for name, one in token_kinds(kinds_of_config(task, config), [image], ids).items()
        }
        found |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    else:
        found |= _decoder(config)
    return found


def _decoder(config: Any) -> dict[str, torch.Tensor]:
    """What the decoder reads, where there is one beside an encoder."""
    start = getattr(config, "decoder_start_token_id", None)
    ids = [[4 if start is None else start, 5, 6]]
    return {"decoder_input_ids": torch.tensor(ids)} if config.is_encoder_decoder else {}


def leaves_of(output: torch.Tensor, whole: bool = False) -> set[int]:
    """Ids of the tensors that gradients of ``output`` would be accumulated in. ``whole``: raise Hidden at a function in
    Python of somebody else's, whose backward may reach weights that are no input of it (Reformer's reversible
    layers)."""
    seen: set[Any] = set()
    found: set[int] = set()
    left = [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        if whole and isinstance(node, BackwardCFunction) and name.removesuffix("Backward") not in OWN_FUNCTIONS:
            raise Hidden(name)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        left += [following for following, _ in node.next_functions]
    return found
