"""What an optimizer is: a file in this package, its formula in toolkit/reference/optimizers, and nothing elsewhere;
or a file of somebody else, which ``register``s an ``OptimizerKind``.

A file ``some_name.py`` defines ``OPTIMIZER``, and the recipe's ``optimizer.name: some-name`` finds it. It imports
nothing heavy: recipes are checked, and memory is planned, without torch. ``build`` and ``formula`` name the modules
that import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.recipe.schema import Recipe
    from toolkit.recipe.traits import Traits


ADAM = ("exp_avg", "exp_avg_sq")


def supported(traits: Traits) -> None:
    """For optimizers that update each element on its own: every strategy supports them."""


def needs_whole_tensors(why: str) -> Callable[[Traits], str | None]:
    """For optimizers whose update of an element depends on its row, column or matrix."""

    def refusal(traits: Traits) -> str | None:
        if not traits.flat_state:
            return None
        return f"{why}, but this strategy updates slices of a flat tensor; use fsdp2, ddp or single"

    return refusal


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    ``keys``: keys of the recipe's section ``optimizer`` that it has and not every optimizer has. ``defaults``: its own
    defaults of them. ``lr``: a customary learning rate, for the documentation. ``build``: ``module:function`` that
    makes the torch optimizer from parameter groups. ``formula``: ``module:class`` of its step in float64, which
    `verify` compares with, or what takes the recipe's section and returns that. ``source``: where the formula is from.
    """

    name: str
    title: str
    source: str
    build: str
    formula: str | Callable[[Any], str]
    diagnoses: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By id what `verify` says of a mistake of its formula: the cause, and the evidence, whose facts are ``count`` and
    ``first`` of the weights."""
    keys: tuple[str, ...] = ()
    keys_of_16_bits: tuple[str, ...] = ()
    """Those of ``keys`` that mean nothing in float32, where `verify` leaves them out."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lr: str = ""
    refusal: Callable[[Traits], str | None] = supported
    """Takes a strategy's traits; returns why that strategy does not support it, or None."""
    problems: Callable[[Recipe], list[str]] = lambda recipe: []
    """What in the rest of a recipe it cannot be used with: messages that begin with the key."""
    averages: bool = False
    """The weights that it updates are not those of the result: evaluations and exports are at an average, which follows
    from the weights and their state ``z``."""
    tensors: Callable[[Any, tuple[int, ...], bool], tuple[str, ...]] = lambda optimizer, shape, matrix: ADAM
    """Names of the tensors in the state of one weight: takes the recipe's section, the weight's shape, and whether it
    is a hidden matrix."""
    counts: Callable[[bool], bool] = lambda matrix: True
    """Whether the state of a weight has a count of steps: takes whether it is a hidden matrix."""
    splits: bool = False
    """Updates hidden matrices itself and leaves all other weights to AdamW."""
    factored: bool = False
    """Its state is not of the weights' shapes; under a strategy that shards single tensors every rank has it whole."""
    packed: bool = False
    """Its state is stored in 8 bits."""
    state: Callable[[tuple[int, ...], bool, int], float] = lambda shape, matrix, size: 2.0 * elements(shape) * size
    """Bytes of the state of one whole weight: takes its shape, whether it is a hidden matrix, and the bytes of an
    element in the trained dtype."""
    temporary: Callable[[tuple[int, ...], bool, int, int], float] = lambda shape, matrix, size, ranks: 0.0
    """Bytes that exist only while one weight is updated: takes its shape, whether it is a hidden matrix, the bytes of
    an element in the trained dtype, and the number of ranks that its tensors are sharded over."""
    copies: Callable[[Any, bool], int] = lambda optimizer, decays: 0
    """Copies that a step makes of all tensors of a parameter group at once, in the trained dtype: takes the recipe's
    section and whether the group has weight decay."""
    passes: int = 7
    """How often a step reads or writes a tensor of the weights' size: weight, gradient and each state tensor."""
    foreach_passes: int = 0
    """... with foreach kernels, each of which reads and writes all tensors; 0: as many as ``passes``."""
    flops: Callable[[Any, tuple[int, ...], bool], float] = lambda optimizer, shape, matrix: 0.0
    """Floating-point operations in bf16 products of one weight's update: takes the recipe's section, the weight's
    shape, and whether it is a hidden matrix."""
    gathers: Callable[[bool], int] = lambda matrix: 0
    """Whole tensors that updating one weight gathers where single tensors are sharded: takes whether it is a hidden
    matrix."""
    settings: Callable[[Any], str] = lambda optimizer: ""
    """Its rule in words, for `config --explain`: takes the recipe's section. Empty: nothing to explain."""
    trainer: Callable[[Any], dict[str, Any] | None] = lambda optimizer: None
    """The same optimizer as keyword arguments of transformers' TrainingArguments: takes the recipe's section. None: the
    Trainer has no equivalent."""

    @property
    def elementwise(self) -> bool:
        """Whether it updates each element on its own, from that element's gradient and state alone, and trains the
        weights that it updates."""
        return self.refusal is supported and not (self.packed or self.factored or self.splits or self.averages)


def elements(shape: tuple[int, ...]) -> int:
    """Elements of a tensor of this shape."""
    product = 1
    for size in shape:
        product *= size
    return product
