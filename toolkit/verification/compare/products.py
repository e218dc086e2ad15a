"""Float8 products, each against the definition on its own operands; and how far they take a step from bf16's."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.recipe.resolve import Resolved
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.record.trace import RankTrace


def products(ranks: Sequence[RankTrace], resolved: Resolved) -> list[Stage]:
    """No stage where there are no such products, or where they run within compiled code: those are counted, and the
    whole model is compared."""
    if not resolved.recipe.fp8 or resolved.recipe.compile:
        return []
    stage = Stage("products", detection_limit=1.0)
    for rank in ranks:
        for one in rank.products:
            stage.measures.append(
                Measure(
                    "product", one.step, one.error, 1.0, one.layer, 1.0, one.micro, rank.rank, {"product": one.kind}
                )
            )
    worst = max((m.error for m in stage.measures), default=0.0)
    stage.summary = f"{len(stage.measures)}, {worst:.2f} of 1 rounding"
    return [stage]
