"""Scripts of other projects, by the path in their repositories, with the arguments that they are run with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """``strategies``: how it is launched; ``-bf16`` asks the launcher for mixed precision."""

    project: str
    path: str
    arguments: str
    strategies: tuple[str, ...] = ("single", "ddp")

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1].removesuffix(".py")


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
)  # fmt: skip
