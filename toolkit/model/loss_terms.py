"""Terms of the loss beside the cross-entropy with the labels: label smoothing, z-loss and those of options; and how
many tokens' logits the fused loss computes at once. Imports no torch: a plan asks too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.rooms import asked_options

if TYPE_CHECKING:
    from toolkit.recipe.schema import Recipe


@dataclass(frozen=True)
class LossTerms:
    """``smoothing``: share of a label that is spread evenly over all classes, 0 to 1 (Szegedy et al.,
    arXiv:1512.00567, section 7). ``z_loss``: coefficient of the squared logarithm of softmax's denominator (Chowdhery
    et al., PaLM, arXiv:2204.02311, section 5). ``others``: of options (``Option.loss_term``)."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    others: tuple[Callable[[Any, Any], Any], ...] = ()

    @staticmethod
    def of(recipe: Recipe) -> LossTerms:
        """The terms that training adds. Evaluation has none: held-out losses stay comparable."""
        adding = (asked for asked in asked_options(recipe) if asked.option.adds_loss)
        others = tuple(option.loss_term(settings) for option, settings in adding)
        return LossTerms(recipe.label_smoothing, recipe.z_loss, others)


CROSS_ENTROPY = LossTerms()


CHUNK_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
"""Bytes of a chunk's float32 logits. A GPU reads the whole head for every chunk, so chunks have to be large enough for
the products to outweigh that (at 128k tokens of vocabulary, 500 rows); a CPU is better off near its caches."""


def chunk_rows(device: str, vocabulary: int) -> int:
    """Tokens of one chunk on ``device`` («cuda» or «cpu»)."""
    return max(1, CHUNK_BYTES[device] // (4 * vocabulary))
