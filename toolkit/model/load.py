"""Loads any Hugging Face model from a folder, the hub or a config, in the dtypes of the recipe."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.errors import InputError, first_line
from toolkit.model.by_part import recorded
from toolkit.model.drawing import drawn
from toolkit.model.new_tokens import add_rows
from toolkit.model.packed_layers import packed_weights
from toolkit.model.padding import pools_by_padding
from toolkit.model.sources import NotByPart
from toolkit.recipe.hub import hub_problem, use_cache_if_offline
from toolkit.recipe.preflight import LAYERDROPS
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import attention_name
from toolkit.tasks import task_of
from toolkit.upstream.transformers import loaded_in_float32

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_base(
    resolved: Resolved, pad_token_id: int | None = None, *, empty: bool = False, by_part: bool = False
) -> nn.Module:
    """The model before adapters, on the CPU, identical in every process: random weights come from ``run.seed``.

    Weights are float32, or the frozen dtype if only an adapter is trained. ``empty``: without memory for them (on the
    meta device). ``by_part``: the same, but they know their source (``sources.py``), and buffers have their values.
    Raises InputError if the model cannot be loaded, NotByPart if it cannot ``by_part``.
    """
    import transformers

    spec = resolved.recipe.model
    dtype = load_dtype(resolved)
    auto = getattr(transformers, task_of(spec.task).auto_class)
    config = build_config(resolved)
    options: dict[str, Any] = {
        "attn_implementation": attention_name(resolved),
        "trust_remote_code": spec.trust_remote_code,
    }
    try:
        if spec.path is not None:
            if empty:
                options["device_map"] = {"": "meta"}
            elif resolved.stored is not None:
                options["device_map"] = {"": "cpu"}  # transformers takes a GPU of its own choice for packed weights
            with recorded() if by_part else contextlib.nullcontext() as found:
                model = auto.from_pretrained(spec.path, config=config, dtype=dtype, revision=spec.revision, **options)
            if found is not None:
                found.attach(model)
        else:
            # Drawn in float32 and cast after: the same numbers in every precision.
            torch.manual_seed(resolved.recipe.run.seed)
            without: Any = drawn(dtype) if by_part else torch.device("meta") if empty else contextlib.nullcontext()
            with without as made:
                model = auto.from_config(config, dtype=torch.float32, **options)
                if by_part:
                    made.append(model)
            _cast(model, dtype, lambda: auto.from_config(copy.deepcopy(config), dtype=dtype, **options))
        if resolved.base is not None and resolved.stored is not None and not empty:
            resolved.base.take(model, resolved, dtype)
    except InputError:
        raise
    except (OSError, ValueError, ImportError) as error:
        if spec.path is not None and (problem := hub_problem(spec.path, error)) is not None:
            raise InputError(f"{resolved.source}: model.path: {problem}") from None
        if (message := _attention_problem(error, resolved)) is not None:
            raise InputError(message) from None
        raise InputError(f"model: {spec.path or spec.config}: {first_line(error)}") from None
    except NotByPart:
        raise
    except Exception as error:  # a model's code checks its config in its own way, or not at all
        if spec.path is not None:
            if (problem := hub_problem(spec.path, error)) is not None:
                raise InputError(f"{resolved.source}: model.path: {problem}") from None
            raise
        what = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(
            f"{resolved.source}: model.config: {config.model_type} cannot be built from it: {what}"
        ) from None
    add_rows(model, resolved)
    if pad_token_id is not None:
        set_padding(model.config, pad_token_id, resolved)
    switch_off_cache(model)
    return model


def bare_model(resolved: Resolved) -> nn.Module | None:
    """The model's modules, made from its config alone, without memory for their weights; None where code of a model's
    own does not allow that."""
    import transformers
    from transformers.initialization import no_init_weights

    spec = resolved.recipe.model
    auto = getattr(transformers, task_of(spec.task).auto_class)
    config = build_config(resolved)
    try:
        with no_init_weights(), torch.device("meta"):
            model: Any = auto.from_config(config, trust_remote_code=spec.trust_remote_code)
            model.tie_weights()
    except Exception:  # whatever it is, the model itself is built next
        return None
    made: nn.Module = model
    return made


def _cast(model: nn.Module, dtype: torch.dtype, build: Callable[[], nn.Module]) -> None:
    """Cast floating parameters in place, and each floating buffer to the dtype that it has in the model that ``build``
    makes in ``dtype``: rotary frequencies stay float32, the decays of MiniMax's linear attention do not, as where a
    folder is loaded in ``dtype``. (``Module.to`` casts all of them, of complex tables the real part alone.)"""
    cast_parameters(model, dtype)
    if dtype != torch.float32:
        cast_buffers(model, _buffer_dtypes(build, dtype))


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters in place."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def cast_buffers(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast buffers to dtypes by name, in place."""
    for key, dtype in dtypes.items():
        name, _, attribute = key.rpartition(".")
        setattr(model.get_submodule(name), attribute, model.get_buffer(key).to(dtype))


