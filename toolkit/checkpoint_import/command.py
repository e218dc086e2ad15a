"""`toolkit import-checkpoint`, and `import_checkpoint` of the Python API. Declared without importing anything
heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.command_options import JSON, OVERRIDES, PathLike, RecipeLike
from toolkit.errors import InputError
from toolkit.results import CommandResult, Result, write_json

if TYPE_CHECKING:
    from toolkit.checkpoint_import.match import Matched
    from toolkit.recipe.resolve import Resolved
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies.engines.prepared import Prepared
    from toolkit.verification.checkpoints.contents import Checkpoint


@dataclass(frozen=True)
class ImportedCheckpoint(CommandResult):
    """The result of `toolkit import-checkpoint`."""

    folder: Path
    """The checkpoint that was written."""
    step: int
    """Optimizer steps taken."""
    differences: tuple[str, ...]
    """What the checkpoint's run and the recipe do not have in common, as far as the checkpoint says it."""


@dataclass(eq=False, repr=False)
class ImportOptions:
    """What is imported, for which recipe."""

    checkpoint: Annotated[
        PathLike, typer.Argument(metavar="CHECKPOINT", help="of DeepSpeed, FSDP, accelerate, the Trainer or torch")
    ]
    recipe: Annotated[RecipeLike, typer.Argument(metavar="RECIPE", help="what the run continues with")]
    overrides: Annotated[Sequence[str], OVERRIDES] = ()
    _: KW_ONLY
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="optimizer steps taken, where the checkpoint does not say")
    ] = None


@dataclass(eq=False, repr=False, kw_only=True)
class ImportRequest(ImportOptions):
    """Continue from another tool's checkpoint. It is written into the recipe's run folder, for train --resume."""

    json_target: Annotated[str | None, JSON] = None


def run_import(request: ImportRequest) -> None:
    """Import, print and write. Raises InputError."""
    made = import_checkpoint(request.checkpoint, request.recipe, request.overrides, step=request.step)
    if request.json_target != "-":
        print(
            f"wrote {made.folder}: step {made.step}, {made.document['tensors']} tensors from {made.document['format']}"
        )
        for difference in made.differences:
            print(f"differs  {difference}")
        for note in made.document["notes"]:
            print(f"note     {note}")
        print(f"next: toolkit train {request.recipe} {' '.join([*request.overrides, '--resume'])}")
    if request.json_target:
        write_json(made.to_json(), request.json_target)


def import_checkpoint(
    checkpoint: str | Path, recipe: str | Path | Recipe, overrides: Sequence[str] = (), *, step: int | None = None
) -> ImportedCheckpoint:
    """``toolkit.import_checkpoint``, which says what is written. Tensors are read and written one after another."""
    from toolkit.checkpoint_import.match import match, other_frozen
    from toolkit.checkpoint_import.write import write
    from toolkit.launch.output import check_folder, claim_folder, release_folder
    from toolkit.model.running_statistics import running_layers
    from toolkit.recipe.load import recipe_from, source_of
    from toolkit.strategies import resolve
    from toolkit.training.export import alone
    from toolkit.training.preparation import prepare_model
    from toolkit.verification.checkpoints.find import places, read

    result = Result("import-checkpoint")
    found = read(places(str(checkpoint))[-1])
    asked = recipe_from(recipe, overrides)
    source = source_of(recipe)
    device = asked.machine.device
    # The run may be for another machine than this one.
    resolved = resolve(asked, source, device="cuda" if device == "auto" else device)
    _check_recipe(asked, source)
    taken = _steps(found, step)
    run_folder = Path(asked.run.output_dir)
    folder = run_folder / "checkpoints"
    if folder.is_dir() and any(folder.glob("step-*")):
        raise InputError(f"{folder}: there are checkpoints of a run; set another run.output_dir, or delete them")
    check_folder(resolved, resume=False)
    prepared = prepare_model(resolve(alone(asked), source, device="cpu"), by_part=True)
    for layer in running_layers(prepared.model).values():
        raise InputError(f"{source}: model: running statistics of {layer.noun} cannot be imported")
    matched = match(found, prepared)
    if not matched.moments:
        why = "; ".join(note for note in matched.checkpoint.notes if "moments" in note) or "it has weights alone"
        raise InputError(
            f"{found.path}: no moments of an optimizer ({why}): a run cannot be continued from it. To begin a new run "
            "with its weights, set model.path (or adapter.path) to it"
        )
    if (name := other_frozen(matched, prepared)) is not None:
        raise InputError(
            f"{found.path}: {name} does not train in this recipe and has other values there than in the recipe's "
            "model: set model.path to the model that the run began with"
        )
    differences = _differences(matched, prepared, resolved, taken)
    target = folder / f"step-{taken:08d}"
    undo = claim_folder(resolved, resume=False)
    try:
        write(matched, prepared, resolved, taken, target)
    except BaseException:
        undo()
        raise
    finally:
        release_folder(run_folder)
    notes = [f"the data continue at step {taken + 1} of this recipe's order"]
    if matched.unused:
        more = ", …" if len(matched.unused) > 1 else ""
        notes.append(f"{len(matched.unused)} tensors are not in the recipe's model ({matched.unused[0]}{more})")
    document = result.finish(
        recipe_sha256=resolved.sha256,
        device="cpu",
        source=str(found.path),
        format=found.format,
        folder=str(target),
        step=taken,
        tensors=len(matched.weights),
        differences=differences,
        notes=notes,
    )
    return ImportedCheckpoint(document, 0, target, taken, tuple(differences))


