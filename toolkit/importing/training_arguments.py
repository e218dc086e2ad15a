"""Rows for arguments of the transformers Trainer (TrainingArguments of transformers 5.23.0), shared by its users."""

from __future__ import annotations

from toolkit.importing.table import Off, Rule, To, nothing, off, parts

TRAINING_ARGUMENTS: dict[str, Rule] = {
    **parts(
        "per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate optim "
        "optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type "
        "lr_scheduler_kwargs warmup_steps warmup_ratio bf16 fp16 gradient_checkpointing activation_checkpointing seed "
        "output_dir logging_steps logging_strategy save_steps save_strategy save_total_limit dataloader_num_workers "
        "dataloader_drop_last use_cpu eval_strategy eval_steps do_eval fsdp fsdp_config deepspeed use_liger_kernel "
        "liger_kernel_config"
    ),
    **nothing("recomputation: memory and time", "gradient_checkpointing_kwargs activation_checkpointing_kwargs"),
    **nothing("kernels: speed and rounding", "tf32 torch_compile "
              "torch_compile_backend torch_compile_mode use_cache torch_empty_cache_steps"),
    **nothing("logging and tracking", "logging_first_step log_on_each_node logging_nan_inf_filter log_level "
              "log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id "
              "trackio_static_space_id include_num_input_tokens_seen logging_dir skip_memory_metrics debug "
              "include_tokens_per_second"),
    **nothing("evaluation does not change training", "eval_delay per_device_eval_batch_size prediction_loss_only "
              "eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps do_predict "
              "include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval metric_for_best_model "
              "greater_is_better load_best_model_at_end predict_with_generate generation_max_length "
              "generation_num_beams generation_config per_gpu_eval_batch_size"),
    **nothing("saving", "save_only_model save_on_each_node enable_jit_checkpoint save_safetensors"),
    **nothing("the hub", "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
              "hub_revision push_to_hub_token push_to_hub_model_id hub_model_revision"),
    **nothing("how data is loaded", "dataloader_pin_memory dataloader_persistent_workers "
              "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns "
              "label_names length_column_name accelerator_config"),
    **nothing("how processes communicate", "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
              "ddp_static_graph ddp_backend ddp_timeout local_rank full_determinism log_on_each_node"),
    **nothing("the order of samples is drawn from run.seed", "data_seed"),
    **nothing("resuming: use toolkit train --resume", "resume_from_checkpoint ignore_data_skip "
              "restore_callback_states_from_checkpoint"),
    **nothing("of earlier versions, without effect on the result", "overwrite_output_dir half_precision_backend "
              "no_cuda fp16_opt_level use_mps_device do_train"),
    "label_smoothing_factor": To("label_smoothing", float),
    **off("an optimizer for some modules", "optim_target_modules"),
    **off("a batch size that changes during the run", "auto_find_batch_size"),
    **off("context, tensor or expert parallelism", "parallelism_config"),
    "average_tokens_across_devices": Off("a mean of the ranks' means", (True,)),
    "train_sampling_strategy": Off("another order of samples", ("random",)),
    "group_by_length": Off("batches of similar length across steps; data.group_by_length sorts within a step",
                           (None, False)),
}  # fmt: skip

# TrainingArguments of transformers 5.23.0 (training_args.py), as far as they decide about training.
TRAINING_DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 5e-5,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,
    "seed": 42,
    "logging_steps": 500,
    "logging_strategy": "steps",
    "save_steps": 500,
    "save_strategy": "steps",
    "dataloader_num_workers": 0,
    "eval_strategy": "no",
}
