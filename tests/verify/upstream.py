"""Upstream defects, each shown in a few lines without this toolkit. Run on two connected processes over gloo.

Every function returns what docs/findings.md tells; tests/verify/test_upstream.py says when one is gone.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def _connect(kind: str) -> None:
    """What `accelerate launch` and torchrun set up, and what engages sharding without a GPU."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(kind == "deepspeed").lower()
    os.environ["ACCELERATE_USE_FSDP"] = str(kind == "fsdp").lower()
    if kind == "deepspeed":
        import deepspeed

        # Else it compiles an op that only inference uses, and waits for ever where a killed job left its build lock.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    state = PartialState(backend="gloo")
    state.device = torch.device("cpu")
    if kind == "fsdp":
        state.distributed_type = DistributedType.MULTI_GPU


def _llama(dropout: float = 0.0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            attention_dropout=dropout,
            use_cache=False,
        )
    ).train()


def _tokens() -> torch.Tensor:
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def _fsdp2_gradients(checkpointing: bool) -> tuple[float, dict[str, torch.Tensor]]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    _connect("fsdp")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=checkpointing,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = _llama(dropout=0.1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    torch.manual_seed(7)
    loss = model(input_ids=_tokens(), labels=_tokens()).loss
    accelerator.backward(loss)
    named = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    return loss.item(), {name: p.grad.full_tensor() for name, p in named.items()}


def fsdp2_checkpointing_redraws_dropout() -> tuple[float, float]:
    """(difference of the loss, largest relative error of a gradient) with checkpointing on and off."""
    plain_loss, plain = _fsdp2_gradients(False)
    loss, found = _fsdp2_gradients(True)
    worst = max(((found[name] - plain[name]).norm() / plain[name].norm()).item() for name in plain)
    return abs(loss - plain_loss), worst


def _deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, **config: Any) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin

    _connect("deepspeed")
    values = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **config,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=values, zero3_init_flag=False))
    return accelerator.prepare(model, optimizer)[0]


def zero2_links_one_group() -> str:
    """What reading Adam's moment of a parameter of the second group says after a step."""
    from deepspeed.utils import safe_get_full_optimizer_state

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    engine = _deepspeed(model, optimizer, 2)
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    # The first group's can be read, the second's cannot.
    assert safe_get_full_optimizer_state(model[0].weight, "exp_avg") is not None
    try:
        safe_get_full_optimizer_state(model[1].weight, "exp_avg")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "read"


def zero2_links_in_another_order() -> list[bool]:
    """By layer, whether reading its float32 weight answers with that, with ``round_robin_gradients``."""
    from deepspeed.utils import safe_get_full_fp32_param

    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    split = {"stage": 2, "round_robin_gradients": True}
    _deepspeed(model, torch.optim.AdamW(model.parameters()), 2, zero_optimization=split)
    return [torch.equal(safe_get_full_fp32_param(p), p) for p in model.parameters()]


def zero2_adds_what_arrives() -> float:
    """Relative error of a gradient under ZeRO-2 where ranks run two layers in different orders."""
    from deepspeed.utils import safe_get_full_grad

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    first, second = (layer.weight.detach().clone().requires_grad_() for layer in model)
    rows = torch.ones(2, 8)
    (((rows @ first.T) @ second.T).sum() / 2 + ((rows @ second.T) @ first.T).sum() / 2).backward()
    assert first.grad is not None
    engine = _deepspeed(model, torch.optim.AdamW(model.parameters()), 2)
    layers = list(engine.module) if dist.get_rank() == 0 else list(reversed(engine.module))
    engine.backward(layers[1](layers[0](rows)).sum())
    seen = safe_get_full_grad(engine.module[0].weight)
    return ((seen - first.grad).norm() / first.grad.norm()).item()


