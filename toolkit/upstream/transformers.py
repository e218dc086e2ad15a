"""The private names of transformers that the toolkit uses, and a public one that its versions differ in. Imports it
where a function is called, not before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from toolkit.upstream.replacement import Replacement, named, unwritten

_LOADS = "transformers:PreTrainedModel._load_pretrained_model"
_FLOAT32, _NOT_SAVED, _ATTENTION = "_keep_in_fp32_modules", "_keys_to_ignore_on_save", "_attn_implementation"
_CONVERSIONS = "_weight_conversions"


@contextlib.contextmanager
def loading_by(load: Callable[..., Any]) -> Iterator[bool]:
    """Context in which ``load(own, model, tensors, files, config, ...)`` reads files into a model for
    ``from_pretrained``, which reads each file whole. ``own``: transformers' function. False where it is not there."""
    own = named(_LOADS)
    if own is None:
        yield False
        return
    from transformers import PreTrainedModel

    replaced = staticmethod(lambda *args, **options: load(own, *args, **options))
    with mock.patch.object(PreTrainedModel, _LOADS.rpartition(".")[2], replaced):
        yield True


def checkpointing_argument() -> str:
    """The name of TrainingArguments for recomputing blocks. transformers 5.23 has given it a new one and warns of the
    old; 5.22 and older have the old one alone, and reject the new."""
    new, old = "activation_checkpointing", "gradient_checkpointing"
    return old if unwritten("transformers", "training_args.py", f"{new}: bool") else new


def why_trainer_takes_no_split(*, adapter: bool) -> str:
    """Why the installed Trainer does not train a model that ``from_pretrained(distributed_config=...)`` has split, in
    words; "" where it does. ``adapter``: one is added after loading, whose gradients the Trainer has to average."""
    names = ["is_distributed_loading_by_transformers", *(["_sync_replicated_trainable_parameters"] if adapter else [])]
    absent = unwritten("transformers", "trainer.py", *names)
    return absent and f"{absent}: its Trainer does not take {'adapters on ' * adapter}models that it has split"


def not_quantised(model: Any) -> Any:
    """Parts of names of modules that bitsandbytes leaves out, since their block casts its input to the weight's dtype
    (T5's ``wo``); None without. ``HfQuantizer.get_modules_to_not_convert`` takes them from its caller."""
    return getattr(model, _FLOAT32, None)


def loaded_in_float32(model: Any, dtype: Any) -> list[str]:
    """Patterns of names of what a model keeps in float32 that is loaded in ``dtype`` (transformers 5.23.0,
    ``_keep_in_fp32_modules_strict``: the routers' corrections of DeepSeek-V3). Loading alone applies them."""
    plan = getattr(model, "_get_dtype_plan", None)
    return [] if plan is None else list(plan(dtype))


def not_saved(model: Any) -> set[str]:
    """Names of tensors that ``save_pretrained`` leaves out."""
    return set(getattr(model, _NOT_SAVED, None) or ())


def attention_of(config: Any) -> str | None:
    """The name of the attention that a model of this config runs; None where it does not say. Public are
    ``set_attn_implementation`` alone, and of experts both."""
    found = getattr(config, _ATTENTION, None)
    return found if isinstance(found, str) else None


def drop_conversions(model: Any, dropped: Callable[[Any], bool]) -> None:
    """Forget conversions that a model was loaded with: saving reverses them all."""
    conversions = getattr(model, _CONVERSIONS, None)
    if conversions is not None:
        setattr(model, _CONVERSIONS, [one for one in conversions if not dropped(one)])


_MODEL = "modeling_utils.py"
REPLACEMENTS = (
    Replacement(
        "transformers", "PreTrainedModel._load_pretrained_model", "each process reads its part of the files",
        "5.17 to 5.23", lambda: unwritten("transformers", _MODEL, "def _load_pretrained_model("),
        "from_pretrained reads each file whole", "each process loads the whole model",
    ),
    Replacement(
        "transformers", "marks of a model's class", "what stays in float32 and what is not saved", "5.17 to 5.23",
        lambda: unwritten("transformers", _MODEL, _FLOAT32, _NOT_SAVED, "_get_dtype_plan"),
        "loading and saving apply them, and do not tell", "no module is kept in float32, every tensor is saved",
    ),
    Replacement(
        "transformers", "the attention that a model runs", "rows in parts put it back; those that take bounds are told",
        "5.17 to 5.23", lambda: unwritten("transformers", "configuration_utils.py", f"def {_ATTENTION}("),
        "set_attn_implementation has no counterpart", "sdpa is assumed",
    ),
    Replacement(
        "transformers", "conversions that a model was loaded with", "a merged 4-bit base is saved", "5.17 to 5.23",
        lambda: unwritten("transformers", "core_model_loading.py", _CONVERSIONS), "save_pretrained reverses all",
        "export --merged of a base in 4 bits ends in transformers' error",
    ),
)  # fmt: skip
