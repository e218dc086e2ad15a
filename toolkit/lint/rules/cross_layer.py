"""XL2xx: one setting in two layers, with two values."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.lint.edits import add, remove, set_value
from toolkit.lint.examples import acc, args, ds, fsdp2, multi_gpu, zero
from toolkit.lint.model import Said, Setting
from toolkit.lint.registry import rule
from toolkit.lint.world import World, number, same, true

_TRAINER = "transformers 5.23.0 integrations/deepspeed.py:trainer_config_process (ValueError in trainer_config_finalize)"
_PLUGIN_CHECK = "accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin._deepspeed_config_checks (ValueError)"
_FILE = ("deepspeed_config_file: ds.json",)


def _there(setting: Setting) -> str:
    return f"{setting.value} in {setting.place.file}:{setting.place.line}"


def _argument(world: World, key: str, default: object) -> tuple[object, str]:
    """A training argument's value and where it is from; its default counts, for the Trainer compares that."""
    setting = world.arg(key)
    if setting is not None and setting.value is not None:
        return setting.value, _there(setting)
    return default, f"{default} by default in the training arguments"


def _trainer(world: World) -> bool:
    return "args" in world.kinds and world.reader == "trainer"


@rule(
    "XL201",
    "error",
    source="transformers 5.23.0 training_args.py:__post_init__ (step 5, mixed precision)",
    fails=multi_gpu() | args(bf16=False),
    passes=multi_gpu() | args(bf16=True),
)
def precision_of_yaml_and_arguments(world: World) -> Iterator[Said]:
    """The accelerate config and the training arguments differ in mixed precision.

    A true argument wins over the accelerate config; a false one does not, and the accelerate config wins.
    """
    launch = world.precision
    if launch is None or not _trainer(world):
        return
    there = str(launch.value).lower() if launch.value is not False else "no"
    for name in ("bf16", "fp16"):
        setting = world.arg(name)
        if setting is None or not isinstance(setting.value, bool):
            continue
        if setting.value and there != name and there in ("bf16", "fp16", "no"):
            yield Said(
                setting,
                f"{name} wins over mixed_precision {there} in {launch.place.file}:{launch.place.line}",
            )
        elif not setting.value and there == name:
            yield Said(
                setting, f"{name} is false here and runs all the same: mixed_precision {there} in "
                f"{launch.place.file}:{launch.place.line} wins", set_value(setting, True),
            )  # fmt: skip


@rule(
    "XL202",
    "error",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.set_mixed_precision",
    fails=zero(*_FILE, top=())
    | ds(fp16={"enabled": True})
    | {"launch.sh": "accelerate launch --config_file accelerate.yaml --mixed_precision bf16 train.py\n"},
    passes=zero(*_FILE, top=())
    | ds(bf16={"enabled": "auto"})
    | {"launch.sh": "accelerate launch --config_file accelerate.yaml --mixed_precision bf16 train.py\n"},
)
def precision_of_yaml_and_deepspeed(world: World) -> Iterator[Said]:
    """The accelerate layer and the DeepSpeed JSON differ in precision.

    The other precision enabled in the JSON is a ValueError; the same one disabled there wins in silence, and the
    run is in fp32.
    """
    launch = world.precision
    if launch is None or str(launch.value) not in ("bf16", "fp16"):
        return
    mine, other = (str(launch.value), "fp16" if launch.value == "bf16" else "bf16")
    enabled = world.ds(f"{other}.enabled")
    if enabled and true(enabled.value):
        yield Said(
            enabled,
            f"{other} is enabled here, mixed_precision is {_there(launch)}: accelerate refuses the two",
        )
    disabled = world.ds(f"{mine}.enabled")
    if disabled and disabled.value is False:
        yield Said(
            disabled, f"{mine} is off here and wins over mixed_precision {_there(launch)}: the run is in fp32"
        )


