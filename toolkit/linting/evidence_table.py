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


def _deepspeed(file: str, scope: str, *shows: str, refutes: tuple[str, ...] = ()) -> Evidence:
    return Evidence("deepspeed", file, scope, shows, refutes)


def _torch(file: str, scope: str, *shows: str) -> Evidence:
    return Evidence("torch", file, scope, shows)


def _flat(*shows: str) -> Evidence:
    """What FSDP1 rejects in the tensors of a unit."""
    return _torch("distributed/fsdp/_flat_param.py", "FlatParamHandle._validate_tensors_to_flatten", *shows)


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


# The optimizer of stages 1 and 2 takes no settings for offloading parameters.
_OFFLOADED_BY_STAGE_3 = (
    _deepspeed(
        "runtime/zero/stage_1_and_2.py", "DeepSpeedZeroOptimizer.__init__", "offload_optimizer_config=",
        refutes=("offload_param",),
    ),
    _deepspeed("runtime/engine.py", "DeepSpeedEngine._configure_zero_optimizer", "offload_param_config=self.zero_off"),
)  # fmt: skip
_OPTIMIZED_AS_WRITTEN = _deepspeed(
    "runtime/engine.py", "DeepSpeedEngine._configure_basic_optimizer",
    "optimizer = FusedLamb(model_parameters, **optimizer_parameters)",
    "optimizer = torch_optimizer(model_parameters, **optimizer_parameters)",
)  # fmt: skip
_SCHEDULED_AS_WRITTEN = _deepspeed(
    "runtime/engine.py", "DeepSpeedEngine._scheduler_from_config",
    "instantiated_scheduler = scheduler(optimizer, **scheduler_params)",
)  # fmt: skip

