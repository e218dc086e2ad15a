"""Every derived value, decided once, with its reason; nothing is left at "auto"."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import InputError
from toolkit.machine import cuda_device_count
from toolkit.recipe.compilable import why_not_compilable
from toolkit.recipe.fp8able import why_not_fp8
from toolkit.recipe.fusable import why_not_fusable
from toolkit.recipe.load import recipe_sha256
from toolkit.recipe.model_facts import ModelFacts, block_classes, model_facts
from toolkit.recipe.needs import cpus_per_node, why_no_tokenizer
from toolkit.recipe.packable import why_not_packable
from toolkit.recipe.quantisable import why_not_quantisable
from toolkit.recipe.schema import Batch, PrecisionName, Recipe
from toolkit.recipe.traits import Traits


@dataclass(frozen=True)
class Decision:
    """One derived value and why it is what it is."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Precision:
    """Dtypes by torch's names. ``compute``: matrix products; ``trainable``: the weights that the optimizer
    updates, its moments and the accumulated gradient; ``frozen``: weights that do not train."""

    compute: str
    trainable: str
    frozen: str
    loss_scaling: bool = False

    @property
    def mixed(self) -> bool:
        """Whether products run in another dtype than the trained weights are kept in."""
        return self.compute != self.trainable


PRECISIONS: dict[PrecisionName, Precision] = {
    "fp32": Precision("float32", "float32", "float32"),
    "bf16": Precision("bfloat16", "float32", "bfloat16"),
    "fp16": Precision("float16", "float32", "float16", loss_scaling=True),
    "bf16-pure": Precision("bfloat16", "bfloat16", "bfloat16"),
}


@dataclass
class Decisions:
    """Collects decisions while a recipe is resolved."""

    made: list[Decision] = field(default_factory=list)

    def __call__(self, key: str, value: Any, reason: str) -> Any:
        """Note one decision and hand its value back."""
        self.made.append(Decision(key, value, reason))
        return value


