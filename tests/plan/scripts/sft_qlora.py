"""QLoRA with TRL's SFTTrainer: the model loaded in 4 bits, an adapter on every linear layer."""

import torch
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

model_id = "meta-llama/Llama-3.1-8B"
bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(
    model_id, quantization_config=bnb_config, torch_dtype=torch.bfloat16, device_map="auto"
)
model = prepare_model_for_kbit_training(model)
tokenizer = AutoTokenizer.from_pretrained(model_id)

peft_config = LoraConfig(
    r=32,
    lora_alpha=64,
    lora_dropout=0.05,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    task_type="CAUSAL_LM",
)
common = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16 // 2}
training_args = SFTConfig(
    output_dir="out",
    max_length=2048,
    optim="paged_adamw_8bit",
    num_train_epochs=3,
    learning_rate=2e-4,
    **common,
)
trainer = SFTTrainer(
    model=model,
    args=training_args,
    train_dataset=load_dataset("json", data_files="train.jsonl")["train"],
    peft_config=peft_config,
    processing_class=tokenizer,
)
trainer.train()
