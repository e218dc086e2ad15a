"""The options of `toolkit plan` for a recipe as the tool that it comes from trains it: its loop, and what the file says
about that loop's habits (toolkit/planning/loops/named.py)."""

from __future__ import annotations

from toolkit.importing.draft import Draft
from toolkit.importing.table import Table

_DOUBLE_QUANT = ("double_quantization", "bnb_4bit_use_double_quant")


def plan_note(draft: Draft, table: Table) -> str:
    """What to ask `toolkit plan` for, in words; it has no loop of torchtune."""
    if not table.loop:
        return f"toolkit plan has no loop of {table.name}: its figures are those of the toolkit's own"
    options = " ".join(["--loop", table.loop, *(f"--loop-set {habit}" for habit in _habits(draft, table))])
    return f"memory and time as {table.name} trains: toolkit plan RECIPE {options}"


def _habits(draft: Draft, table: Table) -> list[str]:
    found = []
    if draft.values.get("activation_checkpointing") == "full" and _reentrant(draft, table):
        found.append("reentrant=true")
    if draft.values.get("adapter.method") == "qlora" and any(draft.get(key) is False for key in _DOUBLE_QUANT):
        found.append("double_quant=false")
    return found


def _reentrant(draft: Draft, table: Table) -> bool:
    """LLaMA-Factory's own default is true, but under FSDP2 (model/model_utils/checkpointing.py)."""
    if table.id == "llamafactory":
        return draft.get("use_reentrant_gc") is not False and draft.values.get("strategy.name") != "fsdp2"
    options = draft.get("gradient_checkpointing_kwargs")
    return isinstance(options, dict) and options.get("use_reentrant") is True
