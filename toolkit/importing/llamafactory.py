"""LLaMA-Factory's `train` (commit ff6d4d12eeb0: src/llamafactory/hparams, data, model/adapter.py)."""

from __future__ import annotations

from toolkit.importing import trainer_parts as trainer
from toolkit.importing.adapters import lora
from toolkit.importing.beside_lora import early_stopping, lora_plus, new_tokens, option, switch
from toolkit.importing.draft import Draft, model
from toolkit.importing.kernels import carry_liger, trainer_kernels
from toolkit.importing.llamafactory_data import data
from toolkit.importing.precision import amp_of, checkpoint_dtype
from toolkit.importing.table import Off, Table, nothing, off, parts
from toolkit.importing.training_arguments import TRAINING_ARGUMENTS, TRAINING_DEFAULTS

_ATTENTION = {"sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3", "disabled": "eager"}


def method(draft: Draft) -> None:
    """Supervised fine-tuning and pre-training, of all weights or of LoRA."""
    stage, kind = str(draft.get("stage")), str(draft.get("finetuning_type"))
    if stage not in ("sft", "pt"):
        draft.block("stage", f"{stage}: the recipe has supervised fine-tuning and plain text")
    draft.ignore("stage", "supervised fine-tuning or plain text, as in the recipe")
    if kind not in ("lora", "full"):
        draft.block("finetuning_type", f"{kind}: the recipe trains all weights or a LoRA adapter")
    if draft.place("do_train") and not draft.active("do_train"):
        draft.block("do_train", "off: this file does not train")
    draft.ignore("do_train", "on, as in a recipe")


def the_model(draft: Draft) -> None:
    """Model, attention and adapter."""
    model(draft, path="model_name_or_path", revision="model_revision")
    attention = str(draft.get("flash_attn"))
    if attention in _ATTENTION:
        draft.carry("flash_attn", "model.attention", _ATTENTION[attention])
    draft.ignore("flash_attn", "sdpa where the model has it, as in the recipe")
    if str(draft.get("finetuning_type")) == "lora":
        _adapter(draft)
        return
    draft.ignore("finetuning_type", "every weight trains, as in a recipe without an adapter")
    for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target", "use_dora",
                "create_new_adapter", "double_quantization", "use_rslora", "pissa_init"):  # fmt: skip
        draft.ignore(key, "of adapters; every weight trains")
    for key in ("adapter_name_or_path", "quantization_bit"):
        if draft.get(key) is not None:
            draft.unsupported(key, "an adapter or a quantised base while every weight trains")


def _adapter(draft: Draft) -> None:
    if draft.get("lora_alpha") is None:
        draft.set("adapter.alpha", 2 * draft.whole("lora_rank"), "default of LLaMA-Factory: twice lora_rank")
    lora(draft, r="lora_rank", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target",
         saved="additional_target", dora="use_dora")  # fmt: skip
    if draft.get("quantization_bit") is not None:
        if draft.get("quantization_bit") == 4 and draft.get("quantization_method") in (None, "bnb", "bitsandbytes"):
            draft.carry("quantization_bit", "adapter.method", "qlora", "nf4")
        else:
            draft.unsupported("quantization_bit", "the recipe's base is in 4 bits (nf4) or not quantised")
    draft.carry("finetuning_type", "adapter.method", draft.values["adapter.method"])
    paths = draft.get("adapter_name_or_path")
    if paths and draft.active("create_new_adapter"):
        draft.unsupported("adapter_name_or_path", "adapters that are merged before a new one is made")
    elif paths and "," not in str(paths):
        draft.carry("adapter_name_or_path", "adapter.path", str(paths))
    elif paths:
        draft.unsupported("adapter_name_or_path", "several adapters")
    for key in ("create_new_adapter", "adapter_name_or_path"):
        draft.ignore(key, "off")
    switch(draft, "use_rslora", "use_rslora")
    if draft.active("pissa_init"):
        rounds = draft.whole("pissa_iter", 16)
        option(draft, "pissa_init", "init_lora_weights", "pissa" if rounds == -1 else f"pissa_niter_{rounds}")


