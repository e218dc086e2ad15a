"""Conversations and sources to verify with, whatever data a recipe names: several turns, tools, reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.recipe.resolve import Resolved

SIZES = (41, 9, 26, 17, 33)
"""Samples of the sources of a mixture, repeated where a recipe has more."""
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks up a word",
            "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "the word"}}},
        },
    }
]
_CALL = {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": {"word": "shard"}}}


def _turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


ROWS: tuple[dict[str, Any], ...] = (
    {"messages": _turns("What is a shard?", "A part of a tensor.")},
    {"messages": [{"role": "system", "content": "Be brief."}, *_turns("Two plus two?", "Four.")]},
    {"messages": _turns("First?", "One answer.", "Second?", "Two answers.", "Third?", "Three answers.")},
    {
        "messages": [
            *_turns("Six times seven?"),
            {"role": "assistant", "content": "Forty-two.", "reasoning_content": "Six sevens are forty-two."},
            *_turns("Seven times eight?"),
            {"role": "assistant", "content": "Fifty-six.", "reasoning_content": "Seven eights are fifty-six."},
        ]
    },
    {
        "messages": [
            *_turns("Look up shard."),
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "name": "lookup", "content": "fragment of pottery"},
            {"role": "assistant", "content": "It is a broken piece."},
        ],
        "tools": _TOOLS,
    },
)

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 > last.user and m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML that drops the reasoning of earlier turns, as Qwen3's does; for recipes whose tokenizer is not here."""


@dataclass(frozen=True)
class DataCase:
    """What a rank turns into samples. ``recipe``: the user's. ``shares``: weight and proportion of each source."""

    recipe: dict[str, Any]
    source: str
    conversations: bool
    shares: tuple[tuple[float | None, float | None], ...]
    fault: str | None = None

    @property
    def sizes(self) -> list[int]:
        return [SIZES[at % len(SIZES)] for at in range(len(self.shares))]


def data_case(resolved: Resolved, fault: str | None) -> DataCase | None:
    """None where a recipe has neither conversations nor several sources."""
    data = resolved.recipe.data
    several = () if isinstance(data.train, str) else tuple((one.weight, one.proportion) for one in data.train)
    if data.format != "messages" and not several:
        return None
    return DataCase(resolved.recipe.model_dump(mode="json"), resolved.source, data.format == "messages", several, fault)


def tokenizer_of(recipe: dict[str, Any]) -> Any:
    """The recipe's own tokenizer where it is on this machine and has a chat template; else one of bytes."""
    from transformers import AutoTokenizer

    path = recipe["tokenizer"]["path"] or recipe["model"]["path"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True) if path else None
    except (OSError, ValueError, ImportError):
        tokenizer = None
    # Without offsets (not a fast one) supervised stretches cannot be found in the text.
    if tokenizer is not None and tokenizer.is_fast and (recipe["data"]["chat_template"] or tokenizer.chat_template):
        return tokenizer
    return _bytes()


def _bytes() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", extra_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
