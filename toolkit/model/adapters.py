"""Adapters by PEFT, on any model."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.errors import InputError, first_line
from toolkit.model.adapter_sources import adding
from toolkit.model.adapter_targets import ALL_LINEAR, check_targets, is_linear, names_something, other_products
from toolkit.model.load import bare_model
from toolkit.model.new_tokens import trained_rows
from toolkit.model.silence import peft_asks
from toolkit.model.sources import NotByPart, has_sources
from toolkit.recipe.adapter_methods import METHODS, Method
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Adapter
from toolkit.tasks import task_of
from toolkit.threads import torch_threads

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_REFUSALS = (OSError, ValueError, RuntimeError, TypeError, ImportError, KeyError, AttributeError, NotImplementedError,
             AssertionError, IndexError)  # fmt: skip
"""What PEFT's methods raise about options and models that they cannot use."""


def add_adapter(model: nn.Module, resolved: Resolved, overwritten: bool = False) -> PeftModel:
    """Wrap ``model`` so that only its adapter (and ``modules_to_save``) is trained; initialised from ``run.seed``.

    Random projections that a method keeps frozen are drawn from the same seed, or from one in its options, and
    eigenvectors are computed on one thread: every process, and every resumed run, has the same. Raises InputError if
    ``target_modules`` or ``modules_to_save`` match nothing, and if PEFT cannot create the adapter; NotByPart if it
    needs values that a model lacks that is loaded by part. ``overwritten``: what trains gets its values afterwards.
    """
    from peft import PeftModel, get_peft_model

    adapter = resolved.recipe.adapter
    assert adapter is not None
    where = f"{resolved.source}: adapter"
    try:
        config = peft_config(adapter, resolved, model) if adapter.path is None else None
    except _REFUSALS as error:
        raise _refused(error, adapter, where) from None
    check_targets(model, adapter, config, resolved.source)
    if adapter.path is not None:
        _check_path(adapter, adapter.path, resolved.source)
    own = {id(buffer) for buffer in model.buffers()}
    torch.manual_seed(resolved.recipe.run.seed)
    by_part = has_sources(model)
    try:
        made: list[Any] = []
        # Eigenvectors of almost equal eigenvalues turn with the last bit of a sum; one thread adds in one order. FRoD's
        # ``frod_U`` differed by 0.96 between one thread and two (torch 2.13.0).
        one_thread = torch_threads(1) if METHODS[adapter.method].eigenvectors else contextlib.nullcontext()
        with adding(model, made, overwritten) if by_part else contextlib.nullcontext(), one_thread, peft_asks():
            if config is None:
                made.append(PeftModel.from_pretrained(model, adapter.path, is_trainable=True))
            else:
                made.append(get_peft_model(model, config))
        [adapted] = made
    except _REFUSALS as error:
        if by_part:  # the base has no values: that may be why, or PEFT refuses the whole model, too
            raise NotByPart("PEFT does not add its adapter to a base without values") from None
        raise _refused(error, adapter, where) from None
    if resolved.precision.mixed:
        method = METHODS[adapter.method]
        if method.peft_type == "LORA" or method.layers_called:
            _leave_inputs(adapted)
    _round_projections(adapted, own, getattr(torch, resolved.precision.frozen))
    return adapted


def _refused(error: Exception, adapter: Adapter, where: str) -> InputError:
    """What PEFT says of an adapter that it cannot create, with the key of the recipe."""
    key = ".path" if adapter.path else "" if METHODS[adapter.method].peft_type == "LORA" else f" ({adapter.method})"
    message = first_line(error)
    if "ParamWrapper" in message and "dropout" in message:
        # peft 0.21.2, on experts, where it puts adapters by default
        message += " It is for experts: set adapter.dropout: 0, or adapter.target_modules to linear layers"
    if adapter.target_modules == ALL_LINEAR and "Incompatible modules" in message:
        # peft 0.21.2, of Mamba's out_proj, whose weight a fused kernel reads past the layer
        message += "; all-linear has it: set adapter.target_modules to others, for example [in_proj]"
    return InputError(f"{where}{key}: {message}")


def check_names(resolved: Resolved) -> None:
    """Raise InputError for names in the recipe's ``adapter`` that match nothing, before a weight of the model is read.
    A model that cannot be built without weights is checked once it is there."""
    adapter = resolved.recipe.adapter
    if adapter is None or not names_something(adapter) or (model := bare_model(resolved)) is None:
        return
    try:
        config = peft_config(adapter, resolved, model) if adapter.path is None else None
    except _REFUSALS:  # comes again, with the place in the recipe
        return
    check_targets(model, adapter, config, resolved.source)


def _round_projections(model: nn.Module, own: set[int], dtype: torch.dtype) -> None:
    """Store the floating buffers of an adapter (the frozen projections of VeRA, RandLoRA and others) in the dtype of
    frozen weights, as PEFT expects them where adapters compute in 16 bits. ``own``: ids of the model's own buffers."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in own and buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def _leave_inputs(model: nn.Module) -> None:
    """PEFT casts an adapter's input to its weight's dtype as it finds it. Under mixed precision that is float32
    or 16 bits depending on what FSDP has gathered just then, so that recomputation differs from the forward
    (peft 0.21.2, torch 2.13.0: CheckpointError). The products run in 16 bits either way. Methods that read their
    weights themselves find them gathered, and some (DEFT) need the cast."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False


