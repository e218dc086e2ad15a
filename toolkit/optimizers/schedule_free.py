"""Schedule-free AdamW: gradients at y, steps of z, and x, the average of z, in place of a decaying learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.optimizers.adamw import adam_arguments
from toolkit.optimizers.base import OptimizerKind, elements

if TYPE_CHECKING:
    from toolkit.recipe.schema import Recipe


def _problems(recipe: Recipe) -> list[str]:
    found, schedule = [], recipe.schedule
    if schedule.name != "constant":
        found.append(
            f"schedule.name: schedule-free averages its steps instead of decaying the learning rate, and here the "
            f"schedule is {schedule.name}; set schedule: {{name: constant, warmup_steps: N}}"
        )
    if schedule.warmup_ratio is not None:
        found.append(
            "schedule.warmup_ratio: the average of schedule-free weighs each step by its learning rate, which must not "
            "depend on the length of the run; set schedule.warmup_steps instead"
        )
    if recipe.precision == "bf16-pure":
        found.append(
            "optimizer.name: schedule-free averages float32 weights, and precision: bf16-pure has none; use bf16"
        )
    if recipe.optimizer.betas[0] == 0:
        found.append(
            "optimizer.betas: schedule-free computes the average from y and z, which are equal if the first of betas "
            "is 0; the default is 0.9"
        )
    return found


def _temporary(shape: tuple[int, ...], matrix: bool, size: int, ranks: int) -> float:
    return -(-elements(shape) // ranks) * size  # the denominator, which becomes the normalised gradient


def _trainer(optimizer: Any) -> dict[str, Any]:
    return {"optim": "schedule_free_adamw"} | adam_arguments(optimizer)  # the package schedulefree


def _settings(optimizer: Any) -> str:
    return (
        "trains at y = (1 - betas[0]) z + betas[0] x; evaluations and exports are at the average x; checkpoints "
        "contain y and z"
    )


OPTIMIZER = OptimizerKind(
    name="schedule-free",
    title="schedule-free AdamW, an average of steps in place of a decay of the learning rate",
    source="Defazio et al., arXiv:2405.15682, algorithm 1, as schedulefree 1.4.1",
    build="toolkit.optim.schedule_free:build",
    formula="toolkit.reference.optimizers.schedule_free:ScheduleFree",
    keys=("betas", "eps"),
    lr="one to ten times AdamW's with a decaying schedule",
    problems=_problems,
    averages=True,
    tensors=lambda optimizer, shape, matrix: ("z", "exp_avg_sq"),
    temporary=_temporary,
    settings=_settings,
    trainer=_trainer,
)
