"""Which text of which package shows what a rule states, by the rule's code.

`python -m tools.lint_evidence WHEEL...` says in which versions each is there; `tests/lint/test_evidence.py` checks the
installed ones.
"""

from __future__ import annotations

from dataclasses import replace

from toolkit.linting.evidence import Evidence

_PLUGIN = "utils/dataclasses.py"
_FSDP = "FullyShardedDataParallelPlugin.__post_init__"


def _new(*evidence: Evidence) -> tuple[Evidence, ...]:
    """The fact came with its text: in versions before, it does not hold."""
    return tuple(replace(each, new=True) for each in evidence)


def _accelerate(file: str, scope: str, *shows: str, refutes: tuple[str, ...] = ()) -> Evidence:
    return Evidence("accelerate", file, scope, shows, refutes)


def _transformers(file: str, scope: str, *shows: str) -> Evidence:
    return Evidence("transformers", file, scope, shows)


def _deepspeed(file: str, scope: str, *shows: str) -> Evidence:
    return Evidence("deepspeed", file, scope, shows)


def _trl(*shows: str) -> tuple[Evidence, ...]:
    return (Evidence("trl", "trainer/grpo_config.py", "GRPOConfig.__post_init__", shows),)


def _launch(*shows: str, refutes: tuple[str, ...] = ()) -> Evidence:
    return _accelerate("commands/launch.py", "_validate_launch_command", *shows, refutes=refutes)


def _environment(*shows: str, refutes: tuple[str, ...] = ()) -> Evidence:
    return _accelerate("utils/launch.py", "prepare_multi_gpu_env", *shows, refutes=refutes)


def _fsdp(*shows: str) -> Evidence:
    return _accelerate(_PLUGIN, _FSDP, *shows)


def _sizes(scope: str, *shows: str) -> Evidence:
    return _accelerate("parallelism_config.py", f"ParallelismConfig.{scope}", *shows)


def _arguments(scope: str, *shows: str) -> Evidence:
    return _transformers("training_args.py", f"TrainingArguments.{scope}", *shows)


def _peft(file: str, scope: str, *shows: str, refutes: tuple[str, ...] = ()) -> tuple[Evidence, ...]:
    return (Evidence("peft", file, scope, shows, refutes),)


def _split(scope: str, *shows: str) -> Evidence:
    owner = "DistributedConfig"
    return _transformers("distributed/configuration_utils.py", f"{owner}.{scope}" if scope else owner, *shows)


def _accelerator_of_trainer(*shows: str) -> Evidence:
    return _transformers("trainer.py", "Trainer.create_accelerator_and_postprocess", *shows)


def _filled(*shows: str) -> tuple[Evidence, ...]:
    """The Trainer compares these values with the DeepSpeed JSON's, and raises where they differ."""
    file, owner = "integrations/deepspeed.py", "HfTrainerDeepSpeedConfig"
    return (
        _transformers(file, f"{owner}.trainer_config_process", *shows),
        _transformers(file, f"{owner}.trainer_config_finalize", "that mismatch TrainingArguments"),
    )


