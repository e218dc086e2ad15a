"""TR10x: arguments of TRL's scripts and of their `--config` files."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import TRL_CONFIGS, LintContext, number, true
from toolkit.linting.edits import remove, rename
from toolkit.linting.files.kinds import known_to_scripts
from toolkit.linting.installed import installed_before
from toolkit.linting.model import Diagnostic, Files, Setting, Severity
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_PARSER = (
    "trl 1.16.0 scripts/utils.py:TrlParser.parse_args_and_config (ValueError: «Unknown arguments from config file»)"
)
_GRPO = "trl 1.16.0 trainer/grpo_config.py:GRPOConfig.__post_init__ (ValueError)"
# What takes the place of a removed argument: a key (renamed), or a sentence.
_INSTEAD: dict[str, tuple[str | None, str]] = {
    "torch_dtype": ("dtype", "renamed to dtype"),
    "max_seq_length": ("max_length", "renamed to max_length"),
    "use_liger": ("use_liger_kernel", "use use_liger_kernel"),
    "use_liger_loss": ("use_liger_kernel", "use use_liger_kernel"),
    "gradient_checkpointing_use_reentrant": (None, "use gradient_checkpointing_kwargs"),
    "max_prompt_length": (None, "prompts are not cut any more: filter long ones out of the data"),
    "dataset_batch_size": (None, "removed without a replacement"),
    "trust_remote_code": (None, "removed from the scripts' arguments"),
}


def _trl(*lines: str) -> Files:
    return {"sft.yaml": "\n".join(("model_name_or_path: m", "dataset_name: d", "output_dir: out", *lines)) + "\n"}


def _current() -> set[str]:
    """Everything that one of the scripts of the newest known TRL reads."""
    sections = (*TRL_CONFIGS, "script", "model")
    return {key for section in sections for key in keys.section("trl", section)} | set(keys.section("transformers", ""))


def _script(context: LintContext) -> str | None:
    """The script, where its own arguments show it: grpo has num_generations."""
    written = set(context.args.section("")) | set(context.args.unknown)
    own = {
        name: set(keys.section("trl", name)) - {k for o in TRL_CONFIGS if o != name for k in keys.section("trl", o)}
        for name in TRL_CONFIGS
    }
    # rloo and grpo share most of theirs, and the checks below are the same in both.
    generating = (set(keys.section("trl", "grpo")) & set(keys.section("trl", "rloo"))) - set(keys.section("trl", "sft"))
    marks = {name: len(written & names) for name, names in own.items()}
    marks["grpo"] += len(written & (generating - set(keys.section("trl", "dpo")) - set(keys.section("trl", "kto"))))
    best = max(marks, key=lambda name: marks[name])
    return best if marks[best] else None


@rule(
    "TR101",
    "error",
    source=_PARSER + "; the configs of trl 0.8 to 1.16, compared (toolkit/linting/keys/history.json)",
    fails=_trl("torch_dtype: bfloat16"),
    passes=_trl("dtype: bfloat16"),
)
def gone(context: LintContext) -> Iterator[Diagnostic]:
    """An argument that this TRL no longer has: its parser rejects it.

    Nothing is reported where the installed TRL still has it.
    """
    if context.args.tool != "trl":
        return
    for key, entry in context.args.section("").items():
        if key in _current():
            continue
        for section in ("model", "script", *TRL_CONFIGS):
            last, without = keys.gone("trl", section).get(key, ("", ""))
            if not last or installed_before("trl", without):
                continue
            setting = Setting(context.args, key, entry)
            new, sentence = _INSTEAD.get(key, (None, "removed without a replacement"))
            fix = rename(setting, new) if new else None
            message = f"{key} was removed from TRL ({last} has it, {without} does not): {sentence}"
            yield Diagnostic(setting, message, fix)
            break


@rule(
    "TR102",
    "error",
    source=_PARSER,
    fails=_trl("assistant_only_los: true"),
    passes=_trl("assistant_only_loss: true"),
)
def misspelt(context: LintContext) -> Iterator[Diagnostic]:
    """An argument of TRL's scripts is misspelt.

    Only names close to a known one are reported: your script may define arguments of its own.
    """
    if context.args.tool != "trl":
        return
    for key, entry in context.args.section("").items():
        if key in known_to_scripts() or key.startswith("_"):
            continue
        near = nearest(key, _current(), 0.88)
        if near and near not in context.args.section("") and near not in keys.section("transformers", ""):
            setting = Setting(context.args, key, entry)
            yield Diagnostic(setting, f'no argument "{key}"{meant(near)}', rename(setting, near))


def _whole(context: LintContext, key: str, default: int | None) -> int | None:
    """An argument of the batch; None if it is not known."""
    if context.args.unsure(key):
        return None
    value = context.args.get(key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@rule(
    "TR103",
    "error",
    source=_GRPO,
    fails=_trl("num_generations: 8", "per_device_train_batch_size: 2"),
    passes=_trl("num_generations: 8", "per_device_train_batch_size: 8"),
)
def groups_that_do_not_fit(context: LintContext) -> Iterator[Diagnostic]:
    """GRPO's generation batch is not a multiple of num_generations.

    Each prompt has num_generations completions, and a batch holds whole groups. The generation batch is
    generation_batch_size, or processes x per_device_train_batch_size x steps_per_generation (by default
    gradient_accumulation_steps). Without a number of processes the finding is a warning: another number may fit.
    """
    if context.args.tool != "trl" or _script(context) not in ("grpo", "rloo"):
        return
    group = context.arg("num_generations")
    if group is None or not isinstance(group.value, int) or group.value < 2:
        return
    given = context.arg("generation_batch_size")
    micro = _whole(context, "per_device_train_batch_size", 8)
    steps = _whole(context, "steps_per_generation", _whole(context, "gradient_accumulation_steps", 1))
    if given is not None and isinstance(given.value, int):
        if given.value % group.value:
            shown = f"generation_batch_size {given.value} is not a multiple of num_generations {group.value}"
            yield Diagnostic(given, f"{shown}: TRL rejects this")
        elif micro and given.value % micro:
            yield Diagnostic(
                given,
                f"generation_batch_size {given.value} is not a multiple of per_device_train_batch_size {micro}: "
                "TRL rejects this",
            )
    elif micro and steps:
        count = context.processes
        total = micro * steps * (count.value if count is not None else 1)
        if total % group.value:
            shown = f"{micro} per device x {steps} steps" + (f" x {count.value} processes" if count is not None else "")
            severity: Severity | None = None if count is not None else "warning"
            yield Diagnostic(
                group, f"{shown} = {total} completions are not whole groups of {group.value}: TRL rejects this",
                severity=severity,
            )  # fmt: skip


@rule(
    "TR104",
    "error",
    source=_GRPO,
    fails=_trl("num_generations: 4", "generation_batch_size: 8", "steps_per_generation: 2"),
    passes=_trl("num_generations: 4", "generation_batch_size: 8"),
)
def two_generation_batches(context: LintContext) -> Iterator[Diagnostic]:
    """GRPO's generation_batch_size and steps_per_generation are both set."""
    one, other = context.arg("generation_batch_size"), context.arg("steps_per_generation")
    if context.args.tool == "trl" and one is not None and other is not None and None not in (one.value, other.value):
        yield Diagnostic(one, f"steps_per_generation is {other.value}: TRL accepts only one of the two")


@rule(
    "TR105",
    "error",
    source=_GRPO,
    fails=_trl("num_generations: 1"),
    passes=_trl("num_generations: 2"),
)
def group_of_one(context: LintContext) -> Iterator[Diagnostic]:
    """num_generations below 2: a group of one has no advantage over itself."""
    setting = context.arg("num_generations")
    if context.args.tool == "trl" and setting is not None and number(setting.value) and setting.value < 2:
        yield Diagnostic(setting, f"num_generations {setting.value}: TRL needs at least 2")


@rule(
    "TR106",
    "error",
    source=_GRPO,
    fails=_trl("num_generations: 4", "auto_find_batch_size: true"),
    passes=_trl("num_generations: 4", "auto_find_batch_size: false"),
)
def finding_the_batch_size(context: LintContext) -> Iterator[Diagnostic]:
    """auto_find_batch_size under GRPO: a smaller batch would no longer hold whole groups."""
    setting = context.arg("auto_find_batch_size")
    if context.args.tool == "trl" and setting is not None and true(setting.value) and _script(context) == "grpo":
        yield Diagnostic(setting, "TRL rejects auto_find_batch_size in GRPO", remove(setting))