def tokens(draft: Draft) -> None:
    """Tokens that the tokenizer gets (model/patcher.py: patch_tokenizer). Read after the adapter."""
    trained = (
        "with an adapter LLaMA-Factory trains the whole embeddings too, unless additional_target names other modules"
    )
    for key in ("add_tokens", "add_special_tokens"):
        new_tokens(draft, key, draft.names(key), special="special" in key, beside_adapter=trained)
    if draft.get("add_tokens") or draft.get("add_special_tokens"):
        draft.ignore("resize_vocab", "new tokens get rows where the embeddings have none")


def optimizer(draft: Draft) -> None:
    """The Trainer's, and LoRA+ (train/trainer_utils.py: _create_loraplus_optimizer)."""
    trainer.optimizer(draft)
    lora_plus(draft, "loraplus_lr_ratio", decays=True)


def evaluation(draft: Draft) -> None:
    """The Trainer's, and its callback (train/tuner.py)."""
    trainer.evaluation(draft)
    early_stopping(draft, "early_stopping_steps")


def mixed_precision(draft: Draft) -> None:
    """Weights that train are cast to float32, unless pure_bf16 (model/adapter.py: cast_trainable_params_to_fp32)."""
    amp = amp_of(draft)
    if draft.active("pure_bf16"):
        draft.carry("pure_bf16", "precision", "bf16-pure")
        draft.ignore("bf16", "pure_bf16 decides")
    elif amp is not None:
        draft.carry(amp, "precision", amp)
    else:
        draft.carry("bf16", "precision", "fp32", "trained weights in float32, no autocast")
        if "adapter.method" in draft.values and checkpoint_dtype(draft) != "float32":
            draft.differs("bf16", "off: the adapter trains in float32 over a base in the checkpoint's dtype")
    for key in ("bf16", "fp16", "pure_bf16"):
        draft.ignore(key, "off")


def recomputation(draft: Draft) -> None:
    """On by default."""
    off_ = draft.active("disable_gradient_checkpointing")
    draft.carry("disable_gradient_checkpointing", "activation_checkpointing", "none" if off_ else "full")
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        draft.ignore(key, "disable_gradient_checkpointing decides")


def kernels(draft: Draft) -> None:
    """Liger's, for pt and sft with its loss (model/model_utils/liger_kernel.py)."""
    carry_liger(draft, "enable_liger_kernel")


