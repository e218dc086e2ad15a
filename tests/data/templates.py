"""Every chat template that TRL ships, with six conversations each: what ``data/chat.py`` makes of them.

``python -m data.templates`` in tests/ writes docs/measurements/chat-templates.md.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from toolkit.data.chat import Chat, Piece
from toolkit.data.fields import canonical_row
from toolkit.data.rows import Row
from toolkit.errors import InputError

_SPECIAL = re.compile(
    r"<[|｜][^<>{}'\"\s]*?[|｜]>|</?s>|<(?:start_of_turn|end_of_turn|end_of_utterance|image)>|<turn\|>|<\|turn>"
)
_TAGS = re.compile(r"</?(?:think|tool_call|tool_response)>|<\|?(?:channel|tool_call|tool_response)\|?>")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "the city"}},
                "required": ["city"],
            },
        },
    }
]


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


_CALL = {"type": "function", "id": "call12345", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [_user("What is two plus two?"), _assistant("It is four.")],
    "system": [{"role": "system", "content": "Answer briefly."}, _user("What is two plus two?"), _assistant("Four.")],
    "several": [
        _user("First question?"), _assistant("First answer."), _user("Second question?"), _assistant("Second answer."),
        _user("Third?"), _assistant("Third answer."),
    ],
    "spaces": [
        _user("  Padded question?  "), _assistant("  Padded answer.  "), _user(" Again? "), _assistant(" Yes. "),
    ],
    "reasoning": [
        _user("Compute 6*7."), _assistant("It is 42.", reasoning_content="Six times seven is forty-two."),
        _user("And 7*8?"), _assistant("It is 56.", reasoning_content="Seven times eight is fifty-six."),
    ],
    "tools": [
        _user("Weather in Paris?"), _assistant("", tool_calls=[_CALL]),
        {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "18 degrees, sunny"},
        _assistant("It is sunny at 18 degrees."),
    ],
}  # fmt: skip


def folder() -> Path | None:
    """TRL's templates, without importing TRL; None where it is not installed."""
    spec = find_spec("trl")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "chat_templates"


def names() -> list[str]:
    """Base templates, by name."""
    here = folder()
    return [] if here is None else sorted(p.stem for p in here.glob("*.jinja") if not p.stem.endswith("_training"))


def tokenizer_for(*templates: str) -> PreTrainedTokenizerFast:
    """Bytes, and every token that a template writes for itself."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=letters, show_progress=False))
    special = sorted({word for text in templates for word in _SPECIAL.findall(text)} - {"<bos>", "<eos>"})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", extra_special_tokens=special
    )
    tags = sorted({word for text in templates for word in _TAGS.findall(text)} - set(special))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.chat_template = templates[0]
    return tokenizer


@dataclass
class Result:
    """``pieces``: the samples, or none where ``refused`` says why. ``trl``: how they compare with TRL's own mask.
    ``theirs``, ``ours``: the text that TRL alone supervises, and that is supervised here alone."""

    pieces: list[Piece]
    refused: str = ""
    trl: str = ""
    theirs: str = ""
    ours: str = ""


@functools.cache
def chat_of(name: str) -> tuple[Chat, str]:
    """The template with its tokenizer, and TRL's template with marks for it, if there is one."""
    here = folder()
    assert here is not None
    text = (here / f"{name}.jinja").read_text()
    training = here / f"{name}_training.jinja"
    marked = training.read_text() if training.exists() else ""
    return Chat(tokenizer_for(text, marked), None), marked


def encode(name: str, conversation: str) -> tuple[Result, Chat, dict[str, Any]]:
    """One cell of the table."""
    chat, marked = chat_of(name)
    value = {"messages": CONVERSATIONS[conversation]} | ({"tools": TOOLS} if conversation == "tools" else {})
    row = Row(value, "x.jsonl", 1)
    fields = canonical_row(row, {"messages": "messages"})
    try:
        pieces = chat.pieces(row, fields)
    except InputError as error:
        return Result([], str(error).removeprefix("x.jsonl:1: ")), chat, fields
    result = Result(pieces)
    if marked and len(pieces) == 1:
        _beside_trl(result, marked, chat, row, fields)
    return result, chat, fields


