"""The shape of a large machine: one rank of many, of a model with the widths of Llama 3 8B.

Fake tensors take no memory and the groups send nothing, so this machine limits neither the model nor the ranks."""

from __future__ import annotations

from math import ceil, prod

from rehearsal.cells import Cell

# meta-llama/Meta-Llama-3-8B, config.json
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
# meta-llama/Meta-Llama-3-70B, config.json
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
MESHES: dict[str, tuple[str, dict[str, int]]] = {
    "hybrid": ("fsdp2", {"replicate": 64, "shard": 8}),
    "layers": ("fsdp2", {"shard": 64, "tensor": 8}),
    "layers-hybrid": ("fsdp2", {"replicate": 8, "shard": 8, "tensor": 8}),
    "rows": ("fsdp2", {"shard": 256, "context": 2}),
}
"""Of 512 ranks."""
SPLIT = ("zero1", "zero2", "zero3", "fsdp1", "fsdp2")
WORLDS = (64, 512, 1024)


def cell(
    strategy: str,
    world: int,
    rank: int,
    layers: int = 32,
    config: dict[str, object] = LLAMA_8B,
    more: dict[str, object] | None = None,
) -> Cell:
    sections = {
        "model": {"config": config | {"num_hidden_layers": layers}},
        "activation_checkpointing": "full",
        # One micro-batch a step, however few samples there are for so many ranks.
        "batch": {"micro_size": 2, "accumulation": 1},
        **(more or {}),
    }
    option = "-".join((f"{config['hidden_size']}-wide-{layers}-layers", *(more or ())))
    return Cell(strategy, option, rank=rank, world=world, sections=sections)


def mesh_cell(name: str, rank: int, config: dict[str, object], layers: int) -> Cell:
    strategy, mesh = MESHES[name]
    whole = cell(strategy, 512, rank, layers)
    sections = whole.sections | {
        "model": {"config": config | {"num_hidden_layers": layers}},
        "strategy": {"mesh": mesh},
    }
    option = f"{name}-{config['hidden_size']}-wide-{layers}-layers"
    return Cell(strategy, option, rank=rank, world=512, sections=sections)


def mesh_part(name: str, weight: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A weight's part on a rank of a mesh: of a matrix that ranks divide, then of its rows."""
    strategy, mesh = MESHES[name]
    tensor, shard = mesh.get("tensor", 1), mesh.get("shard", 1) * mesh.get("context", 1)
    if weight.rpartition(".")[0].endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
        shape = (shape[0] // tensor, *shape[1:])
    elif weight.rpartition(".")[0].endswith(("o_proj", "down_proj")):
        shape = (shape[0], shape[1] // tensor)
    return shape if strategy in ("ddp", "zero2") else rows_here(shape, rank // tensor % shard, shard)


def shapes(layers: int, width: int = 4096, inner: int = 14336) -> dict[str, tuple[int, ...]]:
    """The model's parameters, written down a second time."""
    vocabulary, keys = 128256, 1024
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for at in range(layers):
        block = f"model.layers.{at}"
        found |= {
            f"{block}.self_attn.q_proj.weight": (width, width), f"{block}.self_attn.k_proj.weight": (keys, width),
            f"{block}.self_attn.v_proj.weight": (keys, width), f"{block}.self_attn.o_proj.weight": (width, width),
            f"{block}.mlp.gate_proj.weight": (inner, width), f"{block}.mlp.up_proj.weight": (inner, width),
            f"{block}.mlp.down_proj.weight": (width, inner), f"{block}.input_layernorm.weight": (width,),
            f"{block}.post_attention_layernorm.weight": (width,),
        }  # fmt: skip
    return found | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def rows_here(shape: tuple[int, ...], rank: int, world: int) -> tuple[int, ...]:
    """fsdp2: rows in chunks of equal size, the last ones smaller or empty."""
    chunk = ceil(shape[0] / world)
    return (max(0, min(chunk, shape[0] - rank * chunk)), *shape[1:])


def part_here(shape: tuple[int, ...], rank: int, world: int) -> tuple[int, ...]:
    """zero3: elements in equal parts, the last one padded."""
    return (ceil(prod(shape) / world),)
