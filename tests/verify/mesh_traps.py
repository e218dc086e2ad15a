"""Upstream defects of tensor parallelism, each shown in a few lines without this toolkit, on two connected processes.

Every function returns what docs/findings.md tells; tests/verify/test_upstream.py says when one is gone.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from upstream import _connect, _llama, _tokens


def _saved(tied: bool = False) -> str:
    """A folder with the tiny model, the same for both ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    if dist.get_rank() == 0:
        model = _llama()
        model.config.tie_word_embeddings = tied
        model.save_pretrained(made[0])
    dist.barrier()
    return str(Path(made[0]))


def transformers_ignores_the_mesh() -> tuple[int, int]:
    """(Rows of a matrix of 32 on this rank, ranks of the mesh that was given), where that mesh has one rank of two."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    _connect("none")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    model: Any = AutoModelForCausalLM.from_pretrained(_saved(), tp_plan="auto", device_mesh=mesh)
    weight = model.model.layers[0].self_attn.q_proj.weight
    return int((weight.to_local() if hasattr(weight, "to_local") else weight).shape[0]), mesh.size()


def peft_keeps_whole_widths(target: str) -> str:
    """What a LoRA of a layer that transformers has divided says in its first forward; empty if nothing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    _connect("none")
    base = AutoModelForCausalLM.from_pretrained(_saved(), distributed_config=DistributedConfig(tp_size=2))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=[target]))
    ids = _tokens()
    try:
        model(input_ids=ids, labels=ids).loss.backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def torch_unties_weights() -> tuple[bool, float]:
    """(Whether embedding and head are still one weight after ``parallelize_module`` of both, the 2-norm of the
    embedding's gradient over that of the plain model's)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _connect("none")
    ids, norms = _tokens(), []
    tied = False
    for divided in (False, True):
        model = _llama()
        model.lm_head.weight = model.model.embed_tokens.weight
        if divided:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            plan = {
                "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
                "lm_head": ColwiseParallel(output_layouts=Replicate()),
            }
            parallelize_module(model, mesh, plan)
            tied = model.lm_head.weight is model.model.embed_tokens.weight
        model(input_ids=ids, labels=ids).loss.backward()
        gradient: Any = model.model.embed_tokens.weight.grad
        norms.append((gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).norm().item())
    return tied, norms[1] / norms[0]


def accelerate_asks_for_what_is_gone() -> str:
    """What ``Accelerator.prepare`` says of FSDP2 beside tensor parallelism; empty if nothing. One rank shards."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    _connect("fsdp")
    os.environ["FSDP_VERSION"] = "2"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=plugin)
    accelerator.state.parallelism_config = ParallelismConfig(dp_shard_size=1, tp_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    accelerator.state.device_mesh = mesh
    model = _llama()
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    try:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    except ImportError as error:
        return str(error)
    finally:
        del os.environ["FSDP_VERSION"]
    return ""