def peft_config(adapter: Adapter, resolved: Resolved, model: nn.Module) -> PeftConfig:
    """PEFT's config for a recipe's adapter section."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils import PeftType

    method, task = METHODS[adapter.method], resolved.recipe.model.task
    made = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method.peft_type)]
    values: dict[str, Any] = {"task_type": task_of(task).peft_type, **method.fixed, **adapter.options,
                              **trained_rows(adapter, model, resolved)}  # fmt: skip
    for key, name in method.keys.items():
        value = getattr(adapter, key)
        if value is not None and value != []:
            # alpha may be a float in a recipe; most of PEFT's configs have an int.
            values[name] = int(value) if key == "alpha" and value == int(value) else value
    if values.get("target_modules") == "all-linear":
        _leave_out(values, made, task, model)
    about = task_of(task)
    if about.classes and about.peft_type is None and "modules_to_save" in made.__dataclass_fields__:
        # PEFT trains a classifier's new head whole where it has a type for the task; it has none for images.
        values["modules_to_save"] = values.get("modules_to_save") or [n for n in about.heads if hasattr(model, n)]
    if "ensure_weight_tying" in made.__dataclass_fields__:
        # A saved copy of a tied embedding would leave the head with the old weights.
        values["ensure_weight_tying"] = _ties(model) and bool(adapter.modules_to_save)
    if method.prompt == "cache":
        values = _cache_of_one_head(model) | values
    # PEFT writes into the lists that it is given: where a head is tied, into modules_to_save (peft 0.21.2).
    return made(**copy.deepcopy(values))


def _cache_of_one_head(model: nn.Module) -> dict[str, Any]:
    """Sizes of keys and values in the cache of a Falcon whose heads share one key (``multi_query``, as of 7B). Its
    config has no ``num_key_value_heads``, and PEFT makes a key of every head: the first forward ends in «Sizes of
    tensors must match» (peft 0.21.2, transformers 5.23.0)."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "falcon" or config.new_decoder_architecture or not config.multi_query:
        return {}
    return {"token_dim": config.hidden_size // config.num_attention_heads, "num_attention_heads": 1}


_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score")}
"""Modules whose names end so PEFT trains whole (peft 0.21.2, ``PeftModelForSequenceClassification``)."""


def _leave_out(values: dict[str, Any], made: Any, task: str, model: nn.Module) -> None:
    """peft 0.21.2: all-linear leaves out the head of a sequence classifier, but not that of a token classifier, which
    is then both wrapped and to be trained whole: TypeError. So is what a name of such heads ends (DistilBERT's
    ``pre_classifier``). Nor does it leave out layers that multiply otherwise than a linear layer (``other_products``).
    """
    heads = [name for name in task_of(task).heads if hasattr(model, name)]
    whole = *_HEADS.get(task_of(task).peft_type or "", ()), *(values.get("modules_to_save") or ())
    ended = [name for name, one in model.named_modules() if is_linear(one) and whole and name.endswith(whole)]
    others = [*other_products(model), *(name for name in ended if name.rpartition(".")[2] not in whole)]
    if not heads and not others:
        return
    if "exclude_modules" in made.__dataclass_fields__:
        values.setdefault("exclude_modules", [*heads, *others])
        return
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    output = find()  # left out as PEFT does
    values["target_modules"] = [
        name
        for name, module in model.named_modules()
        if is_linear(module) and module is not output and name.split(".")[0] not in heads and name not in others
    ]


def _ties(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def _check_path(adapter: Adapter, path: str, source: str) -> None:
    """Raise InputError if the saved adapter is one of another method: PEFT would train that one."""
    file = Path(path).expanduser() / "adapter_config.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8")).get("peft_type")
    except (OSError, ValueError, AttributeError):
        return  # on the hub, or broken: PEFT says so
    method: Method = METHODS[adapter.method]
    if saved is not None and saved != method.peft_type:
        theirs = str(saved).lower().replace("_", "-")
        raise InputError(
            f"{source}: adapter.path: {path} is an adapter of method {theirs}, but adapter.method is {method.name}; "
            f"set adapter.method: {theirs}"
        )


def ignored_values(adapter: Adapter) -> str | None:
    """What the recipe says of an adapter that starts from a saved one, where that has other values: PEFT trains those.
    None: nothing, or the saved one is on the hub."""
    if adapter.path is None:
        return None
    try:
        saved = json.loads((Path(adapter.path).expanduser() / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = []
    for key, name in METHODS[adapter.method].keys.items():
        asked, theirs = getattr(adapter, key), saved.get(name)
        if key not in adapter.model_fields_set or asked is None or theirs is None:
            continue
        if isinstance(theirs, list):
            asked, theirs = sorted([asked] if isinstance(asked, str) else asked), sorted(theirs)
        if asked != theirs:
            shown = " ".join(asked) if isinstance(asked, list) else asked
            found.append(f"{key} {', '.join(theirs) if isinstance(theirs, list) else theirs} (recipe: {shown})")
    if not found:
        return None
    return f"adapter.path: the saved adapter's own values are trained, the recipe's are ignored: {'; '.join(found)}"
