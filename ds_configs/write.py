"""Write every preset: `make presets`. A recipe per folder, and beside it what `toolkit config` writes for it, but that
paths do not depend on the machine."""

from __future__ import annotations

from pathlib import Path

from toolkit.launch.files import launch_files, write_files
from toolkit.recipe.load import load_recipe
from toolkit.strategies import resolve

HERE = Path("ds_configs")

# strategy, offload, adapter, what it is for
PRESETS: dict[str, tuple[str, str, bool, str]] = {
    "single-lora": ("single", "none", True, "LoRA on one GPU"),
    "ddp-lora": ("ddp", "none", True, "LoRA when the base fits on each GPU: the fastest"),
    "zero1": ("zero1", "none", False, "Full training; optimizer state sharded"),
    "zero2": ("zero2", "none", False, "Full training; optimizer state and gradients sharded"),
    "zero2-lora": ("zero2", "none", True, "LoRA; optimizer state and gradients of the adapter sharded"),
    "zero2-offload": ("zero2", "optimizer", False, "As zero2, with the optimizer in host memory"),
    "zero3": ("zero3", "none", False, "Full training; weights sharded too"),
    "zero3-lora": ("zero3", "none", True, "LoRA when the base does not fit on one GPU"),
    "zero3-offload-optimizer": ("zero3", "optimizer", False, "As zero3, with the optimizer in host memory"),
    "zero3-offload-all": (
        "zero3",
        "all",
        False,
        "As zero3, with weights and optimizer in host memory: the least GPU memory",
    ),
    "fsdp1": ("fsdp1", "none", False, "Full training; version 1 of FSDP, for scripts that need it"),
    "fsdp2": ("fsdp2", "none", False, "Full training; version 2 of FSDP"),
    "fsdp2-lora": ("fsdp2", "none", True, "LoRA when the base does not fit on one GPU"),
    "fsdp2-offload": ("fsdp2", "all", False, "As fsdp2, with weights and optimizer in host memory"),
}

RECIPE = """\
# {purpose}. Llama-3.2-1B's architecture with random weights: runs without a download.
# Real weights: toolkit train ds_configs/{name}/recipe.yaml model.config=null model.path=meta-llama/Llama-3.2-1B
model:
  config:
    model_type: llama
    hidden_size: 2048
    intermediate_size: 8192
    num_hidden_layers: 16
    num_attention_heads: 32
    num_key_value_heads: 8
    head_dim: 64
    vocab_size: 128256
    max_position_embeddings: 131072
    tie_word_embeddings: true
tokenizer: {{path: meta-llama/Llama-3.2-1B}}
adapter: {adapter}
data: {{train: data/train.jsonl, format: text, max_length: 2048}}
batch: {{micro_size: 2, accumulation: 4}}
optimizer: {{lr: {lr}, weight_decay: 0.0, max_grad_norm: 1.0}}
schedule: {{name: cosine, warmup_ratio: 0.03}}
precision: bf16
activation_checkpointing: full
strategy: {{name: {strategy}, offload: {offload}}}
machine: {{device: cuda, processes: {processes}}}
run: {{max_steps: 1000, output_dir: runs/{name}, save_every: 200}}
"""


def main() -> None:
    for name, (strategy, offload, lora, purpose) in PRESETS.items():
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        adapter = "{method: lora, r: 16, alpha: 32, dropout: 0.05, target_modules: all-linear}" if lora else "null"
        recipe = RECIPE.format(
            name=name,
            purpose=purpose,
            strategy=strategy,
            offload=offload,
            adapter=adapter,
            lr="2.0e-4" if lora else "2.0e-5",
            processes=1 if strategy == "single" else 8,
        )
        file = folder / "recipe.yaml"
        file.write_text(recipe, encoding="utf-8")
        write_files(launch_files(resolve(load_recipe(file), str(file)), str(folder), str(file)), folder)
    print(f"wrote {len(PRESETS)} presets")


if __name__ == "__main__":
    main()
