"""Recipes to start from: shapes of models that need no network, and one on the CPU."""

from __future__ import annotations


def _llama(hidden: int, inner: int, layers: int, heads: int, groups: int, words: int = 128256) -> str:
    return (
        "model:\n"
        f"  config: {{model_type: llama, hidden_size: {hidden}, intermediate_size: {inner}, "
        f"num_hidden_layers: {layers}, num_attention_heads: {heads}, num_key_value_heads: {groups}, "
        f"vocab_size: {words}}}\n"
    )


_REST = """adapter: {{method: lora, r: 16, alpha: 32}}
data:
  train: data/train.jsonl
  max_length: {length}
batch: {{micro_size: {micro}, accumulation: {accumulation}}}
optimizer: {{lr: 2.0e-4}}
precision: bf16
activation_checkpointing: full
strategy: {{name: {strategy}}}
machine: {{device: cuda, processes: {processes}}}
run: {{epochs: 1, output_dir: runs/first}}
"""


def _start(model: str, **values: object) -> str:
    return model + _REST.format(**values)


STARTS: dict[str, tuple[str, str]] = {
    "8B, LoRA, 2 GPUs": ("rtx4090", _start(_llama(4096, 14336, 32, 32, 8), length=4096, micro=1, accumulation=8,
                                           strategy="zero2", processes=2)),
    "1B, LoRA, 1 GPU": ("rtx4090", _start(_llama(2048, 8192, 16, 32, 8), length=2048, micro=4, accumulation=4,
                                          strategy="single", processes=1)),
    "70B, LoRA, 8 GPUs": ("h100", _start(_llama(8192, 28672, 80, 64, 8), length=4096, micro=1, accumulation=2,
                                         strategy="zero2", processes=8)),
}  # fmt: skip
"""Title, and a GPU with the recipe's text. The models have the shapes of Llama 3's."""
