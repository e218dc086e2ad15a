"""Rows as well-known public data sets have them: of every column it is known that it is read, not read, or refused.

Columns and types are those that the data sets' cards state; the words are made here.
"""

from __future__ import annotations

from typing import Any

import pytest

from cases import every_case
from toolkit.data.fields import canonical_row, needed_fields, optional_fields
from toolkit.data.rows import Row
from toolkit.data.unread import Unread
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
H, G = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
S = {"role": "system", "content": "s"}
CALLING = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
TOOLS = '[{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}]'
PIC = {"bytes": b"x", "path": None}
M, P, T = "messages", "prompt-completion", "text"
Shape = tuple[str, str, dict[str, str], dict[str, Any], set[str] | str]

# name, data.format, data.fields, a row, and the columns that are not read, or the column that is refused
SHAPES: list[Shape] = [
    ("tatsu-lab/alpaca", M, {}, {"instruction": "q", "input": "", "output": "a", "text": "q a"}, {"text"}),
    ("yahma/alpaca-cleaned", M, {}, {"instruction": "q", "input": "i", "output": "a"}, set()),
    ("vicgalle/alpaca-gpt4", M, {}, {"instruction": "q", "input": "", "output": "a", "text": "t"}, {"text"}),
    ("databricks/databricks-dolly-15k", P, {"prompt": "instruction", "completion": "response"},
     {"instruction": "q", "context": "c", "response": "a", "category": "open_qa"}, {"context", "category"}),
    ("databricks/databricks-dolly-15k", M, {}, {"instruction": "q", "context": "c", "response": "a", "category": "x"},
     "messages"),
    ("HuggingFaceH4/ultrachat_200k", M, {}, {"prompt": "q", "prompt_id": "1", "messages": [U, A]},
     {"prompt", "prompt_id"}),
    ("HuggingFaceH4/no_robots", M, {}, {"prompt": "q", "prompt_id": "1", "messages": [S, U, A], "category": "c"},
     {"prompt", "prompt_id", "category"}),
    ("HuggingFaceTB/smoltalk", M, {}, {"messages": [U, A], "source": "s"}, {"source"}),
    ("HuggingFaceTB/smoltalk2", M, {}, {"messages": [U, A], "chat_template_kwargs": {"enable_thinking": False},
     "source": "s"}, {"source"}),
    ("allenai/tulu-3-sft-mixture", M, {}, {"id": "1", "messages": [U, A], "source": "s"}, {"id", "source"}),
    ("allenai/tulu-v2-sft-mixture", M, {}, {"dataset": "d", "id": "1", "messages": [U, A]}, {"dataset", "id"}),
    ("teknium/OpenHermes-2.5", M, {}, {"conversations": [H, G | {"weight": None}], "source": "s", "category": "c",
     "system_prompt": "be brief", "id": None, "skip_prompt_formatting": False, "hash": "h"},
     {"source", "category", "skip_prompt_formatting", "hash"}),
    ("teknium/openhermes", M, {}, {"instruction": "q", "input": "", "output": "a"}, set()),
    ("Open-Orca/OpenOrca", P, {"prompt": "question", "completion": "response"},
     {"id": "1", "system_prompt": "s", "question": "q", "response": "a"}, {"id", "system_prompt"}),
    ("Open-Orca/SlimOrca", M, {}, {"conversations": [{"from": "system", "value": "s", "weight": None},
     H | {"weight": 0.0}, G | {"weight": 1.0}]}, set()),
    ("anon8231489123/ShareGPT_Vicuna_unfiltered", M, {}, {"id": "1", "conversations": [H, G]}, {"id"}),
    ("lmsys/lmsys-chat-1m", M, {"messages": "conversation"}, {"conversation_id": "1", "model": "m", "turn": 1,
     "conversation": [U, A], "language": "en", "openai_moderation": [{"flagged": False}], "redacted": False},
     {"conversation_id", "model", "turn", "language", "openai_moderation", "redacted"}),
    ("allenai/WildChat-1M", M, {"messages": "conversation"}, {"conversation_hash": "h", "model": "m", "turn": 1,
     "conversation": [U | {"language": "en", "toxic": False}, A], "toxic": False},
     {"conversation_hash", "model", "turn", "toxic", "conversation[].language", "conversation[].toxic"}),
    ("OpenAssistant/oasst1", T, {}, {"message_id": "1", "parent_id": None, "text": "q", "role": "prompter",
     "lang": "en", "labels": {"name": ["spam"]}}, {"message_id", "role", "lang", "labels"}),
    ("timdettmers/openassistant-guanaco", T, {}, {"text": "### Human: q### Assistant: a"}, set()),
    ("mlabonne/guanaco-llama2-1k", T, {}, {"text": "<s>[INST] q [/INST] a </s>"}, set()),
    ("GAIR/lima", M, {}, {"conversations": ["q", "a"], "source": "s"}, "conversations[0]"),
    ("WizardLMTeam/WizardLM_evol_instruct_V2_196k", M, {}, {"idx": "1", "conversations": [H, G]}, {"idx"}),
    ("nickrosh/Evol-Instruct-Code-80k-v1", M, {}, {"instruction": "q", "output": "a"}, set()),
    ("iamtarun/python_code_instructions_18k_alpaca", M, {},
     {"instruction": "q", "input": "", "output": "a", "prompt": "p"}, {"prompt"}),
    ("sahil2801/CodeAlpaca-20k", M, {}, {"instruction": "q", "input": "", "output": "a"}, set()),
    ("ise-uiuc/Magicoder-OSS-Instruct-75K", P, {"prompt": "problem", "completion": "solution"},
     {"lang": "py", "raw_index": 1, "index": 1, "seed": "s", "openai_fingerprint": "f", "problem": "q",
      "solution": "a"}, {"lang", "raw_index", "index", "seed", "openai_fingerprint"}),
    ("ise-uiuc/Magicoder-Evol-Instruct-110K", P, {"prompt": "instruction", "completion": "response"},
     {"instruction": "q", "response": "a"}, set()),
    ("m-a-p/CodeFeedback-Filtered-Instruction", P, {"prompt": "query", "completion": "answer"},
     {"query": "q", "answer": "a", "resource": "r", "lang": "py"}, {"resource", "lang"}),
    ("openai/gsm8k", P, {"prompt": "question", "completion": "answer"}, {"question": "q", "answer": "a"}, set()),
    ("meta-math/MetaMathQA", P, {"prompt": "query", "completion": "response"},
     {"type": "t", "query": "q", "original_question": "o", "response": "a"}, {"type", "original_question"}),
    ("TIGER-Lab/MathInstruct", M, {}, {"source": "s", "output": "a", "instruction": "q"}, {"source"}),
    ("microsoft/orca-math-word-problems-200k", P, {"prompt": "question", "completion": "answer"},
     {"question": "q", "answer": "a"}, set()),
    ("AI-MO/NuminaMath-CoT", M, {}, {"source": "s", "problem": "q", "solution": "a", "messages": [U, A]},
     {"source", "problem", "solution"}),
    ("open-r1/OpenR1-Math-220k", M, {}, {"problem": "q", "solution": "a", "answer": "1", "generations": ["a"],
     "is_reasoning_complete": [True], "messages": [U, A]},
     {"problem", "solution", "answer", "generations", "is_reasoning_complete"}),
    ("open-thoughts/OpenThoughts-114k", M, {}, {"system": "s", "conversations": [{"from": "user", "value": "q"},
     {"from": "assistant", "value": "a"}]}, set()),
    ("bespokelabs/Bespoke-Stratos-17k", M, {}, {"system": "s", "conversations": [{"from": "user", "value": "q"},
     {"from": "assistant", "value": "a"}]}, set()),
    ("open-r1/Mixture-of-Thoughts", M, {}, {"messages": [U, A], "num_tokens": 7, "source": "s"},
     {"num_tokens", "source"}),
    ("simplescaling/s1K-1.1", P, {"prompt": "question", "completion": "solution"}, {"solution": "a", "question": "q",
     "cot_type": "math", "cot": None, "deepseek_thinking_trajectory": "t"},
     {"cot_type", "deepseek_thinking_trajectory"}),
    ("nvidia/Llama-Nemotron-Post-Training-Dataset", P, {"prompt": "input", "completion": "output"},
     {"input": [U], "output": "a", "category": "c", "reasoning": "on", "system_prompt": "s"}, "output"),
    ("nvidia/OpenMathReasoning", P, {"prompt": "problem", "completion": "generated_solution"},
     {"problem": "q", "generated_solution": "a", "expected_answer": "1"}, {"expected_answer"}),
    ("glaiveai/glaive-function-calling-v2", M, {}, {"system": "s", "chat": "USER: q ASSISTANT: a"}, "messages"),
    ("Salesforce/xlam-function-calling-60k", M, {},
     {"id": 1, "query": "q", "answers": "[]", "tools": TOOLS}, "messages"),
    ("NousResearch/hermes-function-calling-v1", M, {}, {"id": "1", "conversations": [H, G], "tools": TOOLS,
     "category": "c", "subcategory": "s", "task": "t"}, {"id", "category", "subcategory", "task"}),
    ("hiyouga/glaive-function-calling-v2-sharegpt", M, {}, {"conversations": [H, CALLING,
     {"from": "observation", "value": "1"}, G], "tools": TOOLS}, set()),
    ("Team-ACE/ToolACE", M, {}, {"system": "s", "conversations": [{"from": "user", "value": "q"},
     {"from": "assistant", "value": "a"}]}, set()),
    ("llamafactory/alpaca_zh", M, {}, {"instruction": "q", "input": "", "output": "a"}, set()),
    ("hiyouga/DPO-En-Zh-20k", M, {}, {"conversations": [H], "chosen": G, "rejected": G}, "conversations"),
    ("BelleGroup/train_0.5M_CN", M, {}, {"instruction": "q", "input": "", "output": "a"}, set()),
    ("YeungNLP/firefly-train-1.1M", P, {"prompt": "input", "completion": "target"},
     {"kind": "k", "input": "q", "target": "a"}, {"kind"}),
    ("fnlp/moss-003-sft-data", M, {}, {"conversation_id": "1", "meta_instruction": "m", "num_turns": 1,
     "chat": {"turn_1": {"Human": "q"}}}, "messages"),
    ("Anthropic/hh-rlhf", M, {}, {"chosen": "q a", "rejected": "q b"}, "messages"),
    ("HuggingFaceH4/ultrafeedback_binarized", M, {}, {"prompt": "q", "prompt_id": "1", "chosen": [U, A],
     "rejected": [U, A], "messages": [U, A], "score_chosen": 1.0, "score_rejected": 0.0},
     {"prompt", "prompt_id", "chosen", "rejected", "score_chosen", "score_rejected"}),
    ("trl-lib/kto-mix-14k", P, {}, {"prompt": [U], "completion": [A], "label": True}, {"label"}),
    ("trl-lib/tldr", P, {}, {"prompt": "q", "completion": "a"}, set()),
    ("trl-lib/Capybara", M, {}, {"source": "s", "messages": [U, A], "num_turns": 1}, {"source", "num_turns"}),
    ("trl-lib/ultrafeedback_binarized", P, {}, {"chosen": [U, A], "rejected": [U, A], "score_chosen": 1.0}, "prompt"),
    ("nvidia/HelpSteer2", P, {"completion": "response"}, {"prompt": "q", "response": "a", "helpfulness": 4,
     "correctness": 4, "coherence": 4, "complexity": 1, "verbosity": 1},
     {"helpfulness", "correctness", "coherence", "complexity", "verbosity"}),
    ("roneneldan/TinyStories", T, {}, {"text": "t"}, set()),
    ("Salesforce/wikitext", T, {}, {"text": "t"}, set()),
    ("HuggingFaceFW/fineweb-edu", T, {}, {"text": "t", "id": "1", "dump": "d", "url": "u", "language": "en",
     "language_score": 0.9, "token_count": 3, "score": 3.0, "int_score": 3},
     {"id", "dump", "url", "language", "language_score", "token_count", "score", "int_score"}),
    ("allenai/c4", T, {}, {"text": "t", "timestamp": "2019", "url": "u"}, {"timestamp", "url"}),
    ("wikimedia/wikipedia", T, {}, {"id": "1", "url": "u", "title": "t", "text": "x"}, {"id", "url", "title"}),
    ("codeparrot/codeparrot-clean", T, {"text": "content"}, {"repo_name": "r", "path": "p", "copies": "1",
     "size": "2", "content": "x", "license": "mit"}, {"repo_name", "path", "copies", "size", "license"}),
    ("abisee/cnn_dailymail", P, {"prompt": "article", "completion": "highlights"},
     {"article": "q", "highlights": "a", "id": "1"}, {"id"}),
    ("EdinburghNLP/xsum", P, {"prompt": "document", "completion": "summary"},
     {"document": "q", "summary": "a", "id": "1"}, {"id"}),
    ("knkarthick/dialogsum", P, {"prompt": "dialogue", "completion": "summary"},
     {"id": "1", "dialogue": "q", "summary": "a", "topic": "t"}, {"id", "topic"}),
    ("liuhaotian/LLaVA-Instruct-150K", M, {}, {"id": "1", "image": "a.jpg", "conversations": [
     {"from": "human", "value": "<image>\nq"}, G]}, {"id", "image"}),
    ("HuggingFaceM4/the_cauldron", M, {}, {"images": [PIC], "texts": [{"user": "q", "assistant": "a"}]}, "messages"),
    ("trl-lib/llava-instruct-mix", M, {}, {"images": [PIC], "messages": [U, A]}, {"images"}),
]  # fmt: skip

