"""Derives every value that the recipe does not set, once, with its reason."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from toolkit.base_formats import BaseFormat, asked_base
from toolkit.errors import InputError
from toolkit.layouts import layout_named
from toolkit.machine import cuda_device_count
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.combinable import check_combination
from toolkit.recipe.contradictions import contradictions
from toolkit.recipe.limits import with_length
from toolkit.recipe.load import recipe_sha256
from toolkit.recipe.mesh import Mesh, reasons
from toolkit.recipe.model_blocks import block_classes
from toolkit.recipe.model_facts import ModelFacts, model_facts, supports_sdpa
from toolkit.recipe.needs import cpus_per_node, why_no_tokenizer
from toolkit.recipe.rates import rate_factor, why_no_wsd, why_rate
from toolkit.recipe.resolve import PRECISIONS, Decisions, Precision, Resolved
from toolkit.recipe.schema import Batch, Recipe
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.recipe.traits import Traits
from toolkit.rooms import active_options
from toolkit.tasks import task_of
from toolkit.upstream.transformers import checkpointing_argument


def resolve_values(
    recipe: Recipe, source: str, decide: Decisions, traits: Traits, data_size: int, *, device: str | None = None
) -> Resolved:
    """Derive all values that do not belong to the strategy; raises InputError with every contradiction.

    ``data_size``: data-parallel size. ``device``: overrides the device of this machine (for tests, and for planning).
    """
    problems = contradictions(recipe, traits)
    world_size = recipe.machine.processes * recipe.machine.nodes
    if world_size % data_size:
        problems.append(
            f"machine.processes: {world_size} processes cannot be divided into {data_size} data-parallel ranks"
        )
    ranks = "processes" if data_size == world_size else "data-parallel ranks"
    micro, accumulation, global_size = _batch(recipe.batch, data_size, ranks, decide, problems)
    if problems:
        raise InputError(*(f"{source}: {problem}" for problem in problems))
    facts = model_facts(recipe.model)
    recipe = with_length(_with_attention(recipe, facts, decide), facts, decide)
    _data(recipe, decide)
    precision = PRECISIONS[recipe.precision]
    decide("precision.compute", precision.compute, f"precision: {recipe.precision}")
    decide("precision.trainable", precision.trainable, "trainable weights, their accumulated gradients and moments")
    decide("precision.frozen", precision.frozen, "frozen weights")
    device = device or _device(recipe, decide)
    blocks = _blocks(recipe, facts, decide)
    check_combination(recipe, facts, traits, device, blocks, source)
    base, stored = asked_base(recipe, facts)
    _options(recipe, facts, blocks, decide)
    clip = recipe.optimizer.max_grad_norm or 0.0
    decide("max_grad_norm", clip, "written to every file: engines otherwise clip at their default, 1.0")
    _optimizer(recipe, global_size, decide)
    _cores(recipe, decide)
    return Resolved(
        recipe=recipe,
        source=source,
        sha256=recipe_sha256(recipe),
        facts=facts,
        device=device,
        traits=traits,
        world_size=decide("world_size", world_size, "machine.processes x machine.nodes"),
        data_size=data_size,
        mesh=_mesh(recipe, traits, world_size, decide),
        micro_size=micro,
        accumulation=accumulation,
        global_size=global_size,
        precision=precision,
        max_grad_norm=clip,
        blocks=blocks,
        warmup_steps=_warmup(recipe, decide),
        loss_kernel=_loss_kernel(recipe, device, decide),
        base=base,
        base_storage=None if base is None else _base_storage(recipe, base, stored, precision, traits, decide),
        stored=stored,
    )


def _data(recipe: Recipe, decide: Decisions) -> None:
    if recipe.data.packing:
        rows = f"rows of {recipe.data.max_length} tokens"
        decide("data.packing", rows, "not in training_args.json: the Trainer does not pack (TRL's SFTConfig does)")
    if recipe.data.group_by_length:
        decide("data.group_by_length", "within a step", "not in training_args.json: the Trainer groups over many steps")


def _options(recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...], decide: Decisions) -> None:
    """What options of the recipe mean, and which files cannot hold them."""
    if recipe.compile:
        decide(
            "compile", ", ".join(blocks), "each block; not in training_args.json: the Trainer compiles the whole model"
        )
    if recipe.activation_checkpointing != "none":
        why = "the installed transformers' name: activation_checkpointing from 5.23 on, before gradient_checkpointing"
        decide("training_args.activation_checkpointing", checkpointing_argument(), why)
    if (reason := why_no_tokenizer(recipe)) is not None:
        decide("tokenizer.path", None, f"{reason} before training")
    if (fraction := recipe.data.eval_fraction) is not None:
        why = "of the rows, by a hash of their content; not in training_args.json: split the data"
        decide("data.eval_fraction", fraction, why)
    if recipe.run.metric != "eval_loss":
        better = "smaller" if recipe.run.metric.endswith("eval_loss") else "larger"
        decide("run.metric", recipe.run.metric, f"{better} is better; not in training_args.json: use compute_metrics")
    if (early := recipe.run.early_stopping) is not None:
        rule = f"after {early.patience} evaluations without improvement by more than {early.min_delta:g}"
        decide("run.early_stopping", rule, "not in training_args.json: use EarlyStoppingCallback")
    for option, settings in active_options(recipe):
        if (decision := option.explained(settings, recipe, facts)) is not None:
            decide(option.key, *decision)
    if recipe.label_smoothing:
        decide("label_smoothing", recipe.label_smoothing, "training only: held-out losses are without it")
    if recipe.z_loss:
        decide("z_loss", recipe.z_loss, "training only; not in training_args.json: the Trainer has no z-loss")
    if recipe.model.freeze:
        decide(
            "model.freeze", " | ".join(recipe.model.freeze), "not in training_args.json: the Trainer has no such key"
        )
    if added := added_tokens(recipe):
        how = "every weight trains" if recipe.adapter is None else "their rows train beside the adapter"
        decide("tokenizer.add_tokens", len(added), f"{how}; not in training_args.json: add them in your script")
    if recipe.strategy.sync is not None:
        why = (
            "in training_args.json as sync_each_batch; a script's accumulate() sums after the last unless it sets that"
        )
        decide("strategy.sync", recipe.strategy.sync, why)


def _mesh(recipe: Recipe, traits: Traits, world_size: int, decide: Decisions) -> Mesh:
    asked = recipe.strategy.mesh
    if asked is None:
        return Mesh(1, world_size) if traits.shards else Mesh(world_size, 1)
    mesh = Mesh.of(asked, bool(traits.shards))
    why = reasons(mesh, recipe.machine, traits.hybrid)
    for axis, size in asked:
        layout = layout_named(axis)
        decide(f"strategy.mesh.{axis}", size, why[axis] if layout is None else layout.reason(mesh))
    return mesh


def _with_attention(recipe: Recipe, facts: ModelFacts, decide: Decisions) -> Recipe:
    """``recipe`` with the attention that the model supports where the user asks for none."""
    if recipe.model.attention is not None:
        return recipe
    name = "sdpa"
    if not supports_sdpa(facts):
        name = decide("model.attention", "eager", f"{facts.model_type} has no sdpa in the installed transformers")
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention": name})})


def _batch(batch: Batch, data_size: int, ranks: str, decide: Decisions, problems: list[str]) -> tuple[int, int, int]:
    micro, accumulation, total = batch.micro_size, batch.accumulation, batch.global_size
    product = f"micro_size x accumulation x {ranks}"
    if total is None:
        micro = micro or decide("batch.micro_size", 1, "default")
        accumulation = accumulation or decide("batch.accumulation", 1, "default")
        total = decide("batch.global_size", micro * accumulation * data_size, product)
    elif micro and accumulation:
        if micro * accumulation * data_size != total:
            got = f"{micro} x {accumulation} x {data_size} = {micro * accumulation * data_size}"
            problems.append(f"batch: global_size is {total}, but {product} = {got}; remove one of the three keys")
    else:
        given = micro or accumulation or 1
        if total % (given * data_size):
            problems.append(f"batch.global_size: {total} is not a multiple of {given} x {data_size} {ranks}")
        other = max(1, total // (given * data_size))
        if accumulation:
            micro = decide("batch.micro_size", other, f"global_size / (accumulation x {ranks})")
        else:
            micro = micro or decide("batch.micro_size", 1, "default")
            accumulation = decide("batch.accumulation", other, f"global_size / (micro_size x {ranks})")
    assert micro is not None
    assert accumulation is not None
    return micro, accumulation, total


def _optimizer(recipe: Recipe, global_size: int, decide: Decisions) -> None:
    optimizer = recipe.optimizer
    kind = optimizer_kind(optimizer.name)
    factor = rate_factor(optimizer, global_size)
    decide("optimizer.lr", optimizer.lr * factor, why_rate(optimizer, global_size))
    if rule := kind.settings(optimizer):
        decide(f"optimizer.{kind.name}", "rule", rule)
    for at, group in enumerate(optimizer.groups):
        lr = (group.lr or optimizer.lr) * factor
        decay = "as optimizer.weight_decay and optimizer.decay" if group.weight_decay is None else group.weight_decay
        others = f"names with {group.match!r}" + (" in no earlier group" if at else "")
        decide(f"optimizer.groups[{at}]", f"lr {lr:g}", f"{others}; weight decay: {decay}")
    if kind.trainer(optimizer) is None:
        decide("training_args.optim", None, f"not in training_args.json: the Trainer has no equivalent of {kind.name}")
    if kind.averages and recipe.schedule.warmup_steps:
        why = "schedulefree warms up itself: the rate of update k (from 0) is (k + 1) / warmup_steps of lr, here k"
        decide("training_args.lr_scheduler_type", "constant", why)
    if recipe.schedule.name == "wsd" and (reason := why_no_wsd(recipe)) is not None:
        decide("training_args.lr_scheduler_type", None, f"not in training_args.json: warmup_stable_decay: {reason}")
    if optimizer.groups:
        decide("training_args.groups", None, "not in training_args.json: the Trainer has no groups by pattern")


def _device(recipe: Recipe, decide: Decisions) -> str:
    asked = recipe.machine.device
    if asked != "auto":
        return decide("machine.device", asked, "from the recipe")
    count = cuda_device_count()
    return decide("machine.device", "cuda" if count else "cpu", f"auto: this machine has {count} NVIDIA GPUs")


def _cores(recipe: Recipe, decide: Decisions) -> None:
    processes = recipe.machine.processes
    share = "the node's cores" + (f" / {processes}" if processes > 1 else "")
    why = "OMP_NUM_THREADS of each process, counted on the node unless already set; accelerate alone sets 1"
    decide("launch.threads", share, why)
    if recipe.machine.nodes > 1:
        why = "slurm.sbatch: one core per process and data worker; sbatch --cpus-per-task=N requests more"
        decide("launch.cpus_per_task", cpus_per_node(recipe), why)


def _loss_kernel(recipe: Recipe, device: str, decide: Decisions) -> str:
    if recipe.loss == "plain":
        return "plain"
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        return decide("loss.kernel", "liger", "liger_kernel is installed")
    return decide("loss.kernel", "chunked", "on a GPU, liger_kernel is used if it is installed")


def _base_storage(
    recipe: Recipe, base: BaseFormat, stored: Any, precision: Precision, traits: Traits, decide: Decisions
) -> str:
    if stored is not None:
        where = "the packed values of model.path" if recipe.model.path else "model.config's quantization_config"
        decide("adapter.base", str(stored), f"{where}; not in training_args.json: from_pretrained reads it")
    elif (decision := base.decision(None)) is not None:
        decide("adapter.base", *decision)
    if "weights" in traits.shards:
        # FSDP flattens, or casts to the compute dtype, all that shares a unit.
        why = f"{recipe.strategy.name} shards it together with the other frozen weights, which need one dtype"
        return str(decide("adapter.base_storage", precision.frozen, why))
    return str(decide("adapter.base_storage", "uint8", "two weights per byte"))


def _blocks(recipe: Recipe, facts: ModelFacts, decide: Decisions) -> tuple[str, ...]:
    if recipe.strategy.wrap:
        return decide("strategy.wrap", tuple(recipe.strategy.wrap), "from the recipe")
    names = block_classes(facts, task_of(recipe.model.task).auto_class)
    return decide("strategy.wrap", names, facts.why_unknown or f"the blocks of model type {facts.model_type}")


def _warmup(recipe: Recipe, decide: Decisions) -> int | None:
    ratio, steps, total = recipe.schedule.warmup_ratio, recipe.schedule.warmup_steps, recipe.run.max_steps
    if steps is not None:
        return steps
    if not ratio:
        return decide("schedule.warmup_steps", 0, "no warm-up in the recipe")
    if total is None:
        return None
    return decide("schedule.warmup_steps", math.ceil(ratio * total), f"{ratio} of {total} steps, rounded up")
