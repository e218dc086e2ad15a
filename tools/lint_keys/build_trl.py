"""Keys of TRL's command line scripts and of their `--config` files: one section per script."""

from __future__ import annotations

from tools.lint_keys.build import Table, from_dataclass

SCRIPTS = ("dpo", "grpo", "kto", "reward", "rloo", "sft")


def read() -> Table:
    """Each script's own config, without what TrainingArguments has, and the two that all of them take."""
    import trl
    from transformers import TrainingArguments
    from trl.scripts import grpo, rloo
    from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments

    base = from_dataclass(TrainingArguments)
    sections: Table = {}
    for name in SCRIPTS:
        own = from_dataclass(getattr(trl, "RewardConfig" if name == "reward" else f"{name.upper()}Config"))
        sections[name] = {key: entry for key, entry in own.items() if base.get(key) != entry}
    sections["grpo"] |= _more(grpo.GRPOScriptArguments, ScriptArguments)
    sections["rloo"] |= _more(rloo.RLOOScriptArguments, ScriptArguments)
    sections["script"] = from_dataclass(ScriptArguments) | from_dataclass(DatasetMixtureConfig)
    sections["model"] = from_dataclass(trl.ModelConfig)
    return sections


def _more(cls: type, base: type) -> dict[str, dict[str, object]]:
    shared = from_dataclass(base)
    return {key: entry for key, entry in from_dataclass(cls).items() if key not in shared}