def _beside_trl(result: Result, marked: str, chat: Chat, row: Row, fields: dict[str, Any]) -> None:
    tokenizer: Any = chat._tokenizer
    options: dict[str, Any] = {"tools": fields["tools"]} if fields["tools"] else {}
    options |= {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    theirs = chat._dialect.call(
        lambda messages: tokenizer.apply_chat_template(messages, chat_template=marked, **options), fields["messages"]
    )
    ids, ours = chat.encode(row, result.pieces[0])
    if list(theirs["input_ids"]) != ids:
        result.trl = "other text"
        return
    pairs = list(zip(ids, ours, _to_turn_ends(chat, ids, theirs["assistant_masks"]), strict=True))
    result.theirs = tokenizer.decode([token for token, here, there in pairs if there and not here])
    result.ours = tokenizer.decode([token for token, here, there in pairs if here and not there])
    result.trl = "other mask" if result.theirs or result.ours else "equal"


def _to_turn_ends(chat: Chat, ids: list[int], mask: list[int]) -> list[bool]:
    """TRL's mask without what is behind the tokens that end turns, which TRL supervises."""
    found = [bool(on) for on in mask]
    for end in range(len(ids), 0, -1):
        if not found[end - 1] or (end < len(ids) and mask[end]):
            continue
        start = end
        while start > 0 and mask[start - 1]:
            start -= 1
        said = chat._tokenizer.decode(ids[start:end])
        most, kept = chat._special.turn_end(said, chat._closing), end
        while len(chat._tokenizer.decode(ids[start:kept])) > most:
            kept -= 1
        found[kept:end] = [False] * (end - kept)
    return found


_OPENS = "the generation prompt opens <think>, which TRL's template leaves out"
_LINE = "the generation prompt opens <think> and a line, TRL's template <think> alone"
OTHER_TEXT = {
    "deepseek_r1_distill": _OPENS,
    "deepseekv3": _OPENS,
    "glm4moe": "TRL's template ends the last turn with <|user|>; here end-of-sequence ends it",
    "nemotron_3_nano": _LINE,
    "nemotron_3_super": _LINE,
    "nemotron_3_ultra": _LINE,
    "nemotron_3_5_lightning": _LINE,
}
"""Templates whose sample is not TRL's, and why."""

OTHER_MASK = {
    "diffusion_gemma": ("", "<|tool_response>", "the token that ends a tool call is learned here"),
    "gptoss": ("<|start|>assistant", "", "TRL supervises the header"),
    "muse_glimmer": ("<|start|>assistant", "", "TRL supervises the header"),
    "qwen2_5": ("\n", "", "TRL supervises the header's line break"),
    "qwen3_5_nothink": ("<think>\n\n</think>\n\n", "", "TRL supervises the empty block, which the header has"),
    "qwen3_5_think": ("<think>\n", "", "TRL supervises <think>, which the header has"),
    "qwen3_6": ("<think>\n", "", "TRL supervises <think>, which the header has"),
    "qwen3_8": ("<think>\n", "", "TRL supervises <think>, which the header has"),
}
"""Templates whose mask is not TRL's: what TRL alone supervises at each turn, what this project alone does, and why."""

REFUSES = {
    "cohere": ("tools",),
    "cohere2": ("tools",),
    "gemma": ("system", "tools"),
    "gemma3": ("tools",),
    "llava_next": ("tools",),
}
"""What the templates refuse themselves."""
LOSES = {
    "deepseek_r1_distill": ("tools",),
    "gemma4": ("reasoning",),
    "gemma4_v3": ("reasoning",),
    "gemma4_v4": ("reasoning",),
    "idefics3": ("tools",),
    "lfm2": ("tools",),
    "llama3": ("tools",),
    "phi3": ("tools",),
    "phi3_5": ("tools",),
    "qwen2_5_vl": ("tools",),
    "smolvlm": ("tools",),
}
"""Conversations of which a template leaves something out in silence: an error at the row."""


def page() -> str:
    """The table, as docs/measurements/chat-templates.md has it."""
    from importlib.metadata import version

    head = ["template", *CONVERSATIONS, "beside TRL's own mask"]
    lines = [
        "# Chat templates",
        "",
        f"The {len(names())} templates that TRL {version('trl')} ships, with six conversations each. A number counts",
        "the samples that a conversation becomes: several where the template writes earlier turns otherwise than they",
        "were generated. What follows a turn's end token, such as the line break behind `<|im_end|>`, is supervised by",
        "TRL and not here; that difference is left out. Written by `python -m data.templates` in `tests/`;",
        "`tests/data/test_templates.py` asserts it.",
        "",
        "| " + " | ".join(head) + " |",
        "| --- " * len(head) + "|",
    ]
    for name in names():
        results = {conversation: encode(name, conversation)[0] for conversation in CONVERSATIONS}
        cells = []
        for conversation, result in results.items():
            lost = conversation in LOSES.get(name, ())
            cells.append(str(len(result.pieces)) if result.pieces else "loses text" if lost else "refuses")
        kinds = {result.trl for result in results.values()} - {""}
        message = OTHER_TEXT.get(name) or (
            OTHER_MASK[name][2] if name in OTHER_MASK else "equal" if kinds else "TRL has none"
        )
        message = re.sub(r"<\S+>", lambda tag: f"`{tag[0]}`", message).replace("|", "\\|")
        lines.append(f"| {name} | {' | '.join(cells)} | {message} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    target = Path(__file__).parents[2] / "docs" / "measurements" / "chat-templates.md"
    target.write_text(page(), encoding="utf-8")
