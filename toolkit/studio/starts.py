"""Recipes to start from. All but the last one fit their GPUs, and no plan of them needs the network."""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL = "runs/models/SmolLM2-135M-Instruct"
"""The pretrained model that `make demo` leaves (examples/demo/smollm2.py), and the data that it made."""
_DEMO_DATA = "runs/demo/data/conversations.jsonl"


def _llama(hidden: int, inner: int, layers: int, heads: int, groups: int, tied: bool = False) -> str:
    return (
        "model:\n"
        f"  config: {{model_type: llama, hidden_size: {hidden}, intermediate_size: {inner}, "
        f"num_hidden_layers: {layers}, num_attention_heads: {heads}, num_key_value_heads: {groups}, "
        f"vocab_size: 128256{', tie_word_embeddings: true' if tied else ''}}}\n"
    )


_REST = """adapter: {{method: lora, r: 16, alpha: 32}}
data:
  train: data/train.jsonl
  max_length: {length}
batch: {{micro_size: {micro}, accumulation: {accumulation}}}
optimizer: {{lr: 2.0e-4}}
precision: bf16
activation_checkpointing: full
loss: {loss}
strategy: {{name: {strategy}}}
machine: {{device: cuda, processes: {processes}}}
run: {{epochs: 1, output_dir: runs/first}}
"""


def _start(model: str, **values: object) -> str:
    return model + _REST.format(**values)


_SMALL = """model: {{path: {path}}}
adapter: {{method: lora, r: 16, alpha: 32, dropout: 0.05, target_modules: all-linear}}
data: {{train: {train}, eval_fraction: 0.1, format: messages, max_length: 256}}
batch: {{micro_size: 4, accumulation: 2}}
optimizer: {{lr: 1.0e-3}}
schedule: {{name: cosine, warmup_ratio: 0.1}}
precision: {precision}
strategy: {{name: single}}
machine: {{device: auto, processes: 1}}
run: {{epochs: 1, output_dir: runs/first}}
"""
_FROM_HUB = _SMALL.format(path="HuggingFaceTB/SmolLM2-135M-Instruct", train="data/train.jsonl", precision="bf16")
_FROM_DEMO = _SMALL.format(path=DEMO_MODEL, train=_DEMO_DATA, precision="fp32")  # trains on a CPU too

_70B = _llama(8192, 28672, 80, 64, 8)
_ON_8 = {"length": 4096, "micro": 1, "accumulation": 2, "processes": 8}

STARTS: dict[str, tuple[str, str]] = {
    "SmolLM2 135M, LoRA, 1 GPU": ("rtx4090", _FROM_HUB),
    "8B, LoRA, 2 GPUs": ("rtx4090", _start(_llama(4096, 14336, 32, 32, 8), length=4096, micro=1, accumulation=8,
                                           loss="fused", strategy="zero2", processes=2)),
    "1B, LoRA, 1 GPU": ("rtx4090", _start(_llama(2048, 8192, 16, 32, 8, tied=True), length=2048, micro=4,
                                          accumulation=4, loss="fused", strategy="single", processes=1)),
    "70B, LoRA, 8 GPUs": ("h100", _start(_70B, loss="fused", strategy="fsdp2", **_ON_8)),
    "70B, too big for 8 GPUs: see what helps": ("h100", _start(_70B, loss="plain", strategy="zero2", **_ON_8)),
}  # fmt: skip
"""Title, and a GPU with the recipe's text. The first is of a hub model; the others have random weights and the shapes
of Llama 3."""


def starts(root: Path | None) -> dict[str, tuple[str, str]]:
    """``STARTS``, after the model and data of `make demo` where both are below ``root``."""
    if root is None or not all((root / path).exists() for path in (DEMO_MODEL, _DEMO_DATA)):
        return STARTS
    return {"SmolLM2 135M of make demo, LoRA": ("rtx4090", _FROM_DEMO)} | STARTS
