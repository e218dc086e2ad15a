"""From a user's recipe to the cases that verify it: the twin, its samples, and steps that exercise what it asks."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.needs import NO_TOKENIZER
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Batch, Recipe
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.reference.schedule import plain_learning_rate
from toolkit.rooms import asked_options
from toolkit.strategies import resolve
from toolkit.tasks import task_of
from toolkit.verification.cases.case import FULL_WINDOWS, OVERFLOW_STEP, STEPS, Case, PassName, compute_of
from toolkit.verification.cases.samples import ragged_samples
from toolkit.verification.cases.twin import twin_adapter, twin_config
from toolkit.verification.compare.arithmetic import order_of
from toolkit.verification.compare.replay import Reference

_MICRO, _ACCUMULATION = 2, 4
PACKED_LENGTH = 48
"""Tokens of a packed row: a few of the samples, so that an epoch of packed rows stays short."""


def without_gpu_kernels(resolved: Resolved) -> tuple[Resolved, list[str]]:
    """On a CPU the recipe with torch's operators in place of kernels that need a GPU, and notes that say so; elsewhere
    the recipe itself."""
    values, notes = resolved.recipe.model_dump(mode="json"), []
    for option, _ in asked_options(resolved.recipe) if resolved.device == "cpu" else ():
        if option.needs_gpu:
            option.remove(values)
            notes.append(option.needs_gpu)
    attention = resolved.recipe.model.attention
    if resolved.device == "cpu" and (attention or "").startswith("flash_attention"):
        values["model"]["attention"] = "sdpa"
        notes.append(f"model.attention: {attention}: verified with sdpa, since its kernels need a GPU")
    if not notes:
        return resolved, []
    return resolve(Recipe.model_validate(values), resolved.source, device=resolved.device), notes


def twin_recipe(resolved: Resolved, *, full_size: bool) -> dict[str, Any]:
    """The recipe that is run: the user's, on a twin, over a few steps. Raises InputError where no twin can be had."""
    values = resolved.recipe.model_dump(mode="json")
    if not full_size:
        config = resolved.facts.config
        if config is None:
            why = resolved.facts.why_unknown
            raise InputError(f"{resolved.source}: model: the small twin needs the model's config: {why}")
        if "auto_map" in config:
            raise InputError(
                f"{resolved.source}: model.trust_remote_code: no small twin can be made of a model with its own code; "
                "add --full-size"
            )
        mesh = resolved.recipe.strategy.mesh
        ranks = 1 if mesh is None else mesh.tensor * mesh.context
        twin = twin_config(config, ranks, resolved.mesh.pipeline, resolved.mesh.expert * resolved.mesh.expert_shards)
        values["model"] |= {"config": twin, "path": None, "revision": None}
        values["batch"] |= {"micro_size": min(_MICRO, resolved.micro_size), "global_size": None,
                            "accumulation": min(_ACCUMULATION, resolved.accumulation)}  # fmt: skip
        if values["adapter"]:
            values["adapter"] = twin_adapter(values["adapter"], values["model"]["config"])
        for option, _ in asked_options(resolved.recipe):
            option.fit_twin(values)
        if values["data"]["packing"]:
            values["data"]["max_length"] = min(PACKED_LENGTH, values["data"]["max_length"])
    # New tokens follow the twin's own vocabulary.
    added = added_tokens(resolved.recipe)
    values["tokenizer"]["path"] = (None if added else values["tokenizer"]["path"]) or NO_TOKENIZER
    values["data"] |= {"train": "built-in", "eval": None, "eval_fraction": None, "workers": 0, "streaming": False}
    values["run"] |= {"max_steps": STEPS, "epochs": None, "save_every": 0, "eval_every": 0, "trackers": []}
    values["run"] |= {"early_stopping": None, "eval_at_start": False, "metric": "eval_loss",
                      "sample_prompts": []}  # nothing is evaluated  # fmt: skip
    for option, _ in asked_options(resolved.recipe):
        option.shorten(values)
    values["machine"]["device"] = resolved.device
    values["schedule"] |= _warmed_up(resolved) | _decayed(resolved)
    if resolved.recipe.optimizer.base_global_batch is not None:
        # The same learning rate: the twin's batch is smaller, so it has a smaller base.
        small = Batch.model_validate(values["batch"])
        samples = (small.micro_size or 1) * (small.accumulation or 1) * resolved.data_size
        base = resolved.recipe.optimizer.base_global_batch * samples / resolved.global_size
        values["optimizer"]["base_global_batch"] = max(1, round(base))
    return values


