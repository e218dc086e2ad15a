"""The recipe: every key, its type, its default and its description."""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from toolkit.layouts import check_layouts, list_layouts
from toolkit.recipe.adapter_methods import METHODS, known_method, list_methods
from toolkit.recipe.known_names import known_task, list_tasks
from toolkit.recipe.optimizer_names import (
    check_key,
    known_optimizer,
    list_optimizers,
    with_defaults,
    without_others,
)
from toolkit.recipe.strategy_names import known_strategy, list_names
from toolkit.rooms import in_room, known_options

PrecisionName = Literal["fp32", "bf16", "fp16", "bf16-pure"]
CheckpointingName = Literal["none", "full", "selective"]
LossName = Literal["plain", "fused"]
BatchNormName = Literal["synchronised", "local", "frozen"]
KernelsName = Literal["torch", "liger"]

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# 0 <= beta < 1: a beta of 1 would divide by a bias correction of zero (Adam, arXiv:1412.6980, algorithm 1).
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]


def _from_home(value: str) -> str:
    """``~`` as a shell has it; libraries that get the path take it for a name on the hub, or for a folder called ~."""
    return os.path.expanduser(value)


Place = Annotated[str, AfterValidator(_from_home)]
"""A folder, or the name of something on the hub."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, and types are strict."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Section):
    path: Place | None = Field(None, description="hub id or folder (exactly one of `path` and `config`)")
    config: dict[str, Any] | None = Field(
        None, description="a transformers config; weights are random, from `run.seed`"
    )
    task: Annotated[str, AfterValidator(known_task)] = Field(
        "causal-lm", description="the training task", json_schema_extra=list_tasks
    )
    attention: Annotated[str | None, in_room("varlen", on="varlen")] = Field(
        None,
        description="attention implementation, by its transformers name: eager, sdpa, flash_attention_2, ...; "
        "`varlen` computes packed rows sample by sample, with no further package; null: sdpa if the model supports "
        "it, else eager",
    )
    kernels: Annotated[KernelsName, in_room("liger", off="torch")] = Field(
        "torch",
        description="operators of norms, gated MLPs and rotary embeddings: `torch`, or `liger`, those of liger_kernel "
        "(GPU only)",
    )
    batch_norm: Annotated[BatchNormName | None, in_room("batch_norm")] = Field(
        None,
        description="what batch normalisation normalises in training: `synchronised`, a micro-batch of all ranks "
        "together; `local`, each rank's own, which trains another model than the full batch does; `frozen`, by the "
        "model's running statistics; null: synchronised, or frozen with an adapter and for images in text",
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    num_labels: Positive | None = Field(None, description="number of classes, for tasks whose labels are classes")
    neftune_alpha: Annotated[Annotated[float, Field(gt=0)] | None, in_room("neftune")] = Field(
        None,
        description="NEFTune: noise of alpha / sqrt(tokens x width) on the input embeddings while training",
    )
    freeze: list[Pattern] = Field(
        [],
        description="regular expressions, searched for in the names of parameters; those that match are not trained",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.config is None):
            raise ValueError("set exactly one of `path` and `config`")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` needs `model_type`, for example llama")
        return self


class Tokenizer(Section):
    path: Place | None = Field(
        None, description="hub id or folder of a tokenizer or processor; default: the model's own"
    )
    options: dict[str, Any] = Field(
        {}, description="options of its class, e.g. {language: german, task: transcribe} for Whisper"
    )
    add_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="tokens to add; their embeddings are trained, under LoRA too"
    )
    add_special_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="the same for tokens that decoded text leaves out, such as <|im_end|>"
    )

    @model_validator(mode="after")
    def _each_once(self) -> Tokenizer:
        twice = next((token for token in self.added if self.added.count(token) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is added twice")
        return self

    @property
    def added(self) -> list[str]:
        """All tokens to add, in the order in which they are added."""
        return [*self.add_tokens, *self.add_special_tokens]


class Adapter(Section):
    method: Annotated[str, AfterValidator(known_method), in_room("nf4", on="qlora")] = Field(
        "lora",
        description="PEFT method: how-to/choose-a-peft-method.md compares them (qlora: lora with the linear weights of "
        "the base in 4 bits)",
        json_schema_extra=list_methods,
    )
    r: Positive | None = Field(None, description="rank of the update, where the method has one; default: 16 for LoRA, "
        "else PEFT's")  # fmt: skip
    alpha: Annotated[float, Field(gt=0)] | None = Field(
        None, description="the update is scaled by alpha / r; default: 32 for LoRA, else PEFT's"
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="dropout before the first adapter matrix; default: 0 for LoRA, else PEFT's"
    )
    target_modules: str | list[str] | None = Field(
        None,
        description="all-linear, a regular expression or names; default: all-linear, or PEFT's for the model where the "
        "method adapts other layers (ia3, ln-tuning, trainable-tokens)",
    )
    modules_to_save: list[str] = Field([], description="modules that are fully trained and saved with the adapter")
    options: dict[str, Any] = Field(
        {}, description="further fields of PEFT's config class of the method, for example {use_rslora: true}"
    )
    path: Place | None = Field(None, description="an adapter to start from, saved by PEFT or by `toolkit export`")

    @model_validator(mode="after")
    def _defaults_of_the_method(self) -> Adapter:
        """Values that the recipe leaves open; they do not count as set. A key that the method does not take stays None,
        so that one that is written can be refused."""
        for key, value in METHODS[self.method].defaults.items():
            if getattr(self, key) is None:
                self.__dict__[key] = value
        return self


class DataSource(Section):
    """One of several sources of ``data.train``."""

    path: str = Field(description="file, folder or hub id")
    weight: Annotated[float, Field(gt=0)] | None = Field(
        None, description="how often its samples occur in an epoch; 0.5: a half of them, drawn by the seed; default 1"
    )
    proportion: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="its share of an epoch's samples; then every source has one, and an epoch ends where the "
        "first source is used up"
    )  # fmt: skip
    split: str | None = Field(None, description="of a hub data set; default: train")
    name: str | None = Field(None, description="configuration of a hub data set")
    revision: str | None = Field(None, description="branch, tag or commit of a hub data set")
    fields: dict[str, str] = Field({}, description="this source's own names, over data.fields")


def _kind_of_train(value: Any) -> str:
    return "sources" if isinstance(value, list) else "path"


Sources = Annotated[
    Annotated[str, Tag("path")] | Annotated[list[DataSource], Field(min_length=1), Tag("sources")],
    Discriminator(_kind_of_train),
]


def _kind_of_eval(value: Any) -> str:
    return "sets" if isinstance(value, dict) else "path"


def _prompt(value: Any) -> Any:
    """Pydantic's own errors for a union name types of Python."""
    texts = isinstance(value, str) and bool(value.strip())
    if texts or (isinstance(value, list) and value and all(isinstance(one, dict) for one in value)):
        return value
    raise ValueError("a prompt is a text, or a list of messages {role, content}")


