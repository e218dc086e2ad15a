"""Training loops in the shape of those in scripts, each right or with one defect, and what records them in place."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from toolkit.verification.scripts import catch


@contextlib.contextmanager
def recording(session: Path | None) -> Iterator[None]:
    """What ``sitecustomize`` does in the processes of a recorded command; nothing for None."""
    # What earlier jobs of this process have left there is no launch of this one.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = os.environ["ACCELERATE_USE_FSDP"] = "false"
    if session is None:
        yield
        return
    import torch.distributed.fsdp

    catch._session = None
    catch.begin(str(session))
    catch.after_torch(torch)
    catch.after_fsdp(torch.distributed.fsdp)
    for name, action in (("accelerate.accelerator", "after_accelerate"), ("deepspeed", "after_deepspeed")):
        if name in sys.modules:
            getattr(catch, action)(sys.modules[name])
    watching = catch._session
    assert watching is not None
    try:
        yield
    finally:
        watching.end()
        watching.finish()
        catch._session = None
    if watching.error:
        raise AssertionError(watching.error)


def llama(seed: int = 0, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
            attention_dropout=0.1, use_cache=False, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def batches(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Two rows, the second one shorter, by another number of tokens each time."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for at in range(count):
        ids = torch.randint(3, 64, (2, 12), generator=draw)
        mask = torch.ones_like(ids)
        mask[1, 4 + at % 5 :] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def tokens_of(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


Told = tuple[list[float], dict[str, torch.Tensor]]
"""Losses and final weights of a loop."""


def custom_loss(session: Path | None, defect: str = "") -> Told:
    """Plain torch: a loss of hidden states and logits, accumulation, clipping, two groups, a schedule."""
    model = llama()
    with recording(session):
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 5e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)
        losses = []
        for step in range(4):
            for batch in batches(8)[2 * step :][:2]:
                kept = {name: p.grad for name, p in model.named_parameters()}
                if defect == "sums-in-bf16":
                    model.zero_grad()
                output = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
                loss = output.logits.logsumexp(-1).mean() + output.hidden_states[1].pow(2).mean()
                loss = (loss + output.hidden_states[-1].abs().mean()) / 2
                loss.backward()
                losses.append(loss.item())
                if defect == "sums-in-bf16":
                    for name, p in model.named_parameters():
                        before = kept[name]
                        assert p.grad is not None
                        summed = p.grad.bfloat16() + before.bfloat16() if before is not None else p.grad.bfloat16()
                        p.grad = summed.float()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            if defect != "not-zeroed":
                optimizer.zero_grad()
    return losses, dict(model.state_dict())


def preferences(session: Path | None, defect: str = "") -> Told:
    """DPO: an adapter against a frozen reference, both called two times a step."""
    from peft import LoraConfig, get_peft_model

    reference, base = llama().requires_grad_(False), llama()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    chosen, rejected = batches(3), batches(3, seed=2)

    def score(scored: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = scored(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        picked = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
        return (picked * batch["attention_mask"][:, 1:]).sum(-1)

    losses = []
    with recording(session):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for better, worse in zip(chosen, rejected, strict=True):
            margin = score(model, better) - score(model, worse) - score(reference, better) + score(reference, worse)
            loss = -functional.logsigmoid(0.1 * margin).mean()
            loss.backward()
            if defect == "adapter-without-gradient":
                for name, p in model.named_parameters():
                    if "layers.1" in name:
                        p.grad = None
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, dict(model.state_dict())


def accelerated(session: Path | None, defect: str = "") -> Told:
    """Accelerate on two ranks, two micro-batches a step, a cross-entropy that the script computes itself."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    losses = []
    with recording(session):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model: Any = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            window = batches(12)[4 * step + 2 * dist.get_rank() :][:2]
            tokens = torch.tensor(float(sum(map(tokens_of, window))))
            dist.all_reduce(tokens)
            for batch in window:
                with accelerator.accumulate(model):
                    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                    rows, labels = logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
                    if defect == "mean-per-micro-batch":
                        loss = functional.cross_entropy(rows, labels)
                    else:
                        # accelerate divides by the accumulation, DDP by the ranks
                        loss = functional.cross_entropy(rows, labels, reduction="sum") * 4 / tokens
                    if defect == "ranks-divided-twice":
                        loss = loss / 2
                    accelerator.backward(loss)
                    losses.append(loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
        final = dict(accelerator.unwrap_model(model).state_dict())
    return losses, final


def sharded(session: Path | None, defect: str = "") -> Told:
    """FSDP2 by hand on two ranks, bf16 copies of float32 weights. Wrong: gradients are reduced in bf16."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    losses = []
    with recording(session):
        from torch.distributed.fsdp import fully_shard

        model: Any = llama()
        reduce = torch.bfloat16 if defect == "reduced-in-bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            for batch in batches(12)[4 * step + 2 * dist.get_rank() :][:2]:
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                loss = logits.float().logsumexp(-1).mean() / 2
                loss.backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        final = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    return losses, final


def adapters_sharded(session: Path | None, defect: str = "") -> Told:
    """LoRA under FSDP2 on two ranks, two micro-batches a step. Wrong: adapters of the later block get no gradient; or
    micro-batches are added up in bf16, as a sharder that keeps its gradients in the dtype of its weights does."""
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    losses = []
    with recording(session):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(3)
        base = llama()
        model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        mesh = init_device_mesh("cpu", (2,))
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            for batch in batches(12)[4 * step + 2 * dist.get_rank() :][:2]:
                before = {name: None if p.grad is None else p.grad.clone() for name, p in trained.items()}
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                loss = logits.logsumexp(-1).mean() / 2
                loss.backward()
                losses.append(loss.item())
                for name, p in trained.items():
                    if defect == "later-adapters-without-gradient" and "layers.1" in name:
                        p.grad = None
                    if defect == "added-in-bf16" and p.grad is not None and (old := before[name]) is not None:
                        p.grad = (old.bfloat16() + (p.grad - old).bfloat16()).to(p.dtype)
            optimizer.step()
            optimizer.zero_grad()
        final = {name: p.full_tensor().detach().clone() for name, p in trained.items()}
    return losses, final


def reduced_by_hand(session: Path | None, defect: str = "") -> Told:
    """Two ranks without a wrapper: the script averages the gradients itself. Wrong: not those of the second block."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = llama()
    losses = []
    with recording(session):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        for batch in batches(6)[dist.get_rank() :: 2]:
            loss = model(**batch).logits.logsumexp(-1).mean()
            loss.backward()
            for name, p in model.named_parameters():
                if not (defect == "tensors-not-reduced" and "layers.1" in name):
                    assert p.grad is not None
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, dict(model.state_dict())


def partitioned(session: Path | None, defect: str = "") -> Told:
    """ZeRO 2 by hand on two ranks, DeepSpeed's partitions in another order than the parameters. Wrong: gradients are
    reduced in bf16."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # an op for inference, which takes minutes to compile
    )
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "round_robin_gradients": True}, "zero_allow_untested_optimizer": True,
        "communication_data_type": "bf16" if defect == "reduced-in-bf16" else "fp32",
    }  # fmt: skip
    losses = []
    with recording(session):
        model: Any = llama()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=settings)
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            for batch in batches(12)[4 * step + 2 * dist.get_rank() :][:2]:
                logits = engine(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                loss = logits.logsumexp(-1).mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        final = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine.destroy()
    return losses, final


def adapters_partitioned(session: Path | None, defect: str = "") -> Told:
    """LoRA under ZeRO 3 by hand on two ranks. The base is split as it is made, its head and its embedding are one
    weight; the adapters are whole until the engine takes them."""
    import deepspeed
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; takes minutes to compile
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True, "communication_data_type": "fp32",
    }  # fmt: skip
    losses = []
    with recording(session):
        with deepspeed.zero.Init(config_dict_or_path=settings):
            base = llama(tied=True)
        torch.manual_seed(3)
        model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        trained = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=settings)
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            batch = batches(12)[4 * step + dist.get_rank()]
            loss = (
                engine(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.logsumexp(-1).mean()
            )
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        final = {}
        for name, p in model.named_parameters():
            with deepspeed.zero.GatheredParameters([p]):
                final[name] = p.detach().clone()
        engine.destroy()
    return losses, final


class Chunked(torch.nn.Module):
    """Answers with its logits in pieces of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [piece.clone() for piece in self.head(self.table(ids)).chunk(3, dim=1)]


def divided_after(session: Path | None, defect: str = "") -> Told:
    """torchtune's way: sums over micro-batches, and gradients divided by all supervised tokens before the step. Wrong:
    by those of the last micro-batch, or by the micro-batches besides."""
    torch.manual_seed(0)
    model = Chunked()
    losses = []
    with recording(session):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            tokens = 0
            for batch in batches(6)[2 * step :][:2]:
                rows = torch.cat(model(batch["input_ids"]), dim=1)[:, :-1].flatten(0, 1)
                labels = batch["labels"][:, 1:].flatten()
                loss = functional.cross_entropy(rows, labels, reduction="sum")
                loss.backward()
                losses.append(loss.item())
                tokens = tokens_of(batch) if defect == "last-tokens" else tokens + tokens_of(batch)
            for p in model.parameters():
                assert p.grad is not None
                p.grad /= 2 * tokens if defect == "divided-twice" else tokens
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.state_dict())


def scaled(session: Path | None, defect: str = "") -> Told:
    """fp16 by hand: a scaler whose second step overflows. Wrong: clipped before the scale is taken out."""
    model = llama()
    losses = []
    with recording(session):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
        for at, batch in enumerate(batches(4)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch).loss
            scaler.scale(loss * (float("inf") if at == 1 else 1.0)).backward()
            if defect != "clipped-while-scaled":
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, dict(model.state_dict())


def other_optimizer(session: Path | None, defect: str = "") -> Told:
    """SGD: its step is not compared, its gradient is."""
    model = llama()
    losses = []
    with recording(session):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        for batch in batches(3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, dict(model.state_dict())


def both(job: Any, session: Path) -> bool:
    """Whether a loop ends with the same losses and weights, bit by bit, with and without being recorded."""
    plain, seen = job(None), job(session)
    same = plain[0] == seen[0] and plain[1].keys() == seen[1].keys()
    return same and all(torch.equal(plain[1][name], seen[1][name]) for name in plain[1])
