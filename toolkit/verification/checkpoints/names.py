"""Canonical names: a parameter's own name, without what wrappers put around it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from toolkit.verification.checkpoints.contents import Checkpoint

# A part of a name, and what puts it there.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP1",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "base_layer": "PEFT",
}
_ADAPTER_PARTS = (
    "lora_", "modules_to_save", "ia3_", "vera_", "oft_", "boft_", "hada_", "lokr_", "token_adapter", "beft_", "c3a_",
    "deft_", "delora_", "fourierft_", "frod_", "glora_", "gralora_", "hira_", "hra_", "lily_", "ln_tuning_", "miss_",
    "osf_", "peanut_", "prompt_encoder", "psoft_", "pvera_", "randlora_", "road_", "shira_", "supertuning_",
    "tinylora_", "trainable_tokens_", "unilora_", "vblora_", "waveft_",
)  # fmt: skip


def canonical(names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """New names by old, and the renamings that were applied.

    ``module.`` (DDP, DeepSpeed) is removed where every name begins with it, ``base_model.model.`` and the adapter's
    name (``default``) where PEFT added them.
    """
    names = list(names)
    rules: dict[str, None] = {}
    found = {}
    ddp = bool(names) and all(name.startswith("module.") for name in names)
    for name in names:
        parts = name.split(".")
        if ddp:
            rules["module. removed"] = None
            while len(parts) > 1 and parts[0] == "module":
                parts = parts[1:]
        for wrapper, origin in _WRAPPERS.items():
            if wrapper in parts and len(parts) > 1:
                rules[f"{wrapper}. removed ({origin})"] = None
                parts = [part for part in parts if part != wrapper]
        if parts[:2] == ["base_model", "model"]:
            rules["base_model.model. removed (PEFT)"] = None
            parts = parts[2:]
        parts = _without_adapter_name(parts, rules)
        found[name] = ".".join(parts)
    return found, tuple(rules)


def _without_adapter_name(parts: list[str], rules: dict[str, None]) -> list[str]:
    kept: list[str] = []
    for at, part in enumerate(parts):
        after_adapter = at > 0 and parts[at - 1].startswith(_ADAPTER_PARTS)
        if after_adapter and part not in ("weight", "bias") and (at + 1 < len(parts) or part == "default"):
            rules[f".{part} removed (PEFT's adapter name)"] = None
            continue
        kept.append(part)
    if "modules_to_save" in kept:
        rules["modules_to_save. removed (PEFT)"] = None
        kept = [part for part in kept if part != "modules_to_save"]
    return kept


def with_canonical_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under canonical names. PEFT's frozen copies of trained modules (``original_module``) are left
    out."""
    originals = [name for name in checkpoint.weights if ".original_module." in name]
    kept = replace(checkpoint, weights={n: t for n, t in checkpoint.weights.items() if n not in originals})
    names = {*kept.weights, *kept.decay, *kept.order, *(name for one in kept.moments.values() for name in one)}
    found, rules = canonical(sorted(names))
    return kept.renaming(found, rules) if rules else kept


def with_common_prefix(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Remove a leading part (``model.``) that one side has before its names and the other has not, where more names
    agree then."""

    def shared(left: Checkpoint, right: Checkpoint) -> int:
        return len(left.weights.keys() & right.weights.keys())

    for _ in range(2):
        best = (shared(a, b), a, b)
        for swap in (False, True):
            one, other = (b, a) if swap else (a, b)
            for first in sorted({name.split(".")[0] for name in one.weights if "." in name}):
                stripped = _without_first(one, first)
                if (count := shared(stripped, other)) > best[0]:
                    best = (count, other, stripped) if swap else (count, stripped, other)
        if best[1] is a and best[2] is b:
            break
        _, a, b = best
    return a, b


def _without_first(checkpoint: Checkpoint, first: str) -> Checkpoint:
    names = {*checkpoint.weights, *(name for one in checkpoint.moments.values() for name in one)}
    new = {name: name.removeprefix(f"{first}.") for name in names}
    if len(set(new.values())) < len(new):
        return checkpoint
    return checkpoint.renaming(new, [f"{first}. removed (the other side has none)"])
