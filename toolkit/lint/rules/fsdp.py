"""FS4xx: fully sharded data parallel, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.lint import keys
from toolkit.lint.edits import add, both, remove, rename, set_value
from toolkit.lint.examples import args, fsdp, fsdp1, fsdp2, lora
from toolkit.lint.model import Said, Setting
from toolkit.lint.near import meant, nearest
from toolkit.lint.registry import rule
from toolkit.lint.world import World, true

_PLUGIN = "accelerate 1.15.0 utils/dataclasses.py:FullyShardedDataParallelPlugin.__post_init__"
_ONLY_1 = (
    "backward_prefetch",
    "forward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "sharding_strategy",
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")


def _yaml(world: World) -> bool:
    """Whether accelerate's own plugin reads FSDP from the accelerate config."""
    return world.distributed_type == "FSDP" and not world.trainer_fsdp


def _strategy(setting: Setting | None) -> str | None:
    if setting is None:
        return None
    value = str(setting.value).upper()
    return _STRATEGIES[int(value) - 1] if value in ("1", "2", "3", "4", "5") else value


@rule(
    "FS401",
    "warning",
    source=_PLUGIN + ' (FSDP_AUTO_WRAP_POLICY defaults to "NO_WRAP")',
    fails=fsdp("fsdp_version: 2", "fsdp_state_dict_type: FULL_STATE_DICT"),
    passes=fsdp2(),
)
def no_wrap_policy(world: World) -> Iterator[Said]:
    """No wrap policy: the whole model is one FSDP unit.

    accelerate's default is no wrapping: every forward gathers the entire model at once, and sharding saves little.
    FSDP from the training arguments wraps transformer layers by default.
    """
    policy = world.acc("fsdp_config.fsdp_auto_wrap_policy")
    if not _yaml(world):
        return
    if policy is None:
        fix = add(world.accelerate, "fsdp_config", "fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        message = "fsdp_auto_wrap_policy is not written: accelerate wraps nothing, the model is one unit"
        yield world.at_file(world.accelerate, message, "fsdp_config.fsdp_auto_wrap_policy", fix=fix)
    elif str(policy.value).upper() == "NO_WRAP":
        yield Said(
            policy, "NO_WRAP makes the model one unit: each forward gathers all of it", severity="note"
        )


@rule(
    "FS402",
    "warning",
    source=_PLUGIN + " (1); transformers 5.23.0 training_args.py:_process_fsdp_args (2)",
    fails=fsdp("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type: FULL_STATE_DICT"),
    passes=fsdp2(),
)
def no_version(world: World) -> Iterator[Said]:
    """fsdp_version is not written: accelerate runs FSDP1, transformers 5.23 FSDP2.

    The fix writes down the version that runs today. Where keys of version 1 stand beside it, this is a note.
    """
    if _yaml(world) and world.fsdp("version") is None:
        of_one = any(world.fsdp(name) is not None for name in _ONLY_1)
        fix = add(world.accelerate, "fsdp_config", "fsdp_version", 1)
        message = "fsdp_version is not written: accelerate runs FSDP1 (the Trainer's own default is 2)"
        severity = "note" if of_one else None
        yield world.at_file(world.accelerate, message, "fsdp_config.fsdp_version", fix=fix, severity=severity)
    elif world.trainer_fsdp and world.fsdp("version") is None:
        yield Said(
            world.arg("fsdp"), "fsdp_config.version is not written: the Trainer runs FSDP2", severity="note"
        )


@rule(
    "FS403",
    "warning",
    source=_PLUGIN + ": set_state_dict_type",
    fails=fsdp("fsdp_version: 2", "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
    passes=fsdp2(),
)
def no_state_dict_type(world: World) -> Iterator[Said]:
    """fsdp_state_dict_type is not written: full under version 1, sharded under version 2.

    A sharded checkpoint has no file that from_pretrained loads: `accelerate merge-weights` makes one. Under
    the Trainer's own FSDP the default is full.
    """
    if _yaml(world) and world.fsdp("state_dict_type") is None:
        runs = "FULL_STATE_DICT" if world.fsdp_version == 1 else "SHARDED_STATE_DICT"
        fix = add(world.accelerate, "fsdp_config", "fsdp_state_dict_type", runs)
        message = f"fsdp_state_dict_type is not written: version {world.fsdp_version} saves {runs}"
        yield world.at_file(world.accelerate, message, "fsdp_config.fsdp_state_dict_type", fix=fix)


@rule(
    "FS404",
    "error",
    source=_PLUGIN
    + " (version 2 takes true or false); accelerate commands/to_fsdp2.py:ARGUMENT_VALUE_MAPPING",
    fails=fsdp2("fsdp_sharding_strategy: HYBRID_SHARD"),
    passes=fsdp2("fsdp_reshard_after_forward: true"),
)
def strategy_under_2(world: World) -> Iterator[Said]:
    """A sharding strategy of version 1 under FSDP2.

    fsdp_sharding_strategy is not read there, so HYBRID_SHARD, NO_SHARD and SHARD_GRAD_OP become full sharding
    without a word; accelerate's own converter does the same. Hybrid sharding in version 2 is
    parallelism_config with dp_replicate_size and dp_shard_size.
    """
    if world.fsdp_version != 2 or world.uses != "fsdp":
        return
    strategy = world.fsdp("sharding_strategy")
    name = _strategy(strategy)
    if (
        strategy is not None
        and name not in (None, "FULL_SHARD")
        and world.fsdp("reshard_after_forward") is None
    ):
        fix = None
        if name == "SHARD_GRAD_OP" and _yaml(world):
            fix = both(rename(strategy, "fsdp_reshard_after_forward"), set_value(strategy, False))
        advice = (
            "; use parallelism_config's dp_replicate_size and dp_shard_size"
            if name.startswith("HYBRID")
            else ""
        )
        yield Said(strategy, f"{name} is not read under FSDP2: the model is fully sharded{advice}", fix)
    reshard = world.fsdp("reshard_after_forward")
    if reshard is not None and str(reshard.value).upper() in _STRATEGIES:
        value = str(reshard.value).upper()
        fix = set_value(reshard, value == "FULL_SHARD") if value in ("FULL_SHARD", "SHARD_GRAD_OP") else None
        yield Said(
            reshard,
            f"{reshard.value} is a strategy of version 1: FSDP2 takes true or false and fails on it",
            fix,
        )


@rule(
    "FS405",
    "error",
    source=_PLUGIN + " (sharding_strategy is set from FSDP_SHARDING_STRATEGY first); accelerator.py:1947",
    fails=fsdp1("fsdp_reshard_after_forward: SHARD_GRAD_OP"),
    passes=fsdp1("fsdp_sharding_strategy: SHARD_GRAD_OP"),
)
def reshard_under_1(world: World) -> Iterator[Said]:
    """reshard_after_forward under FSDP1 is never used.

    The plugin takes sharding_strategy, which the environment always sets (FULL_SHARD where nothing is written),
    and looks at reshard_after_forward only where that is missing. Under the Trainer it is the same.
    """
    if world.fsdp_version != 1 or world.uses != "fsdp":
        return
    reshard, strategy = world.fsdp("reshard_after_forward"), world.acc("fsdp_config.fsdp_sharding_strategy")
    runs = _strategy(strategy) or "FULL_SHARD"
    asked = _strategy(reshard)
    if reshard is None or asked == runs or (asked == "TRUE" and runs == "FULL_SHARD"):
        return
    fix = None
    if strategy is None and asked in _STRATEGIES and _yaml(world):
        fix = rename(reshard, "fsdp_sharding_strategy")
    yield Said(reshard, f"{reshard.value} has no effect under FSDP1: the run uses {runs}", fix)


@rule(
    "FS406",
    "warning",
    source=_PLUGIN + " (version 2 ignores them)",
    fails=fsdp2("fsdp_use_orig_params: false"),
    passes=fsdp2(),
)
def keys_of_version_1(world: World) -> Iterator[Said]:
    """Keys of FSDP1 under version 2: they have no effect."""
    if world.fsdp_version != 2 or world.uses != "fsdp":
        return
    for name in _ONLY_1:
        setting = world.fsdp(name)
        if setting is None or (name == "sharding_strategy" and _strategy(setting) != "FULL_SHARD"):
            continue
        if name == "sync_module_states" and setting.value is False:
            continue  # FS407: it stops the launcher
        if str(setting.value).upper() not in ("NONE", "NO_PREFETCH"):
            yield Said(setting, f"{setting.name} has no effect under FSDP2", remove(setting))


@rule(
    "FS407",
    "error",
    source="accelerate 1.15.0 utils/launch.py:prepare_multi_gpu_env (ValueError)",
    fails=fsdp1("fsdp_cpu_ram_efficient_loading: true", "fsdp_sync_module_states: false"),
    passes=fsdp1("fsdp_cpu_ram_efficient_loading: true", "fsdp_sync_module_states: true"),
)
def loading_without_sync(world: World) -> Iterator[Said]:
    """cpu_ram_efficient_loading without sync_module_states.

    Only rank 0 loads the weights then, and the others train from garbage unless the states are synchronised.
    accelerate launch refuses the pair (cpu_ram_efficient_loading is true by default); plugins made in code or
    through quoted text are switched to true with a warning.
    """
    sync, loading = world.fsdp("sync_module_states"), world.fsdp("cpu_ram_efficient_loading")
    if sync is None or true(sync.value) or world.uses != "fsdp":
        return
    loads = true(loading.value) if loading is not None else not world.trainer_fsdp
    if loads and not (world.trainer_fsdp and world.fsdp_version == 2):
        fix = set_value(sync, True) if world.fsdp_version == 1 else remove(sync)
        loaded = "is true" if loading is not None else "is true by default"
        yield Said(
            sync,
            f"sync_module_states is false while cpu_ram_efficient_loading {loaded}: only "
            "rank 0 would have the weights",
            fix,
        )


@rule(
    "FS408",
    "error",
    source="torch distributed/fsdp/_flat_param.py («Must flatten tensors with uniform dtype/requires_grad»)",
    fails=fsdp1("fsdp_use_orig_params: false") | lora(),
    passes=fsdp1("fsdp_use_orig_params: true") | lora(),
)
def orig_params_and_lora(world: World) -> Iterator[Said]:
    """use_orig_params: false with LoRA under FSDP1.

    A unit that mixes frozen and trained weights cannot be flattened uniformly: it is refused, or frozen weights
    get gradients. PEFT's page shows false (with a wrap policy of its own), TRL's files true.
    """
    setting = world.fsdp("use_orig_params")
    if setting and not true(setting.value) and world.fsdp_version == 1 and world.uses == "fsdp":
        if world.lora:
            yield Said(
                setting,
                "use_orig_params false with LoRA: frozen and trained weights cannot share a unit",
                set_value(setting, True),
            )
        else:
            yield Said(
                setting,
                "use_orig_params false: with LoRA or frozen weights FSDP1 would refuse its units",
                severity="note",
            )


@rule(
    "FS409",
    "error",
    source="torch distributed/fsdp/_flat_param.py:_validate_tensors_to_flatten («uniform "
    "dtype»); peft autocast_adapter_dtype",
    fails=fsdp1() | lora() | args(torch_dtype="bfloat16", bf16=True),
    passes=fsdp2() | lora() | args(torch_dtype="bfloat16", bf16=True),
)
def adapters_in_fp32(world: World) -> Iterator[Said]:
    """16-bit base weights and fp32 adapters in one FSDP1 unit.

    PEFT keeps the adapters of a 16-bit model in fp32 (autocast_adapter_dtype), and FSDP1 flattens a unit only
    where all its tensors have one dtype. FSDP2 shards each tensor on its own.
    """
    if world.fsdp_version != 1 or world.uses != "fsdp" or not world.lora:
        return
    for key in ("torch_dtype", "dtype", "model_dtype"):
        setting = world.arg(key)
        if setting and str(setting.value) in ("bfloat16", "float16", "bf16", "fp16"):
            yield Said(
                setting,
                f"{setting.value} base weights and fp32 adapters cannot share an FSDP1 unit; "
                "use FSDP2 or load the base in float32",
            )


@rule(
    "FS410",
    "error",
    source="accelerate 1.15.0 utils/fsdp_utils.py:722 (checkpoint_wrapper with preserve_rng_state=False)",
    fails=fsdp2("fsdp_activation_checkpointing: true") | lora(lora_dropout=0.1),
    passes=fsdp2("fsdp_activation_checkpointing: true") | lora(lora_dropout=0.0),
)
def checkpointing_and_dropout(world: World) -> Iterator[Said]:
    """FSDP2's activation checkpointing with dropout: the gradients are wrong.

    accelerate 1.15 recomputes without restoring the random state, so the second pass draws other dropout masks:
    gradients are about 43 % off while the loss agrees to six digits. A note where no dropout is in sight.
    """
    setting = world.fsdp("activation_checkpointing")
    if setting is None or not true(setting.value) or world.fsdp_version != 2 or world.uses != "fsdp":
        return
    dropout = world.lora_dropout
    for key in ("attention_dropout", "dropout", "hidden_dropout"):
        found = world.arg(key)
        dropout = dropout or (found if found and isinstance(found.value, float) and found.value > 0 else None)
    if dropout is not None:
        yield Said(
            setting,
            f"recomputation draws new dropout masks: with {dropout.name} {dropout.value} "
            "the gradients are wrong",
        )
    elif world.lora_key("lora_dropout") is None and world.arg("lora_dropout") is None:
        yield Said(
            setting, "right only without dropout: recomputation draws new dropout masks", severity="note"
        )


@rule(
    "FS411",
    "error",
    source=_PLUGIN + " (ValueError)",
    fails=fsdp2("fsdp_activation_checkpointing_offload: true"),
    passes=fsdp2("fsdp_activation_checkpointing_offload: true", "fsdp_activation_checkpointing: true"),
)
def offload_of_no_checkpoints(world: World) -> Iterator[Said]:
    """Offloaded activation checkpoints without checkpointing, or under FSDP1."""
    setting = world.acc("fsdp_config.fsdp_activation_checkpointing_offload")
    if setting is None or not true(setting.value) or not _yaml(world):
        return
    checkpointing = world.acc("fsdp_config.fsdp_activation_checkpointing")
    if checkpointing is None or not true(checkpointing.value):
        yield Said(setting, "activation_checkpointing_offload requires activation_checkpointing")
    elif world.fsdp_version != 2:
        yield Said(setting, "activation_checkpointing_offload requires fsdp_version 2")


@rule(
    "FS412",
    "error",
    source=_PLUGIN + ' (`split(",")`, nothing is stripped)',
    fails=fsdp2("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, MistralDecoderLayer"),
    passes=fsdp2("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,MistralDecoderLayer"),
)
def class_list(world: World) -> Iterator[Said]:
    """Layer classes with spaces between them, or as a YAML list.

    accelerate splits the text at commas and keeps the spaces, and it turns a list into its Python text: neither
    names a class of the model, and wrapping fails after the model is loaded.
    """
    setting = world.acc("fsdp_config.fsdp_transformer_layer_cls_to_wrap")
    if setting is None or world.trainer_fsdp:
        return
    value = setting.value
    names = value if isinstance(value, list) else str(value).split(",")
    if isinstance(value, list) or any(name != name.strip() for name in names):
        joined = ",".join(str(name).strip() for name in names)
        yield Said(
            setting,
            f"accelerate takes the text apart at commas and strips nothing: write {joined}",
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
def unknown_layer_class(world: World) -> Iterator[Said]:
    """A layer class that no model of transformers names.

    The class must be one of the model's own, or wrapping fails after the model is loaded. Left out, accelerate
    takes the model's `_no_split_modules`. Classes of your own code are not known here.
    """
    setting = world.fsdp("transformer_layer_cls_to_wrap")
    known = keys.section("transformers", "layer_classes")
    if setting is None or not setting.value:
        return
    names = setting.value if isinstance(setting.value, list) else str(setting.value).split(",")
    for name in (str(name).strip() for name in names):
        if name and name not in known:
            yield Said(
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
def key_of_another_policy(world: World) -> Iterator[Said]:
    """A wrapping key that this wrap policy does not read."""
    policy = world.fsdp("auto_wrap_policy")
    name = (
        str(policy.value).upper()
        if policy is not None
        else ("TRANSFORMER_BASED_WRAP" if world.trainer_fsdp else "NO_WRAP")
    )
    for key, owner in (
        ("min_num_params", "SIZE_BASED_WRAP"),
        ("transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"),
    ):
        setting = world.fsdp(key)
        if setting and setting.value and world.uses == "fsdp" and name != owner:
            yield Said(setting, f"{setting.name} has no effect: the wrap policy is {name}, not {owner}")


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
def state_dict_type(world: World) -> Iterator[Said]:
    """A state-dict type that does not exist, or LOCAL_STATE_DICT under FSDP2."""
    setting = world.fsdp("state_dict_type")
    if setting is None or setting.value is None or world.uses != "fsdp":
        return
    value = str(setting.value).upper()
    if value not in _STATES and value not in ("1", "2", "3"):
        near = nearest(value, _STATES, 0.6)
        yield Said(
            setting,
            f"{setting.value!r} is not {', '.join(_STATES)}{meant(near)}",
            set_value(setting, near) if near else None,
        )
    elif world.fsdp_version == 2 and value in ("LOCAL_STATE_DICT", "2"):
        yield Said(setting, "FSDP2 has no LOCAL_STATE_DICT: sharded or full")


@rule(
    "FS416",
    "error",
    source=_PLUGIN + " (KeyError)",
    fails=fsdp1("fsdp_backward_prefetch: PRE"),
    passes=fsdp1("fsdp_backward_prefetch: BACKWARD_PRE"),
)
def prefetch_choice(world: World) -> Iterator[Said]:
    """A backward prefetch that does not exist."""
    setting = world.fsdp("backward_prefetch")
    choices = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
    if setting and setting.value is not None and world.uses == "fsdp":
        value = str(setting.value).upper()
        if value not in choices and value not in ("1", "2"):
            near = nearest(value, choices, 0.5)
            yield Said(setting, f"{setting.value!r} is not {', '.join(choices)}{meant(near)}")
