"""Every argument of ms-swift's `sft`, `pt` and `rlhf` (commit 3602360a5623: swift/arguments, swift/trainers)."""

from __future__ import annotations

from toolkit.importing.table import Off, Rule, nothing, off, parts
from toolkit.importing.training_arguments import TRAINING_ARGUMENTS

RULES: dict[str, Rule] = {
    **TRAINING_ARGUMENTS,
    **off("smoothed labels: its trainers have losses of their own", "label_smoothing_factor"),
    **parts(
        "rlhf_type task_type tuner_type model model_revision attn_impl use_hf lora_rank lora_alpha lora_dropout "
        "target_modules modules_to_save use_dora adapters quant_bits quant_method dataset val_dataset template system "
        "enable_thinking loss_scale use_chat_template max_length truncation_strategy packing split_dataset_ratio "
        "streaming max_epochs torch_dtype use_rslora init_weights target_parameters new_special_tokens"
    ),
    **nothing("how data is prepared or kept", "dataset_num_proc load_from_cache_file lazy_tokenize packing_num_proc "
              "packing_length packing_strategy download_mode strict shuffle_buffer_size custom_dataset_info "
              "stopping_strategy cached_val_dataset"),
    **nothing("the order of samples is drawn from run.seed", "dataset_shuffle val_dataset_shuffle "
              "train_dataloader_shuffle"),
    **nothing("padding and layout of a batch", "padding_free padding_side move_model_batches"),
    **nothing("kernels: speed and rounding", "use_logits_to_keep experts_impl attention_backend "
              "cross_entropy_loss_fusion gradient_accumulation_fusion"),
    **nothing("recomputation: memory and time", "vit_gradient_checkpointing recompute_granularity"),
    **nothing("logging and tracking", "swanlab_token swanlab_project swanlab_workspace swanlab_exp_name "
              "swanlab_notification_method swanlab_webhook_url swanlab_secret swanlab_sender_email "
              "swanlab_receiver_email swanlab_smtp_server swanlab_smtp_port swanlab_email_language swanlab_mode "
              "log_completions enable_channel_loss check_model acc_strategy"),
    **nothing("saving", "add_version create_checkpoint_symlink safe_serialization max_shard_size use_flash_ckpt "
              "no_save_optim no_save_rng merge_lora save_safetensors"),
    **nothing("where files are fetched from", "hub_token local_repo_path load_args load_data_args "
              "enable_npu_model_patch ignore_args_error device_map max_memory use_swift_lora ENV"),
    **nothing("where processes start and how they communicate", "use_ray device_groups zero_hpz_partition_size "
              "ds3_gather_for_generation"),
    **nothing("evaluation does not change training", "eval_metric eval_use_evalscope eval_dataset eval_dataset_args "
              "eval_limit eval_generation_config extra_eval_args metric"),
    **nothing("the folder's config says which model it is", "model_type"),
    **nothing("generation", "max_new_tokens temperature top_k top_p repetition_penalty num_beams stream stop_words "
              "logprobs top_logprobs structured_outputs_regex"),
    **nothing("names of the model in texts about itself", "model_name model_author"),
    **nothing("images and video", "max_pixels freeze_vit freeze_aligner norm_bbox vit_lr aligner_lr"),
    **nothing("settings of a method that another key turns on", "beta label_smoothing max_completion_length "
              "num_generations reward_funcs reward_weights num_iterations use_vllm vllm_mode "
              "vllm_gpu_memory_utilization "
              "vllm_max_model_len vllm_tensor_parallel_size vllm_server_host vllm_server_port vllm_enable_lora "
              "vllm_server_pass_dataset vllm_enforce_eager sleep_level offload_model offload_optimizer "
              "teacher_model teacher_deepspeed offload_teacher_model teacher_model_server rpo_alpha ld_alpha "
              "discopop_tau loss_weights cpo_alpha simpo_gamma desirable_weight undesirable_weight "
              "center_rewards_coefficient sft_alpha lmbda seq_kd gkd_logits_topk epsilon epsilon_high delta "
              "steps_per_generation generation_batch_size multi_turn_scheduler max_turns async_generate "
              "importance_sampling_level advantage_estimator overlong_filter dynamic_sample scale_rewards kl_in_reward "
              "response_length reward_model reward_adapters ref_model ref_adapters reward_model_plugin use_gym_env "
              "gym_env log_entropy top_entropy_quantile log_rollout_offpolicy_metrics colocate_groups tau_pos tau_neg "
              "galore_target_modules galore_rank galore_update_proj_gap galore_scale galore_proj_type "
              "galore_optim_per_parameter galore_with_embedding galore_quantization galore_proj_quant galore_proj_bits "
              "galore_proj_group_size galore_cos_threshold galore_gamma_proj galore_queue_size lisa_step_interval "
              "lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction lora_ga_scale "
              "lora_ga_stable_gamma llamapro_num_new_blocks llamapro_num_groups reft_layer_key reft_layers reft_rank "
              "reft_intervention_type reft_args fourier_n_frequency fourier_scaling boft_block_size boft_block_num "
              "boft_n_butterfly_factor boft_dropout vera_rank vera_projection_prng_key vera_dropout vera_d_initial "
              "adapter_act adapter_length adalora_target_r adalora_init_r adalora_tinit adalora_tfinal adalora_deltaT "
              "adalora_beta1 adalora_beta2 adalora_orth_reg_weight mrl_dims bnb_4bit_compute_dtype "
              "bnb_4bit_quant_storage hqq_axis chord_sft_per_device_train_batch_size chord_sft_dataset "
              "chord_enable_phi_function chord_mu_warmup_steps chord_mu_decay_steps chord_mu_peak chord_mu_valley"),
    **off("a part of the data, or data prepared before", "cached_dataset interleave_prob"),
    **off("other columns: name them in data.fields", "columns disable_auto_column_mapping"),
    **off("another text in the conversations", "agent_template response_prefix preserve_thinking "
          "disable_ignore_empty_think template_backend"),
    "add_non_thinking_prefix": Off("another text in the conversations", (None, True)),
    **off("only some weights train", "freeze_parameters freeze_parameters_regex freeze_parameters_ratio "
          "trainable_parameters trainable_parameters_regex freeze_llm target_regex"),
    **off("LoRA of another kind", "lora_dtype lorap_lr_ratio"),
    "lora_bias": Off("biases that train", ("none",)),
    **off("another loss", "loss_type enable_dft_loss router_aux_loss_coef is_binary_loss_scale"),
    **off("another optimizer", "optimizer use_galore lisa_activated_layers"),
    **off("another model", "rope_scaling max_model_len num_labels "
          "problem_type init_strategy model_kwargs"),
    **off("code of its own", "external_plugins custom_register_path callbacks tuner_backend"),
    **off("an end before the last step", "early_stop_interval"),
    "sequence_parallel_size": Off("sequence parallelism; the recipe shards over all processes", (None, 1)),
    "deepspeed_autotp_size": Off("tensor parallelism; the recipe shards over all processes", (None, 1)),
    "resume_only_model": Off("weights of a checkpoint: name it as the model", (None, False)),
    **off("Megatron's arguments, which ms-swift reads in another program", "micro_batch_size global_batch_size lr "
          "min_lr "
          "lr_warmup_fraction finetune sequence_parallel train_iters expert_model_parallel_size moe_permute_fusion "
          "moe_grouped_gemm moe_shared_expert_overlap moe_aux_loss_coeff recompute_method recompute_num_layers "
          "tensor_model_parallel_size pipeline_model_parallel_size"),
}  # fmt: skip
RULES["tuner_backend"] = Off("another implementation of adapters", (None, "peft"))