def deepspeed_casts_buffers() -> tuple[str, float]:
    """(dtype of the rotary frequencies, radians that position 2000 is turned too far)."""
    model = _llama()
    before = model.model.rotary_emb.inv_freq.clone()
    engine = _deepspeed(model, torch.optim.AdamW(model.parameters()), 2, bf16={"enabled": True})
    after = engine.module.model.rotary_emb.inv_freq
    return str(after.dtype), ((after.float() - before).abs().max() * 2000).item()


def deepspeed_masters_are_rounded() -> float:
    """Relative error of the float32 master weights before any step."""
    from deepspeed.utils import safe_get_full_fp32_param

    model = _llama()
    before = model.lm_head.weight.detach().clone()
    engine = _deepspeed(model, torch.optim.AdamW(model.parameters()), 2, bf16={"enabled": True})
    master = safe_get_full_fp32_param(engine.module.lm_head.weight)
    return ((master - before).norm() / before.norm()).item()


def zero2_divides_in_16_bits(scatter: bool) -> float:
    """Relative error of the average of three equal bf16 gradients under ZeRO-2 that is configured to communicate in
    float32."""
    from deepspeed.utils import safe_get_full_grad

    model = nn.Linear(256, 1, bias=False)
    right = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    config = {
        "train_batch_size": 6,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 2, "reduce_scatter": scatter},
    }
    engine = _deepspeed(model, torch.optim.AdamW(model.parameters()), 2, **config)
    engine.backward((engine.module.weight * right).sum())
    seen = safe_get_full_grad(engine.module.weight)
    return ((seen.float() - right.float()).norm() / right.float().norm()).item()


def fsdp2_bf16_casts_the_loss() -> tuple[str, str, float]:
    """(dtype that gradients are reduced in, dtype of the loss, its error) under accelerate's bf16."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    _connect("fsdp")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
    model = _llama()
    with torch.autocast("cpu", torch.bfloat16):
        right = model(input_ids=_tokens(), labels=_tokens()).loss.item()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    loss = model(input_ids=_tokens(), labels=_tokens()).loss
    policy = plugin.mixed_precision_policy
    return str(policy.reduce_dtype), str(loss.dtype), abs(loss.item() - right)


def zero3_is_reported_with_the_flag_off() -> bool:
    """Whether transformers takes every model made from now on for a ZeRO-3 one, ``zero3_init_flag=False`` or not."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from transformers.integrations import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

    _connect("deepspeed")
    config = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 4, "zero_optimization": {"stage": 3}}
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
    Accelerator(deepspeed_plugin=plugin)
    try:
        return is_deepspeed_zero3_enabled()
    finally:
        unset_hf_deepspeed_config()


def fused_adamw_under_sharded_scaler() -> str:
    """What a fused AdamW step under ShardedGradScaler says."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)  # to clip before the step
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "stepped"


def shm_op_is_wanted() -> tuple[bool, int]:
    """Whether DeepSpeed would build its shared-memory op here, and how many functions of its backend call one."""
    import ast
    import inspect
    from importlib import import_module

    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    source = ast.parse(inspect.getsource(import_module("deepspeed.comm.torch").TorchBackend))
    users = [
        f.name for f in ast.walk(source) if isinstance(f, ast.FunctionDef) and "torch.ops.deepspeed" in ast.unparse(f)
    ]
    return ALL_OPS["deepspeed_shm_comm"].is_compatible(verbose=False), len(users)


def bitsandbytes_misreads_rows() -> tuple[float, float]:
    """How far a weight of 32-long rows is off after 4 bits and back: as it stands, and as one row."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for packed in (weight, weight.flatten()):
        unpacked = dequantize_4bit(*quantize_4bit(packed, quant_type="nf4"))
        found.append(((unpacked.flatten() - weight.flatten()).norm() / weight.norm()).item())
    return found[0], found[1]