def _check_recipe(recipe: Recipe, source: str) -> None:
    from toolkit.optimizers import optimizer_kind
    from toolkit.optimizers.base import ADAM
    from toolkit.rooms import shadowing_options

    optimizer = recipe.optimizer
    kind = optimizer_kind(optimizer.name)
    if kind.packed or kind.splits or kind.tensors(optimizer, (2, 2), False) != ADAM:
        raise InputError(f"{source}: optimizer.name: {optimizer.name}: only the moments of adamw can be imported")
    for option, _ in shadowing_options(recipe):
        assert option.shadow is not None
        raise InputError(
            f"{source}: {option.key}: other tools' checkpoints have no {option.shadow.noun}s; remove the key"
        )


def _steps(found: Checkpoint, asked: int | None) -> int:
    if asked is not None and found.step is not None and asked != found.step:
        raise InputError(f"--step {asked}: {found.path} says {found.step}; leave it out")
    taken = found.step if found.step is not None else asked
    if taken is None:
        raise InputError(f"{found.path}: does not say how many optimizer steps were taken; add --step N")
    if taken < 1:
        raise InputError(f"--step {taken}: must be at least 1")
    return taken


def _differences(matched: Matched, prepared: Prepared, resolved: Resolved, step: int) -> list[str]:
    """What the run that is continued did otherwise than the recipe, where the checkpoint says it."""
    checkpoint, notes = matched.checkpoint, []
    compute = resolved.precision.compute
    if checkpoint.compute not in (None, compute):
        notes.append(f"precision: the run computed in {checkpoint.compute}, the recipe in {compute}")
    halved = [name for name, one in matched.weights.items()
              if one.dtype.itemsize < prepared.model.get_parameter(name).element_size()]  # fmt: skip
    if halved:
        dtype = str(matched.weights[halved[0]].dtype).removeprefix("torch.")
        notes.append(f"{len(halved)} weights are stored in {dtype}, rounded; the recipe trains in "
                    f"{resolved.precision.trainable}")  # fmt: skip
    notes += _rates(checkpoint, resolved, step)
    notes += _decay(matched, prepared)
    return notes


def _rates(checkpoint: Checkpoint, resolved: Resolved, step: int) -> list[str]:
    from toolkit.training.extension import rates

    recipe = resolved.recipe
    if recipe.run.max_steps is not None and step >= recipe.run.max_steps:
        return [f"run.max_steps: {step} steps were taken, the recipe has {recipe.run.max_steps}: nothing is left"]
    if not checkpoint.learning_rate:
        return []
    if recipe.run.max_steps is None and recipe.schedule.name != "constant":
        return ["run.epochs: the learning rate is not compared, since the number of steps depends on the data"]
    here = rates(recipe, recipe.run.max_steps or step + 1, resolved.rate_factor)(step)
    there = max(checkpoint.learning_rate)
    if abs(here - there) <= 1e-6 * max(here, there):
        return []
    return [f"learning rate of step {step + 1}: {there:.4g} in the checkpoint, {here:.4g} in the recipe"]


def _decay(matched: Matched, prepared: Prepared) -> list[str]:
    from toolkit.optim.groups import group_of

    optimizer: Any = prepared.resolved.recipe.optimizer
    wrong: dict[tuple[float, float], list[str]] = {}
    for name, there in matched.decay.items():
        if name not in matched.weights:
            continue
        at = group_of(optimizer, name)
        here = optimizer.weight_decay if name in prepared.decayed else 0.0
        if at is not None and optimizer.groups[at].weight_decay is not None:
            here = optimizer.groups[at].weight_decay
        if here != there:
            wrong.setdefault((there, here), []).append(name)
    return [
        f"weight decay of {len(names)} tensors: {there:g} in the checkpoint, {here:g} in the recipe ({names[0]})"
        for (there, here), names in wrong.items()
    ]