def _buffer_dtypes(build: Callable[[], nn.Module], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """``loaded_buffers`` of a model that is built without memory if its code allows that. Draws no random numbers."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        try:
            with torch.device("meta"):
                built = build()
        except RuntimeError:  # code of its own that computes with values; an error of another kind comes again
            built = build()
    return loaded_buffers(built, dtype)


def loaded_buffers(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtypes by name that floating buffers of a transformers ``model``, which was built in ``dtype``, have where it is
    loaded in it: those that files have and the model's class lists stay float32."""
    from transformers.core_model_loading import build_glob_alternation

    buffers = {name: b.dtype for name, b in model.named_buffers(remove_duplicate=False) if b.is_floating_point()}
    if listed := loaded_in_float32(model, dtype):
        matches = build_glob_alternation(listed)[0].search
        buffers |= {name: torch.float32 for name in model.state_dict() if name in buffers and matches(name)}
    return buffers


_CANNOT_BE_USED = "it cannot be used due to the following error:"


def _attention_problem(error: Exception, resolved: Resolved) -> str | None:
    """Where transformers (5.23.0) says that a model has no such attention: the same in the recipe's words. Its own
    message is about an argument of ``from_pretrained`` and asks for an issue on GitHub."""
    if not any(part in str(error) for part in ("attn_implementation", "attention implementation", _CANNOT_BE_USED)):
        return None
    asked = resolved.recipe.model.attention
    _, cut, why = first_line(error).partition(_CANNOT_BE_USED)
    if cut:  # FlashAttention without its package, or without a GPU
        return f"{resolved.source}: model.attention: {asked} cannot be used: {why.strip().rstrip('.')}; or set sdpa"
    name = resolved.facts.model_type or "this model"
    near = "; set model.attention: eager" if asked != "eager" else f": {first_line(error)}"
    return f"{resolved.source}: model.attention: {name} has no {asked} in the installed transformers{near}"


def switch_off_cache(model: nn.Module) -> None:
    """No keys and values are kept for a next token: a recomputed block would add its own to them once more. A decoder
    behind an encoder (T5) has a copy of the config to itself."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def set_dtypes(model: nn.Module, trainable: str, frozen: str) -> None:
    """Cast every floating parameter in place: trained ones to ``trainable``, others to ``frozen``."""
    packed = packed_weights(model)
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in packed:
            dtype = getattr(torch, trainable if parameter.requires_grad else frozen)
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if type(module) is nn.LayerNorm and trainable != frozen and not _trains_whole(module):
            module.forward = MethodType(_norm_in_its_inputs_dtype, module)  # type: ignore[method-assign]


def _trains_whole(module: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _norm_in_its_inputs_dtype(self: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """A LayerNorm with frozen 16-bit weights of inputs in float32, which an embedding that trains gives under autocast.
    On a GPU autocast casts the weights; on a CPU torch 2.13.0 raises «mixed dtype (CPU): expect parameter to have
    scalar type of Float»."""
    weight: torch.Tensor | None = self.weight
    bias: torch.Tensor | None = self.bias
    dtypes = {one.dtype for one in (weight, bias) if one is not None}
    if x.dtype == torch.float32 or len(dtypes) > 1:  # one that trains and one that does not
        weight, bias = (None if one is None else one.float() for one in (weight, bias))
    return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Have ``model`` take floating inputs (pixels, audio features) in the dtype that its weights compute in: not every
    model casts them itself."""

    def cast(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {name: _as(value, dtype) for name, value in kwargs.items()}

    model.register_forward_pre_hook(cast, with_kwargs=True)


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def input_weight(model: nn.Module) -> torch.Tensor:
    """The input embedding; of a model of images or sound, its first projection or convolution."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        weight = None
    if weight is None:
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        weight = next(module.weight for module in model.modules() if isinstance(module, kinds))
    return weight


def load_dtype(resolved: Resolved) -> torch.dtype:
    """Of the model before adapters: the frozen dtype if only an adapter is trained."""
    precision = resolved.precision
    return getattr(torch, precision.frozen if resolved.recipe.adapter else precision.trainable)


def build_config(resolved: Resolved) -> PretrainedConfig:
    """The model's transformers config as it is built: of its folder or hub id, or the recipe's own. Raises InputError
    where it cannot be had."""
    from transformers import AutoConfig

    spec = resolved.recipe.model
    try:
        if spec.path is not None:
            use_cache_if_offline(spec.path)
            remote = spec.trust_remote_code
            config = AutoConfig.from_pretrained(spec.path, revision=spec.revision, trust_remote_code=remote)
        else:
            assert spec.config is not None
            config = AutoConfig.for_model(**spec.config)
    except Exception as error:  # each config class checks what it was given in its own way
        where = "path" if spec.path else "config"
        if spec.path is not None and (problem := hub_problem(spec.path, error)) is not None:
            raise InputError(f"{resolved.source}: model.path: {problem}") from None
        # transformers names all of its hundreds of architectures.
        why = first_line(error).partition(" Should contain one of")[0]
        raise InputError(f"{resolved.source}: model.{where}: {why}") from None
    if resolved.base is not None and resolved.stored is not None:
        resolved.base.configure(config, resolved)
    if spec.num_labels is not None:
        config.num_labels = spec.num_labels
    if task_of(spec.task).numbers:
        config.num_labels, config.problem_type = 1, "regression"
    if resolved.world_size > 1:
        keep_layers(config)
    return config


def keep_layers(config: PretrainedConfig) -> None:
    """Leave no layer out at random, in place (LayerDrop: M2M100, NLLB, SeamlessM4T): ranks would run different ones."""
    for one in (config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))):
        for key in LAYERDROPS:
            if getattr(one, key, None):
                setattr(one, key, 0.0)


def set_padding(config: PretrainedConfig, pad_token_id: int, resolved: Resolved) -> None:
    """Give the config the token that rows are padded with: a classifier pools at the last one before it. Another task's
    keeps its own, which the attention mask makes equal. Of a model that is built already: from a config that has a
    padding token transformers makes an embedding whose row of it gets no gradient, and its own token may be one that
    ends every turn."""
    whole = pools_by_padding(resolved.recipe)
    for one in (config, config.get_text_config()):
        if whole or getattr(one, "pad_token_id", None) is None:
            one.pad_token_id = pad_token_id


def is_local(path: str) -> bool:
    """Whether the name of a model or tokenizer is a local folder."""
    return Path(path).expanduser().is_dir()