OTHER_TASKS: list[tuple[str, str, str, dict[str, str], dict[str, Any], set[str] | str]] = [
    ("stanfordnlp/imdb", "sequence-classification", T, {}, {"text": "t", "label": 1}, set()),
    ("fancyzhx/ag_news", "sequence-classification", T, {}, {"text": "t", "label": 3}, set()),
    ("nyu-mll/glue, mnli", "sequence-classification", T, {"text": "premise"},
     {"premise": "a", "hypothesis": "b", "label": 2, "idx": 1}, {"hypothesis", "idx"}),
    ("eriktks/conll2003", "token-classification", "tokens", {"labels": "ner_tags"},
     {"id": "1", "tokens": ["a"], "pos_tags": [1], "chunk_tags": [1], "ner_tags": [0]},
     {"id", "pos_tags", "chunk_tags"}),
    ("wmt/wmt16", "seq2seq-lm", P, {}, {"translation": {"de": "a", "en": "b"}}, "prompt"),
    ("Helsinki-NLP/opus_books", "seq2seq-lm", P, {"prompt": "en", "completion": "fr"},
     {"id": "1", "en": "a", "fr": "b"}, {"id"}),
    ("ylecun/mnist", "image-classification", "image", {}, {"image": PIC, "label": 3}, set()),
    ("trl-lib/llava-instruct-mix", "image-text-to-text", M, {},
     {"images": [PIC], "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]},
                                    A]}, set()),
]  # fmt: skip

