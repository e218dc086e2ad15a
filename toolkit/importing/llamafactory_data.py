"""LLaMA-Factory's data: entries of dataset_info.json, templates and what is learned (commit ff6d4d12eeb0: data/)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.importing.draft import Draft
from toolkit.importing.trainer_parts import held_out_share

# Templates of data/template.py that leave the tokenizer's end-of-sequence token as it is.
_PLAIN = (None, "empty", "default", "alpaca", "fewshot", "vanilla")


def data(draft: Draft) -> None:
    """Data sets, their columns, and what is learned."""
    entries = _entries(draft)
    form = "text" if str(draft.get("stage")) == "pt" else "messages"
    draft.set("data.format", form, "stage")
    if entries:
        _sources(draft, entries, form)
    elif "data.train" not in draft.answers:
        draft.block("dataset", "not an entry of a dataset_info.json that is here; name the file: data.train=...")
    packed = draft.active("neat_packing") or draft.active("packing")
    length = draft.whole("cutoff_len") - int(packed)
    draft.carry("cutoff_len", "data.max_length", length, "one less, as LLaMA-Factory packs" if packed else "")
    _packing(draft, form)
    _text(draft) if form == "text" else _conversations(draft)
    if draft.active("streaming"):
        draft.carry("streaming", "data.streaming", True)
    draft.ignore("streaming", "off, as in the recipe")
    held_out_share(draft, "val_size")
    strategy = str(draft.get("mix_strategy"))
    if strategy != "concat":
        draft.unsupported("mix_strategy", f"{strategy}: the recipe joins data sets or draws shares of them")
    for key, why in (
        ("mix_strategy", "joined, as in the recipe"),
        ("interleave_probs", "mix_strategy decides"),
        ("dataset_dir", "used to find the data"),
        ("eval_dataset", "evaluation does not change training; set data.eval"),
    ):
        draft.ignore(key, why)


def _entries(draft: Draft) -> list[tuple[str, dict[str, Any], Path]]:
    """Name, entry of dataset_info.json and folder of each data set; empty if one is not found."""
    if not draft.get("dataset"):
        return []
    place = draft.place("dataset")
    beside = Path(str(place.file)).parent if place else Path()
    folder = str(draft.get("dataset_dir"))
    for home in (Path(folder), beside / folder):
        try:
            info = json.loads((home / "dataset_info.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        wanted = draft.names("dataset")
        if isinstance(info, dict) and all(isinstance(info.get(name), dict) for name in wanted):
            return [(name, info[name], home) for name in wanted]
    return []


def _sources(draft: Draft, entries: list[tuple[str, dict[str, Any], Path]], form: str) -> None:
    sources = []
    for name, entry, home in entries:
        path = str(home / entry["file_name"]) if "file_name" in entry else entry.get("hf_hub_url")
        if path is None:
            draft.block("dataset", f"{name}: neither a file nor a data set of the Hugging Face hub")
            return
        fields = _fields(draft, name, entry, form)
        found = {"path": path, "split": entry.get("split"), "name": entry.get("subset"), "fields": fields}
        sources.append({key: value for key, value in found.items() if value})
        if entry.get("num_samples") or entry.get("ranking"):
            draft.unsupported("dataset", f"{name}: a part of the data, or preferences")
    if len(sources) == 1 and set(sources[0]) <= {"path", "fields"}:
        draft.carry("dataset", "data.train", sources[0]["path"], "dataset_info.json")
        if sources[0].get("fields"):
            draft.set("data.fields", sources[0]["fields"], "columns of dataset_info.json")
    else:
        draft.carry("dataset", "data.train", sources, "dataset_info.json")


def _fields(draft: Draft, name: str, entry: dict[str, Any], form: str) -> dict[str, str]:
    columns = entry.get("columns")
    if form == "text":
        if not isinstance(columns, dict) or not columns.get("prompt") or columns.get("query"):
            draft.differs("dataset", f"{name}: the text is joined from two columns; the recipe reads one")
            return {"text": "instruction"} if not columns else {}
        return {} if columns["prompt"] == "text" else {"text": columns["prompt"]}
    if entry.get("formatting") == "sharegpt":
        messages = (columns or {}).get("messages", "conversations")
        return _beside(columns) | ({} if messages in ("messages", "conversations") else {"messages": messages})
    if columns:
        draft.differs("dataset", f"{name}: rows of one question and answer, which the recipe reads as instruction, "
                      "input and output")  # fmt: skip
    else:
        draft.differs(
            "dataset", f"{name}: LLaMA-Factory joins instruction and input with one line break, the recipe two"
        )
    return _beside(columns)


def _beside(columns: Any) -> dict[str, str]:
    """Columns beside the turns, where they have names of their own."""
    given = columns if isinstance(columns, dict) else {}
    return {key: given[key] for key in ("system", "history", "tools") if given.get(key) and given[key] != key}


def _packing(draft: Draft, form: str) -> None:
    if draft.active("neat_packing"):
        draft.carry("neat_packing", "data.packing", True)
        draft.differs("neat_packing", "both keep samples apart; rows, and so the samples of a step, are others")
        draft.ignore("packing", "neat_packing decides")
    elif draft.active("packing") or (form == "text" and draft.get("packing") is None):
        draft.unsupported("packing", "texts joined and cut into rows, which attend to one another")
    draft.ignore("packing", "off, as in the recipe")
    draft.ignore("neat_packing", "off, as in the recipe")


def _text(draft: Draft) -> None:
    template = draft.get("template")
    if template not in _PLAIN:
        draft.differs("template", f"{template}: may replace the end-of-sequence token that ends each text")
    draft.ignore("template", "not used for plain text")
    # transformers 5.8.0, the newest that LLaMA-Factory allows; 5.16.1 counts what is predicted.
    draft.differs("stage", "pt: LLaMA-Factory's transformers divides the loss by one more token per sample, its first")
    if _adds_bos(draft) is None:
        draft.differs("stage", "pt: equal if the tokenizer adds no other token than the first one, by add_bos_token")
    for key in ("train_on_prompt", "mask_history", "enable_thinking"):
        draft.ignore(key, "for conversations")


def _adds_bos(draft: Draft) -> bool | None:
    """``add_bos_token`` of a local tokenizer: LLaMA-Factory puts the token before the text itself."""
    try:
        text = (Path(str(draft.values.get("model.path"))) / "tokenizer_config.json").read_text(encoding="utf-8")
        found = json.loads(text).get("add_bos_token")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, bool) else None


def _conversations(draft: Draft) -> None:
    if "data.chat_template" in draft.answers:
        draft.ignore("template", "data.chat_template on the command line stands for it")
    else:
        draft.differs(
            "template",
            f"{draft.get('template') or 'none'}: LLaMA-Factory's own text around turns, each tokenised alone; the "
            "recipe uses the tokenizer's chat template, or data.chat_template=FILE",
        )
    if draft.active("train_on_prompt"):
        draft.unsupported("train_on_prompt", "the recipe learns what the assistant says")
    if draft.active("mask_history"):
        draft.carry("mask_history", "data.turns", "last")
    elif draft.place("enable_thinking"):
        draft.carry(
            "enable_thinking", "data.chat_template_kwargs", {"enable_thinking": draft.active("enable_thinking")}
        )
    for key in ("train_on_prompt", "mask_history", "enable_thinking"):
        draft.ignore(key, "off, as in the recipe")
