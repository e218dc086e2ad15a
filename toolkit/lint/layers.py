"""Which layer wins a setting: under `accelerate launch`, under the `deepspeed` launcher, under the Trainer.

Each topic is one function from the files to three answers; the tests run the real packages and compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.lint import keys
from toolkit.lint.model import Setting
from toolkit.lint.world import World, number, true

READERS = ("accelerate launch", "deepspeed launcher", "Trainer")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one reader really uses, where it has it from, and why."""

    value: Any
    where: str
    why: str
    fails: bool = False  # the run stops there; ``value`` is then the kind of error


Answers = tuple[Answer, Answer, Answer]
Topic = Callable[[World], Answers]
_TOPICS: dict[str, Topic] = {}


def topic(*names: str) -> Callable[[Topic], Topic]:
    """Register a topic under every name that its key has in some layer."""

    def register(function: Topic) -> Topic:
        for name in names:
            _TOPICS[name] = function
        return function

    return register


def names() -> list[str]:
    """Every key that has an answer of its own."""
    return sorted(_TOPICS)


def answers(world: World, key: str) -> Answers | None:
    """The three answers for a key, by its full or its last name; None where no layer knows it."""
    function = _TOPICS.get(key) or _TOPICS.get(key.rpartition(".")[2])
    return function(world) if function else _general(world, key)


def _from(setting: Setting, why: str, value: Any = None) -> Answer:
    return Answer(setting.value if value is None else value, f"{setting.key} in {setting.place}", why)


def _default(value: Any, whose: str, why: str = "nothing is written") -> Answer:
    return Answer(value, f"default of {whose}", why)


def _stops(error: str, setting: Setting | None, why: str) -> Answer:
    return Answer(error, str(setting.place) if setting else "", why, fails=True)


def _not_read(why: str) -> Answer:
    return Answer(None, "nowhere", why)


def _number_of(world: World, key: str) -> Setting | None:
    """A number of the accelerate config's DeepSpeed section; "auto" there counts as nothing written."""
    setting = world.acc(f"deepspeed_config.{key}") if world.distributed_type == "DEEPSPEED" else None
    return setting if setting is not None and number(setting.value) else None


@topic("gradient_accumulation_steps")
def _accumulation(world: World) -> Answers:
    json, yaml, arg = (
        world.ds("gradient_accumulation_steps"),
        _number_of(world, "gradient_accumulation_steps"),
        world.arg("gradient_accumulation_steps"),
    )
    mine = json if json is not None and json.value != "auto" else None
    if world.uses != "deepspeed":
        bare = _default(1, "accelerate", "only the script's own argument sets it without DeepSpeed")
    elif "deepspeed" in world.kinds:
        if json is None:
            bare = _default(1, "accelerate's DeepSpeed plugin", "the JSON does not have it")
        elif mine is None:
            bare = _default(1, "accelerate", '"auto" takes the Accelerator\'s own number')
        else:
            bare = _from(mine, "DeepSpeed's number wins over the Accelerator's, with a warning")
    else:
        bare = _from(yaml, "the launcher passes it to the plugin") if yaml else _default(1, "accelerate")
    alone = _alone(world, "gradient_accumulation_steps", 1)
    fixed = mine or (yaml if "deepspeed" not in world.kinds else None)
    steps = arg.value if arg else 1
    if json is None and "deepspeed" in world.kinds and steps != 1 and not world.arg_true("deepspeed"):
        trainer = _stops(
            "ValueError", arg, "the plugin puts 1 into the JSON, which differs from the argument"
        )
    elif fixed is not None and world.uses == "deepspeed" and fixed.value != steps:
        trainer = _stops(
            "ValueError",
            fixed,
            f"{fixed.value} here and {steps} in the training arguments: the Trainer refuses the two",
        )
    else:
        trainer = _from(arg, "the Trainer accumulates itself") if arg else _default(1, "TrainingArguments")
    return bare, alone, trainer


