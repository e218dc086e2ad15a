"""Keys of a recipe that contradict one another, or the strategy's traits."""

from __future__ import annotations

from toolkit.optimizers import optimizer_kind
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.adapter_options import adapter_problems
from toolkit.recipe.mesh import mesh_problems
from toolkit.recipe.schema import Data, Recipe, Run
from toolkit.recipe.traits import Traits
from toolkit.rooms import asked_options
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels


def contradictions(recipe: Recipe, traits: Traits) -> list[str]:
    """A message for each contradiction, which begins with the key; empty if there is none."""
    found = []
    if recipe.adapter is not None:
        found += [f"{'.'.join(path)}: {why}" for path, why in adapter_problems(recipe.adapter)]
        found += _prompts(recipe)
    if recipe.run.max_steps is None and recipe.run.epochs is None:
        found.append("run: set max_steps or epochs")
    task = task_of(recipe.model.task)
    if recipe.z_loss and task.labels is Labels.SAMPLE:
        found.append(f"z_loss: is a mean over tokens, but {task.name} has one label per sample; set it to 0")
    if task.numbers and recipe.model.num_labels not in (None, 1):
        found.append(
            f"model.num_labels: {task.name} has one number per sample, and {recipe.model.num_labels} are set; remove it"
        )
    if task.numbers and recipe.label_smoothing:
        found.append(f"label_smoothing: is defined for classes, and the labels of {task.name} are numbers; set it to 0")
    for option, settings in asked_options(recipe):
        found += option.refusals(settings, recipe)
        if option.adds_loss and recipe.loss == "fused":
            found.append(f"loss: fused computes no logits for the term that {option.key} adds to the loss; set plain")
        if option.adds_loss and task.numbers:
            found.append(f"{option.key}: is defined for classes, and the labels of {task.name} are numbers; remove it")
    if recipe.data.packing and not task.packs:
        found.append(f"data.packing: requires model.task: causal-lm (it is {task.name}); set it to false")
    if recipe.data.packing and recipe.data.group_by_length:
        found.append(
            "data.group_by_length: packed rows already have the same length; set packing or group_by_length to false"
        )
    if recipe.data.group_by_length and recipe.data.streaming:
        found.append("data.group_by_length: the lengths of streamed samples are not known in advance; use data.packing")
    if recipe.data.streaming and recipe.data.cache:
        found.append(
            "data.cache: streamed data is tokenised during training; remove data.cache, or set data.streaming: false"
        )
    if recipe.data.streaming and recipe.run.max_steps is None:
        found.append("data.streaming: the length of a stream is not known; set run.max_steps instead of run.epochs")
    if recipe.data.format not in task.formats:
        *most, last = task.formats
        formats = f"{', '.join(most)} or {last}" if most else last
        why = f" ({task.why_format})" if task.why_format else ""
        found.append(f"data.format: {task.name} requires {formats}{why}; here it is {recipe.data.format}")
    if not task.masks and recipe.data.mask_probability != Data.model_fields["mask_probability"].default:
        found.append(f"data.mask_probability: requires model.task: masked-lm; here it is {task.name}")
    found += _evaluations(recipe) + _samples(recipe)
    if not traits.distributed and recipe.machine.processes * recipe.machine.nodes > 1:
        name = recipe.strategy.name
        found.append(f"strategy.name: {name} runs in one process; set machine.processes: 1, or use ddp")
    found += mesh_problems(recipe, traits)
    kind = optimizer_kind(recipe.optimizer.name)
    if kind.packed and recipe.optimizer.kernel != "fused":
        found.append(f"optimizer.kernel: {kind.name} has its own kernels; remove optimizer.kernel")
    if (refused := kind.refusal(traits)) is not None:
        found.append(f"optimizer.name: under {recipe.strategy.name} {refused}")
    found += kind.problems(recipe)
    length, schedule = recipe.run.max_steps, recipe.schedule
    if schedule.decay_steps and length and schedule.decay_steps + (schedule.warmup_steps or 0) > length:
        found.append(
            f"schedule.decay_steps: {schedule.decay_steps} and the warm-up are more than the {length} steps of the run"
        )
    if (schedule.decay_ratio or 0.0) + (schedule.warmup_ratio or 0.0) > 1:
        found.append("schedule.decay_ratio: with warmup_ratio it is more than the whole run; lower one of them")
    return found