@dataclass(frozen=True)
class Resolved:
    """A recipe with everything decided. Launch files and runs are made from this alone."""

    recipe: Recipe
    source: str
    sha256: str
    facts: ModelFacts
    device: str
    traits: Traits
    """Of the strategy."""
    world_size: int
    """Processes, over all nodes."""
    data_size: int
    """Data-parallel size: parts that a window's samples are divided into; a divisor of ``world_size``."""
    micro_size: int
    accumulation: int
    global_size: int
    precision: Precision
    max_grad_norm: float
    blocks: tuple[str, ...]
    warmup_steps: int | None
    """None: a share of a number of steps that only the data can tell (``run.epochs``)."""
    settings: Any = None
    """The strategy's own values, see its file under toolkit/strategies/."""
    decisions: tuple[Decision, ...] = ()
    loss_kernel: str = "plain"
    """What computes ``loss: fused``: «chunked», the toolkit's own, or «liger»; «plain» without."""

    base_storage: str | None = None
    """``adapter.method: qlora``: the dtype whose elements the base's 4-bit weights are packed in; None without."""

    @property
    def ranks_per_part(self) -> int:
        """Ranks that get the same samples: 1 where every rank is a data-parallel rank of its own."""
        return self.world_size // self.data_size

    def data_rank(self, rank: int) -> int:
        """The data-parallel rank, from 0 to ``data_size`` - 1, of a process."""
        return rank // self.ranks_per_part

    def warmup(self, total_steps: int) -> int:
        """Warm-up in optimizer steps for a run of ``total_steps``; a share is rounded up, as transformers does."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil((self.recipe.schedule.warmup_ratio or 0.0) * total_steps)


def resolve_values(
    recipe: Recipe, source: str, decide: Decisions, traits: Traits, data_size: int, *, device: str | None = None
) -> Resolved:
    """Decide all that is not the strategy's own; raises InputError with every contradiction.

    ``data_size``: data-parallel size. ``device`` stands in for what this machine has (tests, planning for another
    machine).
    """
    problems = [*_contradictions(recipe, traits)]
    world_size = recipe.machine.processes * recipe.machine.nodes
    if world_size % data_size:
        problems.append(
            f"machine.processes: {world_size} processes cannot be divided into {data_size} data-parallel ranks"
        )
    micro, accumulation, global_size = _batch(recipe.batch, data_size, decide, problems)
    if problems:
        raise InputError(*(f"{source}: {problem}" for problem in problems))
    facts = model_facts(recipe.model)
    if recipe.data.packing and (reason := why_not_packable(facts, recipe.model.attention)):
        near = "data.packing: false" + ("" if recipe.data.streaming else ", with data.group_by_length: true")
        raise InputError(f"{source}: data.packing: {reason}; set {near}")
    if recipe.data.packing:
        rows = f"rows of {recipe.data.max_length} tokens"
        decide(
            "data.packing", rows, "training_args.json cannot say it: the Trainer does not pack, TRL's SFTConfig does"
        )
    if recipe.data.group_by_length:
        decide(
            "data.group_by_length", "within a step", "the Trainer's own groups over many steps: not in its arguments"
        )
    precision = PRECISIONS[recipe.precision]
    decide("precision.compute", precision.compute, f"precision: {recipe.precision}")
    decide("precision.trainable", precision.trainable, "weights that train, their gradients' sum and moments")
    decide("precision.frozen", precision.frozen, "weights that do not train")
    if recipe.loss == "fused" and (reason := why_not_fusable(recipe, facts)):
        raise InputError(f"{source}: loss: fused {reason}; or set loss: plain")
    if recipe.adapter is not None and recipe.adapter.method == "qlora" and (reason := why_not_quantisable(facts)):
        raise InputError(f"{source}: adapter.method: qlora {reason}; take lora")
    device = device or _device(recipe, decide)
    if recipe.activation_offload and device == "cpu":
        raise InputError(
            f"{source}: activation_offload: moves memory from a GPU to the host, and machine.device is cpu, where the "
            "host's memory is all there is; set it to false, or machine.device: cuda"
        )
    blocks = _blocks(recipe, facts, decide)
    if recipe.compile and (reason := why_not_compilable(recipe, blocks, traits)):
        raise InputError(f"{source}: compile: {reason}; or set compile: false")
    if recipe.compile:
        decide("compile", ", ".join(blocks), "each block apart; training_args.json cannot say it: its own is the whole")
    if recipe.fp8 and (reason := why_not_fp8(recipe, facts, blocks)):
        raise InputError(f"{source}: fp8: {reason}, or set fp8: false")
    if recipe.fp8:
        decide("fp8", "e4m3, gradients e5m2", "a scale per tensor, each time anew; training_args.json cannot say it")
    if (reason := why_no_tokenizer(recipe)) is not None:
        decide("tokenizer.path", None, f"{reason} before it trains")
    clip = recipe.optimizer.max_grad_norm or 0.0
    decide("max_grad_norm", clip, "written into every file: engines left alone clip at their own default, 1.0")
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
        micro_size=micro,
        accumulation=accumulation,
        global_size=global_size,
        precision=precision,
        max_grad_norm=clip,
        blocks=blocks,
        warmup_steps=_warmup(recipe, decide),
        loss_kernel=_loss_kernel(recipe, device, decide),
        base_storage=_base_storage(recipe, precision, traits, decide),
    )


def _contradictions(recipe: Recipe, traits: Traits) -> list[str]:
    found = []
    if recipe.run.max_steps is None and recipe.run.epochs is None:
        found.append("run: give max_steps or epochs")
    if recipe.data.packing and recipe.model.task != "causal-lm":
        found.append(
            f"data.packing: packs samples of causal-lm, and model.task is {recipe.model.task}; set it to false"
        )
    if recipe.data.packing and recipe.data.group_by_length:
        found.append("data.group_by_length: packed rows are of like length already; set one of the two to false")
    if recipe.data.group_by_length and recipe.data.streaming:
        found.append("data.group_by_length: a stream's lengths are not known before it is read; use data.packing")
    if recipe.data.streaming and recipe.data.cache:
        found.append("data.cache: a stream is tokenised as it is read; leave it out, or set data.streaming: false")
    if recipe.data.streaming and recipe.run.max_steps is None:
        found.append("data.streaming: a stream's length is not known; give run.max_steps in place of run.epochs")
    if recipe.model.task == "seq2seq-lm" and recipe.data.format != "prompt-completion":
        found.append("data.format: seq2seq-lm reads prompt-completion (prompt to the encoder)")
    if recipe.model.task == "sequence-classification" and recipe.data.format != "text":
        found.append("data.format: sequence-classification reads text, with a label beside it")
    if recipe.run.eval_every and recipe.data.eval is None:
        found.append("run.eval_every: there is no data.eval to evaluate on; give it, or set eval_every: 0")
    if recipe.activation_offload and recipe.activation_checkpointing != "full":
        found.append(
            "activation_offload: moves what checkpointed blocks keep; set activation_checkpointing: full "
            f"(it is {recipe.activation_checkpointing})"
        )
    if not traits.distributed and recipe.machine.processes * recipe.machine.nodes > 1:
        name = recipe.strategy.name
        found.append(f"strategy.name: {name} runs in one process; set machine.processes: 1, or use ddp")
    if recipe.optimizer.name == "adamw8bit" and recipe.optimizer.kernel != "fused":
        found.append("optimizer.kernel: adamw8bit has steps of its own; leave kernel out")
    if recipe.optimizer.name == "adamw8bit" and not traits.torch_optimizer:
        found.append(
            f"optimizer.name: under {recipe.strategy.name} DeepSpeed finds a weight's moments as a stretch of one flat "
            "tensor, which 8-bit codes with their scales are not; use fsdp2 (as zero3), or ddp"
        )
    return found


def _batch(batch: Batch, data_size: int, decide: Decisions, problems: list[str]) -> tuple[int, int, int]:
    micro, accumulation, total = batch.micro_size, batch.accumulation, batch.global_size
    product = "micro_size x accumulation x processes"
    if total is None:
        micro = micro or decide("batch.micro_size", 1, "not given")
        accumulation = accumulation or decide("batch.accumulation", 1, "not given")
        total = decide("batch.global_size", micro * accumulation * data_size, product)
    elif micro and accumulation:
        if micro * accumulation * data_size != total:
            got = f"{micro} x {accumulation} x {data_size} = {micro * accumulation * data_size}"
            problems.append(f"batch: global_size is {total}, but {product} = {got}; leave one of the three out")
    else:
        given = micro or accumulation or 1
        if total % (given * data_size):
            problems.append(f"batch.global_size: {total} is not a multiple of {given} x {data_size} processes")
        other = max(1, total // (given * data_size))
        if accumulation:
            micro = decide("batch.micro_size", other, "global_size / (accumulation x processes)")
        else:
            micro = micro or decide("batch.micro_size", 1, "not given")
            accumulation = decide("batch.accumulation", other, "global_size / (micro_size x processes)")
    assert micro is not None
    assert accumulation is not None
    return micro, accumulation, total


def _device(recipe: Recipe, decide: Decisions) -> str:
    asked = recipe.machine.device
    if asked != "auto":
        return decide("machine.device", asked, "asked for")
    count = cuda_device_count()
    return decide("machine.device", "cuda" if count else "cpu", f"auto: this machine has {count} NVIDIA GPUs")


def _cores(recipe: Recipe, decide: Decisions) -> None:
    processes = recipe.machine.processes
    share = "the node's cores" + (f" / {processes}" if processes > 1 else "")
    why = "OMP_NUM_THREADS of each process, counted where it runs unless it is set there; accelerate alone sets 1"
    decide("launch.threads", share, why)
    if recipe.machine.nodes > 1:
        why = "slurm.sbatch: a core for each process and each data worker; sbatch --cpus-per-task=N asks for more"
        decide("launch.cpus_per_task", cpus_per_node(recipe), why)


def _loss_kernel(recipe: Recipe, device: str, decide: Decisions) -> str:
    if recipe.loss == "plain":
        return "plain"
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        return decide("loss.kernel", "liger", "liger_kernel is installed")
    return decide("loss.kernel", "chunked", "on a GPU, liger_kernel's is taken where it is installed")


def _base_storage(recipe: Recipe, precision: Precision, traits: Traits, decide: Decisions) -> str | None:
    if recipe.adapter is None or recipe.adapter.method != "qlora":
        return None
    decide("adapter.base", "nf4, doubly quantised", "the Trainer's arguments cannot say it: BitsAndBytesConfig does")
    if "weights" in traits.shards:
        # FSDP flattens, or casts to the compute dtype, all that shares a unit.
        why = f"{recipe.strategy.name} splits it with the other frozen weights, of one dtype"
        return decide("adapter.base_storage", precision.frozen, why)
    return decide("adapter.base_storage", "uint8", "two weights a byte")


def _blocks(recipe: Recipe, facts: ModelFacts, decide: Decisions) -> tuple[str, ...]:
    if recipe.strategy.wrap:
        return decide("strategy.wrap", tuple(recipe.strategy.wrap), "asked for")
    names = block_classes(facts)
    return decide("strategy.wrap", names, facts.why_unknown or f"the blocks of model type {facts.model_type}")


def _warmup(recipe: Recipe, decide: Decisions) -> int | None:
    ratio, steps, total = recipe.schedule.warmup_ratio, recipe.schedule.warmup_steps, recipe.run.max_steps
    if steps is not None:
        return steps
    if not ratio:
        return decide("schedule.warmup_steps", 0, "no warm-up asked for")
    if total is None:
        return None
    return decide("schedule.warmup_steps", math.ceil(ratio * total), f"{ratio} of {total} steps, rounded up")
