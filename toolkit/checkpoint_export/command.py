"""`toolkit export`, and `export` of the Python API: for from_pretrained and PEFT, or for another tool's run. Declared
without importing anything heavy."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

import typer

from toolkit.command_options import JSON, PathLike
from toolkit.errors import InputError
from toolkit.results import CommandResult, Result, write_json
from toolkit.terminal import working

WEIGHTS = "transformers"
"""The format of weights that from_pretrained loads."""


@dataclass(eq=False, repr=False)
class ExportOptions:
    """What is exported, and as what."""

    checkpoint: Annotated[PathLike, typer.Argument(metavar="CHECKPOINT", help="a checkpoint or run folder")]
    output: Annotated[PathLike, typer.Option("-o", "--output", metavar="DIR", help="new folder")]
    _: KW_ONLY
    merged: Annotated[bool, typer.Option("--merged", help="merge the adapter into the base model")] = False
    dequantise: Annotated[bool, typer.Option("--dequantise", help="qlora: merge into dequantised weights")] = False
    best: Annotated[
        bool, typer.Option("--best", help="the best checkpoint by run.metric, by default the lowest held-out loss")
    ] = False
    ema: Annotated[bool, typer.Option("--ema", help="the averages of run.ema in place of the weights")] = False
    push: Annotated[str | None, typer.Option("--push", metavar="REPO", help="upload to a private hub repository")] = (
        None
    )
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="D", help="fp32, bf16 or fp16; a merged model: default the base's")
    ] = None
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="transformers, or the training state: deepspeed-universal, torch (torch.distributed.checkpoint)",
        ),
    ] = WEIGHTS


@dataclass(eq=False, repr=False, kw_only=True)
class Request(ExportOptions):
    """Export a checkpoint for from_pretrained and PEFT. The folder has a model card. Or, with --format, a checkpoint to
    continue from with DeepSpeed or FSDP."""

    json_target: Annotated[str | None, JSON] = None


def export_command(request: Request) -> None:
    """Export, print and write. Raises InputError, and RunFailed if the export answers otherwise than the trained model
    or the upload fails."""
    output, json_target = request.output, request.json_target
    with working("writing the model and comparing it with what was trained"):
        done = export_checkpoint(request)
    if json_target != "-" and request.format != WEIGHTS:
        print(f"wrote {output}: {done.kind}, step {done.document['step']}: weights and moments in float32")
        for note in done.document["notes"]:
            print(f"note: {note}")
    elif json_target != "-":
        print(f"wrote {output}: {done.kind}, with its tokenizer and model card")
        print(f"{'compared: ' if done.document['compared'] else 'note: '}{done.comparison}")
        if done.built_whole:
            print(f"note: the whole model was built in memory, not one tensor after another: {done.built_whole}")
        if request.push:
            print(f"pushed to {request.push}")
    if json_target:
        write_json(done.to_json(), json_target)


@dataclass(frozen=True)
class Exported(CommandResult):
    """The result of `toolkit export`."""

    kind: str
    """``adapter``, ``merged model`` or ``full model``; of another ``format`` its name."""
    folder: Path
    built_whole: str | None = None
    """Why the whole model was built in memory; None where it was written one tensor after another."""
    comparison: str | None = None
    """How its logits compare with the trained model's, or why they were not compared; None of another ``format``."""


def export_checkpoint(options: ExportOptions) -> Exported:
    """``toolkit.export`` says what is written. Raises InputError if the checkpoint or the folder cannot be used,
    RunFailed if the export answers otherwise than the trained model, or cannot be pushed."""
    from toolkit.checkpoint_export.state import export_state
    from toolkit.model.silence import silence_libraries
    from toolkit.training.export import export, push_folder

    checkpoint, output, format = Path(options.checkpoint), Path(options.output), options.format
    merged, best, dequantise, ema = options.merged, options.best, options.dequantise, options.ema
    result = Result("export")
    silence_libraries()
    if format != WEIGHTS:
        flags = {"--merged": merged, "--dequantise": dequantise, "--ema": ema, "--push": options.push,
                   "--dtype": options.dtype}  # fmt: skip
        if given := next((name for name, value in flags.items() if value), None):
            raise InputError(f"{given}: not with --format {format}, which has weights and moments as they train")
        kind, resolved, contents = export_state(checkpoint, output, format, best=best)
        state = {"kind": kind, "output": str(options.output), "pushed": None, "built_whole": None, "format": format,
                 "step": contents.step, "tensors": len(contents.names), "notes": list(contents.notes)}  # fmt: skip
        document = result.finish(recipe_sha256=resolved.sha256, device="cpu", **state)
        return Exported(document, 0, kind, output)
    done = export(checkpoint, output, merged=merged, best=best, dequantise=dequantise,
                  weights_of="ema" if ema else None, dtype=options.dtype)  # fmt: skip
    if options.push:
        push_folder(str(options.output), options.push)
    compared = None if isinstance(done.compared, str) else done.compared.to_json()
    why_not = done.compared if isinstance(done.compared, str) else None
    fields = {"kind": done.kind, "output": str(options.output), "pushed": options.push, "built_whole": done.built_whole,
              "format": format, "compared": compared, "not_compared": why_not}  # fmt: skip
    document = result.finish(recipe_sha256=done.resolved.sha256, device="cpu", **fields)
    return Exported(document, 0, done.kind, output, done.built_whole, str(done.compared))
