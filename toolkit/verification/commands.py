"""The command line of `toolkit verify`. Imports nothing heavy before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import typer

from toolkit.command_options import JSON, OVERRIDES, RECIPE, PathLike
from toolkit.errors import InputError


@dataclass(eq=False, repr=False)
class CompareOptions:
    """Which checkpoints are compared."""

    a: Annotated[PathLike, typer.Argument(metavar="A", help="a checkpoint, adapter, export or run folder")]
    b: Annotated[PathLike, typer.Argument(metavar="B", help="another one")]
    _: KW_ONLY
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", metavar="X", help="relative, for every tensor; default: measured")
    ] = None


@dataclass(eq=False, repr=False, kw_only=True)
class CompareRequest(CompareOptions):
    """Compare two checkpoints, adapters or exports. Tensor by tensor; of two run folders, each step that both have."""

    json_target: Annotated[str | None, JSON] = None


def compare_command(request: CompareRequest) -> int:
    """Compare, print and write; returns the exit status. Raises InputError."""
    from toolkit.verification.checkpoints.command import run_checkpoints

    return run_checkpoints([request.a, request.b], request.tolerance, request.json_target, command="compare")


@dataclass(eq=False, repr=False)
class VerifyRequest:
    """Prove a recipe equal to a plain PyTorch loop. Where it is not, names the first stage, step and tensor that
    differ."""

    recipe: Annotated[str | None, RECIPE] = None
    overrides: Annotated[Sequence[str], OVERRIDES] = ()
    fault: Annotated[str | None, typer.Option("--fault", metavar="ID", help="inject one known defect")] = None
    kill_matrix: Annotated[
        bool, typer.Option("--kill-matrix", help="run every fault under every strategy; -o FILE writes Markdown")
    ] = False
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="DIR", help="verify a recorded training loop instead of a recipe")
    ] = None
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="HTML report; default: in runs/verify, by recipe and overrides"
        ),
    ] = None
    full_size: Annotated[bool, typer.Option("--full-size", help="use the full model, not a small twin")] = False
    json_target: Annotated[str | None, JSON] = None
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="FILE", help="a result of --json; exit 1 if less is proven now than then"),
    ] = None
    badge: Annotated[
        str | None, typer.Option("--badge", metavar="FILE", help="write the verdict for a shields.io badge")
    ] = None
    checkpoint: Annotated[
        Sequence[str], typer.Option("--checkpoint", metavar="PATH", help="as toolkit compare A B; give it twice")
    ] = ()
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", metavar="X", help="relative, for every tensor; with --checkpoint")
    ] = None
    time_limit: Annotated[float, typer.Option("--time-limit", metavar="SECONDS", help="limit for each pass")] = 300.0


def verify_command(asked: VerifyRequest) -> int:
    """Verify what the request names; returns the exit status. Raises InputError, RunFailed."""
    recipe, trace = asked.recipe, asked.trace
    if asked.checkpoint:
        others = {"RECIPE": recipe, "--trace": trace, "--fault": asked.fault, "--output": asked.output,
                  "--baseline": asked.baseline, "--badge": asked.badge, "--kill-matrix": asked.kill_matrix or None,
                  "--full-size": asked.full_size or None}  # fmt: skip
        for option, value in others.items():
            if value is not None:
                raise InputError(f"toolkit verify: {option}: not available with --checkpoint")
        from toolkit.verification.checkpoints.command import run_checkpoints

        return run_checkpoints(asked.checkpoint, asked.tolerance, asked.json_target)
    if asked.tolerance is not None:
        raise InputError("toolkit verify: --tolerance: only available with --checkpoint")
    if recipe is not None and trace is None:
        from toolkit.launch.forks import begin_imports
        from toolkit.recipe.load import recipe_from

        begin_imports(recipe_from(recipe, asked.overrides))  # beside this process's own
    from toolkit.verification.command import run_command, run_matrix, run_trace

    for option, value in {"--baseline": asked.baseline, "--badge": asked.badge}.items():
        if value is not None and (trace is not None or asked.kill_matrix or asked.fault is not None):
            raise InputError(f"toolkit verify: {option}: not available with --trace, --fault or --kill-matrix")
    if trace is not None and asked.output is not None:
        raise InputError("toolkit verify: --output: not available with --trace; use --json FILE")
    if trace is not None:
        return run_trace(trace, asked.json_target)
    if recipe is None:
        raise InputError("toolkit verify: expected a recipe, --trace DIR, or --checkpoint twice")
    return run_matrix(recipe, asked) if asked.kill_matrix else run_command(recipe, asked)
