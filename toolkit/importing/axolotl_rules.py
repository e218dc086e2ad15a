"""Every key of Axolotl's configuration (commit 067b021c8b87: utils/schemas), and of its deprecated ones."""

from __future__ import annotations

from toolkit.importing.table import Off, Rule, nothing, off, parts

_ONE = (None, 0, 1, False)

RULES: dict[str, Rule] = {
    **parts(
        "rl reward_model process_reward_model adapter plugins base_model revision_of_model attn_implementation "
        "flash_attention sdp_attention eager_attention flex_attention trust_remote_code tokenizer_config "
        "special_tokens tokens lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear "
        "lora_modules_to_save peft_use_dora peft_use_rslora peft_init_lora_weights peft_layers_to_transform "
        "peft_layers_pattern "
        "lora_target_parameters lora_exclude_modules lora_rank_pattern lora_alpha_pattern loraplus_lr_ratio "
        "early_stopping_patience lora_model_dir load_in_4bit load_in_8bit datasets pretraining_dataset test_datasets "
        "sequence_len chat_template chat_template_jinja train_on_inputs default_system_message eot_tokens "
        "excess_length_strategy sample_packing eval_sample_packing val_set_size micro_batch_size "
        "gradient_accumulation_steps batch_size num_epochs max_steps learning_rate optimizer optim_args weight_decay "
        "adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler lr_scheduler_kwargs warmup_steps warmup_ratio "
        "bf16 fp16 bfloat16 float16 float32 gradient_checkpointing seed output_dir logging_steps save_steps "
        "save_strategy saves_per_epoch save_total_limit evals_per_epoch eval_steps eval_strategy "
        "dataloader_num_workers dataloader_drop_last deepspeed fsdp fsdp_config liger_rope liger_rms_norm "
        "liger_glu_activation liger_fused_linear_cross_entropy"
    ),
    **nothing("how data is prepared or kept", "dataset_prepared_path dataset_processes dataset_num_proc "
              "dataset_keep_in_memory num_dataset_shards_to_save push_dataset_to_hub hf_use_auth_token is_preprocess "
              "dataloader_pin_memory dataloader_prefetch_factor remove_unused_columns accelerator_config debug "
              "max_prompt_len total_num_tokens total_supervised_tokens sample_packing_eff_est "
              "preprocess_iterable sample_packing_mp_start_method streaming_multipack_buffer_size"),
    **nothing("padding is hidden by the attention mask", "pad_to_sequence_len pad_to_multiple_of"),
    **nothing("how samples are packed into rows", "sample_packing_group_size sample_packing_bin_size "
              "sample_packing_sequentially multipack_real_batches pretrain_multipack_buffer_size "
              "pretrain_multipack_attn max_packed_sequence_len sample_packing_seq_len_multiplier"),
    **nothing("the order of samples is drawn from run.seed", "shuffle_merged_datasets shuffle_before_merging_datasets"),
    **nothing("kernels: speed and rounding", "tf32 flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm "
              "flash_optimum xformers_attention sage_attention sdpa_varlen fused_attn_kernel flex_attn_compile_kwargs "
              "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel chunked_cross_entropy "
              "chunked_cross_entropy_num_chunks cut_cross_entropy liger_layer_norm liger_rms_norm_gated "
              "liger_cross_entropy tiled_mlp "
              "tiled_mlp_num_shards tiled_mlp_use_original_mlp torch_compile torch_compile_backend torch_compile_mode "
              "torch_compile_options use_kernels use_scattermoe use_sonicmoe experts_implementation "
              "gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 use_dsv4_kernels use_glm_dsa_kernels "
              "deepcompile"),
    **nothing("recomputation and offload: memory and time", "gradient_checkpointing_kwargs selective_checkpointing "
              "layer_offloading gc_steps gc_collect_steps torch_empty_cache_steps lora_on_cpu "
              "low_cpu_mem_usage max_memory gpu_memory_limit embeddings_skip_upcast qlora_sharded_model_loading "
              "experimental_skip_move_to_device fp32_norms fp32_norm_classes"),
    **nothing("logging and tracking", "wandb_project wandb_entity wandb_watch wandb_name wandb_run_id wandb_mode "
              "wandb_log_model use_wandb use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
              "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name "
              "comet_experiment_key comet_mode comet_online comet_experiment_config use_trackio trackio_project_name "
              "trackio_run_name trackio_space_id use_otel_metrics otel_metrics_host otel_metrics_port use_tensorboard "
              "profiler_steps profiler_steps_start include_tokens_per_second include_tkps use_swanlab swanlab_project "
              "swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace swanlab_log_model "
              "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer strict"),
    **nothing("saving and the hub", "save_only_model save_safetensors save_first_step hub_model_id hub_strategy "
              "hub_revision tokenizer_save_jinja_files merge_lora merge_method fsdp_final_state_dict_type "
              "load_best_model_at_end metric_for_best_model greater_is_better"),
    **nothing("resuming: use toolkit train --resume", "resume_from_checkpoint auto_resume_from_checkpoints"),
    **nothing("where processes start and how they communicate", "device device_map world_size local_rank ddp "
              "ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters use_ray ray_run_name "
              "ray_num_workers resources_per_worker fsdp_version launcher heads_k_stride ring_attn_func"),
    **nothing("evaluation does not change training", "eval_batch_size eval_table_size eval_max_new_tokens "
              "eval_causal_lm_metrics do_causal_lm_eval do_bench_eval bench_dataset bench_split eval_sequence_len "
              "generate_samples num_generation_samples generation_max_new_tokens generation_temperature "
              "generation_top_p generation_top_k generation_prompt_ratio generation_do_sample"),
    **nothing("a web page for generation", "gradio_title gradio_share gradio_server_name gradio_server_port "
              "gradio_max_new_tokens gradio_temperature"),
    **nothing("ends a run that goes wrong: set run.on_bad_loss", "loss_watchdog_threshold loss_watchdog_patience"),
    **nothing("the class comes with the model", "model_type tokenizer_type tokenizer_use_fast tokenizer_legacy "
              "tokenizer_use_mistral_common processor_type processor_kwargs type_of_model is_falcon_derived_model "
              "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model base_model_config "
              "base_model_ignore_patterns"),
    **nothing("images", "image_size image_resize_algorithm freeze_mm_modules"),
    **nothing("settings of a method that another key turns on", "trl vllm ebft rl_beta orpo_alpha simpo_gamma "
              "cpo_alpha kto_desirable_weight kto_undesirable_weight dpo_beta dpo_use_weighting dpo_label_smoothing "
              "dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss dpo_loss_type dpo_loss_weights "
              "dpo_padding_free dpo_use_liger_kernel precompute_ref_log_probs rpo_alpha center_rewards_coefficient "
              "lisa_layers_attribute lisa_step_interval relora_prune_ratio relora_prune_method relora_cpu_offload "
              "jagged_restart_warmup_steps jagged_restart_anneal_steps relora_warmup_steps relora_anneal_steps "
              "eaft_alpha eaft_k loraplus_lr_embedding gptq_groupsize gptq_model_v1 "
              "gptq_disable_exllama torchdistx_path eta_min lr_quadratic_warmup dion_rank_fraction "
              "dion_rank_multiple_of pose_split_on_token_ids pose_max_context_len pose_num_chunks "
              "scaling_softmax_factor scaling_softmax_bias nemo_gym_dir nemo_gym_auto_clone nemo_gym_auto_start "
              "nemo_gym_config_paths nemo_gym_datasets nemo_gym_head_port nemo_gym_server_timeout "
              "nemo_gym_verify_timeout nemo_gym_multi_turn nemo_gym_max_turns"),
    **off("a part of the data, or samples that are left out", "dataset_shard_num dataset_shard_idx min_sample_len "
          "dataset_exact_deduplication skip_prepare_dataset"),
    **off("another order of samples", "curriculum_sampling"),
    "group_by_length": Off("batches of similar length across steps; data.group_by_length sorts within a step",
                           (None, False)),
    **off("samples without padding in one row", "batch_flattening"),
    **off("text that is read during training", "streaming pretraining_sample_concatenation"),
    **off("another tokenizer, or more tokens", "added_tokens_overrides resize_token_embeddings_to_32x "
          "mean_resizing_embeddings shrink_embeddings fix_untrained_tokens"),
    **off("another text in the conversations", "chat_template_kwargs role_boundaries"),
    **off("LoRA of another kind", "lora_fan_in_fan_out "
          "peft peft_layer_replication "
          "peft_trainable_token_indices peft_ensure_weight_tying loftq_config"),
    "peft_autocast_adapter_dtype": Off("an adapter in 16 bits", (None, True)),
    **off("other learning rates for some weights", "embedding_lr embedding_lr_scale lr_groups"),
    **off("only some weights train", "unfrozen_parameters lisa_n_layers optim_target_modules"),
    **off("another learning rate course", "cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor relora "
          "relora_steps jagged_restart_steps"),
    **off("another optimizer's numbers", "adam_epsilon2 adam_beta3 dion_lr dion_momentum qgalore_rank "
          "qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits "
          "qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size"),
    **off("another loss", "use_eaft"),
    **off("another model", "overrides_of_model_config overrides_of_model_kwargs cls_model_config model_config "
          "rope_scaling reinit_weights llama4_linearized_experts use_onebitllms num_labels"),
    **off("another attention", "s2_attention scaling_softmax use_pose"),
    **off("another number format", "qat quantization gptq model_quantization_config "
          "model_quantization_config_kwargs bnb_config_kwargs quantize_moe_experts"),
    **off("a program of its own", "trainer_cls llmcompressor diffusion dynamic_checkpoint nemo_gym_enabled hatchery"),
    **off("a batch size that changes during the run", "auto_find_batch_size"),
    **{key: Off("another parallelism; the recipe shards over all processes", _ONE) for key in (
        "context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "expert_parallel_size",
        "dp_shard_size", "dp_replicate_size", "expert_parallel_num_nvl_bytes", "expert_parallel_token_capacity")},
}  # fmt: skip