TABLE: dict[str, tuple[Evidence, ...]] = {
    "AC101": (
        _accelerate("commands/config/config_args.py", "BaseConfig.from_yaml_file", "had unknown keys ({extra_keys})"),
    ),
    "AC103": (_environment("Unknown mixed_precision mode"),),
    "AC104": (_launch("getattr(args, name, None) is None"),),
    "AC105": (
        _accelerate(
            "utils/launch.py", "prepare_deepspeed_cmd_env", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
            refutes=("OFFLOAD_PARAM_NVME_PATH", "OFFLOAD_OPTIMIZER_NVME_PATH"),
        ),
    ),
    "AC106": (
        _launch(
            'name == "fsdp_config" and not key.startswith("fsdp")', refutes=('elif name == "parallelism_config"',)
        ),
        _accelerate("utils/launch.py", "", "args.parallelism_config_dp_shard_size"),
    ),
    "AC107": (_environment("str(args.fsdp_offload_params).lower()", refutes=("args.fsdp_cpu_offload",)),),
    "AC108": (_environment("args.mixed_precision.lower()"),),
    "AC109": (
        _accelerate("commands/config/config_args.py", "BaseConfig.process_config", "A `distributed_type` must be"),
    ),
    "AC110": (_launch("You need to manually pass in `--num_processes`"),),
    "AC111": (_launch('args.gpu_ids.split(",")'),),
    "AC114": (_environment("str(args.fsdp_forward_prefetch).lower()"),),
    "AC115": (_accelerate("utils/environment.py", "str_to_bool", "invalid truth value"),),
    "AC117": (_accelerate(_PLUGIN, "DeepSpeedPlugin.__post_init__", '"ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)'),),
    "AC119": (_deepspeed("runtime/zero/offload_config.py", "OffloadDeviceEnum", 'nvme = "nvme"'),),
    "AC121": (_environment("Unknown dynamo backend"),),
    "AU301": (_deepspeed("runtime/config_utils.py", "DeepSpeedConfigModel.__init__", '(v != "auto"'),),
    "AU303": (_deepspeed("runtime/config.py", "get_gradient_clipping", "return get_scalar_param(param_dict, GRAD"),),
    "AU304": (_accelerate(_PLUGIN, "DeepSpeedPlugin.fill_match", "not found in kwargs"),),
    "AU305": (
        _transformers(
            "integrations/deepspeed.py", "HfTrainerDeepSpeedConfig.fill_match", 'config.get(ds_key) == "auto"'
        ),
    ),
    "AU306": (_accelerate("accelerator.py", "Accelerator._prepare_deepspeed", "DummyOptim"),),
    "AU307": (_deepspeed("runtime/config.py", "get_optimizer_params", "return param_dict[OPTIMIZER][OPTIMIZER_P"),),
    "DC101": (_split("from_dict", "for k, v in merged.items() if k in valid_keys"),),
    "DC102": (
        _split("_resolve_parallelism", "Parallelism sizes must be >= 1"),
        _split("_validate_mesh_config", "must be a multiple of `tp_size`", "Combining FSDP with pipeline parallelism"),
    ),
    "DC103": (
        _transformers("distributed/utils.py", "initialize_distributed_mesh", "The parallel mesh requires"),
    ),
    "DC104": (_split("", "Reserved for sequence parallelism. Not wired up yet."),),
    "DC105": (
        _transformers("trainer.py", "Trainer.__init__", "Resuming is not supported for models sharded at load time"),
    ),
    "DC106": (_split("_resolve_parallelism", "`enable_expert_parallel` without `ep_size` is deprecated"),),
    "DS102": (_deepspeed("runtime/config_utils.py", "DeepSpeedConfigModel", 'extra="forbid"'),),
    "DS104": _new(_deepspeed("runtime/config.py", "_reject_removed_config_keys", "raise DeepSpeedConfigError")),
    "DS107": (
        _deepspeed(
            "runtime/config_utils.py", "DeepSpeedConfigModel._process_deprecated_field",
            "Cannot provide deprecated parameter",
        ),
    ),
    "DS201": (
        _deepspeed("runtime/config.py", "DeepSpeedConfig._initialize_params", "cannot be simultaneously enabled"),
    ),
    "DS202": (
        _deepspeed("runtime/precision_config.py", "", "must be > 0 when dynamic loss scaling is enabled"),
    ),
    "DS203": _new(
        _deepspeed(
            "runtime/config.py", "DeepSpeedConfig._do_error_check", "='sum' is not supported with ZeRO stage 3"
        ),
    ),
    "DS204": (
        _deepspeed(
            "runtime/config.py", "DeepSpeedConfig._do_error_check",
            "bf16_optimizer_states requires bf16_master_weights_and_grads",
        ),
    ),
    "DS205": (
        _deepspeed("runtime/zero/config.py", "", "Partial offloading only supported for ZeRO Stage 3"),
    ),
    "DS206": (
        _accelerate(_PLUGIN, "DeepSpeedPlugin.__post_init__", "Please specify the ZeRO optimization config"),
    ),
    "DS207": (
        _deepspeed(
            "runtime/config.py", "DeepSpeedConfig._set_batch_related_parameters",
            "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
        ),
    ),
    "DS208": (_deepspeed("runtime/config.py", "get_communication_data_type", "Invalid communication_data_type"),),
    "DS209": (
        _deepspeed(
            "runtime/engine.py", "DeepSpeedEngine._configure_basic_optimizer",
            "'max_grad_norm' is not supported as an optimizer parameter",
        ),
    ),
    "DS210": (
        _deepspeed("runtime/zero/partition_parameters.py", "", '"nvme_path" in DeepSpeed Config cannot be None'),
    ),
    "DS211": _new(_deepspeed("runtime/constants.py", "", "GRADIENT_CLIPPING_DEFAULT = 1.0")),
    "DS213": (
        _deepspeed(
            "runtime/zero/config.py", "read_zero_config_deprecated",
            'zero_config_dict["stage"] = 1 if param_dict[ZERO_OPTIMIZATION] else 0',
        ),
    ),
    "DS214": (_deepspeed("runtime/engine.py", "", "You are using an untested ZeRO Optimizer"),),
    "DS217": (_deepspeed("runtime/zero/config.py", "ZeroStageEnum", "max_stage = 3"),),
    "DS220": (_deepspeed("runtime/zero/linear.py", "", "output += bias"),),
    "DS229": (
        _deepspeed(
            "runtime/engine.py", "DeepSpeedEngine._apply_autotp_partitioning",
            "does not match tensor_parallel.autotp_size",
        ),
    ),
    "DS230": (_deepspeed("runtime/tensor_parallel/config.py", "TPTrainingConfig", "dtype: torch.dtype ="),),
    "DS231": (_deepspeed("module_inject/autotp_config.py", "", "if preset_fn: return preset_fn() return None"),),
    "DS232": (
        _transformers("trainer.py", "Trainer.get_total_train_batch_size", "args.world_size // self.get_tp_size()"),
    ),
    "DS233": _new(
        _deepspeed(
            "runtime/engine.py", "DeepSpeedEngine._apply_autotp_partitioning",
            "vocab_parallel_ce_backend='liger' requires",
        ),
    ),
    "FA101": (_arguments("_process_fsdp_args", "if not self.fsdp: return None"),),
    "FA103": (_arguments("_apply_legacy_fsdp_to_config", "Passing `fsdp` as a string is deprecated"),),
    "FA104": (_arguments("_apply_legacy_fsdp_to_config", "Unknown `fsdp` option"),),
    "FA105": (_accelerator_of_trainer("fsdp_plugin.activation_checkpointing and self.args."),),
    "FA106": (_arguments("_process_fsdp_args", "redundant AllGather in the backward pass"),),
    "FA107": (_arguments("_process_fsdp_args", "if auto_wrap_policy not in FSDP_AUTO_WRAP_POLICY: raise ValueError"),),
    "FS401": (_fsdp('os.environ.get(env_prefix + "AUTO_WRAP_POLICY", "NO_WRAP")'),),
    "FS402": (
        _fsdp('os.environ.get(env_prefix + "VERSION", "1")'),
        _arguments("_process_fsdp_args", 'self.fsdp_config.get("version", 2)'),
    ),
    "FS403": (
        _accelerate(
            _PLUGIN, "FullyShardedDataParallelPlugin.set_state_dict_type",
            '"FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"',
        ),
    ),
    "FS404": (_fsdp("if self.fsdp_version == 1: if self.sharding_strategy is None:"),),
    "FS405": (_fsdp('os.environ.get(env_prefix + "SHARDING_STRATEGY", "FULL_SHARD")'),),
    "FS406": (_fsdp("use_orig_params is obsolete in FSDP2", "sync_module_states is obsolete in FSDP2"),),
    "FS407": (_environment("set `--fsdp_sync_module_states` to `True`"),),
    "FS410": (
        _accelerate(
            "utils/fsdp_utils.py", "fsdp2_apply_ac", "preserve_rng_state=False", refutes=("preserve_rng_state=True",)
        ),
    ),
    "FS411": _new(_fsdp("`activation_checkpointing_offload=True` requires `activation_checkpointing=True`")),
    "FS412": (_fsdp('self.transformer_cls_names_to_wrap.split(",")'),),
    "FS413": (
        _accelerate(
            _PLUGIN, "FullyShardedDataParallelPlugin.set_auto_wrap_policy", "Could not find the transformer layer class"
        ),
    ),
    "FS415": (
        _accelerate(
            _PLUGIN, "FullyShardedDataParallelPlugin.set_state_dict_type",
            "StateDictType[self.state_dict_type.upper()]", "FSDP2 does not support LOCAL_STATE_DICT",
        ),
    ),
    "FS416": (_fsdp("BackwardPrefetch[self.backward_prefetch.upper()]"),),
    "FS417": (
        _accelerate(
            _PLUGIN, "FullyShardedDataParallelPlugin.set_mixed_precision", "MixedPrecision(**dtype_args)",
            refutes=('dtype_args["cast_forward_inputs"] = False',),
        ),
    ),
    "FS418": (
        _accelerate(
            _PLUGIN, "FullyShardedDataParallelPlugin.set_mixed_precision",
            'dtype_args["buffer_dtype"] = buffer_type',
        ),
    ),
    "LR803": (
        _transformers("trainer_utils.py", "validate_quantization_for_training", "on purely quantized models"),
    ),
    "LR805": (
        _transformers(
            "utils/quantization_config.py", "BitsAndBytesConfig.__init__", "load_in_4bit and load_in_8bit are both True"
        ),
    ),
    "LR806": _peft(
        "tuners/tuners_utils.py", "_maybe_include_all_linear_layers", "isinstance(peft_config.target_modules, str)"
    ),
    "LR807": _peft("config.py", "", "Unexpected keyword arguments"),
    "LR808": _peft("tuners/lora/layer.py", "LoraLayer.update_layer", "`r` should be a positive integer value"),
    "LR813": _peft("tuners/tuners_utils.py", "", 'NotImplementedError(f"Requested bias: {bias}, is not implemented.")'),
    "LR814": _peft("config.py", "", "Invalid task type"),
    "LR816": _peft("tuners/oft/config.py", "OFTConfig.__post_init__", "Either `r` or `oft_block_size` must be non-"),
    "LT502": (_environment('f"{main_process_ip}:{main_process_port}"'),),
    "LT503": (_environment("args.nproc_per_node = str(num_processes // num_machines)"),),
    "LT505": (_sizes("_validate_accelerator", "does not match"),),
    "LT506": (_sizes("_validate_accelerator", "has no dimension for FSDP to shard across"),),
    "LT507": (_launch("Less than two GPU ids were configured"),),
    "LT511": (_launch("You can only use one of `--cpu`, `--multi_gpu`, `--tpu`, `--use_deepspeed`, `--use_fsdp`"),),
    "LT513": (
        _deepspeed(
            "runtime/config.py", "DeepSpeedConfig._set_batch_related_parameters", "train_batch // self.world_size"
        ),
    ),
    "LT514": (_deepspeed("runtime/config.py", "DeepSpeedConfig._batch_assertion", "has to be greater than 0"),),
    "LT515": (_sizes("__post_init__", "must be at least 1, but got"),),
    "LT516": (_sizes("__post_init__", "are mutually exclusive"),),
    "LT517": (_sizes("__post_init__", "cannot be used with pure data parallelism"),),
    "LT518": (_sizes("__post_init__", 'valid_cp_backends = ["torch"]'),),
    "LT521": (_launch("args.use_parallelism_config = defaults.parallelism_config != {}"),),
    "LT522": (_launch("You cannot use `--use_parallelism_config` without `--use_fsdp`"),),
    "LT529": (
        _transformers(
            "trainer.py", "Trainer._prepare_context_parallel_inputs",
            "Context parallelism is supported only with SDPA attention",
        ),
    ),
    "LT530": (_accelerate("accelerator.py", "Accelerator._prepare_tp", "import ReplicateParallel"),),
    "MM601": (_deepspeed("runtime/zero/stage_1_and_2.py", "", "buf_0 = torch.empty(int(self.reduce_bucket_size)"),),
    "SV702": (_accelerator_of_trainer("save_only_model option is not compatible with FSDP state dict type"),),
    "SV703": (_accelerator_of_trainer("can't be used with `save_only_model` along with `load_best_model_at_end`"),),
    "SV704": (
        _accelerate(
            _PLUGIN, "DeepSpeedPlugin.__post_init__", "only applicable for ZeRO Stage 3. Setting it to False."
        ),
    ),
    "SV706": (_accelerator_of_trainer("`auto_find_batch_size` isn't supported yet with DeepSpeed Zero-3"),),
    "TA101": (
        _transformers("hf_argparser.py", "HfArgumentParser.parse_dict", "Some keys are not used by the HfArgument"),
    ),
    "TA103": _new(
        _arguments(
            "__post_init__", '("gradient_checkpointing", "activation_checkpointing")',
            "is deprecated and will be removed in v6",
        ),
    ),
    "TA105": (_arguments("_validate_args", "At most one of fp16 and bf16 can be True"),),
    "TA106": (_arguments("_validate_args", "--load_best_model_at_end requires the save and eval strategy to match"),),
    "TA107": (_arguments("_validate_args", "--dataloader_prefetch_factor can only be set when"),),
    "TA108": (_arguments("_validate_args", "--logging_steps must be an integer if bigger than 1"),),
    "TA109": (_arguments("_validate_args", "lr_scheduler_type reduce_lr_on_plateau requires an eval strategy"),),
    "TA110": (_arguments("__post_init__", "self.optim = OptimizerNames(self.optim)"),),
    "TA112": (_accelerator_of_trainer("do not set the `TrainingArguments` `gradient_accumulation_steps`"),),
    "TA115": _new(_arguments("__post_init__", "if getattr(self, new) is None and getattr(self, old) is not None")),
    "TR101": (
        Evidence("trl", "scripts/utils.py", "TrlParser.parse_args_and_config", ("Unknown arguments from config file",)),
    ),
    "TR102": (
        Evidence("trl", "scripts/utils.py", "TrlParser.parse_args_and_config", ("Unknown arguments from config file",)),
    ),
    "TR103": _trl("must be divisible by num_generations"),
    "TR104": _trl("'generation_batch_size' and 'steps_per_generation' can not be both configured"),
    "TR105": _trl("GRPO requires at least 2 generations per prompt"),
    "TR106": _new(*_trl("auto_find_batch_size is not supported by GRPO")),
    "XL202": (_accelerate(_PLUGIN, "DeepSpeedPlugin.set_mixed_precision", "`--mixed_precision` arg cannot be set to"),),
    "XL203": _filled('"bf16.enabled"', '"fp16.enabled"'),
    "XL204": _filled('"gradient_accumulation_steps"'),
    "XL205": _filled('"train_micro_batch_size_per_gpu"'),
    "XL206": _filled('"train_batch_size"'),
    "XL207": _filled('"gradient_clipping"'),
    "XL208": (
        _transformers(
            "integrations/deepspeed.py", "HfTrainerDeepSpeedConfig.fill_match", 'if config.get(ds_key) == "auto"',
            "ds_val is not None and ds_val != hf_val",
        ),
    ),
    "XL209": _filled('"optimizer.params.lr"'),
    "XL210": (
        _transformers(
            "integrations/deepspeed.py", "HfTrainerDeepSpeedConfig.trainer_config_finalize",
            '"scheduler.params.total_num_steps"', "that mismatch TrainingArguments",
        ),
    ),
    "XL211": (
        _transformers("integrations/deepspeed.py", "deepspeed_optim_sched", 'if "optimizer" in config:', "DummyOptim("),
    ),
    "XL213": (_accelerate(_PLUGIN, "DeepSpeedPlugin._deepspeed_config_checks", "When using `deepspeed_config_file`"),),
    "XL214": (_accelerate(_PLUGIN, "DeepSpeedPlugin._deepspeed_config_checks", "When using `deepspeed_config_file`"),),
    "XL216": (_transformers("trainer.py", "Trainer.__init__", "Using --fsdp xxx together with --deepspeed"),),
}  # fmt: skip