def shapes_of_unpacked(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of 4-bit values of this shape, unpacked: what bitsandbytes gives, and what it tells a compiler that it will."""
    from bitsandbytes.functional import quantize_4bit
    from torch._subclasses.fake_tensor import FakeTensorMode

    packed, state = quantize_4bit(torch.ones(shape), quant_type="nf4")
    options = (state.blocksize, state.quant_type, state.shape, state.dtype)
    given = torch.ops.bitsandbytes.dequantize_4bit(packed, state.absmax, *options)
    with FakeTensorMode() as fake:
        message = torch.ops.bitsandbytes.dequantize_4bit(
            fake.from_tensor(packed), fake.from_tensor(state.absmax), *options
        )
    return tuple(given.shape), tuple(message.shape)


def zero3_moves_a_model_whole() -> list[int]:
    """Elements of the largest module that is moved to the device before ZeRO-3 splits it, and of the whole model."""
    _connect("deepspeed")
    model = _llama()
    moved = [0]
    right = nn.Module.to

    def to(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        if torch._C._nn._parse_to(*arguments, **options)[0] is not None:  # a device
            moved.append(sum(p.numel() for p in module.parameters()))
        return right(module, *arguments, **options)

    whole = sum(p.numel() for p in model.parameters())
    nn.Module.to = to  # type: ignore[method-assign]
    try:
        _deepspeed(model, torch.optim.AdamW(model.parameters()), 3)
    finally:
        nn.Module.to = right  # type: ignore[method-assign]
    return [max(moved), whole]


def zero2_engine_is_never_freed(destroyed: bool) -> bool:
    """Whether an engine that nobody has any more is there after a collection."""
    import gc
    import weakref

    _connect("deepspeed")
    model = _llama()
    engine = _deepspeed(model, torch.optim.AdamW(model.parameters()), 2)
    seen = weakref.ref(engine)
    if destroyed:
        engine.destroy()
    del model, engine
    _connect("deepspeed")  # accelerate's state had the model too
    gc.collect()
    return seen() is not None


def limits_of_groups() -> tuple[float, float]:
    """Hours that a rank waits for another: in the first process group, once it is set, and in one made after that."""
    from datetime import timedelta

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    c10d = dist.distributed_c10d
    c10d._set_pg_timeout(timedelta(hours=5))
    made = dist.new_group()
    limits = [g._get_backend(torch.device("cpu")).options._timeout for g in (c10d._get_default_group(), made)]
    dist.destroy_process_group(made)
    return limits[0].total_seconds() / 3600, limits[1].total_seconds() / 3600


def marks_count_as_recomputed() -> str:
    """What selective checkpointing says of a block that sets a mark for the profiler when it is computed again."""
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    calls = 0

    def block(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            with torch.profiler.record_function("gather"):
                pass
        return (x @ x).relu()

    keep = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    x = torch.ones(4, 4, requires_grad=True)
    try:
        checkpoint(block, x, use_reentrant=False, context_fn=keep).sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "done"


def selective_checkpointing_misses_a_change() -> float:
    """Relative error of a gradient where a kept product is changed in place behind matmul's view; torch alone."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    weight, bias = torch.randn(8, 8, requires_grad=True), torch.randn(8)

    def block(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        y += bias
        return torch.tanh(y).sum()

    x = torch.randn(3, 4, 8)
    right = torch.autograd.grad(block(x), weight)[0]
    found = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, context_fn=_keep_products()), weight)[0]
    return ((found - right).norm() / right.norm()).item()


def _keep_products() -> Any:
    """The usual policy of selective checkpointing: results of matrix products are kept."""
    from functools import partial

    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    return partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])