@rule(
    "XL203",
    "error",
    source=_TRAINER,
    fails=ds(bf16={"enabled": True}) | args(fp16=True, per_device_train_batch_size=2),
    passes=ds(bf16={"enabled": True}) | args(bf16=True, per_device_train_batch_size=2),
)
def precision_of_deepspeed_and_arguments(world: World) -> Iterator[Said]:
    """The DeepSpeed JSON and the training arguments differ in precision: the Trainer refuses them.

    An argument that is not written counts as false.
    """
    if not _trainer(world):
        return
    for name in ("fp16", "bf16"):
        setting = world.ds(f"{name}.enabled")
        if setting is None or not isinstance(setting.value, bool):
            continue
        asked = world.arg_true(name) or world.arg_true(f"{name}_full_eval")
        if setting.value != asked:
            fix = set_value(setting, "auto")
            shown = f"{name} is {str(asked).lower()} in the training arguments"
            yield Said(
                setting, f"{str(setting.value).lower()} here, {shown}: the Trainer refuses the two", fix
            )


@rule(
    "XL204",
    "error",
    source=_TRAINER + "; accelerate 1.15.0 accelerator.py:_prepare_deepspeed",
    fails=zero("zero_stage: 2", "gradient_accumulation_steps: 1") | args(gradient_accumulation_steps=4),
    passes=zero("zero_stage: 2", "gradient_accumulation_steps: 4")
    | args(gradient_accumulation_steps=4, bf16=True),
)
def accumulation(world: World) -> Iterator[Said]:
    """gradient_accumulation_steps differs between the layers.

    The Trainer raises a ValueError after the model is loaded. A bare Accelerator warns and takes DeepSpeed's.
    """
    for setting in (
        world.acc("deepspeed_config.gradient_accumulation_steps"),
        world.ds("gradient_accumulation_steps"),
    ):
        if setting is None or not number(setting.value) or not _trainer(world):
            continue
        steps, where = _argument(world, "gradient_accumulation_steps", 1)
        if not same(setting.value, steps):
            message = f"gradient_accumulation_steps is {setting.value} here, {where}: the Trainer refuses that once the model is loaded"
            yield Said(setting, message, set_value(setting, steps))


@rule(
    "XL205",
    "error",
    source=_TRAINER,
    fails=ds() | args(per_device_train_batch_size=4),
    passes=ds() | args(per_device_train_batch_size=2),
)
def micro_batch(world: World) -> Iterator[Said]:
    """The micro-batch of the DeepSpeed JSON is not the Trainer's.

    per_device_train_batch_size counts with its default, 8, where it is not written.
    """
    setting = world.ds("train_micro_batch_size_per_gpu")
    if (
        setting is None
        or not number(setting.value)
        or not _trainer(world)
        or world.arg_true("auto_find_batch_size")
    ):
        return
    size, where = _argument(world, "per_device_train_batch_size", 8)
    if not same(setting.value, size):
        yield Said(
            setting,
            f"{setting.value} here, per_device_train_batch_size {where}: the Trainer refuses the two",
            set_value(setting, "auto"),
        )


