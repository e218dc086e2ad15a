"""Loops on models that transformers itself splits over ranks (``DistributedConfig``), recorded in place, and what makes
the recorder fail in the middle of one."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.verification.scripts import catch

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 64, "use_cache": False}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp_size": 2},
    "mixed": {"fsdp_size": 2, "fsdp_mixed_precision": True},
    "tensor": {"tp_size": 2},
    "experts": {"fsdp_size": 2, "ep_size": 2},
    "hybrid": {"fsdp_size": 2, "dp_replicate_size": 2},
    "both": {"fsdp_size": 2, "tp_size": 2},
}
STEPS = 3
OTHER_MACHINES = "ranks on other machines"
"""A way to fail: no file says where these are."""
Told = tuple[list[float], dict[str, torch.Tensor]]


def save_model(kind: str, folder: Path) -> None:
    """What the loops read."""
    import transformers

    torch.manual_seed(0)
    if kind == "experts":
        config: Any = transformers.Qwen3MoeConfig(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8, **SIZES
        )
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    else:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)


def train(kind: str, model_folder: str) -> Told:
    """A plain loop; the losses of this rank and the whole weights."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # of a job of the same processes before: accelerate's state keeps it
    config = DistributedConfig(**CONFIGS[kind])
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, distributed_config=config, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    # Ranks that hold parts of a layer have the same rows.
    parts = dist.get_world_size() // CONFIGS[kind].get("tp_size", 1)
    place = dist.get_rank() * parts // dist.get_world_size()
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        ids = torch.randint(3, 64, (parts, 2, 12), generator=draw)[place]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if "tp_size" not in CONFIGS[kind] and "ep_size" not in CONFIGS[kind]:  # torch clips plain or split gradients
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in model.named_parameters()}
    return losses, {name: tensor.detach().clone() for name, tensor in whole.items()}


def recorded(kind: str, model_folder: str, session: str | None, way: str = "") -> tuple[Told, str | None]:
    """``train``, recorded in ``session``; what ended the recording. ``way``: ``broken``'s."""
    if session is None:
        return train(kind, model_folder), None
    os.environ["ACCELERATE_USE_DEEPSPEED"] = os.environ["ACCELERATE_USE_FSDP"] = "false"
    import torch.distributed.fsdp

    catch._session = None
    catch.begin(session)
    watching = catch._session
    assert watching is not None
    try:
        with broken(way):
            catch.after_torch(torch)
            catch.after_fsdp(torch.distributed.fsdp)
            told = train(kind, model_folder)
            watching.finish()
    finally:
        watching.end()
        catch._session = None
    return told, watching.error


@contextlib.contextmanager
def broken(way: str) -> Iterator[None]:
    """``module:name:rank:call``: of the recorder's, a function raises on that rank at that call; what reads a tensor
    together with the other ranks does so behind that, as where there is no memory for a copy."""
    if not way:
        yield
        return
    if way == OTHER_MACHINES:
        before = os.environ.get("LOCAL_WORLD_SIZE")
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        try:
            yield
        finally:
            os.environ.pop("LOCAL_WORLD_SIZE")
            if before is not None:
                os.environ["LOCAL_WORLD_SIZE"] = before
        return
    module, name, rank, call = way.split(":")
    owner: Any = importlib.import_module(f"toolkit.verification.{module}")
    *inside, attribute = name.split(".")
    for part in inside:
        owner = getattr(owner, part)
    right, calls = getattr(owner, attribute), 0

    def wrong(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        fails = calls == int(call) and dist.get_rank() == int(rank)
        if fails and attribute != "whole":
            raise RuntimeError(f"planted in {name}")
        answer = right(*args, **kwargs)
        if fails:
            raise RuntimeError(f"planted in {name}")
        return answer

    setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        setattr(owner, attribute, right)
