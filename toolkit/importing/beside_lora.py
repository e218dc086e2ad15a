"""What several tools have beside plain LoRA: PEFT's own options, LoRA+, new tokens, and an end before the last step."""

from __future__ import annotations

import re
from typing import Any

from toolkit.importing.draft import Draft
from toolkit.importing.table import flag

_INITIAL = re.compile(r"gaussian|olora|orthogonal|pissa(_niter_\d+)?")


def option(draft: Draft, key: str, name: str, value: Any, how: str = "") -> None:
    """The key becomes PEFT's option of this ``name``."""
    draft.carry(key, "adapter.options", draft.values.get("adapter.options", {}) | {name: value}, how)


def switch(draft: Draft, key: str, name: str) -> None:
    """A switch that is a switch of PEFT's too."""
    if flag(draft.get(key)):
        option(draft, key, name, True)
    draft.ignore(key, "off")


def given(draft: Draft, key: str, name: str) -> None:
    """A value that PEFT takes as it is written; empty is none."""
    if draft.get(key) not in (None, "", [], {}):
        option(draft, key, name, draft.get(key))
    draft.ignore(key, "empty")


def initial(draft: Draft, key: str) -> None:
    """How the adapter's matrices are drawn: ``init_lora_weights`` of PEFT's LoraConfig."""
    value = draft.get(key)
    if value in (None, "") or (not isinstance(value, str) and value is True) or str(value).lower() == "true":
        draft.ignore(key, "PEFT's default, as in the recipe")
    elif isinstance(value, str) and _INITIAL.fullmatch(value):
        option(draft, key, "init_lora_weights", value)
    else:
        draft.unsupported(key, f"{value}: another initial adapter")


def lora_plus(draft: Draft, key: str, *, decays: bool) -> None:
    """LoRA+ (arXiv:2402.12354): a group of the optimizer with a rate of its own, as PEFT's create_loraplus_optimizer
    makes it: matrices B, and all vectors. Read after the optimizer. ``decays``: whether the tool hands on the weight
    decay; PEFT's default is none."""
    if draft.get(key) in (None, "", 0):
        draft.ignore(key, "off")
        return
    ratio = draft.number(key)
    rate = draft.values["optimizer.lr"] * ratio
    vectors = "|lora_magnitude_vector" if draft.values.get("adapter.method") == "dora" else ""
    draft.carry(key, "optimizer.groups", [{"match": f"lora_B{vectors}", "lr": rate}], f"lr x {ratio:g} for matrices B")
    if draft.values.get("adapter.modules_to_save"):
        draft.differs(key, "vectors of modules_to_save have that rate too, and optimizer.lr in the recipe")
    if not decays and draft.values.get("optimizer.weight_decay"):
        reason = f"without effect: with {draft.name(key)} the tool gives PEFT's optimizer no weight decay"
        draft.set("optimizer.weight_decay", 0.0, reason)
        draft.notes.append(f"weight_decay: {reason}")


def new_tokens(draft: Draft, key: str, tokens: list[str], *, special: bool, beside_adapter: str) -> None:
    """Tokens that the tokenizer gets. ``beside_adapter``: which weights of the embeddings the tool trains with an
    adapter."""
    if not tokens:
        draft.ignore(key, "empty")
        return
    draft.carry(key, "tokenizer.add_special_tokens" if special else "tokenizer.add_tokens", tokens)
    if "adapter.method" in draft.values:
        draft.differs(key, f"{beside_adapter}; the recipe trains the rows of the new tokens")
    else:
        draft.differs(key, "their rows are drawn from run.seed: other values than the tool's")


def early_stopping(draft: Draft, key: str, threshold: str | None = None) -> None:
    """transformers' EarlyStoppingCallback. Read after the evaluations."""
    if not draft.get(key):
        draft.ignore(key, "off")
    elif "run.eval_every" not in draft.values:
        draft.unsupported(key, "an end before the last step needs evaluations every so many steps: set run.eval_every "
                          "and run.early_stopping")  # fmt: skip
    else:
        least = draft.number(threshold, 0.0) if threshold else 0.0
        draft.carry(key, "run.early_stopping", {"patience": draft.whole(key), "min_delta": least})
        metric = draft.get("metric_for_best_model")
        if metric not in (None, "loss", "eval_loss"):
            draft.differs(key, f"{metric} decides; in the recipe the held-out loss")