@topic("gradient_clipping", "max_grad_norm")
def _clipping(world: World) -> Answers:
    json, yaml, arg = (
        world.ds("gradient_clipping"),
        _number_of(world, "gradient_clipping"),
        world.arg("max_grad_norm"),
    )
    mine = json if json is not None and json.value != "auto" else None
    default = keys.section("deepspeed", "")["gradient_clipping"].default
    if world.uses != "deepspeed":
        bare = _not_read("without DeepSpeed only the script's own clip_grad_norm_ clips")
    elif "deepspeed" in world.kinds:
        if json is None:
            bare = _default(
                default, "DeepSpeed", "the JSON does not have it; the script's clip_grad_norm_ does nothing"
            )
        elif mine is None:
            bare = _default(1.0, "accelerate", '"auto" becomes 1.0 in prepare')
        else:
            bare = _from(mine, "DeepSpeed clips; the script's clip_grad_norm_ does nothing")
    else:
        bare = (
            _from(yaml, "the launcher passes it to the plugin")
            if yaml
            else _default(1.0, "accelerate", '"auto" becomes 1.0 in prepare')
        )
    alone = _alone(world, "gradient_clipping", default)
    norm = arg.value if arg else 1.0
    fixed = mine or (yaml if "deepspeed" not in world.kinds else None)
    if world.uses == "deepspeed" and fixed is not None:
        if fixed.value != norm:
            trainer = _stops(
                "ValueError",
                fixed,
                f"{fixed.value} here and max_grad_norm {norm}: the Trainer refuses the two",
            )
        else:
            trainer = _from(fixed, "DeepSpeed clips, at the same value as max_grad_norm")
    elif world.uses == "deepspeed" and "deepspeed" in world.kinds and json is None:
        trainer = _default(
            default,
            "DeepSpeed",
            'the JSON does not have it, and max_grad_norm is filled in only for an "auto"',
        )
    else:
        trainer = (
            _from(arg, 'the Trainer clips, or fills DeepSpeed\'s "auto"')
            if arg
            else _default(1.0, "TrainingArguments")
        )
    return bare, alone, trainer


@topic("mixed_precision", "bf16", "fp16", "bf16.enabled", "fp16.enabled")
def _precision(world: World) -> Answers:
    launch = world.precision
    asked = "no" if launch is None or launch.value in (None, False) else str(launch.value)
    bare = _plugin_precision(world, asked, launch)
    alone = _stored(world)
    if alone is None:
        alone = _default("no", "DeepSpeed", 'an "auto" or missing section is off')
    return bare, alone, _trainer_precision(world, asked, launch)


def _stored(world: World) -> Answer | None:
    for name in ("bf16", "fp16"):
        setting = world.ds(f"{name}.enabled")
        if setting is not None and true(setting.value):
            return _from(setting, "the DeepSpeed config alone decides", name)
    return None


def _plugin_precision(world: World, asked: str, launch: Setting | None) -> Answer:
    given = _from(launch, "the launcher passes it on", asked) if launch else _default("no", "accelerate")
    if world.uses != "deepspeed" or "deepspeed" not in world.kinds:
        return given
    other = {"bf16": "fp16", "fp16": "bf16"}.get(asked)
    clash = world.ds(f"{other}.enabled") if other else None
    if clash is not None and true(clash.value):
        return _stops("ValueError", clash, f"{other} is enabled here, the launch asks for {asked}")
    own = world.ds(f"{asked}.enabled") if other else None
    if own is not None and own.value is False:
        return _from(own, f"the JSON's false wins over {asked}", "no")
    return _stored(world) or given


def _trainer_precision(world: World, asked: str, launch: Setting | None) -> Answer:
    arg = next((world.arg(name) for name in ("fp16", "bf16") if world.args.get(name) is True), None)
    if world.uses == "deepspeed":
        for name in ("fp16", "bf16"):
            stored = world.ds(f"{name}.enabled")
            mine = bool(arg and arg.name == name)
            if stored is not None and isinstance(stored.value, bool) and stored.value != mine:
                return _stops(
                    "ValueError",
                    stored,
                    f"{name} is {str(stored.value).lower()} here, {str(mine).lower()} in the arguments",
                )
        if arg is None and asked in ("bf16", "fp16") and not world.arg_true("deepspeed"):
            return _stops(
                "ValueError",
                launch,
                f"accelerate enables {asked} in the DeepSpeed config, the arguments do not",
            )
    if arg is not None:
        return _from(arg, "a true argument wins over the accelerate config", arg.name)
    if launch is not None:
        return _from(launch, "no argument is true: the launcher's precision is used", asked)
    return _default("no", "TrainingArguments")


