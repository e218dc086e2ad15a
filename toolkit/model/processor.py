"""The tokenizer or processor of a recipe: what its samples are made with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.data.media import missing_package
from toolkit.errors import InputError, first_line
from toolkit.model.padding import choose_padding
from toolkit.recipe.hub import hub_problem, use_cache_if_offline
from toolkit.recipe.needs import missing_tokenizer, why_no_tokenizer
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(recipe: Recipe, *, own_padding: bool = False) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; raises InputError if there is none. ``own_padding``: with the padding token of its files,
    also for a classifier."""
    from transformers import AutoTokenizer

    path = _place(recipe)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=recipe.model.trust_remote_code, **_revision(recipe), **recipe.tokenizer.options
        )
        tokenizer = _with_added(tokenizer, recipe)
        if not own_padding:
            choose_padding(tokenizer, recipe)
        return tokenizer
    except InputError:
        raise
    except Exception as error:  # of transformers and of the network
        raise _not_loaded("tokenizer", recipe, path, error) from None


def load_processor(recipe: Recipe, *, own_padding: bool = False) -> Any:
    """What the recipe's samples are made with: its tokenizer, or the processor of images or recordings, in which there
    may be a tokenizer. Raises InputError if there is none. ``own_padding``: as of ``load_tokenizer``."""
    media = task_of(recipe.model.task).media
    if media is None:
        return load_tokenizer(recipe, own_padding=own_padding)
    import transformers

    missing_package(recipe)
    path = _place(recipe)
    try:
        processor = getattr(transformers, media.processor).from_pretrained(
            path, trust_remote_code=recipe.model.trust_remote_code, **_revision(recipe), **recipe.tokenizer.options
        )
        return _with_added(processor, recipe)
    except InputError:
        raise
    except Exception as error:  # of transformers and of the network
        raise _not_loaded("processor", recipe, path, error) from None


def _revision(recipe: Recipe) -> dict[str, str]:
    """The model's own tokenizer is of the model's revision."""
    revision = None if recipe.tokenizer.path else recipe.model.revision
    return {} if revision is None else {"revision": revision}


def _not_loaded(what: str, recipe: Recipe, path: str | None, error: Exception) -> Exception:
    """The error for a tokenizer or processor that cannot be loaded; an unknown kind of error as it is."""
    key = "tokenizer.path" if recipe.tokenizer.path else "model.path"
    if (problem := hub_problem(str(path), error)) is not None:
        return InputError(f"{key}: {problem}")
    if not isinstance(error, OSError | ValueError | ImportError):
        return error
    return InputError(f"{key}: no {what} could be loaded from {path}: {first_line(error)}")


def _place(recipe: Recipe) -> str | None:
    """The folder or hub id of the recipe's tokenizer or processor; raises InputError if it has none."""
    if (reason := why_no_tokenizer(recipe) or missing_tokenizer(recipe)) is not None:
        raise InputError(f"tokenizer.path: {reason}")
    path = recipe.tokenizer.path or recipe.model.path
    use_cache_if_offline(path)
    return path


def _with_added(processor: Any, recipe: Recipe) -> Any:
    asked = recipe.tokenizer
    if not asked.added:
        return processor
    tokenizer = processor if hasattr(processor, "add_tokens") else getattr(processor, "tokenizer", None)
    if tokenizer is None:
        raise InputError(f"tokenizer.add_tokens: {recipe.model.task} has no tokenizer; remove the key")
    tokenizer.add_tokens(asked.add_tokens)
    tokenizer.add_tokens(asked.add_special_tokens, special_tokens=True)
    return processor


def pad_token_name(processor: Any) -> str | None:
    """The padding token of a tokenizer, or of the one in a processor, as text."""
    return getattr(getattr(processor, "tokenizer", processor), "pad_token", None)


def pad_token_of(processor: Any) -> int | None:
    """The padding token of a tokenizer, or of the one in a processor."""
    return getattr(getattr(processor, "tokenizer", processor), "pad_token_id", None)
