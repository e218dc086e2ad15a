"""Every key of torchtune's fine-tuning configurations, with dots (commit bd2a0fc7c314: recipes, recipes/configs)."""

from __future__ import annotations

from toolkit.importing.table import Off, Rule, nothing, off, parts

RULES: dict[str, Rule] = {
    **parts("loss._component_ teacher_model._component_ ref_checkpointer._component_ quantizer quantizer._component_ "
            "tasks checkpointer.checkpoint_dir checkpointer._component_ model._component_ model.use_dora "
            "model.lora_rank model.lora_alpha model.lora_dropout model.lora_attn_modules model.apply_lora_to_mlp "
            "model.apply_lora_to_output dataset dataset._component_ dataset.source dataset.data_files dataset.name "
            "dataset.subset dataset.split dataset.column dataset.add_eos dataset.packed dataset.split_across_pack "
            "shuffle tokenizer._component_ tokenizer.max_seq_len batch_size gradient_accumulation_steps epochs "
            "max_steps_per_epoch optimizer._component_ optimizer.lr optimizer.weight_decay optimizer.betas "
            "optimizer.eps clip_grad_norm lr_scheduler lr_scheduler._component_ lr_scheduler.num_warmup_steps "
            "dtype enable_activation_checkpointing seed output_dir log_every_n_steps save_every_n_steps device "
            "compile"),
    **nothing("how AdamW is computed", "optimizer.fused optimizer.foreach optimizer_in_bwd"),
    **nothing("memory", "low_cpu_ram fsdp_cpu_offload fsdp_reshard_after_forward "
              "custom_sharded_layers fsdp.cpu_offload ac_mode ac_option loss.num_output_chunks"),
    **nothing("which files of the folder", "checkpointer.checkpoint_files checkpointer.checkpoint_files.* "
              "checkpointer.model_type checkpointer.output_dir checkpointer.keep_last_n_checkpoints "
              "checkpointer.safe_serialization tokenizer.path tokenizer.merges_file tokenizer.vocab_path "
              "tokenizer.merges_path tokenizer.special_tokens_path"),
    **nothing("saving and resuming", "resume_from_checkpoint save_adapter_weights_only enable_async_checkpointing "
              "checkpointer.recipe_checkpoint"),
    **nothing("logging and profiling", "metric_logger.* log_peak_memory_stats log_level profiler.* name "
              "profile_memory cudnn_deterministic_mode"),
    **nothing("evaluation does not change training", "dataset_val.* run_val_every_n_steps batch_size_val"),
    **nothing("how a batch is padded", "collate_fn"),
    **nothing("settings of another kind of training", "kd_loss.* kd_ratio teacher_checkpointer.* quantizer.* "
              "ref_checkpointer.* forward_batch_size max_generated_tokens ppo_epochs num_steps prompt.* "
              "max_new_tokens temperature top_k limit max_seq_length enable_kv_cache base_model_path "
              "reward_and_value_model.* policy_model.* loss.epsilon loss.beta loss.label_smoothing "
              "dataset.partition"),
    **off("an adapter to start from: name it in adapter.path", "checkpointer.adapter_checkpoint"),
    **off("another text around the columns", "tokenizer.prompt_template dataset.train_on_input dataset.column_map "
          "dataset.new_system_prompt dataset.conversation_column dataset.conversation_style"),
    **off("rows that a function chooses", "dataset.filter_fn"),
    **off("images", "model.decoder_trainable model.encoder_trainable model.fusion_trainable model.image_size "
          "tokenizer.image_size tokenizer.max_num_tiles"),
    **off("adapters of a kind of their own", "model.quantize_base"),
    **off("more tokens", "resize_token_embeddings"),
    **off("tensor parallelism", "tensor_parallel_plan._component_ tensor_parallel_plan"),
    **{key: Off("another parallelism; the recipe shards over all processes", (None, 1, -1)) for key in (
        "tensor_parallel_dim", "context_parallel_dim", "data_parallel_shard_dim", "data_parallel_replicate_dim")},
    **off("another kind of training", "training.* inference.* orchestration.* postprocessing.* reward_functions "
          "reward_functions.* ref_policy_checkpointer.* value_checkpointer.* reward_checkpointer.* grpo_samples "
          "ppo_batch_size gamma lmbda kl_coeff whiten_rewards min_response_length penalise_no_eos reward_penalty "
          "stop_token_ids loss.kl_coeff loss.value_coeff loss.value_clip_range"),
    **off("layers that are left out, or losses of earlier layers", "early_exit_loss.* layer_dropout.*"),
    **off("data sets of a recipe under development", "datasets datasets.* dataloader.* apply_chat_template"),
    **nothing("the folder's config says it", "model.vocab_size model.num_layers model.num_heads model.num_kv_heads "
              "model.embed_dim model.max_seq_len model.intermediate_dim model.norm_eps"),
    **nothing("of distillation", "teacher_model.*"),
    **nothing("memory, saving and logging", "memory_efficient_fsdp_wrap use_distributed_state_dict "
              "save_every_n_epochs debug_logging_enabled debug_num_samples_per_step use_flex"),
    **off("another model", "model.attn_dropout"),
    **off("another text around the columns", "dataset.column_map.*"),
}  # fmt: skip