def _evaluations(recipe: Recipe) -> list[str]:
    """What evaluations need."""
    data, run, found = recipe.data, recipe.run, []
    if run.eval_every and not data.held_out and not run.sample_prompts:
        found.append("run.eval_every: no data is held out; set data.eval or data.eval_fraction, or set eval_every: 0")
    why = "run.eval_every is 0" if data.held_out else "no data is held out"
    asked = {
        "early_stopping": run.early_stopping is not None,
        "eval_at_start": run.eval_at_start,
        "metric": run.metric != "eval_loss",
    }
    for key in asked if not recipe.eval_interval else ():
        if asked[key] and not (key == "eval_at_start" and recipe.sample_interval):
            what = "data.eval or data.eval_fraction" if not data.held_out else "run.eval_every"
            found.append(f"run.{key}: needs evaluations, but {why}; set {what}, or remove run.{key}")
    if data.eval_fraction is not None and data.streaming and not isinstance(data.train, str):
        found.append("data.eval_fraction: several sources are streamed; keep held-out rows in files, and set data.eval")
    held_out, _, metric = run.metric.rpartition(".")
    if held_out and (not isinstance(data.eval, dict) or held_out not in data.eval):
        names = ", ".join(name for name in data.held_out if name)
        there = f"the held-out sets are {names}" if names else "held-out sets have no names here"
        found.append(f"run.metric: {run.metric}: there is no held-out set {held_out}; {there}")
    task = task_of(recipe.model.task)
    if metric not in task.metrics:
        *most, last = task.metrics
        known = f"{', '.join(most)} or {last}" if most else last
        found.append(f"run.metric: {metric} is not measured for {task.name}; set {known}")
    return found


def _samples(recipe: Recipe) -> list[str]:
    """What answers to ``run.sample_prompts`` need."""
    data, run, found = recipe.data, recipe.run, []
    if not run.sample_prompts:
        default = Run.model_fields["sample_max_new_tokens"].default
        unread = run.sample_max_new_tokens != default
        return ["run.sample_max_new_tokens: there are no run.sample_prompts; remove it"] if unread else []
    if recipe.model.task not in _WRITERS:
        found.append(f"run.sample_prompts: requires model.task: {' or '.join(_WRITERS)} (it is {recipe.model.task})")
    if run.eval_every == 0:
        found.append("run.sample_prompts: are answered at evaluations, and run.eval_every is 0; remove one of them")
    for at, prompt in enumerate(run.sample_prompts):
        if not isinstance(prompt, str) and data.format != "messages":
            found.append(
                f"run.sample_prompts[{at}]: is a list of messages, and data.format: {data.format} has no chat "
                "template; write it as a text"
            )
    mesh = recipe.strategy.mesh
    for axis, why in _WITHOUT_ANSWERS.items():
        if mesh is not None and axis in mesh.axes:
            found.append(f"run.sample_prompts: not with strategy.mesh.{axis}: {why}; remove one of them")
    return found


_WRITERS = ("causal-lm", "seq2seq-lm")
_WITHOUT_ANSWERS = {
    "context": "a process has the logits of a part of each row only",
    "pipeline": "the logits are on the last stage only",
}


def _prompts(recipe: Recipe) -> list[str]:
    """What virtual tokens, and keys and values in front of a layer's own, exclude."""
    assert recipe.adapter is not None
    method = METHODS[recipe.adapter.method]
    if method.prompt is None:
        return []
    found = []
    if recipe.model.task != "causal-lm":
        found.append(
            f"adapter.method: {method.name} requires model.task: causal-lm (it is {recipe.model.task}); with "
            "other tasks it is not verified; use lora"
        )
    if recipe.data.packing:
        found.append(
            f"data.packing: {method.name} puts its virtual tokens in front of a row, so only the first of its packed "
            "samples would see them; set it to false"
        )
    if recipe.loss == "fused" and method.prompt == "tokens":
        found.append(f"loss: fused requires an output for each label, but {method.name} adds virtual tokens; set plain")
    if recipe.activation_checkpointing != "none" and method.prompt == "cache":
        found.append(
            f"activation_checkpointing: a recomputed block would append its keys and values to those of {method.name} "
            "once more; set none, or use prompt-tuning"
        )
    return found
