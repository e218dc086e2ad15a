"""The Python API: what the commands do, as functions that return objects.

Every function takes a recipe as a file's path or as a Recipe object, and ``section.key=value`` overrides. Results have
``to_json()``, equal to the command's ``--json``, and ``exit_code``, the command's exit status. Errors are ToolkitError:
InputError if the input cannot be used, RunFailed if the thing asked about is not so. Import the names from
``toolkit``; heavy packages are imported when a function needs them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from toolkit.benchmark.command import BenchOptions
from toolkit.checkpoint_export.command import ExportOptions
from toolkit.checkpoint_import.command import ImportOptions
from toolkit.command_options import takes
from toolkit.inspection.command import DataOptions
from toolkit.launch.command import TrainOptions
from toolkit.planning.options import PlanOptions
from toolkit.recipe.schema import Recipe
from toolkit.results import CommandResult
from toolkit.verification.commands import CompareOptions
from toolkit.verification.scripts.commands import ProveOptions, RecordOptions

if TYPE_CHECKING:
    from toolkit.benchmark.command import Measured
    from toolkit.checkpoint_export.command import Exported
    from toolkit.checkpoint_import.command import ImportedCheckpoint
    from toolkit.importing.run import Imported
    from toolkit.inspection.measure import Inspected
    from toolkit.linting.model import Finding
    from toolkit.migration.run import Migrated
    from toolkit.planning.command import Planned
    from toolkit.verification.checkpoints.command import CheckpointComparison
    from toolkit.verification.command import Verdict
    from toolkit.verification.scripts.command import Recorded
    from toolkit.verification.scripts.prove import Proven

RecipeLike = str | Path | Recipe


@dataclass(frozen=True)
class Trained(CommandResult):
    """The result of `toolkit train`."""

    @property
    def final_loss(self) -> float | None:
        """Mean loss per supervised token of the last step; None if no step was taken, or the last had no such token."""
        return self.document["final_loss"]

    @property
    def steps(self) -> int:
        """Optimizer steps, including those of resumed checkpoints."""
        return self.document["steps"]

    @property
    def tokens(self) -> int:
        """Supervised tokens consumed by this run."""
        return self.document["tokens"]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the rows per second, without padding, evaluation and saving."""
        return self.document["tokens_per_second"]

    @property
    def peak_memory_bytes(self) -> list[int]:
        """Peak memory in bytes by rank."""
        return self.document["peak_memory_bytes"]

    @property
    def checkpoint(self) -> Path | None:
        """The latest checkpoint, if any was saved."""
        saved = self.document["checkpoint"]
        return None if saved is None else Path(saved)


@takes(TrainOptions)
def train(options: TrainOptions) -> Trained:
    """Launch through `accelerate launch` on this machine, train, and wait for the end.

    ``resume``: resume from the latest valid checkpoint. ``extend``: with ``resume``, allow a run length that changes
    the learning rates. ``changed_data``: with ``resume``, go on although the rows are others than before.
    ``max_restarts``: maximum number of automatic restarts when a rank dies or hangs. ``dry_run``: stop after one
    forward and backward of the longest micro-batch, on every rank; no update is made and no folder is left.

    Raises InputError if the recipe cannot run here, RunFailed if training fails, Stopped after a signal.
    """
    from toolkit.launch.job import train as launch_and_train

    return Trained(launch_and_train(options), 0)


def verify(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    fault: str | None = None,
    full_size: bool = False,
    time_limit: float = 300.0,
    log: str | Path | None = None,
) -> Verdict:
    """Prove a recipe equal to the plain PyTorch loop, or find the first stage, step and tensor that differ.

    ``fault``: inject a known fault, by its id. ``full_size``: use the model itself instead of a small twin.
    ``time_limit``: seconds for one pass. ``log``: a file for the output of the ranks; None: standard output and error.

    Raises InputError if the recipe cannot run here, RunFailed if the model fails by itself or a fault was never
    reached.
    """
    from toolkit.verification.command import verify_recipe

    to = None if log is None else Path(log).absolute()
    return verify_recipe(recipe, overrides, fault=fault, full_size=full_size, time_limit=time_limit, log=to)