@topic("zero_stage", "zero_optimization.stage", "stage")
def _stage(world: World) -> Answers:
    json, yaml = world.ds("zero_optimization.stage"), world.acc("deepspeed_config.zero_stage")
    stored = _from(json, "the JSON is the DeepSpeed config") if json else _default(0, "DeepSpeed")
    alone = stored if "deepspeed" in world.kinds else _not_read("there is no DeepSpeed JSON")
    if world.uses != "deepspeed":
        nothing = _not_read("DeepSpeed is not used")
        return nothing, alone, nothing
    if "deepspeed" in world.kinds:
        if json is None and world.ds("zero_optimization") is None:
            bare = _stops("ValueError", None, "accelerate refuses a DeepSpeed JSON without zero_optimization")
        else:
            bare = stored
    else:
        bare = (
            _from(yaml, "the launcher passes it to the plugin")
            if yaml
            else _default(2, "accelerate's DeepSpeed plugin")
        )
    return bare, alone, bare


@topic("train_micro_batch_size_per_gpu", "per_device_train_batch_size")
def _micro(world: World) -> Answers:
    json, arg = world.ds("train_micro_batch_size_per_gpu"), world.arg("per_device_train_batch_size")
    mine = json if json is not None and json.value != "auto" else None
    bare = (
        _from(mine, "DeepSpeed uses its own number")
        if mine
        else Answer("the data loader's batch size", "the script", "nothing else sets it")
    )
    if "deepspeed" in world.kinds and json is None and world.ds("train_batch_size") is None:
        bare = _stops("AssertionError", None, 'DeepSpeed needs a batch size; only an "auto" is filled in')
    alone = _alone(world, "train_micro_batch_size_per_gpu", None)
    size = arg.value if arg else 8
    if mine is not None and world.uses == "deepspeed" and mine.value != size:
        return bare, alone, _stops("ValueError", mine, f"{mine.value} here, {size} in the training arguments")
    return (
        bare,
        alone,
        _from(arg, "the Trainer's loader uses it") if arg else _default(8, "TrainingArguments"),
    )


@topic("fsdp_version", "version", "fsdp_config.version")
def _fsdp_version(world: World) -> Answers:
    yaml = world.acc("fsdp_config.fsdp_version")
    bare = (
        _from(
            yaml,
            "the launcher passes it to the plugin",
            int(yaml.value) if str(yaml.value) in ("1", "2") else yaml.value,
        )
        if yaml
        else _default(1, "accelerate")
    )
    trainer = bare
    if world.trainer_fsdp:
        arg = world.fsdp("version")
        trainer = (
            _from(arg, "fsdp is set: the Trainer builds the plugin itself", world.fsdp_version)
            if arg
            else _default(2, "TrainingArguments", "fsdp is set and names no version")
        )
    return bare, _not_read("DeepSpeed has no FSDP"), trainer


@topic("fsdp_state_dict_type", "state_dict_type", "fsdp_config.state_dict_type")
def _state_dict(world: World) -> Answers:
    yaml, version = world.acc("fsdp_config.fsdp_state_dict_type"), world.acc("fsdp_config.fsdp_version")
    two = version is not None and str(version.value) == "2"
    bare = (
        _from(yaml, "the launcher passes it to the plugin")
        if yaml
        else _default(
            "SHARDED_STATE_DICT" if two else "FULL_STATE_DICT", f"accelerate for version {2 if two else 1}"
        )
    )
    trainer = bare
    if world.trainer_fsdp:
        arg = world.fsdp("state_dict_type")
        trainer = (
            _from(arg, "fsdp is set: the Trainer builds the plugin itself")
            if arg
            else _default("FULL_STATE_DICT", "TrainingArguments", "fsdp is set and names no type")
        )
    return bare, _not_read("DeepSpeed has no FSDP"), trainer


