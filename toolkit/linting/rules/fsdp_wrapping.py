"""FS41x: wrapping, state-dict types and prefetching."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext
from toolkit.linting.edits import set_value
from toolkit.linting.examples import fsdp, fsdp1, fsdp2
from toolkit.linting.model import Diagnostic
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_PLUGIN = "accelerate 1.15.0 utils/dataclasses.py:FullyShardedDataParallelPlugin.__post_init__"
_STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")


@rule(
    "FS412",
    "error",
    source=_PLUGIN + ' (`split(",")`, nothing is stripped)',
    fails=fsdp2("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, MistralDecoderLayer"),
    passes=fsdp2("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,MistralDecoderLayer"),
)
def class_list(context: LintContext) -> Iterator[Diagnostic]:
    """Layer classes with spaces between them, or as a YAML list.

    accelerate splits the text at commas and keeps the spaces, and it turns a list into its Python text:
    neither names a class of the model, and wrapping fails after the model is loaded.
    """
    setting = context.acc("fsdp_config.fsdp_transformer_layer_cls_to_wrap")
    if setting is None or context.trainer_fsdp:
        return
    value = setting.value
    names = value if isinstance(value, list) else str(value).split(",")
    if isinstance(value, list) or any(name != name.strip() for name in names):
        joined = ",".join(str(name).strip() for name in names)
        yield Diagnostic(
            setting,
            f"accelerate splits the text at commas and keeps spaces: write {joined}",
            set_value(setting, joined),
        )


@rule(
    "FS413",
    "warning",
    source="accelerate 1.15.0 dataclasses.py:set_auto_wrap_policy (ValueError after load); "
    "_no_split_modules in transformers models/",
    fails=fsdp2("fsdp_transformer_layer_cls_to_wrap: LlamaDecodeLayer"),
    passes=fsdp2("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer"),
)
def unknown_layer_class(context: LintContext) -> Iterator[Diagnostic]:
    """A layer class that no model of transformers names.

    The class must be one of the model's own, or wrapping fails after the model is loaded. Left out,
    accelerate takes the model's `_no_split_modules`. Classes of your own code are not known here.
    """
    setting = context.fsdp("transformer_layer_cls_to_wrap")
    known = keys.section("transformers", "layer_classes")
    if setting is None or not setting.value:
        return
    names = setting.value if isinstance(setting.value, list) else str(setting.value).split(",")
    for name in (str(name).strip() for name in names):
        if name and name not in known:
            yield Diagnostic(
                setting,
                f"no model of transformers {keys.versions('transformers')[-1]} has a layer "
                f"class {name}{meant(nearest(name, known))}",
            )


@rule(
    "FS414",
    "warning",
    source=_PLUGIN + " (each policy reads its own key)",
    fails=fsdp2("fsdp_min_num_params: 1000000"),
    passes=fsdp("fsdp_version: 2", "fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "fsdp_min_num_params: 1000000"),
)
def key_of_another_policy(context: LintContext) -> Iterator[Diagnostic]:
    """A wrapping key that this wrap policy does not read."""
    policy = context.fsdp("auto_wrap_policy")
    name = (
        str(policy.value).upper()
        if policy is not None
        else ("TRANSFORMER_BASED_WRAP" if context.trainer_fsdp else "NO_WRAP")
    )
    for key, owner in (
        ("min_num_params", "SIZE_BASED_WRAP"),
        ("transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"),
    ):
        setting = context.fsdp(key)
        if setting and setting.value and context.uses == "fsdp" and name != owner:
            yield Diagnostic(setting, f"{setting.name} has no effect: the wrap policy is {name}, not {owner}")


@rule(
    "FS415",
    "error",
    source=_PLUGIN + ": set_state_dict_type (KeyError, ValueError)",
    fails=fsdp(
        "fsdp_version: 2",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type: LOCAL_STATE_DICT",
    ),
    passes=fsdp2(),
)
def state_dict_type(context: LintContext) -> Iterator[Diagnostic]:
    """A state-dict type that does not exist, or LOCAL_STATE_DICT under FSDP2."""
    setting = context.fsdp("state_dict_type")
    if setting is None or setting.value is None or context.uses != "fsdp":
        return
    value = str(setting.value).upper()
    if value not in _STATES and value not in ("1", "2", "3"):
        near = nearest(value, _STATES, 0.6)
        yield Diagnostic(
            setting,
            f"{setting.value!r} is not {', '.join(_STATES)}{meant(near)}",
            set_value(setting, near) if near else None,
        )
    elif context.fsdp_version == 2 and value in ("LOCAL_STATE_DICT", "2"):
        yield Diagnostic(setting, "FSDP2 has no LOCAL_STATE_DICT: sharded or full")


@rule(
    "FS416",
    "error",
    source=_PLUGIN + " (KeyError)",
    fails=fsdp1("fsdp_backward_prefetch: PRE"),
    passes=fsdp1("fsdp_backward_prefetch: BACKWARD_PRE"),
)
def prefetch_choice(context: LintContext) -> Iterator[Diagnostic]:
    """A backward prefetch that does not exist."""
    setting = context.fsdp("backward_prefetch")
    choices = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
    if setting and setting.value is not None and context.uses == "fsdp":
        value = str(setting.value).upper()
        if value not in choices and value not in ("1", "2"):
            near = nearest(value, choices, 0.5)
            yield Diagnostic(setting, f"{setting.value!r} is not {', '.join(choices)}{meant(near)}")
