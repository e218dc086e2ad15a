"""AdamW: decoupled weight decay, two moments in the trained dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.optimizers.base import OptimizerKind

if TYPE_CHECKING:
    from toolkit.recipe.schema import Recipe


def _trainer(optimizer: Any) -> dict[str, Any] | None:
    if optimizer.rounding == "stochastic":
        return None
    return {"optim": f"adamw_torch{'_fused' if optimizer.kernel == 'fused' else ''}"} | adam_arguments(optimizer)


def adam_arguments(optimizer: Any) -> dict[str, Any]:
    """The Trainer's arguments of every Adam."""
    beta1, beta2 = optimizer.betas
    return {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": optimizer.eps}


def _copies(optimizer: Any, decays: bool) -> int:
    # torch 2.13.0 optim/adam.py, ``_multi_tensor_adam``: the roots of the second moments.
    return int(optimizer.kernel == "foreach")


def _problems(recipe: Recipe) -> list[str]:
    if recipe.optimizer.rounding != "stochastic":
        return []
    found = []
    if recipe.precision != "bf16-pure":
        found.append(
            "optimizer.rounding: stochastic rounds weights that are kept in bfloat16, and precision: "
            f"{recipe.precision} keeps float32 ones, which need none; set precision: bf16-pure, or remove "
            "optimizer.rounding"
        )
    if recipe.optimizer.kernel != "fused":
        found.append("optimizer.kernel: rounding: stochastic has its own kernel; remove optimizer.kernel")
    mesh = recipe.strategy.mesh
    if mesh is not None and max(mesh.tensor, mesh.pipeline, mesh.expert) > 1:
        found.append(
            "optimizer.rounding: stochastic has not been verified beside mesh.tensor, pipeline and expert; remove one "
            "of them"
        )
    return found


def _settings(optimizer: Any) -> str:
    if optimizer.rounding != "stochastic":
        return ""
    return (
        "weights and moments rounded stochastically, by bits that follow from a weight's name, the step and the place"
    )


def _formula(optimizer: Any) -> str:
    if getattr(optimizer, "rounding", None) == "stochastic":  # a recorded script's settings have no such key
        return "toolkit.reference.optimizers.stochastic:StochasticAdamW"
    return "toolkit.reference.optimizers.adamw:AdamW"


OPTIMIZER = OptimizerKind(
    name="adamw",
    title="AdamW with decoupled weight decay",
    source="Loshchilov and Hutter, arXiv:1711.05101, algorithm 2",
    build="toolkit.optim.adamw:build",
    formula=_formula,
    diagnoses={
        "nearest-not-stochastic": (
            "weights are rounded to nearest, not stochastically",
            "{count} weights, first {first}",
        ),
        "rounded-by-other-bits": (
            "weights are rounded stochastically by other bits than those of their name, step and place",
            "{count} weights, first {first}",
        ),
    },
    keys=("kernel", "betas", "eps", "rounding"),
    keys_of_16_bits=("rounding",),
    lr="2e-4",
    # ``_multi_tensor_adam``: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4.
    foreach_passes=20,
    problems=_problems,
    copies=_copies,
    settings=_settings,
    trainer=_trainer,
)