Prompt = Annotated[str | list[dict[str, Any]], BeforeValidator(_prompt)]
"""A text, or a conversation for the model to go on with."""
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""The name of a held-out set, as it stands in results and before the dot of `run.metric`."""


class Data(Section):
    train: Sources = Field(description="file, folder or hub id; or a list of sources, see below")
    eval: (
        Annotated[
            Annotated[str, Tag("path")] | Annotated[dict[SetName, Sources], Tag("sets")], Discriminator(_kind_of_eval)
        ]
        | None
    ) = Field(
        None,
        description="held-out data: file, folder or hub id; or several of them by name, e.g. {news: news.jsonl, code: "
        "code.jsonl}; null: none, or `eval_fraction`",
    )
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="hold out about this share of the rows of `train`, in place of `eval`. A hash of a row's content "
        "decides: the same rows in every run, and equal rows on one side",
    )
    format: Literal["text", "prompt-completion", "messages", "tokens", "image", "audio"] = Field(
        "text",
        description="format of a sample; tokens: a list of words, for token-classification; image: an image and its "
        "class; audio: a recording and its words",
    )
    max_length: Annotated[int, Field(ge=2)] = Field(
        1024, description="longer samples are truncated to this number of tokens"
    )
    packing: bool = Field(
        False,
        description="pack several samples into one row of max_length tokens; samples do not attend to each other; "
        "micro_size then counts rows",
    )
    group_by_length: bool = Field(
        False,
        description="put samples of similar length into the same micro-batch; the samples of each step do not change",
    )
    cache: str | Literal[False] | None = Field(
        None,
        description="folder that caches tokenised samples; null: the user's cache folder, for data "
        "of 1 MiB and more; false: no cache",
    )
    workers: Count = Field(2, description="loader processes per training process")
    streaming: bool = Field(False, description="read the data during training; requires run.max_steps")
    shuffle: bool = Field(True, description="a new order in each epoch, determined by run.seed")
    fields: dict[str, str] = Field({}, description="field names of the data, e.g. {prompt: question}")
    chat_template: str | None = Field(None, description="a Jinja file; default: the tokenizer's own template")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="arguments of the chat template, e.g. {enable_thinking: false}"
    )
    mask_probability: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.15, description="masked-lm: share of the tokens that are predicted, drawn anew in each epoch"
    )
    turns: Literal["auto", "all", "last", "each"] = Field(
        "auto",
        description="assistant turns to learn. auto: all, in one sample unless the template rewrites earlier turns; "
        "all: all, in one sample; last: the last; each: all, each in a sample of its own",
    )

    @property
    def held_out(self) -> tuple[str, ...]:
        """Names of the held-out sets, in their order; "" is a single one, which has no name."""
        if isinstance(self.eval, dict):
            return tuple(self.eval)
        return () if self.eval is None and self.eval_fraction is None else ("",)

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> Data:
        if self.eval is not None and self.eval_fraction is not None:
            raise ValueError("`eval` and `eval_fraction` both say what is held out; set one of them")
        if self.eval == {}:
            raise ValueError("`eval` names no held-out set; set null")
        for name, sources in self.eval.items() if isinstance(self.eval, dict) else ():
            for at, source in enumerate(sources if isinstance(sources, list) else ()):
                if source.weight is not None or source.proportion is not None:
                    raise ValueError(f"`eval.{name}[{at}]`: every held-out sample counts once; remove its share")
        return self

    @model_validator(mode="after")
    def _one_way_to_mix(self) -> Data:
        if isinstance(self.train, str):
            return self
        shares = [source.proportion for source in self.train]
        if any(share is not None for share in shares):
            if None in shares:
                raise ValueError(f"`train[{shares.index(None)}]` has no proportion, but another source has one")
            if any(source.weight is not None for source in self.train):
                raise ValueError("give `train`'s sources weights or proportions, not both")
            total = sum(share for share in shares if share is not None)
            if abs(total - 1) > 1e-6:
                raise ValueError(f"the proportions of `train` add up to {total:g}, not 1")
        elif self.streaming:
            raise ValueError("a stream of several sources needs a `proportion` for each: its sizes are not known")
        return self


class Batch(Section):
    micro_size: Positive | None = Field(None, description="samples per process and forward pass")
    accumulation: Positive | None = Field(None, description="forward passes per optimizer step")
    global_size: Positive | None = Field(None, description="micro_size x accumulation x processes")


class ParameterGroup(Section):
    """Parameters with a learning rate or weight decay of their own."""

    match: str = Field(description="regular expression, searched for in the names of the parameters")
    lr: Annotated[float, Field(gt=0)] | None = Field(
        None, description="their peak learning rate; default: optimizer.lr. The schedule is the same"
    )
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        None, description="of all that match, norms and biases too; default: optimizer.weight_decay and optimizer.decay"
    )

    @model_validator(mode="after")
    def _changes_something(self) -> ParameterGroup:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"`match` is not a regular expression: {error}") from None
        if self.lr is None and self.weight_decay is None:
            raise ValueError("set `lr`, `weight_decay` or both")
        return self


class Optimizer(Section):
    name: Annotated[str, AfterValidator(known_optimizer)] = Field(
        "adamw",
        description="the optimizer; «Optimizers and schedules» describes each",
        json_schema_extra=list_optimizers,
    )
    kernel: Literal["fused", "foreach"] = Field(
        "fused",
        description="adamw, sgd. fused: one kernel for all operations; foreach: a few kernels per operation (more "
        "memory)",
    )
    lr: Annotated[float, Field(gt=0)] = Field(2.0e-4, description="peak learning rate")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="multiply all learning rates by the ratio of the global batch to base_global_batch, or by its "
        "square root",
    )
    base_global_batch: Positive | None = Field(None, description="the global batch that lr was chosen for")
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = Field(
        [0.9, 0.999], description="adamw, adamw8bit, schedule-free, muon (for AdamW's part); lion: [0.9, 0.99]"
    )
    eps: Annotated[float, Field(gt=0)] = Field(
        1.0e-8, description="adamw, adamw8bit, schedule-free, muon (for AdamW's part)"
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="adamw with bf16-pure: how updated weights and moments are rounded to bfloat16. stochastic: up or "
        "down by chance, so that small updates are not lost",
    )
    momentum: Beta | None = Field(None, description="sgd: 0.9; muon: 0.95")
    nesterov: bool | None = Field(None, description="Nesterov momentum. sgd: false; muon: true")
    ns_steps: Annotated[int, Field(ge=1, le=99)] | None = Field(
        None, description="muon: iterations of Newton-Schulz; default 5"
    )
    adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = Field(
        None,
        description="muon: what lr is multiplied by for each matrix. match_rms_adamw (default): 0.2 sqrt(larger side); "
        "original: sqrt(max(1, rows / columns))",
    )
    beta2_decay: Annotated[float, Field(lt=0)] | None = Field(
        None, description="adafactor: 1 - update^beta2_decay is the decay of the second moment; default -0.8"
    )
    clip_threshold: Annotated[float, Field(ge=1)] | None = Field(
        None, description="adafactor: largest root mean square of an update before it is scaled; default 1"
    )
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="weights with weight decay; matrices: excludes norms, biases and embeddings"
    )
    groups: list[ParameterGroup] = Field(
        [], description="parameters with a rate or decay of their own; the first group whose pattern matches applies"
    )
    max_grad_norm: Annotated[float, Field(ge=0)] | None = Field(1.0, description="null or 0: no clipping")

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, values: Any) -> Any:
        return with_defaults(values)

    @field_validator(
        "kernel",
        "betas",
        "eps",
        "rounding",
        "momentum",
        "nesterov",
        "ns_steps",
        "adjust_lr_fn",
        "beta2_decay",
        "clip_threshold",
    )
    @classmethod
    def _own_key(cls, value: Any, info: ValidationInfo) -> Any:
        """Only written keys are checked: pydantic does not validate defaults."""
        if "name" in info.data:
            check_key(info.data["name"], str(info.field_name), value)
        return value

    @model_validator(mode="after")
    def _scaling_has_a_base(self) -> Optimizer:
        if (self.lr_scaling == "none") != (self.base_global_batch is None):
            raise ValueError("`lr_scaling: linear` or `sqrt` and `base_global_batch` go together; set both or neither")
        if self.nesterov and not self.momentum:
            raise ValueError("`nesterov` needs a `momentum` above 0")
        return self

    @model_serializer(mode="wrap")
    def _without_others(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_others(self.name, handler(self))


class Schedule(Section):
    name: Literal["cosine", "linear", "constant", "wsd", "polynomial", "inverse-sqrt"] = Field(
        "cosine",
        description="course after the warm-up; «Optimizers and schedules» describes each",
    )
    warmup_ratio: Fraction | None = Field(None, description="fraction of the steps; or set warmup_steps")
    warmup_steps: Count | None = None
    min_ratio: Fraction | None = Field(
        None, description="cosine, polynomial, wsd: the last learning rate as a fraction of the peak; default 0"
    )
    power: Annotated[float, Field(gt=0)] | None = Field(None, description="polynomial: the exponent; default 1")
    decay_ratio: Fraction | None = Field(
        None, description="wsd: fraction of the steps that decay, rounded up; or set decay_steps"
    )
    decay_steps: Positive | None = Field(None, description="wsd: steps that decay, the last of the run")
    decay_shape: Literal["linear", "cosine", "1-sqrt"] | None = Field(
        None, description="wsd: course of the decay; default linear"
    )

    @field_validator("min_ratio", "power", "decay_ratio", "decay_steps", "decay_shape")
    @classmethod
    def _own_key(cls, value: Any, info: ValidationInfo) -> Any:
        owners = SCHEDULE_KEYS[str(info.field_name)]
        if value is not None and info.data.get("name", owners[0]) not in owners:
            name = info.data["name"]
            raise ValueError(f"the schedule {name} does not have this key ({', '.join(owners)}: yes); remove it")
        return value

    @model_validator(mode="after")
    def _one_warmup(self) -> Schedule:
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError("set only one of `warmup_ratio` and `warmup_steps`")
        if self.name == "wsd" and (self.decay_ratio is None) == (self.decay_steps is None):
            raise ValueError("wsd needs one of `decay_ratio` and `decay_steps`")
        return self

    @model_serializer(mode="wrap")
    def _without_others(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in handler(self).items() if k not in SCHEDULE_KEYS or v is not None}


SCHEDULE_KEYS = {
    "min_ratio": ("cosine", "polynomial", "wsd"),
    "power": ("polynomial",),
    "decay_ratio": ("wsd",),
    "decay_steps": ("wsd",),
    "decay_shape": ("wsd",),
}
"""Keys that not every schedule has, and the schedules that have each."""


class MeshAxes(Section):
    """How the processes are divided; the product of all axes is their number."""

    model_config = ConfigDict(extra="allow", json_schema_extra=list_layouts)
    __pydantic_extra__: dict[str, Positive] = Field(init=False)
    """The axes of layouts in files of their own (toolkit/layouts.py), by name."""

    replicate: Positive = Field(
        1, description="copies of what `shard` divides; between nodes they exchange gradients alone"
    )
    shard: Positive = Field(
        1, description="consecutive ranks that divide weights, gradients and optimizer state; best: those of a node"
    )
    context: Positive = Field(
        1, description="consecutive ranks that divide the tokens of each row, for rows too long for one device"
    )
    tensor: Positive = Field(1, description="consecutive ranks that divide the matrices of each layer")
    pipeline: Positive = Field(1, description="stages of consecutive blocks, through which micro-batches pass")
    expert: Positive = Field(
        1, description="consecutive ranks that divide the experts of each layer, each with samples of its own"
    )

    @model_validator(mode="after")
    def _known(self) -> MeshAxes:
        check_layouts(self.__pydantic_extra__)
        return self

    @property
    def axes(self) -> dict[str, int]:
        """The axes that a layout divides something over, with more than one rank."""
        return {axis: size for axis, size in self if axis not in ("replicate", "shard") and size > 1}

    @property
    def others(self) -> dict[str, int]:
        """Those that this class has no key for."""
        return {axis: size for axis, size in self.axes.items() if axis in self.__pydantic_extra__}

    @property
    def columns(self) -> int:
        """How many consecutive ranks train on the same samples, each with its part of some weights."""
        return math.prod(self.others.values(), start=self.tensor)


class Strategy(Section):
    name: Annotated[str, AfterValidator(known_strategy)] = Field(
        "single", description="how the training state is distributed over the processes", json_schema_extra=list_names
    )
    offload: Literal["none", "optimizer", "all"] = Field("none", description="what is kept in host memory")
    reshard_after_forward: bool = Field(
        True,
        description="fsdp1, fsdp2: free the gathered weights after the forward; false is faster and larger",
    )
    sync: Literal["every", "last"] | None = Field(
        None,
        description="when gradients are summed over the ranks: after every micro-batch of a step, or after the last, "
        "until when each rank has whole gradients. Default: every for fsdp1, fsdp2, zero2, zero3, last for ddp, zero1",
    )
    unsharded_blocks: Annotated[Positive | None, in_room("unsharded")] = Field(
        None,
        description="fsdp1, fsdp2, zero3: so many blocks, from the first, have their frozen weights whole on every "
        "process, where they need not be gathered; more is faster and larger. null: none",
    )
    wrap: list[str] | None = Field(
        None, description="classes of the model's blocks; default: those that its code marks"
    )
    mesh: MeshAxes | None = Field(
        None,
        description="how the processes are divided between kinds of parallelism, e.g. {replicate: 2, shard: 8}; null: "
        "the strategy's own, one group of all processes",
    )


class Machine(Section):
    device: Literal["auto", "cuda", "cpu"] = "auto"
    processes: Positive = Field(1, description="processes per node")
    nodes: Positive = 1


class EarlyStopping(Section):
    """When a run ends before its last step."""

    patience: Positive = Field(description="evaluations in a row without improvement, after which the run ends")
    min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="an evaluation improves if `metric` is better than the best so far by more than this"
    )


class Ema(Section):
    """An exponential moving average of the trained weights."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.999, description="the average becomes decay x average + (1 - decay) x weights"
    )
    every: Positive = Field(1, description="updates between two changes of the average")
    start: Count = Field(0, description="updates before the average begins; until then it equals the weights")


