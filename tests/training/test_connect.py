"""One job after another in a process group, as `verify` and `bench` run them on GPUs: what accelerate is left with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cuda_calls import CudaCalls
from jobs import resolved_from
from nights import nightly_but
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.strategies.engines.connect import make_accelerator
from toolkit.training.session import open_session


def on_cuda(tiny_root: Path, strategy: str, precision: str = "fp32", offload: str = "none") -> Resolved:
    recipe = recipe_dict(
        tiny_root,
        strategy={"name": strategy, "offload": offload},
        precision=precision,
        machine={"device": "cuda", "processes": 2},
    )
    return resolve(Recipe.model_validate(recipe), "recipe.yaml", device="cuda")


def _begin() -> None:
    """What is imported first sees that there is no GPU, and later jobs of this process with it."""
    import deepspeed
    import torch.distributed.fsdp  # noqa: F401
    import transformers  # noqa: F401

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see connect._without_shm_op
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def accelerators_job(jobs: list[Resolved]) -> list[dict[str, Any]]:
    """What accelerate's state says after each job's Accelerator is made, the device's functions stood in for."""
    found = []
    _begin()
    with CudaCalls().standing_in():
        for resolved in jobs:
            state = make_accelerator(resolved).state
            fsdp = getattr(state, "fsdp_plugin", None) if state.distributed_type == "FSDP" else None
            policy = fsdp.mixed_precision_policy if fsdp else None
            zero = state.deepspeed_plugin.deepspeed_config if state.distributed_type == "DEEPSPEED" else None
            found.append(
                {
                    "type": str(state.distributed_type.value),
                    "fsdp": fsdp and fsdp.fsdp_version,
                    "reduce": policy and str(policy.reduce_dtype),
                    "compute": policy and str(policy.param_dtype),
                    "stage": zero and zero["zero_optimization"]["stage"],
                    "bf16": zero and zero["bf16"]["enabled"],
                    "device": str(state.device),
                }
            )
    return found


def test_each_job_of_a_process_has_its_own_strategy_and_precision_on_a_gpu(tiny_root: Path, group: WorkerGroup) -> None:
    jobs = [
        ("zero2", "fp32"), ("zero2", "bf16"), ("ddp", "bf16"), ("zero1", "fp32"), ("ddp", "fp32"), ("fsdp2", "fp32"),
        ("fsdp2", "bf16"), ("fsdp1", "bf16"), ("zero3", "bf16"),
    ]  # fmt: skip
    ranks = group.run(accelerators_job, [on_cuda(tiny_root, *job) for job in jobs], timeout=240)
    for rank, found in enumerate(ranks):
        for (strategy, precision), state in zip(jobs, found, strict=True):
            bf16 = precision == "bf16"
            expected: dict[str, Any] = dict.fromkeys(state) | {"device": f"cuda:{rank}", "type": "MULTI_GPU"}
            if strategy.startswith("zero"):
                expected |= {"type": "DEEPSPEED", "stage": int(strategy[-1]), "bf16": bf16}
            if strategy.startswith("fsdp"):
                expected |= {"type": "FSDP", "fsdp": int(strategy[-1])}
                expected |= {"compute": "torch.bfloat16", "reduce": "torch.float32"} if bf16 else {}
            assert state == expected, (strategy, precision)


def connecting_job(resolved: Resolved) -> list[tuple[Any, ...]]:
    """What is asked of the device and of torch.distributed by a process that is not connected yet."""
    import deepspeed.comm

    _begin()
    deepspeed.comm.comm.cdb = None  # as in a new process
    with CudaCalls().standing_in(connected=False) as calls:
        make_accelerator(resolved)
    return calls.seen


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "zero2", "fsdp1", "fsdp2"], "zero2"))
def test_gloo_is_connected_beside_nccl_by_every_first_job(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    """A later job of the process may offload, and reduces gradients on the host."""
    for rank, seen in enumerate(group.run(connecting_job, on_cuda(tiny_root, strategy), timeout=240)):
        assert seen[0] == ("set_device", rank), "NCCL would look for its device on GPU 0"
        assert [call[1] for call in seen if call[0] == "init"] == ["cuda:nccl,cpu:gloo"]


def limits_job(resolved: Resolved) -> list[float]:
    """Seconds that each process group, and the store behind them, lets a rank wait once training begins."""
    _begin()
    groups, store = dist.distributed_c10d._world.pg_map, dist.distributed_c10d._get_default_store()
    store.set_timeout(dist.default_pg_timeout)
    for group in list(groups):
        dist.distributed_c10d._set_pg_timeout(dist.default_pg_timeout, group)
    open_session(resolved)
    limits = {group._get_backend(device).options._timeout for group in groups for device in group._device_types}
    return [limit.total_seconds() for limit in (*limits, store.timeout)]


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "zero1", "fsdp2"], "zero1"))
def test_ranks_may_wait_for_hours_while_rank_0_saves(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    """DeepSpeed makes a group of its own. Hangs are found by the product's own watch, whatever torch's limit."""
    for limits in group.run(
        limits_job, resolved_from(recipe_dict(tiny_root, strategy={"name": strategy})), timeout=240
    ):
        assert min(limits) >= 6 * 3600


def test_a_torch_without_cuda_is_reported_in_place_of_training_on_the_cpu(
    tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"machine\.device: cuda, but torch .* sees no GPU"):
        make_accelerator(on_cuda(tiny_root, "ddp"))