ALL = [(name, "causal-lm", *rest) for name, *rest in SHAPES] + OTHER_TASKS


@every_case(("name", "task", "form", "fields", "value", "expected"), ALL, ids=[one[0] for one in ALL])
def test_every_column_is_read_or_said_not_to_be(
    name: str, task: str, form: str, fields: dict[str, str], value: dict[str, Any], expected: set[str] | str
) -> None:
    recipe = Recipe.model_validate({
        "model": {"config": {"model_type": "llama"}, "task": task},
        "data": {"train": "x", "format": form, "fields": fields},
        "run": {"max_steps": 1},
    })  # fmt: skip
    needed, optional = needed_fields(recipe), optional_fields(recipe)
    row = Row(value, "x", 1, "row")
    if isinstance(expected, str):
        with pytest.raises(InputError) as caught:
            canonical_row(row, needed, optional)
        assert str(caught.value).startswith(f"x: row 1: {expected}: ")
        return
    sample = canonical_row(row, needed, optional)
    unread = Unread(needed, optional)
    if "messages" in sample and form == P:  # conversations in prompt and completion: opening.py reads them as messages
        unread = Unread({"messages": "messages"}, fields)
    unread.add(row)
    assert {one["name"] for one in unread.to_json()} == expected
    # What is read is in the sample: none of the words is lost.
    said = repr(sample)
    for column in {*value} - expected - {"id", "skip_prompt_formatting"}:
        words = value[column]
        assert not isinstance(words, str) or not words or column == "tools" or words in said


def test_there_are_sixty() -> None:
    assert len({name for name, *_ in ALL}) >= 60
