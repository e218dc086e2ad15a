"""Axolotl's data sets, prompt strategies and packing (commit 067b021c8b87: prompt_strategies, utils/data)."""

from __future__ import annotations

from typing import Any

from toolkit.importing.data_files import longest_text, source
from toolkit.importing.draft import Draft
from toolkit.importing.table import words
from toolkit.importing.trainer_parts import held_out_share

_NOTHING = words("trust_remote_code ds_type shards_idx preprocess_shards conversation roles")
_COMPLETION, _CHAT = "completion", "chat_template"
# Values of a data set's keys that leave the strategy as it is by default.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "roles_to_train": (None, ["assistant"], ["gpt", "assistant"]),
    "train_on_eos": (None, "turn"),
    "train_on_eot": (None, "turn"),
    "message_field_role": (None, "role"),
    "message_field_content": (None, "content"),
    "message_property_mappings": (None, {"role": "role", "content": "content"}, {"role": "from", "content": "value"}),
    "chat_template": (None, "tokenizer_default"),
    "drop_system_message": (None, False),
}


def data(draft: Draft) -> None:
    """``datasets``, ``sequence_len``, packing and what is learned."""
    entries = draft.mappings("datasets")
    if draft.get("pretraining_dataset"):
        draft.block("pretraining_dataset", "a stream of texts that are joined; the recipe keeps samples apart")
    elif not entries and "data.train" not in draft.answers:
        draft.block("datasets", "no data; name it on this command line: data.train=... data.format=...")
    draft.carry("sequence_len", "data.max_length", draft.whole("sequence_len"))
    kinds = {_kind(entry) for entry in entries}
    if len(kinds) > 1:
        draft.unsupported("datasets", f"{' and '.join(sorted(kinds))} together; the recipe has one format")
    kind = sorted(kinds)[0] if kinds else "completion"
    draft.set("data.format", "text" if kind == _COMPLETION else "messages", "datasets: type")
    if entries:
        _sources(draft, entries, kind)
    if kind == _CHAT:
        _conversations(draft)
    for key in ("chat_template", "chat_template_jinja", "train_on_inputs", "default_system_message", "eot_tokens"):
        draft.ignore(key, "for conversations, or as in the recipe")
    if kind not in (_CHAT, _COMPLETION):
        draft.unsupported("datasets", f"type {kind}: a text of Axolotl's own around the columns; the recipe reads "
                          "instruction, input and output through the chat template")  # fmt: skip
    _long_samples(draft, kind)
    _packing(draft)
    held_out_share(draft, "val_set_size")
    draft.ignore("test_datasets", "evaluation does not change training; set data.eval")


def _kind(entry: dict[str, Any]) -> str:
    kind = entry.get("type")
    if not isinstance(kind, str):
        return "of the file's own"
    return _CHAT if kind in (_CHAT, "chat_template.default") else kind


def _sources(draft: Draft, entries: list[dict[str, Any]], kind: str) -> None:
    found = []
    for at, entry in enumerate(entries):
        path, name = str(entry.get("path")), entry.get("name")
        where = source(path, files=entry.get("data_files"), name=name, split=entry.get("split"),
                       revision=entry.get("revision"))  # fmt: skip
        if where is None:
            draft.block("datasets", f"datasets[{at}]: no file or data set that data.train can name")
            return
        one = {"path": where} if isinstance(where, str) else where
        fields = _fields(entry, kind)
        found.append({**one, "fields": fields} if fields else one)
        _strategy(draft, at, entry, kind)
    if len(found) == 1 and set(found[0]) <= {"path", "fields"}:
        draft.carry("datasets", "data.train", found[0]["path"])
        if "fields" in found[0]:
            draft.set("data.fields", found[0]["fields"], "datasets: field")
    else:
        draft.carry("datasets", "data.train", found)


def _fields(entry: dict[str, Any], kind: str) -> dict[str, str]:
    if kind == _COMPLETION and entry.get("field") not in (None, "text"):
        return {"text": str(entry["field"])}
    if kind == _CHAT and entry.get("field_messages") not in (None, "messages", "conversations"):
        return {"messages": str(entry["field_messages"])}
    return {}


def _strategy(draft: Draft, at: int, entry: dict[str, Any], kind: str) -> None:
    """Keys of a data set that change what is made of its rows."""
    read = words("path type name split revision data_files field field_messages field_tools")
    for key, value in entry.items():
        if key in read or key in _NOTHING or value in _DEFAULTS.get(key, (None,)):
            continue
        draft.unsupported("datasets", f"datasets[{at}].{key}: the recipe has no such setting")
    if kind == _CHAT and entry.get("field_tools") not in (None, "tools"):
        draft.unsupported("datasets", f"datasets[{at}].field_tools: name the column in data.fields")


def _conversations(draft: Draft) -> None:
    template = draft.get("chat_template")
    if "data.chat_template" in draft.answers:
        draft.ignore("chat_template", "data.chat_template on the command line stands for it")
    elif template not in (None, "tokenizer_default", ""):
        draft.unsupported("chat_template", f"{template}: Axolotl's own text of this template; write it to a Jinja file "
                          "and set data.chat_template=FILE")  # fmt: skip
    else:
        draft.differs("datasets", "equal if the chat template ends a conversation with the end-of-sequence token")
    for key in ("default_system_message", "chat_template_jinja"):
        if draft.get(key):
            draft.unsupported(key, "another text of the turns")
    if (ends := draft.get("eot_tokens")) is not None and ends != []:
        draft.differs("eot_tokens", "equal if the chat template ends a turn with one of these, which the recipe learns")
    else:
        draft.differs(
            "eot_tokens",
            "not set: Axolotl learns the token that ends a turn only where it is the tokenizer's end-of-sequence "
            "token; the recipe learns it",
        )
    if draft.active("train_on_inputs"):
        draft.unsupported("train_on_inputs", "the recipe learns what the assistant says")


def _long_samples(draft: Draft, kind: str) -> None:
    length = int(draft.values["data.max_length"])
    how = str(draft.get("excess_length_strategy") or "drop")
    trained: Any = draft.values.get("data.train")
    if kind == _COMPLETION and isinstance(trained, str):
        field = (draft.values.get("data.fields") or {}).get("text", "text")
        longest = longest_text(trained, field)
        if longest is not None and longest < length:
            draft.ignore("excess_length_strategy", "no text is longer")
            return
    if kind == _COMPLETION:
        draft.differs("sequence_len", "a longer text becomes several samples; the recipe truncates it to one")
    elif how != "truncate":
        draft.differs("excess_length_strategy", "drop: longer samples are left out; the recipe truncates them")
    draft.ignore("excess_length_strategy", "truncated, as in the recipe")


def _packing(draft: Draft) -> None:
    if draft.active("sample_packing"):
        draft.carry("sample_packing", "data.packing", True)
        draft.differs("sample_packing", "both keep samples apart; rows, and so the samples of a step, are others")
        if draft.get("eval_sample_packing") is False:
            draft.differs(
                "eval_sample_packing", "off: the last, short batch of an epoch is dropped; the recipe trains it"
            )
    for key in ("sample_packing", "eval_sample_packing"):
        draft.ignore(key, "off, as in the recipe")