@topic("fsdp_auto_wrap_policy", "auto_wrap_policy")
def _wrap(world: World) -> Answers:
    yaml = world.acc("fsdp_config.fsdp_auto_wrap_policy")
    bare = _from(yaml, "the launcher passes it to the plugin") if yaml else _default("NO_WRAP", "accelerate")
    trainer = bare
    if world.trainer_fsdp:
        arg = world.fsdp("auto_wrap_policy")
        trainer = (
            _from(arg, "fsdp is set: the Trainer builds the plugin itself")
            if arg
            else _default("TRANSFORMER_BASED_WRAP", "TrainingArguments")
        )
    return bare, _not_read("DeepSpeed has no FSDP"), trainer


@topic("fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward", "reshard_after_forward")
def _sharding(world: World) -> Answers:
    strategy, reshard = (
        world.acc("fsdp_config.fsdp_sharding_strategy"),
        world.acc("fsdp_config.fsdp_reshard_after_forward"),
    )
    version = world.acc("fsdp_config.fsdp_version")
    if version is not None and str(version.value) == "2":
        bare = (
            _from(reshard, "version 2 reads reshard_after_forward alone", true(reshard.value))
            if reshard
            else _default(True, "accelerate for version 2")
        )
    else:
        bare = (
            _from(strategy, "version 1 reads sharding_strategy first")
            if strategy
            else _default("FULL_SHARD", "accelerate for version 1", "reshard_after_forward is never reached")
        )
    trainer = bare
    if world.trainer_fsdp:
        arg = world.fsdp("reshard_after_forward")
        if world.fsdp_version == 2:
            trainer = (
                _from(arg, "fsdp is set: the Trainer builds the plugin itself", true(arg.value))
                if arg
                else _default(True, "TrainingArguments")
            )
        else:
            trainer = bare
    return bare, _not_read("DeepSpeed has no FSDP"), trainer


def _alone(world: World, key: str, default: Any) -> Answer:
    """What `deepspeed.initialize` makes of a top-level number of the JSON."""
    setting = world.ds(key)
    if setting is None:
        if "deepspeed" not in world.kinds:
            return _not_read("there is no DeepSpeed JSON")
        return _default(default, "DeepSpeed")
    if setting.value == "auto":
        error = "TypeError" if "batch" in key or "accumulation" in key else "fails at the first step"
        return _stops(error, setting, '"auto" stays text: nobody fills it in')
    return _from(setting, "the DeepSpeed config alone decides")


def _general(world: World, key: str) -> Answers | None:
    """A key that one layer has: that layer's value wherever the layer is read."""
    yaml = world.acc(key) or next(
        (world.acc(f"{s}.{key}") for s in _SECTIONS if world.acc(f"{s}.{key}")), None
    )
    json, arg = world.ds(key) or world.ds(f"zero_optimization.{key}"), world.arg(key)
    known = _known_default(key)
    if yaml is None and json is None and arg is None and known is None:
        return None
    bare = _from(yaml, "only the accelerate layer has it") if yaml else None
    if bare is not None and yaml is not None and _dropped(yaml):
        bare = _not_read("accelerate launch accepts the key and never uses it")
    stored = _from(json, "only the DeepSpeed JSON has it") if json else None
    default = known or _not_read("no layer writes it")
    return (
        bare or stored or default,
        stored
        or (
            default
            if known and "DeepSpeed" in known.where
            else _not_read("the deepspeed launcher reads the JSON alone")
        ),
        (_from(arg, "the Trainer's own argument") if arg else None) or bare or stored or default,
    )


_SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config", "fp8_config", "dynamo_config")


def _dropped(setting: Setting) -> bool:
    section, _, name = setting.key.rpartition(".")
    if setting.source.kind != "accelerate":
        return False
    raw = keys.package("accelerate")["sections"].get(section, {}).get(name, {})
    return raw.get("read") is False


def _known_default(key: str) -> Answer | None:
    tables = (
        ("transformers", "", "TrainingArguments"),
        ("deepspeed", "", "DeepSpeed"),
        ("deepspeed", "zero_optimization", "DeepSpeed"),
        ("accelerate", "", "accelerate"),
        ("accelerate", "deepspeed_config", "accelerate"),
        ("accelerate", "fsdp_config", "accelerate"),
    )
    last = key.rpartition(".")[2]
    for package, section, whose in tables:
        known = keys.section(package, section)
        if last in known:
            return _default(known[last].default, whose)
    return None
