"""The private names of DeepSpeed that the toolkit uses. Imports it where a function is called, not before."""

from __future__ import annotations

from typing import Any

from toolkit.errors import RunFailed
from toolkit.upstream.replacement import Replacement, unwritten


def no_fragments() -> str:
    """Why parts of ZeRO 1 and 2 cannot be read, "" if they can. ``safe_get_full_*`` put whole tensors together on every
    rank, and ``safe_get_local_*`` know stage 3 alone."""
    links = "runtime/zero/stage_1_and_2.py"
    return unwritten(
        "deepspeed", "utils/mixed_precision_linkage.py", "_hp_mapping", "_index_in_param_group"
    ) or unwritten("deepspeed", links, "_hp_optimizer_states_linked", "def _lazy_init_hp_params_optimizer_state(")


def fragment_of(parameter: Any) -> Any:
    """ZeRO 1 and 2: which elements of a parameter this rank updates, with its float32 copy and moments; None: none."""
    return parameter._hp_mapping


def gradient_of(parameter: Any) -> Any:
    """ZeRO 1 and 2: the gradient of what this rank updates; None if there is none."""
    return fragment_of(parameter).get_lp_grad_fragment(parameter._index_in_param_group)


def link_moments(zero: Any) -> None:
    """DeepSpeed 0.19.8, stages 1 and 2, links parameters to their moments after the first group's first step and never
    again, so that parameters of every other group have none («exp_avg not found in optimizer state fragment»): link all
    groups."""
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def overflowing(zero: Any, found: Any, dropped: Any) -> dict[str, Any]:
    """What of an optimizer has to be which of two functions, so that a step finds an overflow whatever the gradients
    are. In 0.19.8 stages 1 and 2 ask ``check_overflow`` where ``check_grad_overflow`` says so, stage 3 a method of its
    own, and BF16_Optimizer (stage 1 under bf16) the norm alone. A gradient that is not finite is no way: what counts
    losses under bf16 does not look at it. Raises RunFailed for an optimizer of another kind."""
    own = "_overflow_check_and_loss_scale_update"
    if hasattr(zero, own):
        return {own: found}
    if hasattr(zero, "check_grad_overflow"):
        return {"check_grad_overflow": True, "check_overflow": found}
    if not hasattr(zero, "clear_hp_grads"):
        raise RunFailed(
            "this DeepSpeed does not drop a step for its loss (toolkit doctor): set run.on_bad_loss to stop"
        )
    return {"step": dropped}


def set_norm(zero: Any, norm: float) -> None:
    """BF16_Optimizer keeps the norm of the last step under a private name, and returns it by a public one."""
    zero._global_grad_norm = norm


def forget_second_copies() -> None:
    """hpZ's groups are a global of DeepSpeed 0.19.8 (utils/groups.py), which refuses to make them twice in a process
    and uses those of an earlier engine, whatever their size and the next engine's configuration."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


REPLACEMENTS = (
    Replacement(
        "deepspeed", "fragments of ZeRO 1 and 2", "each rank reads, writes and saves its part", "0.19.8", no_fragments,
        "safe_get_local_* know stage 3 alone", "strategies zero1 and zero2 are refused: use zero3 or fsdp2",
    ),
    Replacement(
        "deepspeed", "overflow of a step", "a step is dropped for its loss", "0.19.8",
        lambda: unwritten("deepspeed", "runtime/zero/stage3.py", "_overflow_check_and_loss_scale_update")
        or unwritten("deepspeed", "runtime/bf16_optimizer.py", "_global_grad_norm"),
        "none: under bf16 it looks at no gradient", "a run that has to drop one ends",
    ),
    Replacement(
        "deepspeed", "groups of hpZ", "two engines of one process have groups of their own", "0.19.8",
        lambda: unwritten("deepspeed", "utils/groups.py", "_ZERO_PARAM_INTRA_PARALLEL_GROUP"),
        "none", "one engine with second copies for each process",
    ),
)  # fmt: skip