class _Checkpointed(nn.Module):
    """Two linear layers with a bias, as a block that is computed again in the backward."""

    def __init__(self, selective: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.selective = nn.Linear(8, 16), nn.Linear(16, 8), selective
        nn.init.ones_(self.up.bias)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        if not self.selective:
            return self.block(x).pow(2).sum()
        return checkpoint(self.block, x, use_reentrant=False, context_fn=_keep_products()).pow(2).sum()


def zero3_adds_a_bias_twice(memory_efficient: bool = True) -> float:
    """Relative error of a gradient under ZeRO-3 where products are kept by selective checkpointing."""
    import importlib

    from deepspeed.utils import safe_get_full_grad

    importlib.reload(importlib.import_module("deepspeed.runtime.zero.linear"))  # our engine changes it for the process
    # Not torch.nn.functional.linear: an earlier ZeRO-3 job of this process may have left DeepSpeed's there.
    linear, found = torch._C._nn.linear, []
    for selective in (False, True):
        torch.nn.functional.linear = linear
        model = _Checkpointed(selective)
        try:
            zero = {"stage": 3, "memory_efficient_linear": memory_efficient}
            engine = _deepspeed(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, zero_optimization=zero)
            engine.backward(engine(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))))
            found.append(safe_get_full_grad(model.up.weight))
        finally:
            torch.nn.functional.linear = linear  # DeepSpeed's own stays in its place for the process
    return ((found[1] - found[0]).norm() / found[0].norm()).item()