@takes(CompareOptions)
def compare_checkpoints(options: CompareOptions) -> CheckpointComparison:
    """Compare the weights and moments of two checkpoints by name, whichever tools wrote them.

    ``a``, ``b``: a checkpoint (a folder or a file), or a folder with several steps, of which those that both have are
    compared. ``tolerance``: relative 2-norm error that every tensor may have; None: as far as correct runs differ.

    Raises InputError if a checkpoint cannot be read, or if the two are of different models.
    """
    from toolkit.verification.checkpoints.command import compare_two

    return compare_two(**vars(options))


@takes(RecordOptions)
def record(options: RecordOptions) -> Recorded:
    """Run an unmodified training command and keep its optimizer steps ``after + 1`` to ``after + steps`` in ``folder``.

    ``timeout``: seconds until the command is ended. ``stop``: end it once the steps are recorded. ``on_cpu``: on a
    machine without a GPU, have accelerate run the FSDP or DeepSpeed that it was launched for.

    Raises InputError if the command cannot be run or there is nothing to record, RunFailed if it fails.
    """
    from toolkit.verification.scripts.command import record as record_command

    return record_command(**vars(options))


@takes(ProveOptions)
def prove(options: ProveOptions) -> Proven:
    """Record an unmodified training command and compare its steps with a plain PyTorch loop.

    ``folder``: keeps the recording. The other arguments are those of ``record``. Raises InputError if there is nothing
    to record or it cannot be compared here, RunFailed if the command fails.
    """
    from toolkit.verification.scripts.prove import prove as prove_command

    return prove_command(**vars(options))


@takes(PlanOptions)
def plan(options: PlanOptions) -> Planned:
    """Predict peak memory and time of every strategy, and choose the fastest that fits.

    ``recipe`` may also be a model's config.json, folder or hub id. ``script``: a training script, whose settings are
    read from its text in place of a recipe; ``recipe`` is then a model in place of the script's, or None. ``gpu``: a
    name of the device table, for example h100, or ``memory``: GiB per device. ``gpu_table``: a YAML file of more
    devices. ``gpus``, ``nodes``: override the recipe's. ``link``: GB/s between nodes, per node and direction.
    ``length``, ``micro``: tokens per row, rows per device and forward pass. ``headroom``: fraction of the memory to
    keep free. ``every``: keep candidates that cannot win. ``scale``: predict 1 to 1,024 devices. ``calibrate``: measure
    the rates of this machine. ``loop``: whose training loop, of those of ``--loop``. ``loop_set``: its habits,
    «held_outputs=true». ``fit``: inverse questions, of length, micro, model, gpus and gpu. ``explain``: where the bytes
    are. ``price``: of an hour of a device, «2.5», «h100=2.5» or a YAML file of them. ``images``, ``image_size``: images
    per row, and their width and height in pixels, «1024x768», for models that see. ``disk``: GB/s of a node's disk, for
    the seconds of loading, saving and resuming. ``lora``, ``qlora``: the rank of an adapter, or ``full``: all weights,
    for a model without a recipe. ``tokens``: of the training data, which the run reads ``epochs`` times. ``cache``:
    take traces from the plan cache and keep them there. ``output``: a file for the chosen recipe.

    Raises InputError if the input cannot be used, RunFailed if calibration fails.
    """
    from toolkit.planning.command import make_plan

    return make_plan(options)


@takes(BenchOptions)
def bench(options: BenchOptions) -> Measured:
    """Measure tokens per second, peak memory and MFU on this machine.

    The cells are the recipe, the recipe under each of ``strategies`` (names, or all), with each of ``options``
    (``key=value``), and the recipe ``against``. Each cell is measured ``turns`` times, interleaved with the others:
    ``steps`` timed steps after ``warmup`` untimed ones. ``full_rows``: use rows of random tokens instead of the data.
    ``profile``: a file for a trace of two steps. ``tflops``: peak rate of the device, for MFU; None: its data sheet's.
    ``say``: called with lines of progress. ``log``: a file for the output of the ranks.

    Raises InputError if the input cannot be used.
    """
    from toolkit.benchmark.command import measure

    return measure(options)