@rule(
    "XL206",
    "error",
    source=_TRAINER,
    fails=ds(train_batch_size=32)
    | args(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    | multi_gpu(),
    passes=ds(train_batch_size=16) | args(per_device_train_batch_size=2, gradient_accumulation_steps=4),
)
def global_batch(world: World) -> Iterator[Said]:
    """train_batch_size is not processes × micro-batch × accumulation."""
    setting, processes = world.ds("train_batch_size"), world.processes
    if setting is None or not number(setting.value) or processes is None or not _trainer(world):
        return
    micro, steps = (
        _argument(world, "per_device_train_batch_size", 8)[0],
        _argument(world, "gradient_accumulation_steps", 1)[0],
    )
    if not isinstance(micro, int) or not isinstance(steps, int):
        return
    total = processes.value * micro * steps
    if setting.value != total and world.parallel_extra == 1:
        message = f"{setting.value} here, but {processes.value} processes × {micro} × {steps} accumulation = {total}"
        yield Said(setting, message, set_value(setting, "auto"))


@rule(
    "XL207",
    "error",
    source=_TRAINER,
    fails=ds(gradient_clipping=0.5) | args(max_grad_norm=1.0, per_device_train_batch_size=2),
    passes=ds(gradient_clipping="auto") | args(max_grad_norm=0.5, per_device_train_batch_size=2),
)
def clipping(world: World) -> Iterator[Said]:
    """Gradient clipping differs between the layers: the Trainer refuses that.

    max_grad_norm counts with its default, 1.0, where it is not written.
    """
    for setting in (world.ds("gradient_clipping"), world.acc("deepspeed_config.gradient_clipping")):
        if setting is None or not number(setting.value) or not _trainer(world):
            continue
        norm, where = _argument(world, "max_grad_norm", 1.0)
        if not same(setting.value, norm):
            yield Said(
                setting,
                f"gradient_clipping is {setting.value} here, max_grad_norm {where}: the "
                "Trainer refuses the two",
                set_value(setting, "auto"),
            )


@rule(
    "XL208",
    "error",
    source='transformers 5.23.0 integrations/deepspeed.py:fill_match (only an "auto" is '
    "filled); deepspeed constants.py",
    fails=ds(gradient_clipping=None) | args(max_grad_norm=0.3, per_device_train_batch_size=2),
    passes=ds(gradient_clipping="auto") | args(max_grad_norm=0.3, per_device_train_batch_size=2),
)
def clipping_is_ignored(world: World) -> Iterator[Said]:
    """max_grad_norm has no effect: the DeepSpeed JSON has no gradient_clipping.

    DeepSpeed clips by its own config alone, at its default of 1.0 where nothing is written; the Trainer fills the
    key only where it stands there as "auto".
    """
    norm = world.arg("max_grad_norm")
    if (
        norm is None
        or "deepspeed" not in world.kinds
        or world.ds("gradient_clipping") is not None
        or same(norm.value, 1.0)
    ):
        return
    fix = add(world.deepspeed, "", "gradient_clipping", "auto")
    yield Said(
        norm,
        f"max_grad_norm {norm.value} has no effect: {world.deepspeed.path} has no "
        "gradient_clipping, and DeepSpeed clips at 1.0",
        fix,
    )


@rule(
    "XL209",
    "error",
    source=_TRAINER,
    fails=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4}})
    | args(learning_rate=2e-4, per_device_train_batch_size=2),
    passes=ds(optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    | args(learning_rate=2e-4, per_device_train_batch_size=2),
)
def optimizer_values(world: World) -> Iterator[Said]:
    """An optimizer value of the DeepSpeed JSON is not the Trainer's.

    The defaults of the training arguments count: learning_rate 5e-5, weight_decay 0, betas 0.9 and 0.999.
    """
    if not _trainer(world):
        return
    betas = [_argument(world, "adam_beta1", 0.9)[0], _argument(world, "adam_beta2", 0.999)[0]]
    for key, value in (
        ("optimizer.params.lr", _argument(world, "learning_rate", 5e-5)[0]),
        ("optimizer.params.betas", betas),
        ("optimizer.params.eps", _argument(world, "adam_epsilon", 1e-8)[0]),
        ("optimizer.params.weight_decay", _argument(world, "weight_decay", 0.0)[0]),
        ("scheduler.params.warmup_max_lr", _argument(world, "learning_rate", 5e-5)[0]),
    ):
        setting = world.ds(key)
        if (
            setting
            and setting.value not in (None, "auto")
            and setting.value != value
            and (number(setting.value) or key.endswith("betas"))
        ):
            fix = set_value(setting, "auto") if setting.entry.node.items is None else None
            yield Said(
                setting,
                f"{setting.name} is {setting.value} here, {value} in the training arguments: "
                "the Trainer refuses the two",
                fix,
            )


@rule(
    "XL210",
    "error",
    source="transformers 5.23.0 integrations/deepspeed.py:trainer_config_finalize (ValueError)",
    fails=ds(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 500}})
    | args(max_steps=100, per_device_train_batch_size=2),
    passes=ds(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})
    | args(max_steps=100, per_device_train_batch_size=2),
)
def schedule_length(world: World) -> Iterator[Said]:
    """The DeepSpeed schedule is as long as another run: total_num_steps is not max_steps."""
    setting, steps = world.ds("scheduler.params.total_num_steps"), world.arg("max_steps")
    if (
        setting
        and steps
        and number(setting.value)
        and number(steps.value)
        and steps.value > 0
        and setting.value != steps.value
    ):
        yield Said(
            setting,
            f"total_num_steps is {setting.value} here, max_steps {_there(steps)}",
            set_value(setting, "auto"),
        )