def _decayed(resolved: Resolved) -> dict[str, Any]:
    """``wsd``: the last steps of the case decay, as many as come before them at most."""
    steps = resolved.recipe.schedule.decay_steps
    return {} if steps is None else {"decay_steps": min(steps, STEPS // 2)}


def _warmed_up(resolved: Resolved) -> dict[str, Any]:
    """At most one step of warm-up: the first step's learning rate is 0 then, and the others change the weights."""
    asked = resolved.recipe.schedule
    return {"warmup_ratio": None, "warmup_steps": min(1, asked.warmup_steps or 0) or int(bool(asked.warmup_ratio))}


def make_case(values: dict[str, Any], resolved: Resolved, pass_name: PassName, folder: Path) -> Case:
    """The case of one pass: ``logic`` runs everything in float32 (no option that rounds or takes 16 bits alone, no
    rounding by chance), ``precision`` as the recipe says."""
    values = copy.deepcopy(values)
    if pass_name == "logic":
        values["precision"] = "fp32"
        for option, _ in asked_options(resolved.recipe):
            if not option.in_float32(resolved.device):
                option.remove(values)
        left_out = optimizer_kind(resolved.recipe.optimizer.name).keys_of_16_bits
        values["optimizer"] = {key: value for key, value in values["optimizer"].items() if key not in left_out}
    small = resolve(Recipe.model_validate(values), resolved.source, device=resolved.device)
    config = dict(small.facts.config or {})
    if "vocab_size" not in config and isinstance(config.get("text_config"), dict):
        config = config["text_config"] | config
    media = task_of(small.recipe.model.task).media
    if not isinstance(config.get("vocab_size"), int) and (media is None or media.tokens):
        raise InputError(f"{resolved.source}: model: its config has no vocab_size")
    folder.mkdir(parents=True, exist_ok=True)
    overflow = OVERFLOW_STEP if small.precision.loss_scaling else None
    samples = ragged_samples(small, config, FULL_WINDOWS)
    return Case(values, resolved.source, resolved.device, pass_name, samples, folder, overflow_step=overflow)


def exercise_clipping(case: Case) -> Case:
    """Where the recipe clips, a limit between the norms that the plain loop meets: steps above it, steps below."""
    resolved = case.resolved()
    if resolved.max_grad_norm <= 0:
        return case
    return clip_between(case, _plain_norms(_with_limit(case, None)))


def clip_between(case: Case, norms: Sequence[float]) -> Case:
    """With a limit in the widest gap between these norms; as it is if there is none."""
    # A recipe that diverges is for the comparison to report.
    found = sorted(norm for norm in norms if math.isfinite(norm))
    gaps = [(high / low, (high * low) ** 0.5) for low, high in itertools.pairwise(found) if low > 0]
    if not gaps:
        return case
    return _with_limit(case, max(gaps)[1])


def clip_by_trial(case: Case, norms: Sequence[float]) -> Case:
    """With the limit between two of ``norms`` that is furthest from every norm which the plain loop meets with it; as
    it is where each of them makes all steps clip, or none."""
    found: list[tuple[float, Case]] = []
    for limit in _between(norms):
        tried = _with_limit(case, limit)
        met = _plain_norms(tried)
        if all(math.isfinite(norm) for norm in met) and min(met) < limit < max(met):
            found.append((min(abs(math.log(norm / limit)) for norm in met if norm > 0), tried))
    return max(found, key=lambda one: one[0], default=(0.0, case))[1]


def _between(norms: Sequence[float]) -> list[float]:
    ordered = sorted(norm for norm in norms if math.isfinite(norm) and norm > 0)
    return [(low * high) ** 0.5 for low, high in itertools.pairwise(ordered)]


def _with_limit(case: Case, limit: float | None) -> Case:
    return replace(case, recipe=case.recipe | {"optimizer": case.recipe["optimizer"] | {"max_grad_norm": limit}})


def avoid_overflow(case: Case) -> Case:
    """Under fp16, with a loss scale at which no gradient of the plain loop overflows, at the first weights and with a
    factor of four to spare."""
    resolved = case.resolved()
    if not resolved.precision.loss_scaling:
        return case
    reference, scale = Reference(case), case.loss_scale
    while scale > 1 and not all_finite(reference, 4 * scale):
        scale /= 4
    return replace(case, loss_scale=scale)


def all_finite(reference: Reference, scale: float) -> bool:
    """Whether the plain loop's gradients are, in every window, at its weights of now and this loss scale."""
    for step, window in enumerate(reference.windows):
        reference.loop.backward(step, window, scale)
        if not all(bool(torch.isfinite(gradient).all()) for gradient in reference.loop.gradients.values()):
            return False
    return True


_NORMS: dict[str, list[float]] = {}
"""What ``_plain_norms`` found in this process, for other strategies and faults of the same recipe."""


def _plain_norms(case: Case) -> list[float]:
    """By step, without the one that is made to overflow: it updates nothing, and no norm of it is compared."""
    key = _plain_key(case)
    if key not in _NORMS:
        _NORMS[key] = _norms_of_a_run(case)
    return _NORMS[key]


def _plain_key(case: Case) -> str:
    """All that the plain loop of a case depends on: the recipe, and of its strategy the mesh, the order of sums and the
    dtype of weights."""
    resolved = case.resolved()
    strategy = (resolved.mesh, order_of(resolved), resolved.traits.sums_input_gradients_by_block, compute_of(resolved))
    samples = hashlib.sha256(pickle.dumps(case.samples)).hexdigest()
    facts = (case.recipe | {"strategy": None}, strategy, case.device, samples, case.overflow_step, case.steps)
    return repr((facts, torch.get_num_threads()))


def _norms_of_a_run(case: Case) -> list[float]:
    reference = Reference(case)
    loop, norms = reference.loop, []
    for step, window in enumerate(reference.windows):
        loop.backward(step, window)
        if step == case.overflow_step:
            continue
        loop.update(plain_learning_rate(reference.resolved, step, case.steps))
        norms.append(loop.norm)
    return norms