LLAMAFACTORY = Table(
    id="llamafactory",
    name="LLaMA-Factory",
    version="LLaMA-Factory ff6d4d12eeb0",
    source="https://github.com/hiyouga/LLaMA-Factory/tree/ff6d4d12eeb0",
    own_rules={
        **TRAINING_ARGUMENTS,
        **parts("stage finetuning_type do_train model_name_or_path model_revision trust_remote_code flash_attn "
                "adapter_name_or_path create_new_adapter quantization_bit lora_rank lora_alpha lora_dropout "
                "lora_target additional_target use_dora dataset eval_dataset dataset_dir template cutoff_len "
                "train_on_prompt mask_history packing neat_packing streaming mix_strategy interleave_probs "
                "pure_bf16 disable_gradient_checkpointing enable_thinking use_rslora pissa_init add_tokens "
                "add_special_tokens loraplus_lr_ratio early_stopping_steps enable_liger_kernel val_size"),
        **nothing("how data is prepared or kept", "overwrite_cache preprocessing_batch_size "
                  "preprocessing_num_workers tokenized_path data_shared_file_system buffer_size cache_dir"),
        **nothing("where files are fetched from", "hf_hub_token ms_hub_token om_hub_token media_dir "
                  "low_cpu_mem_usage use_fast_tokenizer print_param_status offload_folder device_map"),
        **nothing("recomputation: memory and time", "use_reentrant_gc use_unsloth_gc"),
        **nothing("kernels: speed and rounding", "use_v1_kernels use_kv_cache"),
        **nothing("logging and tracking", "plot_loss compute_accuracy include_effective_tokens_per_second use_swanlab "
                  "swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
                  "swanlab_lark_webhook_url swanlab_lark_secret"),
        **nothing("profiling", "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps "
                  "profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory "
                  "profiler_with_stack profile_modules"),
        **nothing("generation, export and other commands", "infer_backend infer_dtype eval_num_beams "
                  "eval_on_each_dataset max_new_tokens temperature top_p top_k do_sample repetition_penalty "
                  "length_penalty max_length default_system_inference export_dir export_size export_device "
                  "export_quantization_bit export_quantization_dataset export_quantization_nsamples "
                  "export_quantization_maxlen export_legacy_format export_hub_model_id vllm_maxlen vllm_gpu_util "
                  "vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction "
                  "sglang_tp_size sglang_config sglang_lora_backend"),
        **nothing("where processes start", "ray_num_workers ray_init_kwargs ray_run_name ray_storage_path "
                  "resources_per_worker placement_strategy master_addr master_port"),
        **nothing("images, video and audio", "image_max_pixels image_min_pixels image_do_pan_and_scan "
                  "crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video "
                  "audio_sampling_rate freeze_vision_tower freeze_multi_modal_projector"),
        **nothing("settings of a method that another key turns on", "galore_target galore_rank galore_update_interval "
                  "galore_scale galore_proj_type galore_layerwise apollo_target apollo_rank apollo_update_interval "
                  "apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front "
                  "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio "
                  "badam_mask_mode badam_verbose asft_alpha eaft_alpha pissa_iter pissa_convert loraplus_lr_embedding "
                  "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules oft_rank oft_block_size "
                  "oft_target module_dropout kt_cpu_activation kt_config kt_weight_path "
                  "kt_non_expert_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num "
                  "kt_lora_expert_intermediate_size hyper_parallel_args hyper_parallel_cp_size quantization_device_map "
                  "init_special_tokens new_special_tokens_config"),
        **nothing("learning from preferences", "pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing "
                  "kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm "
                  "ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model "
                  "reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha"),
        **off("a part of the data", "max_samples"),
        **off("another optimizer", "use_galore use_apollo use_badam use_adam_mini use_muon"),
        **off("another loss", "use_dft_loss use_asft_loss use_eaft_loss"),
        **off("another model", "use_llama_pro mixture_of_depths shift_attn rope_scaling train_from_scratch "
              "moe_aux_loss_coef upcast_layernorm upcast_lmhead_output freeze_language_model adapter_folder"),
        **off("another tokenizer", "resize_vocab split_special_tokens"),
        **off("another text in the conversations", "tool_format default_system preserve_thinking"),
        **off("another program", "use_unsloth use_kt use_mca use_megatron_bridge use_hyper_parallel"),
        **off("a fixed order; set data.shuffle: false", "disable_shuffling"),
        **off("LLaMA-Factory's v1 files are not read", "model model_class dist_config train_dataset micro_batch_size "
              "kernel_config sample_backend quant_config peft_config init_config cp_size cp_mode optim_config "
              "batching_strategy lr_scheduler_config"),
        **off("Megatron's parallelism", "tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel "
              "use_distributed_optimizer context_parallel_size expert_model_parallel_size overlap_param_gather "
              "overlap_grad_reduce bias_activation_fusion apply_rope_fusion moe_grouped_gemm moe_token_dispatcher_type "
              "recompute_granularity use_packed_sequences export_hf_on_finish mixed_precision"),
        "ignore_pad_token_for_loss": Off("padding is learned", (True,)),
    },
    defaults={
        **TRAINING_DEFAULTS,
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "dataset_dir": "data",
        "cutoff_len": 2048,
        "mix_strategy": "concat",
        "model_revision": "main",
        "flash_attn": "auto",
    },
    parts=(
        method, the_model, tokens, data, trainer.batch, trainer.length, trainer.distribution, mixed_precision,
        optimizer, trainer.schedule, recomputation, trainer.running, evaluation,
        trainer_kernels, kernels,
    ),
    former={"evaluation_strategy": "eval_strategy"},
)  # fmt: skip