@rule(
    "XL211",
    "warning",
    source="transformers 5.23.0 integrations/deepspeed.py:deepspeed_optim_sched (the JSON's section wins)",
    fails=ds(scheduler={"type": "WarmupLR", "params": {}})
    | args(lr_scheduler_type="cosine", per_device_train_batch_size=2),
    passes=ds() | args(lr_scheduler_type="cosine", per_device_train_batch_size=2),
)
def schedule_is_ignored(world: World) -> Iterator[Said]:
    """lr_scheduler_type or optim has no effect: the DeepSpeed JSON has a scheduler or optimizer of its own."""
    for key, section in (("lr_scheduler_type", "scheduler"), ("optim", "optimizer")):
        setting, owner = world.arg(key), world.ds(section)
        if setting and owner and _trainer(world):
            kind = world.deepspeed.get(f"{section}.type")
            yield Said(
                setting,
                f"{key} {setting.value} has no effect: {section} {kind} in "
                f"{owner.place.file}:{owner.place.line} is used",
            )


@rule(
    "XL213",
    "error",
    source=_PLUGIN_CHECK,
    fails=zero(*_FILE, "zero_stage: 2", top=()) | ds(),
    passes=zero(*_FILE, top=()) | ds(),
)
def beside_the_config_file(world: World) -> Iterator[Said]:
    """deepspeed_config_file stands beside settings that belong into that file.

    accelerate raises a ValueError at launch where stage, accumulation, clipping, offload, 16-bit saving or
    mixed_precision stand in the accelerate config too. They are removed here only where the JSON says the same.
    """
    if World._in(world.accelerate, "deepspeed_config.deepspeed_config_file") is None:
        return
    pairs = {
        "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
        "deepspeed_config.gradient_clipping": "gradient_clipping",
        "deepspeed_config.zero_stage": "zero_optimization.stage",
        "deepspeed_config.offload_optimizer_device": "zero_optimization.offload_optimizer.device",
        "deepspeed_config.offload_param_device": "zero_optimization.offload_param.device",
        "deepspeed_config.offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
        "deepspeed_config.offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
        "deepspeed_config.zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "mixed_precision": "",
    }
    for key, twin in pairs.items():
        setting = World._in(world.accelerate, key)
        if setting is None or (key == "mixed_precision" and setting.value is None):
            continue
        theirs = world.deepspeed.get(twin, "none" if key.endswith("_device") else None) if twin else None
        agreed = same(theirs, setting.value)
        if key == "mixed_precision":
            agreed = world.deepspeed.get(f"{setting.value}.enabled") is True
        fix = remove(setting) if agreed else None
        yield Said(
            setting,
            f"{setting.name} may not stand beside deepspeed_config_file: accelerate "
            "refuses the file at launch",
            fix,
        )


@rule(
    "XL214",
    "error",
    source=_PLUGIN_CHECK + "; transformers 5.23.0 training_args.py:__post_init__ (step 12)",
    fails=zero("zero_stage: 3", "zero3_save_16bit_model: true")
    | args(deepspeed="ds.json", per_device_train_batch_size=2)
    | ds(3, zero={"stage3_gather_16bit_weights_on_model_save": True}),
    passes=multi_gpu()
    | args(deepspeed="ds.json", per_device_train_batch_size=2, bf16=True)
    | ds(3, zero={"stage3_gather_16bit_weights_on_model_save": True}),
)
def deepspeed_twice(world: World) -> Iterator[Said]:
    """DeepSpeed is configured in the accelerate config and in the training arguments.

    The Trainer builds the plugin from its own file, and accelerate refuses it because the accelerate config sets
    DeepSpeed keys too.
    """
    setting = world.arg("deepspeed")
    if setting is None or not world.arg_true("deepspeed") or world.distributed_type != "DEEPSPEED":
        return
    written = [key for key in world.accelerate.section("deepspeed_config") if key in _REFUSED]
    written += ["mixed_precision"] if world.accelerate.get("mixed_precision") is not None else []
    if written:
        message = f"the Trainer takes DeepSpeed from here, and accelerate refuses that beside {', '.join(written)} in {world.accelerate.path}"
        yield Said(setting, message)


