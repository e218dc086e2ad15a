"""Terms of the loss beside the cross-entropy with the labels: label smoothing and z-loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.recipe.schema import Recipe


@dataclass(frozen=True)
class LossTerms:
    """``smoothing``: share of a label that is spread evenly over all classes, 0 to 1 (Szegedy et al.,
    arXiv:1512.00567, section 7). ``z_loss``: coefficient of the squared logarithm of softmax's denominator (Chowdhery
    et al., PaLM, arXiv:2204.02311, section 5)."""

    smoothing: float = 0.0
    z_loss: float = 0.0

    @staticmethod
    def of(recipe: Recipe) -> LossTerms:
        """The terms that training adds. Evaluation has none: held-out losses stay comparable."""
        return LossTerms(recipe.label_smoothing, recipe.z_loss)


CROSS_ENTROPY = LossTerms()
