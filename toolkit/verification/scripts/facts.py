"""What is kept of one model of a recorded command, on each rank, beside the steps of its optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from toolkit.verification.record.trace import RankTrace

SAMPLE = 4096
"""Elements kept of an output, to compare the replayed one with."""


@dataclass
class OutputTrace:
    """A tensor that a call answered with and that a gradient may reach. ``sample``: elements at equal distances of
    each other, at most 4,096. ``gradient``: all that arrived, in the tensor's dtype,
    loss scale included; None if none did. ``reached``: whether the loss was computed from it directly, not only from
    another output that the model computed from it: no gradient is kept of one that it was not.
    ``arrived``: whether any did."""

    name: str
    shape: list[int]
    sample: torch.Tensor
    gradient: torch.Tensor | None = None
    reached: bool = False
    arrived: bool = False


@dataclass
class CallTrace:
    """One call of the model under grad, or of a part of it by the script itself (``path``, its name)."""

    path: str
    training: bool
    arguments: str
    """``[args, kwargs]``, as ``tree.flatten`` writes it."""
    tensors: list[torch.Tensor]
    autocast: str | None
    rng: dict[str, torch.Tensor]
    drawn: list[str]
    outputs: list[OutputTrace] = field(default_factory=list)


@dataclass
class GroupFacts:
    """The settings of one parameter group of the optimizer, and the trained parameters in it, by name."""

    names: list[str]
    betas: list[float]
    eps: float
    decay: float
    lr: list[float]
    """By recorded step."""


@dataclass
class ScriptFacts:
    """``steps``: the calls of every recorded step, in order. ``dtypes``, ``buffers``: of the live model, as it
    computes: the dtype of every parameter, and the buffers themselves (rank 0). ``frozen``: the frozen parameters whose
    values changed after the model was first seen, or could not be read then. ``averaged``: gradients of how many ranks
    the strategy averages. ``adam``: whether the optimizer is AdamW, whose step is compared. ``whole_clip``: whether
    clipping took exactly the gradients of this model's trained parameters."""

    device: str
    """The kind that computed: ``cpu``, ``cuda``, ..."""
    device_name: str
    float32_products: str
    """``ieee`` or ``tf32``."""
    computed: list[str]
    """The dtypes of the parameters, of a 16-bit copy and of autocast: all that it computes in."""
    copy: str | None
    """The dtype of a 16-bit copy that computes, where there is one."""
    autocast: str | None
    limit: float
    """The 2-norm that gradients are clipped to; 0: never."""
    steps: list[list[CallTrace]]
    strategy: str
    world: int
    averaged: int
    threads: int
    dtypes: dict[str, str]
    buffers: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    groups: list[GroupFacts]
    optimizer: str
    adam: bool
    whole_clip: bool
    after: int
    """Optimizer steps before the first recorded one."""
    loaded: bool
    """Whether weights were loaded between the first sight of the model and its first recorded step."""
    launched: str | None = None
    """What the launcher asked accelerate for: ``FSDP`` or ``DEEPSPEED``."""
    connected: bool = True
    """Whether the launched processes are in one process group."""
    reduce: str | None = None
    """The dtype that gradients are reduced in, where the strategy says so."""
    outside: list[str] = field(default_factory=list)
    """Parameters that the script's loss reads itself, not by calling the model."""
    notes: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """Why calls of the model could not be kept."""
    by_labels: bool = False
    """Whether the loss has to be the mean over the labels that the model is given, as `toolkit.Recorder` asks."""


@dataclass
class Sketches:
    """The trained tensors when a step has been taken, by name, each as ``sketch`` has it: float64 of shape (n,).

    ``gradient``: averaged and unscaled, before clipping; None if there was none. ``squares``: of its elements' squares.
    ``norms``: its 2-norm, in float64 and as torch sums it in the gradient's dtype. ``rounded``: 16-bit dtypes that all
    its elements have without rounding. ``moments``: the optimizer's, by its names. ``counts``: its steps.
    ``directions``: what AdamW's formula makes of the moments, bias-corrected: the change of the weight for a learning
    rate of -1, without decay.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: dict[str, torch.Tensor | None] = field(default_factory=dict)
    squares: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: dict[str, tuple[float, float]] = field(default_factory=dict)
    rounded: dict[str, list[str]] = field(default_factory=dict)
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    directions: dict[str, torch.Tensor] = field(default_factory=dict)
    moment_dtype: str = "float32"


@dataclass
class UnitTrace:
    """All that one rank kept of one model. ``trace``: the weights that each step began with, whole, of rank 0.
    ``begun``: before the first step; ``sketches``: of each step. Rank 0 has them."""

    trace: RankTrace
    facts: ScriptFacts
    begun: Sketches = field(default_factory=Sketches)
    sketches: list[Sketches] = field(default_factory=list)
