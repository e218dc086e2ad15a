"""Scripts of other projects, by the path in their repositories, with the arguments that they are run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Script:
    """``strategies``: how it is launched; ``-bf16`` asks the launcher for mixed precision. ``launch``: by strategy, the
    command of a tool that launches by itself, with ``{file}``, ``{arguments}`` and ``{project}``, its checkout.
    ``environment``: the virtual environment of a tool with other versions of its own."""

    project: str
    path: str
    arguments: str
    strategies: tuple[str, ...] = ("single", "ddp")
    launch: Mapping[str, str] = field(default_factory=dict)
    environment: str = ""

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1].removesuffix(".py").removesuffix(".yaml")


_ALL = ("single", "ddp", "fsdp2", "fsdp1", "zero2", "zero3")
_EXAMPLES = "examples/pytorch"
_TRAINER = (
    "--do_train --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 4 --output_dir out "
    "--report_to none --learning_rate 1e-3 --save_strategy no"
)
_NO_TRAINER = (
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_train_steps 4 --learning_rate 1e-3 "
    "--output_dir out"
)
_TRL = (
    "--model_name_or_path llama --output_dir out --max_steps 4 --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 2 --report_to none --bf16 False --gradient_checkpointing False "
    "--learning_rate 1e-3 --save_strategy no"
)
_PEFT = "--use_peft --lora_r 4 --lora_target_modules all-linear"
_FACTORY = (
    "model_name_or_path=llama trust_remote_code=false template=default cutoff_len=96 max_samples=32 "
    "preprocessing_num_workers=1 dataloader_num_workers=0 output_dir=out/factory gradient_accumulation_steps=2 "
    "per_device_train_batch_size=2 bf16=false save_steps=100 max_steps=4 plot_loss=false dataset_dir={project}/data"
)
_FACTORY_RANKS = "env FORCE_TORCHRUN=1 NPROC_PER_NODE=2 llamafactory-cli train {file} {arguments}"
_FACTORY_LAUNCH = {
    "single": "llamafactory-cli train {file} {arguments}",
    "ddp": _FACTORY_RANKS,
    "zero2": _FACTORY_RANKS + " deepspeed={project}/examples/deepspeed/ds_z2_config.json",
    "zero3": _FACTORY_RANKS + " deepspeed={project}/examples/deepspeed/ds_z3_config.json",
    "fsdp2": "env DISABLE_VERSION_CHECK=1 accelerate launch --config_file fsdp2.yaml {project}/src/train.py {file} "
    "{arguments}",
}
_SWIFT = (
    "--model ./llama --model_type llama --template default --max_steps 4 --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 2 --learning_rate 1e-3 --output_dir out/swift --max_length 128 --save_steps 100"
)
_SWIFT_LAUNCH = {
    "single": "swift {file} {arguments}",
    "ddp": "env NPROC_PER_NODE=2 swift {file} {arguments}",
    "zero2": "env NPROC_PER_NODE=2 swift {file} {arguments} --deepspeed zero2",
    "zero3": "env NPROC_PER_NODE=2 swift {file} {arguments} --deepspeed zero3",
}
_TUNE = (
    "output_dir=out/tune tokenizer._component_=torchtune.models.llama2.llama2_tokenizer tokenizer.path=spm.model "
    "tokenizer.max_seq_len=96 dataset._component_=torchtune.datasets.alpaca_dataset model.vocab_size=300 "
    "model.num_layers=2 model.num_heads=4 model.num_kv_heads=2 model.embed_dim=64 model.max_seq_len=512 "
    "model.intermediate_dim=128 checkpointer.checkpoint_dir=llama checkpointer.model_type=LLAMA3 device=cpu dtype=fp32 "
    "batch_size=2 gradient_accumulation_steps=2 max_steps_per_epoch=4 log_peak_memory_stats=False"
)
_TUNE_FULL = f"{_TUNE} model._component_=torchtune.models.llama3.llama3 optimizer._component_=torch.optim.AdamW"
_TUNE_LORA = f"{_TUNE} model._component_=torchtune.models.llama3.lora_llama3 model.lora_rank=4 model.lora_alpha=8"
_TUNE_LAUNCH = {"single": "tune run {file} {arguments}", "fsdp2": "tune run --nproc_per_node 2 {file} {arguments}"}
_LITGPT = (
    "./litgpt --data JSON --data.json_path alpaca.json --data.val_split_fraction 0.1 --train.global_batch_size 4 "
    "--train.micro_batch_size 2 --train.max_seq_length 96 --train.max_steps 4 --precision 32-true --eval.interval 100 "
    "--eval.initial_validation false --out_dir out/litgpt"
)
_PEFT_SFT = (
    "--base_model_name_or_path llama --dataset_split train --output_dir out/peft --num_train_epochs 1 --max_steps 4 "
    "--data_path tatsu-lab/alpaca --dataset_field instruction output "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 "
    "--bits fp32 --bf16 False --use_cpu --logging_steps 1 --save_strategy no --report_to none"
)
_FABRIC = "fabric run --accelerator cpu --devices 2"

SCRIPTS = (
    Script("transformers", f"{_EXAMPLES}/language-modeling/run_clm.py",
           f"--model_name_or_path gpt2 --train_file text.txt --block_size 64 {_TRAINER}",
           _ALL),
    Script("transformers", f"{_EXAMPLES}/language-modeling/run_clm.py",
           f"--model_name_or_path gpt2 --train_file text.txt --block_size 64 --bf16 --use_cpu {_TRAINER}",
           ("single", "ddp")),
    Script("transformers", f"{_EXAMPLES}/language-modeling/run_clm_no_trainer.py",
           f"--model_name_or_path gpt2 --train_file text.txt --block_size 64 {_NO_TRAINER}", ("single",)),
    Script("transformers", f"{_EXAMPLES}/language-modeling/run_mlm.py",
           f"--model_name_or_path bert-base-cased --train_file text.txt --line_by_line {_TRAINER}",
           ("single", "ddp", "fsdp2", "zero3")),
    Script("transformers", f"{_EXAMPLES}/language-modeling/run_mlm_no_trainer.py",
           f"--model_name_or_path bert-base-cased --train_file text.txt --line_by_line True {_NO_TRAINER}"),
    Script("transformers", f"{_EXAMPLES}/language-modeling/run_fim.py",
           f"--model_name_or_path gpt2 --train_file text.txt --block_size 64 {_TRAINER}", ("single",)),
    Script("transformers", f"{_EXAMPLES}/text-classification/run_glue.py",
           f"--model_name_or_path bert-base-cased --train_file pairs.csv --validation_file pairs.csv {_TRAINER}",
           ("single", "ddp", "zero2")),
    Script("transformers", f"{_EXAMPLES}/text-classification/run_glue_no_trainer.py",
           f"--model_name_or_path bert-base-cased --train_file pairs.csv --validation_file pairs.csv {_NO_TRAINER}"),
    Script("transformers", f"{_EXAMPLES}/summarization/run_summarization.py",
           f"--model_name_or_path t5 --train_file summaries/train.json {_TRAINER}", ("single", "ddp", "fsdp2")),
    Script("transformers", f"{_EXAMPLES}/summarization/run_summarization_no_trainer.py",
           f"--model_name_or_path t5 --train_file summaries/train.json --validation_file summaries/train.json "
           f"{_NO_TRAINER}"),
    Script("transformers", f"{_EXAMPLES}/translation/run_translation.py",
           f"--model_name_or_path t5 --train_file translations/train.json --source_lang en --target_lang de {_TRAINER}",
           ("single",)),
    Script("trl", "trl/scripts/sft.py", f"--dataset_name prompts {_TRL}", ("single", "ddp", "fsdp2", "zero2", "zero3")),
    Script("trl", "trl/scripts/sft.py", f"--dataset_name prompts {_TRL} {_PEFT}", ("single", "fsdp2")),
    Script("trl", "trl/scripts/dpo.py", f"--dataset_name preferences {_TRL}", ("single", "ddp", "fsdp2", "zero2")),
    Script("trl", "trl/scripts/dpo.py", f"--dataset_name preferences {_TRL} {_PEFT}", ("single",)),
    Script("trl", "trl/scripts/reward.py", f"--dataset_name preferences {_TRL}", ("single", "ddp", "zero3")),
    Script("trl", "trl/scripts/kto.py", f"--dataset_name labelled {_TRL}", ("single", "ddp")),
    Script("accelerate", "examples/nlp_example.py", "", ("single", "ddp", "fsdp2", "zero2")),
    Script("accelerate", "examples/complete_nlp_example.py", "", ("single",)),
    Script("accelerate", "examples/by_feature/gradient_accumulation.py", "--gradient_accumulation_steps 2"),
    Script("accelerate", "examples/by_feature/gradient_accumulation_for_autoregressive_models.py",
           "--gradient_accumulation_steps 2", ("single", "ddp")),
    Script("accelerate", "examples/by_feature/automatic_gradient_accumulation.py", "", ("single",)),
    Script("accelerate", "examples/by_feature/checkpointing.py", "", ("single",)),
    Script("accelerate", "examples/by_feature/early_stopping.py", "", ("single",)),
    Script("accelerate", "examples/by_feature/ddp_comm_hook.py", "--ddp_comm_hook bf16", ("ddp",)),
    Script("accelerate", "examples/by_feature/ddp_comm_hook.py", "--ddp_comm_hook no", ("ddp",)),
    Script("accelerate", "examples/by_feature/local_sgd.py", "--local_sgd_steps 2", ("ddp",)),
    Script("accelerate", "examples/by_feature/multi_process_metrics.py", "", ("ddp",)),
    Script("accelerate", "examples/by_feature/memory.py", "", ("single",)),
    Script("accelerate", "examples/by_feature/cross_validation.py", "", ("single",)),
    Script("peft", "examples/sequence_classification/peft_no_lora_accelerate.py", "", ("single",)),
    Script("peft", "examples/dora_finetuning/dora_finetuning.py",
           "--base_model llama --data_path tatsu-lab/alpaca --output_dir out --batch_size 2", ("single",)),
    Script("DeepSpeedExamples", "training/DeepSpeed-ZenFlow/finetuning/finetune_llama.py",
           "--model_name llama --lr 1e-4 --batch_size 2 --deepspeed_config deepspeed.json --output_dir out",
           ("deepspeed",)),
    Script("DeepSpeedExamples", "applications/DeepSpeed-Chat/training/step1_supervised_finetuning/main.py",
           "--model_name_or_path llama --data_path local/jsonfile --max_seq_len 64 --zero_stage 2 --deepspeed "
           "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --dtype bf16 --output_dir out",
           ("deepspeed",)),
    Script("pytorch-lightning", "examples/fabric/language_model/train.py", "",
           ("single", "ddp", "fsdp", "deepspeed"), environment="lightning",
           launch={kind: f"{_FABRIC} --strategy {kind} {{file}}" for kind in ("ddp", "fsdp", "deepspeed")}),
    Script("pytorch-lightning", "examples/pytorch/basics/transformer.py", "", ("single", "ddp"),
           environment="lightning"),
    Script("pytorch-lightning", "examples/pytorch/basics/autoencoder.py", "fit --trainer.max_steps 4", ("single",),
           environment="lightning"),
    Script("litgpt", "litgpt finetune_full", _LITGPT, ("single", "fsdp"), environment="lightning",
           launch={"single": "{file} {arguments}", "fsdp": "{file} {arguments} --devices 2"}),
    Script("litgpt", "litgpt finetune_lora", f"{_LITGPT} --lora_r 4", ("single",), environment="lightning",
           launch={"single": "{file} {arguments}"}),
    Script("torchtune", "full_finetune_single_device --config llama3_2/1B_full_single_device",
           f"{_TUNE_FULL} optimizer_in_bwd=False clip_grad_norm=1.0", ("single",), _TUNE_LAUNCH, "torchtune"),
    Script("torchtune", "full_finetune_distributed --config llama3_2/1B_full", f"{_TUNE_FULL} clip_grad_norm=1.0",
           ("fsdp2",), _TUNE_LAUNCH, "torchtune"),
    Script("torchtune", "lora_finetune_single_device --config llama3_2/1B_lora_single_device", _TUNE_LORA, ("single",),
           _TUNE_LAUNCH, "torchtune"),
    Script("torchtune", "lora_finetune_distributed --config llama3_2/1B_lora", _TUNE_LORA, ("fsdp2",), _TUNE_LAUNCH,
           "torchtune"),
    Script("LLaMA-Factory", "examples/train_lora/qwen3_lora_sft.yaml", f"{_FACTORY} lora_rank=4",
           ("single", "ddp", "zero2", "zero3", "fsdp2"), _FACTORY_LAUNCH, "factory"),
    Script("LLaMA-Factory", "examples/train_full/qwen3_full_sft.yaml", _FACTORY, ("zero2", "zero3"), _FACTORY_LAUNCH,
           "factory"),
    Script("LLaMA-Factory", "examples/train_lora/qwen3_lora_dpo.yaml", f"{_FACTORY} lora_rank=4", ("single", "ddp"),
           _FACTORY_LAUNCH, "factory"),
    Script("LLaMA-Factory", "examples/train_lora/qwen3_lora_pretrain.yaml", f"{_FACTORY} lora_rank=4", ("ddp",),
           _FACTORY_LAUNCH, "factory"),
    Script("LLaMA-Factory", "examples/train_lora/qwen3_lora_reward.yaml", f"{_FACTORY} lora_rank=4", ("single",),
           _FACTORY_LAUNCH, "factory"),
    Script("ms-swift", "sft", f"{_SWIFT} --dataset chats.jsonl --tuner_type lora", ("single", "ddp", "zero2", "zero3"),
           _SWIFT_LAUNCH, "swift"),
    Script("ms-swift", "sft", f"{_SWIFT} --dataset chats.jsonl --tuner_type full", ("ddp",), _SWIFT_LAUNCH, "swift"),
    Script("ms-swift", "pt", f"{_SWIFT} --dataset chats.jsonl --tuner_type lora", ("ddp",), _SWIFT_LAUNCH, "swift"),
    Script("axolotl", "axolotl train", "axolotl.yaml --launcher python", ("single",), environment="axolotl",
           launch={"single": "{file} {arguments}"}),
    Script("axolotl", "axolotl train", "axolotl.yaml", ("ddp", "zero2"), environment="axolotl",
           launch={"ddp": "{file} {arguments} --launcher torchrun -- --nproc_per_node=2",
                   "zero2": "{file} {arguments} --launcher accelerate -- --config_file zero2.yaml"}),
    Script("peft", "examples/sft/train.py",
           "--model_name_or_path llama --dataset_name prompts_sft --splits train,test --dataset_text_field text "
           "--max_length 96 --max_steps 4 --output_dir out/peft --per_device_train_batch_size 2 "
           "--gradient_accumulation_steps 2 --use_peft_lora True --lora_r 4 --lora_target_modules all-linear "
           "--report_to none --bf16 False --learning_rate 1e-3 --save_strategy no --append_concat_token False",
           ("single", "ddp", "fsdp2", "zero3")),
    Script("peft", "examples/conditional_generation/peft_lora_seq2seq_accelerate_fsdp.py", "", ("single",)),
    Script("peft", "examples/miss_finetuning/miss_finetuning.py", _PEFT_SFT, ("single",)),
    Script("peft", "examples/olora_finetuning/olora_finetuning.py",
           "--base_model llama --data_path tatsu-lab/alpaca --output_dir out/olora --batch_size 4 --num_epochs 1 "
           "--cutoff_len 96 --val_set_size 16 --lora_r 4", ("single", "ddp")),
    Script("peft", "examples/pissa_finetuning/pissa_finetuning.py", _PEFT_SFT, ("single",)),
    Script("accelerate", "examples/by_feature/profiler.py", "", ("single",)),
    Script("accelerate", "examples/by_feature/schedule_free.py", "", ("single",)),
    Script("accelerate", "examples/by_feature/tracking.py", "", ("single",)),
    Script("accelerate", "examples/by_feature/deepspeed_with_config_support.py",
           "--dataset_name text --model_name_or_path gpt2 --max_train_steps 4", ("zero2",)),
    Script("accelerate", "examples/by_feature/fsdp_with_peak_mem_tracking.py",
           "--model_name_or_path bert-base-cased", ("fsdp2",)),
    Script("accelerate", "examples/torch_native_parallelism/fsdp2_fp8.py", "", ("fsdp2",)),
)  # fmt: skip