def fsdp_rounds_what_rotary_needs(version: int) -> tuple[str, str, float]:
    """Under accelerate's bf16: (dtype of the cosines that a block of OLMo-2 is given, dtype of the rotary frequencies,
    radians that position 2000 is turned too far)."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from transformers import Olmo2Config, Olmo2ForCausalLM

    _connect("fsdp")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Olmo2DecoderLayer"],
        **({} if version == 2 else {"use_orig_params": True}),
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = Olmo2ForCausalLM(Olmo2Config(**sizes, vocab_size=64, use_cache=False))
    block, rotary = model.model.layers[0], model.model.rotary_emb
    before = rotary.inv_freq.clone()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    seen: list[str] = []
    block.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(str(kwargs["position_embeddings"][0].dtype)), with_kwargs=True
    )
    model(input_ids=_tokens())
    turned = ((rotary.inv_freq.float() - before).abs().max() * 2000).item()
    return seen[0], str(rotary.inv_freq.dtype), turned


def fsdp_without_sync_rounds_sums(version: int, micros: int = 8) -> float:
    """How far the gradient of ``micros`` micro-batches is off, relative, where it is reduced after the last one alone,
    as accelerate's ``accumulate`` does: weights in bf16, ``reduce_dtype`` float32."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    kind: Any = MixedPrecisionPolicy if version == 2 else MixedPrecision
    found = []
    for without_sync in (False, True):
        _connect("fsdp")
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            mixed_precision_policy=kind(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            **({} if version == 2 else {"use_orig_params": True}),
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = _llama()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for micro in range(micros):
            ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(micro))
            last = micro == micros - 1
            with contextlib.nullcontext() if last or not without_sync else accelerator.no_sync(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
        parts = [p.grad.to_local() if version == 2 else p.grad for p in model.parameters() if p.grad is not None]
        found.append(torch.cat([part.flatten().float() for part in parts]))
    return ((found[1] - found[0]).norm() / found[0].norm()).item()


def fsdp1_keeps_gradients_that_are_cleared() -> tuple[bool, bool]:
    """Whether FSDP1's flat gradient is in memory after ``zero_grad``, and after the next forward."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    _connect("none")
    model = FullyShardedDataParallel(nn.Linear(8, 8), use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.ones(2, 8)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    kept = model._handle.flat_param.grad is not None
    model(torch.ones(2, 8))
    return kept, model._handle.flat_param.grad is not None


def fsdp2_gathers_what_no_gradient_reaches(evaluated: bool) -> list[str]:
    """Units that a backward gathers and does not use: below frozen ones, or after an evaluation (``evaluated``)."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    _connect("none")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(evaluated)
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    if evaluated:
        with torch.no_grad():
            model(torch.ones(2, 8))
    loss = model(torch.ones(2, 8)).sum()
    unused: list[str] = []
    right = FSDPParamGroup.finalize_backward

    def finalize(group: FSDPParamGroup) -> None:
        if group._all_gather_result is not None:
            unused.append(str(group._module_fqn))
        right(group)

    FSDPParamGroup.finalize_backward = finalize
    try:
        loss.backward()
    finally:
        FSDPParamGroup.finalize_backward = right
    return unused


def hpz_groups_outlive_their_engine() -> tuple[str, int]:
    """(What DeepSpeed says when hpZ's groups are made a second time in a process, the size of the groups that are still
    there.)"""
    import deepspeed
    from deepspeed.utils import groups

    _connect("deepspeed")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._create_zero_param_parallel_group(2)
    try:
        groups._create_zero_param_parallel_group(1)
        return "", 0
    except AssertionError as error:
        return str(error), groups._get_zero_param_intra_parallel_group().size()
    finally:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def zero3_linear_rounds_twice() -> float:
    """Share of elements in which ZeRO-3's linear differs from torch's in bf16, the same operands given."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((4, 8, 32), (32, 32), (32,)))
    found, right = zero3_linear_wrap(x, weight, bias), torch.nn.functional.linear(x, weight, bias)
    return (found != right).double().mean().item()


def zero3_universal_load_shares_a_step(folder: str) -> tuple[int, list[float], list[float]]:
    """A run of two steps under ZeRO-3 with two parameter groups, saved, converted by ``ds_to_universal.py``, loaded
    into an equal run: (objects that are ``step``, for two sub-groups; their counts after one more step, the third;
    weight decay of the groups, which was 0.1 and 0.0)."""
    from argparse import Namespace
    from pathlib import Path

    from deepspeed.checkpoint import ds_to_universal

    def engine_of(load: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        decays = zip(model, (0.1, 0.0), strict=True)
        groups = [{"params": [layer.weight], "weight_decay": decay} for layer, decay in decays]
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {"zero_optimization": zero, "checkpoint": {"load_universal": load}}
        return _deepspeed(model, torch.optim.AdamW(groups, lr=0.1), 3, **config)

    def step(engine: Any) -> None:
        engine.backward(engine(torch.ones(2, 8)).pow(2).sum())
        engine.step()

    engine = engine_of(False)
    for _ in range(2):
        step(engine)
    engine.save_checkpoint(f"{folder}/saved")
    dist.barrier()
    if dist.get_rank() == 0:
        source = Path(folder) / "saved"
        tag = (source / "latest").read_text().strip()
        ds_to_universal.main(
            Namespace(
                input_folder=str(source / tag), output_folder=f"{folder}/universal/all", num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
            )
        )  # fmt: skip
        (Path(folder) / "universal" / "latest_universal").write_text("all")
    dist.barrier()
    engine.destroy()
    engine = engine_of(True)
    engine.load_checkpoint(f"{folder}/universal")
    adam = engine.optimizer.optimizer
    shared = len({id(state["step"]) for state in adam.state.values()})
    decay = [group["weight_decay"] for group in adam.param_groups]
    step(engine)
    counts = [float(state["step"]) for state in adam.state.values()]
    engine.destroy()
    dist.barrier()
    return shared, counts, decay


def gloo_threads_of_groups(groups: int) -> int:
    """How many more threads that wake up every 10 ms a process has after so many further groups were made."""
    import time
    from pathlib import Path

    def waking() -> int:
        time.sleep(0.1)  # a thread names itself once it runs
        names = (task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm"))
        return sum(name == "gloo_tcp_loop" for name in names)

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    before = waking()
    for _ in range(groups):
        dist.new_group([0])
    return waking() - before


def gloo_threads_share_a_string(seconds: float) -> None:
    """All-gathers of a DTensor's kind in a group of one process for so long, as far as the process lives."""
    import time

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gloo = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    given, taken, end = torch.ones(1), torch.zeros(1), time.monotonic() + seconds
    while time.monotonic() < end:
        for work in [gloo.allgather_coalesced([[taken]], [given]) for _ in range(64)]:
            work.wait()
