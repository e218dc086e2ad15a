"""The files of one run, with lookup by key: which layer sets it, and its meaning there."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from toolkit.errors import Place
from toolkit.linting import keys
from toolkit.linting.files.leads import SAME_DEFAULTS, arguments_of
from toolkit.linting.files.load import empty
from toolkit.linting.files.tools import BY_ID
from toolkit.linting.files.tree import Entry, Source
from toolkit.linting.model import Diagnostic, Reader, Setting

TRL_CONFIGS = ("dpo", "grpo", "kto", "reward", "rloo", "sft")
_KINDS = ("accelerate", "deepspeed", "args", "peft", "launch", "tool", "distributed")

# Keys that say that adapters are trained: of TRL's ModelConfig and alignment-handbook, and with a choice those of
# LLaMA-Factory, Axolotl and ms-swift.
_LORA_CHOICES = ("finetuning_type", "adapter", "train_type", "tuner_type")
_LORA_ARGUMENTS = ("lora_r", "lora_rank", "lora_alpha", "lora_target_modules", "lora_target")


class LintContext:
    """At most one source of each kind, and the program that reads them."""

    def __init__(
        self,
        sources: list[Source],
        reader: Reader | None = None,
        missing: list[tuple[Place, str]] | None = None,
    ) -> None:
        self.sources = sources
        self.missing = missing or []
        by_kind: dict[str, Source] = {}
        for source in sources:
            by_kind.setdefault(source.kind, source)
        self.kinds = set(by_kind)
        self.accelerate, self.deepspeed, self.args, self.peft, self.launch, self.tool, self.distributed = (
            by_kind.get(kind) or empty(kind) for kind in _KINDS
        )
        led = arguments_of(self.tool) if "tool" in self.kinds and "args" not in self.kinds else None
        if led is not None:
            self.args = led
            self.kinds.add("args")
        self.reader_given = reader is not None
        self.reader = reader or infer_reader(self.kinds, self.tool, self.launch)

    # ---- keys by layer -----------------------------------------------------------------------------

    def acc(self, key: str) -> Setting | None:
        """A key of the accelerate layer: the command's flag wins over the file's key."""
        flag = key.rpartition(".")[2]
        if self.launch.launcher == "accelerate":
            entry = self.launch.entry(flag)
            if entry is not None:
                return Setting(self.launch, flag, entry)
            if flag in self.launch.unknown:
                return None  # a shell variable, which wins over the file's key
        found = self._in(self.accelerate, key)
        if found is None and key.startswith("fsdp_config.fsdp_"):
            # `accelerate launch` puts the prefix there itself (launch.py:_validate_launch_command)
            found = self._in(self.accelerate, "fsdp_config." + key[len("fsdp_config.fsdp_") :])
        return found

    def ds(self, key: str) -> Setting | None:
        """A key of the DeepSpeed JSON."""
        return self._in(self.deepspeed, key)

    def arg(self, key: str) -> Setting | None:
        """A key of the training arguments."""
        return self._in(self.args, key)

    def sets_acc(self, key: str) -> bool:
        """Whether the accelerate layer sets a key, be it to a shell variable; a variable may hold further flags."""
        by_command = self.launch.launcher == "accelerate" and self.launch.unsure(key.rpartition(".")[2])
        return by_command or self.acc(key) is not None

    def lora_key(self, key: str) -> Setting | None:
        """A key of a PEFT adapter config."""
        return self._in(self.peft, key)

    def split(self, key: str) -> Setting | None:
        """A key of transformers' DistributedConfig."""
        return self._in(self.distributed, key)

    @staticmethod
    def _in(source: Source, key: str) -> Setting | None:
        entry = source.entry(key)
        return Setting(source, key, entry) if entry is not None else None

    @staticmethod
    def of(source: Source, key: str, entry: Entry) -> Setting:
        """A setting from a walk over a source."""
        return Setting(source, key, entry)

    def at_file(self, source: Source, message: str, key: str = "", **more: Any) -> Diagnostic:
        """A finding about something that is *not* written in a file."""
        parent = key.rpartition(".")[0]
        entry = source.entry(parent) if parent else None
        setting = Setting(source, parent, entry) if entry is not None else None
        return Diagnostic(setting, message, source=source, key=key, **more)

    # ---- what the files mean together --------------------------------------------------------------

    @cached_property
    def distributed_type(self) -> str | None:
        """The accelerate layer's type, upper case."""
        for flag, name in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"), ("multi_gpu", "MULTI_GPU")):
            if self.launch.launcher == "accelerate" and self.launch.get(flag) is True:
                return name
        found = self.accelerate.get("distributed_type")
        if found is False:  # YAML 1.1 reads a bare NO as false
            return "NO"
        return str(found).upper() if found is not None else None

    @cached_property
    def uses(self) -> str | None:
        """``deepspeed``, ``fsdp``, ``ddp`` or ``single``; None if the files do not say."""
        if self.distributed_type in ("DEEPSPEED", "FSDP"):
            return self.distributed_type.lower()
        if self.arg_true("fsdp"):
            return "fsdp"
        if "deepspeed" in self.kinds or self.arg_true("deepspeed") or self.launch.launcher == "deepspeed":
            return "deepspeed"
        if self.distributed_type is None:
            return None
        return "single" if self.distributed_type == "NO" else "ddp"

    @cached_property
    def trainer_fsdp(self) -> bool:
        """FSDP set in the training arguments: the Trainer then builds the plugin from them alone."""
        return self.arg_true("fsdp")

    @property
    def fsdp_from_yaml(self) -> bool:
        """Whether accelerate's own plugin takes FSDP from the accelerate config."""
        return self.distributed_type == "FSDP" and not self.trainer_fsdp

    @property
    def trainer_run(self) -> bool:
        """Whether the Trainer compares these training arguments with the other layers."""
        return "args" in self.kinds and self.reader == "trainer"

    @property
    def local(self) -> bool:
        """Whether the accelerate config is for machines of your own (not SageMaker)."""
        return self.accelerate.get("compute_environment", "LOCAL_MACHINE") == "LOCAL_MACHINE"

    @cached_property
    def fsdp_version(self) -> int:
        """1 or 2, by the default of who reads it."""
        setting = self.fsdp("version")
        if setting is not None:
            return 2 if str(setting.value) == "2" else 1
        return 2 if self.trainer_fsdp else 1

    def fsdp(self, name: str) -> Setting | None:
        """An FSDP key by its name without the prefix, from the layer that the run takes FSDP from."""
        if self.trainer_fsdp:
            return self.arg(f"fsdp_config.{name}") or self.arg(f"fsdp_config.fsdp_{name}")
        name = {"cpu_offload": "offload_params"}.get(name, name)
        return self.acc(f"fsdp_config.fsdp_{name}")

    @property
    def fsdp_source(self) -> Source:
        """The file that FSDP is set in."""
        return self.args if self.trainer_fsdp else self.accelerate

    @cached_property
    def zero_stage(self) -> int | None:
        """The ZeRO stage that will run; None if the files do not say, or DeepSpeed is not used."""
        if self.uses != "deepspeed":
            return None
        if "deepspeed" in self.kinds:
            stage = self.deepspeed.get("zero_optimization.stage", 0)
        elif "accelerate" in self.kinds or self.launch.launcher == "accelerate":
            if self.acc("deepspeed_config.deepspeed_config_file") is not None:
                return None  # a file that is not here
            setting = self.acc("deepspeed_config.zero_stage")
            stage = 2 if setting is None else setting.value  # DeepSpeedPlugin.__post_init__: default 2
        else:
            return None
        return int(stage) if str(stage) in ("0", "1", "2", "3") else None

    @cached_property
    def lora(self) -> bool:
        """Whether adapters are trained, as far as the files say."""
        if "peft" in self.kinds or self.arg_true("use_peft"):
            return True
        if any(str(self.tool.get(key, "")).lower() in ("lora", "qlora", "dora") for key in _LORA_CHOICES):
            return True
        return any(source.has(key) for source in (self.args, self.tool) for key in _LORA_ARGUMENTS)

    @cached_property
    def lora_dropout(self) -> Setting | None:
        """The adapters' dropout, where it is above 0."""
        setting = self.lora_key("lora_dropout") or self.arg("lora_dropout")
        return setting if setting is not None and number(setting.value) and setting.value > 0 else None

    @cached_property
    def four_bit(self) -> Setting | None:
        """4-bit loading, where the arguments ask for it."""
        for key in ("load_in_4bit", "quantization_config.load_in_4bit"):
            setting = self.arg(key)
            if setting is not None and true(setting.value):
                return setting
        bits = self.arg("quantization_bit")
        return bits if bits is not None and str(bits.value) == "4" else None

    @cached_property
    def checkpointing(self) -> Setting | None:
        """Activation checkpointing by the training arguments, under either name."""
        for key in ("activation_checkpointing", "gradient_checkpointing"):
            if self.arg_true(key):
                return self.arg(key)
        return None

    @cached_property
    def reentrant(self) -> Setting | None:
        """``use_reentrant`` of that checkpointing, where it is written."""
        for key in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            setting = self.arg(f"{key}.use_reentrant")
            if setting is not None:
                return setting
        return self.arg("use_reentrant")

    @cached_property
    def processes(self) -> Setting | None:
        """How many processes start in all, where a whole number is written."""
        for setting in (self.acc("num_processes"), self._in(self.launch, "nproc_per_node")):
            if setting is not None and isinstance(setting.value, int) and not isinstance(setting.value, bool):
                return setting
        gpus = self._in(self.launch, "num_gpus") if self.launch.launcher == "deepspeed" else None
        nodes = self.launch.get("num_nodes", 1)
        if gpus is not None and isinstance(gpus.value, int) and gpus.value > 0 and nodes in (1, -1):
            return gpus
        return None

    @cached_property
    def parallel_extra(self) -> int:
        """Processes that share one batch: tensor, context and sequence parallelism."""
        sizes = [self.acc(f"parallelism_config.parallelism_config_{kind}_size") for kind in ("tp", "cp", "sp")]
        extra = self.deepspeed.get("tensor_parallel.autotp_size", 1)
        product = extra if isinstance(extra, int) and extra > 0 else 1
        for size in sizes:
            product *= size.value if size is not None and isinstance(size.value, int) and size.value > 0 else 1
        return product

    @cached_property
    def precision(self) -> Setting | None:
        """The accelerate layer's mixed precision."""
        return self.acc("mixed_precision")

    def arg_unsure(self, key: str) -> bool:
        """Whether a training argument that is not written may have another value than TrainingArguments' default.

        A shell variable may hold it, or the default is another one in TRL's configs and in other tools.
        """
        known = self.args.tool in SAME_DEFAULTS or not self.args.tool
        if self.args.tool == "trl":
            known = not any(key in keys.section("trl", section) for section in TRL_CONFIGS)
        return self.args.unsure(key) or (not known and not self.args.has(key))

    def arg_true(self, key: str) -> bool:
        """Whether a training argument is set and not false."""
        value = self.args.get(key)
        return value not in (None, False, "", "false", "False", "no", [], {}) if self.args.has(key) else False