@takes(DataOptions)
def inspect_data(options: DataOptions) -> Inspected:
    """Read the data as a run does: samples token by token, lengths, duplicates, and what padding costs.

    ``samples``: how many to show; of a recipe with packing, rows. ``only``: show samples of this kind. ``evaluation``:
    data.eval instead of data.train. ``rows``: read only the first rows of each source; of a stream 10,000 by default.

    Raises InputError if none of the data can be used. Rows that a run would refuse are in ``refused``.
    """
    from toolkit.inspection.command import inspect

    return inspect(options)


@dataclass(frozen=True)
class Linted(CommandResult):
    """The result of `toolkit lint`."""

    findings: tuple[Finding, ...]
    """Code, severity, place, key, message and fix, in the order of the files."""
    unread: tuple[str, ...] = ()
    """What is wrong with each file that cannot be used; the others are checked."""


def lint(
    files: Sequence[str | Path],
    *,
    command: str | None = None,
    reader: Literal["trainer", "accelerator", "deepspeed"] | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> Linted:
    """Check accelerate, DeepSpeed, Trainer and PEFT configuration files together.

    ``command``: a launch command, as one string. ``reader``: the package that reads the files; None: detected.
    ``select``, ``ignore``: rule codes or their prefixes. Raises InputError if no file can be used.
    """
    from toolkit.linting.engine import lint as check_files
    from toolkit.linting.output.machine import as_json

    started = time.time()
    report = check_files([str(file) for file in files], command=command, reader=reader, select=select, ignore=ignore)
    status = 2 if report.unread else int(report.failed)
    return Linted(as_json(report, started), status, tuple(report.findings), tuple(report.unread))


def migrate(files: Sequence[str | Path], to: str) -> Migrated:
    """Convert launch files to another strategy (zero1, zero2, zero3 or fsdp2).

    Raises InputError if the files cannot be used, RunFailed with every reason if a setting has no equivalent.
    """
    from toolkit.migration.run import migrate as migrate_files

    return migrate_files([str(file) for file in files], to)


def import_config(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Imported:
    """Make a recipe from a configuration of Axolotl, LLaMA-Factory, ms-swift, TRL, torchtune or the Trainer.

    ``files``: the tool's file or launch script, and launch files beside it. ``overrides``: ``section.key=value`` of the
    recipe, which settle what the files leave open. The result lists what became of every key; nothing is written.

    Raises InputError if the files cannot be used.
    """
    from toolkit.importing.run import import_config as import_files

    return import_files([str(file) for file in files], overrides)


@takes(ExportOptions)
def export(options: ExportOptions) -> Exported:
    """Write a folder that from_pretrained (and PEFT) loads, from a checkpoint or a run folder.

    ``merged``: merge the adapter into the base model. ``best``: use the checkpoint with the lowest held-out loss
    instead of the latest. ``push``: upload to this hub repository. ``dequantise``: required with ``merged`` for a 4-bit
    base. ``ema``: the averages of ``run.ema`` in place of the weights. ``format``: ``deepspeed-universal`` or ``torch``
    (torch.distributed.checkpoint) writes weights, moments and counts, from which a run of DeepSpeed or FSDP continues.
    ``dtype``: of a merged or full model (fp32, bf16 or fp16); a merged one has the base's if None.

    Logits of a few rows are compared with those of the trained model, one model at a time in memory: ``comparison`` of
    the result. Raises InputError if the checkpoint or the folder cannot be used, RunFailed if they differ by more than
    rounding explains (nothing is left), or if the upload fails.
    """
    from toolkit.checkpoint_export.command import export_checkpoint

    return export_checkpoint(options)


@takes(ImportOptions)
def import_checkpoint(options: ImportOptions) -> ImportedCheckpoint:
    """Write another tool's checkpoint into the recipe's run folder, for ``train(..., resume=True)``.

    ``checkpoint``: a folder or file of DeepSpeed (partitions of ZeRO 1 to 3, or universal), FSDP, accelerate, the
    Trainer or torch; of a run's several the newest. ``step``: optimizer steps taken, where it does not say.

    Weights and moments are copied one tensor after another, in the dtype that the recipe trains in.
    ``differences`` of the result: what that run did otherwise than the recipe, as far as the checkpoint says it.

    Raises InputError if the checkpoint cannot be read, has no moments of AdamW, or is of another model; RunFailed if it
    cannot be written, on a full disk for example. Nothing is left then.
    """
    from toolkit.checkpoint_import.command import import_checkpoint as run

    return run(**vars(options))
