"""The model's keys under the names that several tools share."""

from __future__ import annotations

from toolkit.importing.draft import Draft


def model(draft: Draft, *, path: str, revision: str | None = None, attention: str | None = None) -> None:
    """``model.path``, ``model.revision``, ``model.attention`` and ``model.trust_remote_code``."""
    name = draft.get(path)
    if isinstance(name, str) and name:
        draft.carry(path, "model.path", name)
    elif "model.path" not in draft.answers and "model.config" not in draft.answers:
        draft.block(path, "no model; name one on this command line: model.path=...")
    if revision and draft.get(revision) not in (None, "", "main"):
        draft.carry(revision, "model.revision", str(draft.get(revision)))
    elif revision:
        draft.ignore(revision, "the default branch")
    if attention and draft.get(attention) not in (None, "", "auto"):
        draft.carry(attention, "model.attention", str(draft.get(attention)))
    elif attention:
        draft.ignore(attention, "sdpa where the model has it, as in the recipe")
    if draft.active("trust_remote_code"):
        draft.carry("trust_remote_code", "model.trust_remote_code", True)
    draft.ignore("trust_remote_code", "off, as in the recipe")