TABLE: dict[str, tuple[Evidence, ...]] = {
    "AC101": (
        _accelerate("commands/config/config_args.py", "BaseConfig.from_yaml_file", "had unknown keys ({extra_keys})"),
    ),
    "AC102": (_launch('if hasattr(args, "nondefault") and key not in args.nondefault: setattr(args, key, value)'),),
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
    "AC112": (
        _environment('if args.use_fsdp: current_env["ACCELERATE_USE_FSDP"]', "if args.use_megatron_lm: prefix ="),
        _accelerate("commands/launch.py", "launch_command", "if args.use_deepspeed and not args.cpu:"),
        _accelerate("utils/launch.py", "prepare_deepspeed_cmd_env", "if args.zero_stage is not None: current_env["),
    ),
    "AC113": (
        _accelerate(
            "commands/config/config_args.py", "BaseConfig.process_config",
            '"fp16" if ("fp16" in config_dict and config_dict["fp16"])', 'config_dict.pop("dynamo_backend")',
        ),
    ),
    "AC114": (_environment("str(args.fsdp_forward_prefetch).lower()"),),
    "AC115": (_accelerate("utils/environment.py", "str_to_bool", "invalid truth value"),),
    "AC116": (
        _accelerate(
            _PLUGIN, "DeepSpeedPlugin.__post_init__", 'int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))',
            "float(gradient_clipping)", "int(gas) if gas.isdigit() else gas",
        ),
    ),
    "AC117": (_accelerate(_PLUGIN, "DeepSpeedPlugin.__post_init__", '"ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)'),),
    "AC118": _OFFLOADED_BY_STAGE_3,
    "AC119": (_deepspeed("runtime/zero/offload_config.py", "OffloadDeviceEnum", 'nvme = "nvme"'),),
    "AC120": (
        _accelerate(
            _PLUGIN, "DeepSpeedPlugin.__post_init__", "self.zero3_init_flag = ( str_to_bool(",
            '"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false").lower() == "true"',
        ),
        _accelerate("utils/environment.py", "str_to_bool", "invalid truth value"),
    ),
    "AC121": (_environment("Unknown dynamo backend"),),
    "AU301": (_deepspeed("runtime/config_utils.py", "DeepSpeedConfigModel.__init__", '(v != "auto"'),),
    "AU302": (
        _deepspeed("runtime/config.py", "get_train_batch_size", "return get_scalar_param(param_dict, TRAIN_BATCH_SIZE"),
        _deepspeed("runtime/config.py", "DeepSpeedConfig._batch_assertion", "assert (train_batch > 0)"),
    ),
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
    "DS106": (
        _deepspeed(
            "runtime/config_utils.py", "DeepSpeedConfigModel._process_deprecated_field",
            'f"Config parameter {dep_field} is deprecated"', "setattr(pydantic_config, new_param_name, param_value)",
        ),
        _deepspeed(
            "runtime/zero/config.py", "DeepSpeedZeroConfig",
            '"deprecated": True, "new_param": "gather_16bit_weights_on_model_save"',
        ),
    ),
    "DS107": (
        _deepspeed(
            "runtime/config_utils.py", "DeepSpeedConfigModel._process_deprecated_field",
            "Cannot provide deprecated parameter",
        ),
    ),
    "DS108": (
        _deepspeed("runtime/precision_config.py", "get_bfloat16_config", "DeepSpeedBF16Config(**bf16_config_dict)"),
        _deepspeed("runtime/zero/config.py", "get_zero_config", "DeepSpeedZeroConfig(**zero_config_dict)"),
        _deepspeed("runtime/config.py", "get_optimizer_name", "TYPE in param_dict[OPTIMIZER].keys()"),
        _deepspeed("runtime/config.py", "get_scheduler_name", "TYPE in param_dict[SCHEDULER].keys()"),
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
    "DS215": (
        _deepspeed(
            "runtime/engine.py", "DeepSpeedEngine._is_supported_optimizer",
            "optimizer_name in DEEPSPEED_OPTIMIZERS or getattr(torch.optim, optimizer_name, None) is not None",
        ),
        _deepspeed(
            "runtime/config.py", "",
            "DEEPSPEED_OPTIMIZERS = [ ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, "
            "MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER ]",
        ),
    ),
    "DS216": (_SCHEDULED_AS_WRITTEN,),
    "DS217": (_deepspeed("runtime/zero/config.py", "ZeroStageEnum", "max_stage = 3"),),
    "DS218": (
        *_OFFLOADED_BY_STAGE_3,
        _deepspeed(
            "runtime/engine.py", "DeepSpeedEngine.zero_use_cpu_optimizer",
            "if self._config.zero_config.offload_optimizer is not None: return", refutes=("stage",),
        ),
        _deepspeed("ops/adam/cpu_adam.py", "DeepSpeedCPUAdam.step", "and must be 'cpu', make"),
    ),
    "DS219": (
        _deepspeed(
            "runtime/zero/stage_1_and_2.py", "DeepSpeedZeroOptimizer.__init__", "reduce_bucket_size=",
            refutes=("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance", "persistence_threshold"),
        ),
    ),
    "DS220": (_deepspeed("runtime/zero/linear.py", "", "output += bias"),),
    "DS222": (
        _deepspeed(
            "runtime/zero/partitioned_param_coordinator.py", "PartitionedParameterCoordinator",
            "max_params_to_prefetch = min(self.__max_n_available_params - self.__n_available_params",
            "numel_prefetching < max_params_to_prefetch",
        ),
        _deepspeed(
            "runtime/zero/stage3.py", "DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups",
            "if local_sub_group_size >= sub_group_size or",
        ),
    ),
    "DS223": (_OPTIMIZED_AS_WRITTEN, _SCHEDULED_AS_WRITTEN),
    "DS224": (_OPTIMIZED_AS_WRITTEN,),
    "DS225": (
        _SCHEDULED_AS_WRITTEN,
        _deepspeed("runtime/lr_schedules.py", "WarmupDecayLR.__init__", "optimizer: Optimizer, total_num_steps: int,"),
        _deepspeed("runtime/lr_schedules.py", "WarmupCosineLR.__init__", "optimizer: Optimizer, total_num_steps: int,"),
        _deepspeed("runtime/lr_schedules.py", "OneCycle.__init__", "optimizer, cycle_min_lr, cycle_max_lr,"),
    ),
    "DS226": (
        _deepspeed(
            "runtime/zero/stage_1_and_2.py", "DeepSpeedZeroOptimizer.average_tensor", "if not self.reduce_scatter:",
            "tensor.div_(dist.get_world_size(group=self.dp_process_group) / float(self.sequence_parallel_size))",
        ),
        _deepspeed(
            "runtime/zero/stage_1_and_2.py", "DeepSpeedZeroOptimizer.gradient_reduction_w_predivide",
            "tensor_to_allreduce = tensor.to(communication_data_type)", "tensor_to_allreduce.mul_(",
        ),
    ),
    "DS227": (
        _deepspeed(
            "utils/groups.py", "_init_tp_mesh_device", "dist.get_world_size() // tensor_model_parallel_size",
            "(data_parallel_size, tensor_model_parallel_size)",
        ),
    ),
    "DS228": (
        _deepspeed(
            "module_inject/auto_tp.py", "AutoTP._replace_module",
            'elif hasattr(child, "weight") and', "new_child = self._replace_with_config(child, full_name)",
        ),
        *_peft("tuners/tuners_utils.py", "BaseTunerLayer.weight", "base_layer = self.get_base_layer()"),
    ),
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
    "DS234": _new(
        _deepspeed(
            "runtime/engine.py", "DeepSpeedEngine._apply_autotp_partitioning",
            "tp_config.vocab_parallel_lm_head is None and has_tied_vocab_head", "configure_vocab_parallel_loss(model,",
        ),
    ),
    "DS235": _new(
        _deepspeed(
            "module_inject/auto_ep_folding.py", "validate_folding_global",
            "DeepCompile with AutoEP+AutoTP folding is not supported", "requires expert_parallel.autoep_size > 1",
            "expert_parallel.preset_model must match", "ZeRO optimizer/parameter offload with AutoEP+AutoTP folding",
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
    "FS408": (_flat("Must flatten tensors with uniform `requires_grad` when"),),
    "FS409": (
        _flat("Must flatten tensors with uniform dtype but got"),
        *_peft("tuners/tuners_utils.py", "", "dtypes_to_convert_to_fp32 = {torch.float16, torch.bfloat16}"),
    ),
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
    "FS414": (
        _fsdp(
            'if self.auto_wrap_policy.upper() == "TRANSFORMER_BASED_WRAP": '
            "self.auto_wrap_policy = transformer_auto_wrap_policy if self.transformer_cls_names_to_wrap is None",
            'elif self.auto_wrap_policy.upper() == "SIZE_BASED_WRAP": '
            "self.auto_wrap_policy = size_based_auto_wrap_policy if self.min_num_params is None",
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
    "FS419": (
        _torch(
            "distributed/fsdp/_runtime_utils.py", "_post_backward_hook",
            "if not state._sync_gradients: if handle._use_orig_params: handle._use_unsharded_grad_views() return",
        ),
        _accelerate(
            "accelerator.py", "Accelerator.accumulate", "no_sync", 'plugin_kwargs.get("sync_each_batch", False)'
        ),
    ),
    "LR801": (
        _torch("utils/checkpoint.py", "check_backward_validity", "None of the inputs have requires_grad=True."),
    ),
    "LR803": (
        _transformers("trainer_utils.py", "validate_quantization_for_training", "on purely quantized models"),
    ),
    "LR804": (
        _accelerate(
            "utils/fsdp_utils.py", "fsdp2_prepare_model", "Excluding from FSDP2 sharding to prevent quant_state"
        ),
        _flat("Cannot flatten integer dtype tensors"),
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
    "LR809": (
        *_peft("peft_model.py", "PeftModel.save_pretrained", "peft_config.inference_mode = True"),
        *_peft(
            "tuners/tuners_utils.py", "BaseTunerLayer.set_adapter", "(key in adapter_names) and (not inference_mode)"
        ),
    ),
    "LR810": _peft(
        "tuners/tuners_utils.py", "BaseTuner", 'if bias == "all": for n, p in model.named_parameters():',
        "Careful, disabling adapter layers with bias configured to be",
    ),
    "LR811": (_flat("Must flatten tensors with uniform dtype but got"),),
    "LR812": _peft("config.py", "PeftConfigMixin.from_peft_type", "PEFT_TYPE_TO_CONFIG_MAPPING[peft_type]"),
    "LR813": _peft("tuners/tuners_utils.py", "", 'NotImplementedError(f"Requested bias: {bias}, is not implemented.")'),
    "LR814": _peft("config.py", "", "Invalid task type"),
    "LR815": _peft(
        "tuners/lora/layer.py", "LoraLayer.update_layer", "if r <= 0:", "if lora_dropout > 0.0:", "lora_alpha / r",
        "nn.Linear(self.in_features, r, bias=False)",
    ),
    "LR816": _peft("tuners/oft/config.py", "OFTConfig.__post_init__", "Either `r` or `oft_block_size` must be non-"),
    "LT502": (_environment('f"{main_process_ip}:{main_process_port}"'),),
    "LT503": (_environment("args.nproc_per_node = str(num_processes // num_machines)"),),
    "LT505": (_sizes("_validate_accelerator", "does not match"),),
    "LT506": (_sizes("_validate_accelerator", "has no dimension for FSDP to shard across"),),
    "LT507": (_launch("Less than two GPU ids were configured"),),
    "LT509": (
        _accelerate("commands/launch.py", "launch_command", "else: simple_launcher(args)"),
        _accelerate("commands/launch.py", "simple_launcher", "process = subprocess.Popen(cmd, env=current_env)"),
        _accelerate(
            "utils/launch.py", "prepare_simple_launcher_cmd_env", "if args.mpirun_hostfile is not None:",
            "cmd.append(sys.executable)",
        ),
    ),
    "LT510": (
        _environment('current_env["ACCELERATE_USE_FSDP"] = "true"', refutes=("ACCELERATE_USE_CPU",)),
        _accelerate(
            "utils/launch.py", "prepare_deepspeed_cmd_env", 'current_env["ACCELERATE_USE_DEEPSPEED"] = "true"',
            refutes=("ACCELERATE_USE_CPU",),
        ),
    ),
    "LT511": (_launch("You can only use one of `--cpu`, `--multi_gpu`, `--tpu`, `--use_deepspeed`, `--use_fsdp`"),),
    "LT512": (
        _accelerate("commands/launch.py", "launch_command_parser", "allow_abbrev=False"),
        _deepspeed("launcher/runner.py", "parse_args", "parser.parse_args(args=args)", refutes=("parse_known_args",)),
    ),
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
    "LT519": (
        _sizes("_validate_accelerator", "is only compatible DistributedType.FSDP (version 2)"),
        _accelerate(
            "accelerator.py", "Accelerator.prepare_model",
            "if self.multi_device and not (self.parallelism_config and self.parallelism_config.tp_enabled):",
        ),
    ),
    "LT520": (
        _accelerate(_PLUGIN, "TorchContextParallelConfig.__post_init__", "Must be one of 'allgather' or 'alltoall'"),
        _accelerate(
            _PLUGIN, "DeepSpeedSequenceParallelConfig.__post_init__",
            "when `sp_seq_length_is_variable` is `False` `sp_seq_length` must be provided",
            '["flash_attention_2", "flash_attention_3", "sdpa"]', "or a hub-hosted flash attention kernel",
        ),
    ),
    "LT521": (_launch("args.use_parallelism_config = defaults.parallelism_config != {}"),),
    "LT522": (_launch("You cannot use `--use_parallelism_config` without `--use_fsdp`"),),
    "LT523": (
        _sizes("_get_mesh", 'mesh_order = ["dp_replicate", "dp_shard", "cp", "sp", "tp"]'),
        _deepspeed("utils/groups.py", "_init_tp_mesh_device", '("data_parallel", "tensor_parallel")'),
    ),
    "LT524": (
        _accelerate(
            "accelerator.py", "Accelerator._prepare_deepspeed", "sp_size = self.parallelism_config.sp_size",
            refutes=("parallelism_config.tp_size", "parallelism_config.cp_size", "parallelism_config.tp_enabled"),
        ),
        _accelerate(
            "data_loader.py", "prepare_data_loader", "if state.distributed_type == DistributedType.DEEPSPEED:",
            "process_index = process_index // submesh_tp_size num_processes = num_processes // submesh_tp_size",
        ),
    ),
    "LT525": (
        _sizes("build_device_mesh", 'if self.sp_backend == "deepspeed" and self.sp_size > 1: return None'),
        _transformers(
            "integrations/deepspeed.py", "deepspeed_sp_compute_loss", "sp_group = groups._get_sequence_parallel_group()"
        ),
    ),
    "LT526": (
        _sizes("_validate_accelerator", 'if self.sp_backend == "deepspeed" and self.sp_size > 1: pass'),
        _accelerate("accelerator.py", "Accelerator._prepare_deepspeed", "* pc.data_parallel_size"),
        _deepspeed(
            "runtime/config.py", "DeepSpeedConfig", "train_batch == micro_batch * grad_acc * self.world_size",
            "self.world_size = dist.get_world_size() / mpu.get_sequence_parallel_world_size()",
        ),
    ),
    "LT527": (
        _deepspeed(
            "runtime/zero/stage_1_and_2.py", "DeepSpeedZeroOptimizer.average_tensor",
            "tensor.div_(dist.get_world_size(group=self.dp_process_group) / float(self.sequence_parallel_size))",
        ),
        _deepspeed(
            "runtime/zero/stage3.py", "DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads",
            "reduce_scatter_coalesced(full_grads_for_rank", refutes=("sequence_parallel_size",),
        ),
        _deepspeed("runtime/comm/coalesced_collectives.py", "reduce_scatter_coalesced", ".div_(world_sz)"),
        _transformers(
            "integrations/deepspeed.py", "deepspeed_sp_compute_loss", "distributed.nn.functional.all_gather(loss,"
        ),
    ),
    "LT528": (
        _accelerate("big_modeling.py", "_attach_context_parallel_hooks", 'module_kwargs["attention_mask"] = None'),
        _deepspeed(
            "runtime/sequence_parallel/ulysses_sp.py", "UlyssesSPAttentionHF.register_with_transformers",
            "attention_mask = None",
        ),
    ),
    "LT529": (
        _transformers(
            "trainer.py", "Trainer._prepare_context_parallel_inputs",
            "Context parallelism is supported only with SDPA attention",
        ),
    ),
    "LT530": (_accelerate("accelerator.py", "Accelerator._prepare_tp", "import ReplicateParallel"),),
    "MM601": (_deepspeed("runtime/zero/stage_1_and_2.py", "", "buf_0 = torch.empty(int(self.reduce_bucket_size)"),),
    "MM604": (
        _deepspeed("utils/timer.py", "CudaEventTimer.get_elapsed_msec", "self.end_event.synchronize()"),
        _deepspeed("runtime/engine.py", "DeepSpeedEngine.step", "if self.wall_clock_breakdown(): "),
        _deepspeed(
            "comm/comm.py", "timed_op",
            "if comms_logger.enabled: # Need to make op blocking for accurate logging get_accelerator().synchronize()",
        ),
        _deepspeed("runtime/config.py", "", "get_wall_clock_breakdown(param_dict) | self.flops_profiler_config"),
        _deepspeed("runtime/utils.py", "see_memory_usage", "if not force: return", "gc.collect()"),
    ),
    "MM605": (
        Evidence(
            "transformers", "modeling_utils.py", "",
            ("from torch.utils.checkpoint import checkpoint", "gradient_checkpointing_func: Callable = checkpoint"),
            ("deepspeed.checkpointing",),
        ),
    ),
    "MM607": _new(
        _accelerate(
            _PLUGIN, "DeepSpeedPlugin.set_deepspeed_weakref",
            "ds_config = copy.deepcopy(self.deepspeed_config) if self.zero3_init_flag:",
            "self.dschf = HfDeepSpeedConfig(ds_config)",
        ),
        _transformers(
            "integrations/deepspeed.py", "is_deepspeed_zero3_enabled", "_hf_deepspeed_config_weak_ref().is_zero3()"
        ),
    ),
    "MM608": (
        _torch(
            "distributed/fsdp/_fully_shard/_fsdp_param_group.py", "FSDPParamGroup.reshard",
            "if not self._reshard_after_forward: return",
        ),
        _accelerate(
            "utils/fsdp_utils.py", "fsdp2_prepare_model", '"reshard_after_forward": fsdp2_plugin.reshard_after_forward'
        ),
    ),
    "SV701": (
        _accelerate("accelerator.py", "Accelerator.get_state_dict", "Cannot get 16bit model weights because `stage3"),
        _transformers(
            "trainer.py", "Trainer.save_model", "except ValueError:",
            "stage3_gather_16bit_weights_on_model_save=false. Saving the full checkpoint instead",
            "_zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)",
        ),
    ),
    "SV702": (_accelerator_of_trainer("save_only_model option is not compatible with FSDP state dict type"),),
    "SV703": (_accelerator_of_trainer("can't be used with `save_only_model` along with `load_best_model_at_end`"),),
    "SV704": (
        _accelerate(
            _PLUGIN, "DeepSpeedPlugin.__post_init__", "only applicable for ZeRO Stage 3. Setting it to False."
        ),
    ),
    "SV705": (
        _accelerate(
            "utils/fsdp_utils.py", "save_fsdp_model", "StateDictType.SHARDED_STATE_DICT",
            "storage_writer=dist_cp.FileSystemWriter(ckpt_dir)",
        ),
        _accelerate("utils/fsdp_utils.py", "merge_fsdp_weights", "_distributed_checkpoint_to_merged_weights("),
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
    "TA111": (_arguments("__post_init__", "AcceleratorConfig(**self.accelerator_config)"),),
    "TA112": (_accelerator_of_trainer("do not set the `TrainingArguments` `gradient_accumulation_steps`"),),
    "TA113": (
        _transformers(
            "trainer.py", "Trainer.set_initial_training_values", "epoch_based = max_steps < 0",
            "if args.max_steps > 0: num_train_epochs = max_steps // num_update_steps_per_epoch",
        ),
    ),
    "TA114": (
        _arguments(
            "__post_init__", "Using `split_batches=True` in `accelerator_config` will override the `per_device"
        ),
        _accelerate(
            "data_loader.py", "BatchSamplerShard._iter_with_split", "batch_sampler.batch_size // self.num_processes"
        ),
    ),
    "TA115": _new(_arguments("__post_init__", "if getattr(self, new) is None and getattr(self, old) is not None")),
    "TA117": (
        Evidence(
            "transformers", "training_args.py", "TrainingArguments",
            ("parallelism_config: ParallelismConfig | None = field(",),
            ("self.parallelism_config =", "ParallelismConfig(**"),
        ),
        _transformers("trainer.py", "Trainer", 'args["parallelism_config"] = self.args.parallelism_config'),
        _accelerate("accelerator.py", "Accelerator.__init__", "self.parallelism_config.get_device_mesh("),
    ),
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
    "XL201": (
        _arguments(
            "__post_init__", 'os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if self.fp16: ', "elif self.bf16: "
        ),
    ),
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
    "XL215": (_accelerator_of_trainer("FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)"),),
    "XL216": (_transformers("trainer.py", "Trainer.__init__", "Using --fsdp xxx together with --deepspeed"),),
    "XL217": (
        _arguments("__post_init__", "self.deepspeed_plugin.set_mixed_precision("),
        *_filled('"bf16.enabled"', '"fp16.enabled"'),
    ),
    "XL218": (
        _accelerate(
            _PLUGIN, "DeepSpeedPlugin.__post_init__", 'os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")',
            'else: config = { "train_batch_size": "auto"',
        ),
    ),
}  # fmt: skip
