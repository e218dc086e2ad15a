"""A recorded loop's model as plain values: class, config, adapter and tensors. It is built again from them by
transformers and PEFT, never unpickled."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.model.silence import peft_asks
from toolkit.upstream.transformers import attention_of
from toolkit.verification.scripts.together import read_each
from toolkit.verification.scripts.watch import whole

_ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""transformers would fetch code from the hub for any other name."""
_NOT_REBUILT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "megatron_core"),
    *("loftq_config", "eva_config", "corda_config", "init_lora_weights", "runtime_config"),
}
"""Of a PEFT config: where things came from, and how values begin that the kept tensors replace."""


@dataclass
class KeptModel:
    """``structure``: every module's class, what it prints of itself, and its float attributes (dropout, scaling, eps):
    a rebuilt model that differs from the recorded one in any of them is refused, never compared."""

    kind: str
    """The class, by its name in transformers; with the module's name where it is from elsewhere."""
    config: str
    attention: str
    adapter: str | None
    """The PEFT config, as JSON."""
    adapter_name: str | None
    tensors: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    trainable: list[str]
    structure: dict[str, str]


def keep_model(
    model: Any,
    meet: Callable[[], None] | None = None,
    keep: Callable[[torch.Tensor], torch.Tensor] | None = torch.Tensor.detach,
) -> KeptModel:
    """A model before anything wraps it. ``meet``: of one whose parameters are split over ranks, which all of them
    read together after that call. ``keep``: of each tensor, as soon as it is read; None: this rank takes part, and
    keeps none."""
    base, adapter, name = model, None, None
    if hasattr(model, "peft_config"):
        name = str(model.active_adapter)
        base, adapter = model.get_base_model(), json.dumps(_plain_config(model.peft_config[name].to_dict()))
    config: Any = getattr(base, "config", None)
    kept = KeptModel(
        kind=_kind_of(base),
        config=json.dumps(config.to_dict() if hasattr(config, "to_dict") else {}, default=str),
        attention=attention_of(config) or "eager",
        adapter=adapter,
        adapter_name=name,
        tensors={},
        buffers={name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()},
        trainable=[name for name, parameter in model.named_parameters() if parameter.requires_grad],
        structure=_structure(model),
    )
    tensors = list(model.state_dict().items())
    if meet is not None:
        meet()
    if keep is None:
        read_each(tensors, _drop)
        return kept
    tied: dict[Any, torch.Tensor] = {}

    def read(tensor: Any) -> torch.Tensor:
        plain = type(tensor) in (torch.Tensor, nn.Parameter)
        which = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if plain else id(tensor)
        if which not in tied or not tensor.numel():
            tied[which] = keep(whole(tensor))
        return tied[which]

    kept.tensors = read_each(tensors, read)
    return kept


def _drop(tensor: Any) -> None:
    whole(tensor)


def rebuild(kept: KeptModel, given: nn.Module | None, source: str) -> Any:
    """The recorded model in float32, in training mode, on the CPU. ``given``: one of the same structure, for a class
    that is not transformers' own; its values are replaced.

    Raises InputError where the class is not transformers' and none is given, or where what is built is not the model
    that was recorded.
    """
    model = given if given is not None else _built(kept, source)
    found = _structure(model)
    for name in {**kept.structure, **found}:
        if kept.structure.get(name) != found.get(name):
            there, here = kept.structure.get(name, "nothing"), found.get(name, "nothing")
            raise InputError(
                f"{source}: the recorded model is not the one that its config builds: {name or 'the model'} was "
                f"{there}, and is {here}. {_GIVE}"
            )
    model = model.float()
    try:
        model.load_state_dict(kept.tensors, strict=True)
    except RuntimeError as error:
        last = str(error).splitlines()[-1].strip()
        raise InputError(f"{source}: its tensors do not match the model: {last}") from None
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in kept.buffers and kept.buffers[name].shape == buffer.shape:
                buffer.copy_(kept.buffers[name])
    trainable = set(kept.trainable)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    return model.train()


_GIVE = (
    "Build the model in Python as the recorded loop did, and pass it: "
    "toolkit.verification.loops.verify_trace.verify_trace(Path(folder), model=model)"
)


def _built(kept: KeptModel, source: str) -> Any:
    import transformers

    found = getattr(transformers, kept.kind, None) if kept.kind.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise InputError(f"{source}: {kept.kind} is not a transformers model class, and is not imported. {_GIVE}")
    if kept.attention not in _ATTENTIONS:
        raise InputError(f"{source}: attention {kept.attention!r} is none of {', '.join(_ATTENTIONS)}. {_GIVE}")
    kind: Any = found
    try:
        values = {key: value for key, value in json.loads(kept.config).items() if key not in ("auto_map", "dtype")}
        config = kind.config_class.from_dict(values | {"attn_implementation": kept.attention})
        model = kind(config)
        model.config.use_cache = False
        return _with_adapter(model, kept) if kept.adapter is not None else model
    except (TypeError, ValueError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise InputError(f"{source}: {kept.kind} cannot be built from its config: {error}. {_GIVE}") from None


def _with_adapter(model: Any, kept: KeptModel) -> Any:
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_peft_type(**_plain_config(json.loads(kept.adapter or "{}")))
    with peft_asks():
        return get_peft_model(model, config, adapter_name=kept.adapter_name or "default")


def _plain_config(values: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        if key in _NOT_REBUILT or value is None:
            continue
        value = sorted(value) if isinstance(value, set) else value
        kept[key] = getattr(value, "value", value)  # an enumeration's
    return kept


def _class(module: nn.Module) -> type:
    """A module's class, before FSDP2 made one of its own of it."""
    kind = type(module)
    return next((base for base in kind.__bases__ if kind.__name__ == f"FSDP{base.__name__}"), kind)


def _kind_of(base: Any) -> str:
    kind = _class(base)
    transformers = sys.modules.get("transformers")  # a class of its own has imported it
    own = transformers is not None and getattr(transformers, kind.__name__, None) is kind
    return kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}"


def _structure(model: nn.Module) -> dict[str, str]:
    found = {}
    for name, module in model.named_modules():
        floats = {key: value for key, value in sorted(vars(module).items()) if type(value) is float}
        described = [_whole_shapes(module, module.extra_repr()), *(f"{key}={value!r}" for key, value in floats.items())]
        kind = _class(module)
        found[name] = f"{kind.__module__}.{kind.__qualname__}({', '.join(filter(None, described))})"
    return found


def _whole_shapes(module: nn.Module, text: str) -> str:
    """What a module prints, where DeepSpeed has split its parameters as they were made: their own shape is (0,)."""
    for parameter in module.parameters(recurse=False):
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if shape != parameter.shape:
            text = text.replace(str(tuple(parameter.shape)), str(tuple(shape)))
    return text