def true(value: Any) -> bool:
    """A truth as the packages' str_to_bool takes it."""
    return str(value).lower() in ("true", "1", "yes", "y", "t", "on")


def number(value: Any) -> bool:
    """A finite number: not a boolean, not text."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(value: Any) -> bool:
    """A whole number, 5e8 included."""
    return number(value) and (isinstance(value, int) or value.is_integer())


def same(one: Any, other: Any) -> bool:
    """Equal values, where 1 equals 1.0 and no number equals a boolean."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def infer_reader(kinds: set[str], tool: Source, launch: Source) -> Reader | None:
    """The Trainer, where there are training arguments or a tool that starts it; DeepSpeed, where its script says so."""
    if "tool" in kinds:
        if tool.tool and BY_ID[tool.tool].trainer:
            return "trainer"
        # `--deepspeed FILE` is an argument of the Trainer; deepspeed.add_config_arguments has a bare `--deepspeed`.
        if isinstance(tool.get("deepspeed"), str) or "deepspeed" in tool.unknown:
            return "trainer"
        has_config = tool.has("deepspeed_config") or "deepspeed_config" in tool.unknown
        return "deepspeed" if has_config and not tool.tool else None
    if "args" in kinds:
        return "trainer"
    return "deepspeed" if launch.launcher == "deepspeed" else None