class Run(Section):
    max_steps: Positive | None = Field(None, description="optimizer steps; or set epochs")
    epochs: Positive | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    output_dir: Place = "runs/run"
    log_every: Positive = Field(1, description="steps between log lines (each synchronises the device once)")
    group_norms: bool = Field(
        False,
        description="log the norms of gradient, update and weights of each of optimizer.groups, and of all others; "
        "takes a copy of the weights that a process updates",
    )
    save_every: Count = Field(500, description="optimizer steps between checkpoints, and one at the end; 0: never")
    keep: Positive = Field(2, description="number of latest checkpoints to keep, in addition to the best one")
    async_save: bool = Field(
        True, description="continue training while checkpoints are written; buffers at most 4 GiB per process"
    )
    eval_every: Count | None = Field(
        None,
        description="optimizer steps between evaluations, and one at the end; 0: never; null: 500 if data is held out",
    )
    eval_at_start: bool = Field(False, description="evaluate before the first step too")
    metric: Annotated[str, Field(pattern=r"^([A-Za-z0-9_-]+\.)?[a-z0-9_]+$")] = Field(
        "eval_loss",
        description="what says which checkpoint is the best, and when early_stopping ends the run: eval_loss; accuracy "
        "or f1 (classes); pearson (numbers); of one of several held-out sets: NAME.eval_loss",
    )
    sample_prompts: list[Prompt] = Field(
        [],
        description="prompts that the model answers at each evaluation and at the end: texts, or lists of messages "
        "{role, content}; without held-out data every `eval_every` steps, or 500",
    )
    sample_max_new_tokens: Positive = Field(64, description="longest answer to one of `sample_prompts`, in tokens")
    early_stopping: EarlyStopping | None = Field(
        None, description="end the run when `metric` no longer improves: {patience, min_delta}"
    )
    ema: Annotated[Ema | None, in_room("ema")] = Field(
        None, description="keep a float32 moving average of the trained weights, for toolkit export --ema"
    )
    trackers: list[str] = Field([], description="trackers, by their accelerate name: tensorboard, wandb, ...")
    on_bad_loss: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="if the loss is not finite, or is a spike: stop the run; skip the step (synchronises the device at "
        "every step); or roll back to the latest checkpoint's weights and continue with the data after the step",
    )
    loss_spike: Annotated[float, Field(gt=1)] | None = Field(
        None, description="a loss above this multiple of the mean of the last 20 steps is a spike; null: no spike check"
    )
    hang_after: Count = Field(
        40,
        description="end the run if one rank is behind the others and no rank makes progress for this many seconds "
        "(saving, evaluation and the first step are not timed); 0: never",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Run:
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError("set only one of `max_steps` and `epochs`")
        return self


class Places(dict[tuple[str | int, ...], str]):
    """Where keys are written: file, line and column, or the override. No part of what a recipe says, so that recipes
    are equal wherever their keys are written."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places)

    __hash__ = None


class Recipe(Section):
    """The whole recipe."""

    _places: Places = PrivateAttr(default_factory=Places)

    def written(self, key: str, source: str) -> str:
        """Where ``key`` (``data.max_length``) is written, or the nearest section around it; ``source`` where that is
        not known."""
        path: tuple[str | int, ...] = tuple(key.split("."))
        while path and path not in self._places:
            path = path[:-1]
        return self._places[path] if path else source

    @property
    def eval_interval(self) -> int:
        """Optimizer steps between evaluations; 0 if there are none."""
        if not self.data.held_out:
            return 0
        return 500 if self.run.eval_every is None else self.run.eval_every

    @property
    def sample_interval(self) -> int:
        """Optimizer steps between answers to ``run.sample_prompts``; 0 if there are none."""
        if not self.run.sample_prompts:
            return 0
        return 500 if self.run.eval_every is None else self.run.eval_every

    model: Model
    tokenizer: Tokenizer = Tokenizer()
    adapter: Adapter | None = None
    data: Data
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: PrecisionName = "fp32"
    activation_checkpointing: CheckpointingName = "none"
    activation_offload: Annotated[bool, in_room("activation_offload", off=False)] = Field(
        False, description="keep the checkpoints of activation_checkpointing: full in host memory (GPU only)"
    )
    loss: LossName = Field(
        "plain", description="fused: computed from the hidden states, without materialising all logits"
    )
    label_smoothing: Fraction = Field(
        0.0, description="share of each label that is spread evenly over all classes, while training"
    )
    z_loss: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="coefficient of the mean squared logsumexp of the logits of supervised tokens, added to the loss "
        "while training; PaLM has 1e-4",
    )
    fp8: Annotated[bool, in_room("fp8", off=False)] = Field(
        False,
        description="compute the matrix products of the blocks' linear layers in float8; weights and optimizer do "
        "not change",
    )
    compile: bool = Field(False, description="apply torch.compile to each block; the first steps take longer")
    options: Annotated[dict[str, dict[str, Any]], AfterValidator(known_options)] = Field(
        {}, description="options of other packages, each with its own keys: {NAME: {key: value}}"
    )
    strategy: Strategy = Strategy()
    machine: Machine = Machine()
    run: Run = Run()

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the section that came later where nothing is in it: files of earlier recipes do not change."""
        return {key: value for key, value in handler(self).items() if key != "options" or value}