_REFUSED = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
}  # fmt: skip


@rule(
    "XL215",
    "error",
    source="transformers 5.23.0 trainer.py:create_accelerator_and_postprocess (plugin from "
    "the arguments alone)",
    fails=fsdp2() | args(fsdp=True, fsdp_config={"version": 1}),
    passes=fsdp2() | args(fsdp=True, fsdp_config={"version": 2}),
)
def fsdp_twice(world: World) -> Iterator[Said]:
    """FSDP is configured in the accelerate config and, otherwise, in the training arguments.

    With `fsdp` set the Trainer builds the plugin from the training arguments: what they set wins.
    """
    if not world.trainer_fsdp or world.distributed_type != "FSDP":
        return
    for name, yaml_name, default in (
        ("version", "version", 2),
        ("reshard_after_forward", "reshard_after_forward", True),
        ("cpu_offload", "offload_params", False),
        ("state_dict_type", "state_dict_type", "FULL_STATE_DICT"),
    ):
        theirs = world.acc(f"fsdp_config.fsdp_{yaml_name}")
        mine = world.fsdp(name)
        value = mine.value if mine is not None else default
        if theirs is not None and str(theirs.value).lower() != str(value).lower():
            yield Said(
                theirs,
                f"{theirs.value} here has no effect: the Trainer uses {value} from the training arguments",
            )


@rule(
    "XL216",
    "error",
    source="transformers 5.23.0 trainer.py (ValueError: «--fsdp xxx together with --deepspeed»)",
    fails=zero("zero_stage: 2") | args(fsdp=True),
    passes=acc("distributed_type: FSDP", "num_processes: 2") | args(fsdp=True),
)
def fsdp_and_deepspeed(world: World) -> Iterator[Said]:
    """FSDP in the training arguments together with DeepSpeed: the Trainer refuses the two."""
    setting = world.arg("fsdp")
    if (
        setting
        and world.trainer_fsdp
        and (world.distributed_type == "DEEPSPEED" or world.arg_true("deepspeed"))
    ):
        yield Said(setting, "fsdp is set while DeepSpeed is on: the Trainer refuses the two")


@rule(
    "XL217",
    "error",
    source="transformers 5.23.0 training_args.py:__post_init__ (set_mixed_precision) and " + _TRAINER,
    fails=zero("zero_stage: 2") | args(per_device_train_batch_size=2),
    passes=zero("zero_stage: 2") | args(per_device_train_batch_size=2, bf16=True),
)
def precision_only_in_the_yaml(world: World) -> Iterator[Said]:
    """mixed_precision stands in a DeepSpeed launch only, not in the training arguments.

    accelerate enables it in the DeepSpeed config first; then the Trainer compares that with bf16 and fp16 of its
    own, which count as false where they are not written, and refuses the run once the model is loaded. Without
    DeepSpeed the accelerate config alone is enough.
    """
    launch = world.precision
    if launch is None or str(launch.value) not in ("bf16", "fp16") or not _trainer(world):
        return
    if world.distributed_type != "DEEPSPEED" or world.arg_true("deepspeed"):
        return
    name = str(launch.value)
    if "deepspeed" in world.kinds and world.deepspeed.get(f"{name}.enabled", "auto") != "auto":
        return  # XL203 compares the JSON
    if not (world.arg_true("bf16") or world.arg_true("fp16") or world.arg_true(f"{name}_full_eval")):
        written = world.arg(name)
        fix = set_value(written, True) if written else add(world.args, "", name, True)
        message = f"{name} only here: under DeepSpeed the Trainer refuses it unless {name} is true in the training arguments"
        yield Said(launch, message, fix)
