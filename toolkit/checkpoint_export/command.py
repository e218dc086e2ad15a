"""`toolkit export`, and `export` of the Python API: for from_pretrained and PEFT, or for another tool's run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint_export.state import export_state
from toolkit.errors import InputError
from toolkit.model.silence import silence_libraries
from toolkit.results import CommandResult, Result, write_json
from toolkit.terminal import working
from toolkit.training.export import export, push_folder

WEIGHTS = "transformers"
"""The format of weights that from_pretrained loads."""


def export_command(
    checkpoint: str,
    output: str,
    merged: bool,
    json_target: str | None,
    *,
    best: bool = False,
    push: str | None = None,
    dequantise: bool = False,
    ema: bool = False,
    form: str = WEIGHTS,
    dtype: str | None = None,
) -> None:
    """Write ``output`` from a checkpoint, or from the latest (or best) one of a run, and ``push`` it to the hub. Raises
    InputError, and RunFailed if the export answers otherwise than the trained model or the upload fails."""
    with working("writing the model and comparing it with what was trained"):
        done = export_checkpoint(
            checkpoint,
            output,
            merged=merged,
            best=best,
            push=push,
            dequantise=dequantise,
            ema=ema,
            format=form,
            dtype=dtype,
        )
    if json_target != "-" and form != WEIGHTS:
        print(f"wrote {output}: {done.kind}, step {done.document['step']}: weights and moments in float32")
        for note in done.document["notes"]:
            print(f"note: {note}")
    elif json_target != "-":
        print(f"wrote {output}: {done.kind}, with its tokenizer and model card")
        print(f"{'compared: ' if done.document['compared'] else 'note: '}{done.comparison}")
        if done.built_whole:
            print(f"note: the whole model was built in memory, not one tensor after another: {done.built_whole}")
        if push:
            print(f"pushed to {push}")
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


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    merged: bool = False,
    best: bool = False,
    push: str | None = None,
    dequantise: bool = False,
    ema: bool = False,
    format: str = WEIGHTS,
    dtype: str | None = None,
) -> Exported:
    """Write ``output``, a folder that from_pretrained (and PEFT) loads, from a checkpoint or a run's folder.

    ``merged``: merge the adapter into the base; ``dequantise``: with a 4-bit base, into its dequantised weights.
    ``best``: of a run the best checkpoint by evaluation, not the newest. ``ema``: the averages of ``run.ema`` in place
    of the weights. ``push``: upload to this repository of the hub. ``format``: ``deepspeed-universal`` or ``torch``: a
    checkpoint from which a run of DeepSpeed or FSDP continues, without these options but ``best``. ``dtype``: of a
    merged model (fp32, bf16, fp16), the base's if None. Raises InputError if the checkpoint or the folder cannot be
    used, RunFailed if the export answers otherwise than the trained model, or cannot be pushed.
    """
    result = Result("export")
    silence_libraries()
    if format != WEIGHTS:
        options = {"--merged": merged, "--dequantise": dequantise, "--ema": ema, "--push": push,
                   "--dtype": dtype}  # fmt: skip
        if given := next((name for name, value in options.items() if value), None):
            raise InputError(f"{given}: not with --format {format}, which has weights and moments as they train")
        kind, resolved, contents = export_state(Path(checkpoint), Path(output), format, best=best)
        state = {"kind": kind, "output": str(output), "pushed": None, "built_whole": None, "format": format,
                 "step": contents.step, "tensors": len(contents.names), "notes": list(contents.notes)}  # fmt: skip
        document = result.finish(recipe_sha256=resolved.sha256, device="cpu", **state)
        return Exported(document, 0, kind, Path(output))
    done = export(Path(checkpoint), Path(output), merged=merged, best=best, dequantise=dequantise, ema=ema, dtype=dtype)
    if push:
        push_folder(str(output), push)
    compared = None if isinstance(done.compared, str) else done.compared.to_json()
    why_not = done.compared if isinstance(done.compared, str) else None
    fields = {"kind": done.kind, "output": str(output), "pushed": push, "built_whole": done.built_whole,
              "format": format, "compared": compared, "not_compared": why_not}  # fmt: skip
    document = result.finish(recipe_sha256=done.resolved.sha256, device="cpu", **fields)
    return Exported(document, 0, done.kind, Path(output), done.built_whole, str(done.compared))
