"""LoRA and DoRA by PEFT, on any model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Adapter
from toolkit.tasks import task_of

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


def add_adapter(model: nn.Module, resolved: Resolved) -> PeftModel:
    """Wrap ``model`` so that only its adapter (and ``modules_to_save``) is trained; initialised from ``run.seed``.
    Raises InputError if ``target_modules`` or ``modules_to_save`` match nothing."""
    from peft import PeftModel, get_peft_model

    adapter = resolved.recipe.adapter
    assert adapter is not None
    _check_targets(model, adapter, resolved.source)
    torch.manual_seed(resolved.recipe.run.seed)
    where = f"{resolved.source}: adapter"
    try:
        if adapter.path is not None:
            adapted = PeftModel.from_pretrained(model, adapter.path, is_trainable=True)
        else:
            adapted = get_peft_model(model, lora_config(adapter, resolved.recipe.model.task, model))
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise InputError(f"{where}{'.path' if adapter.path else ''}: {str(error).splitlines()[0]}") from None
    if resolved.precision.mixed:
        _leave_inputs(adapted)
    return adapted


def _leave_inputs(model: nn.Module) -> None:
    """PEFT casts an adapter's input to its weight's dtype as it finds it. Under mixed precision that is float32
    or 16 bits depending on what FSDP has gathered just then, so that recomputation differs from the forward
    (peft 0.21.2, torch 2.13.0: CheckpointError). The products run in 16 bits either way."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False


def lora_config(adapter: Adapter, task: str, model: nn.Module) -> LoraConfig:
    """PEFT's config for a recipe's adapter section."""
    from peft import LoraConfig

    # peft 0.21.2: all-linear leaves out the head of a sequence classifier, but not that of a token classifier, which
    # is then both wrapped and to be trained whole: TypeError.
    about = task_of(task)
    heads = [name for name in about.heads if hasattr(model, name)]
    # PEFT trains a classifier's new head whole where it has a type for the task; it has none for images.
    whole = list(adapter.modules_to_save) or (heads if about.classes and about.peft_type is None else [])
    return LoraConfig(
        task_type=about.peft_type,
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
        modules_to_save=whole or None,
        exclude_modules=heads or None if adapter.target_modules == "all-linear" else None,
        use_dora=adapter.method == "dora",
        # A saved copy of a tied embedding would leave the head with the old weights.
        ensure_weight_tying=_ties(model) and bool(adapter.modules_to_save),
    )


def _ties(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def _check_targets(model: nn.Module, adapter: Adapter, source: str) -> None:
    names = [name for name, _ in model.named_modules() if name]
    problems = []
    for wanted in adapter.modules_to_save:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
            problems.append(f"{source}: adapter.modules_to_save: no module is named {wanted!r}" + _candidates(model))
    if isinstance(adapter.target_modules, list):
        for wanted in adapter.target_modules:
            if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
                problems.append(f"{source}: adapter.target_modules: {wanted!r} matches no module" + _candidates(model))
    if problems:
        raise InputError(*problems)


def _candidates(model: nn.Module) -> str:
    ends = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if _is_linear(module)}
    return f"; linear layers of this model: {', '.join(sorted(ends))}"


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
