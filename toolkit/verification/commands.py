"""The command line of `toolkit verify`. Imports nothing heavy before it runs."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the toolkit's."""
    app.command(name="verify")(verify_command)
    app.command(name="compare")(compare_command)


def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help="a checkpoint, adapter, export or run folder")],
    b: Annotated[str, typer.Argument(metavar="B", help="another one")],
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", metavar="X", help="relative, for every tensor; default: measured")
    ] = None,
    json_target: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    ] = None,
) -> None:
    """Compare two checkpoints, adapters or exports. Tensor by tensor; of two run folders, each step that both have."""
    from toolkit.verification.checkpoints.command import run_checkpoints

    raise typer.Exit(run_checkpoints([a, b], tolerance, json_target, command="compare"))


def verify_command(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="the recipe, a YAML file")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]...", help="override recipe values")
    ] = None,
    fault: Annotated[str | None, typer.Option("--fault", metavar="ID", help="inject one known defect")] = None,
    kill_matrix: Annotated[
        bool, typer.Option("--kill-matrix", help="run every fault under every strategy; -o FILE writes Markdown")
    ] = False,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="DIR", help="verify a recorded training loop instead of a recipe")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="HTML report; default: in runs/verify, by recipe and overrides"
        ),
    ] = None,
    full_size: Annotated[bool, typer.Option("--full-size", help="use the full model, not a small twin")] = False,
    json_target: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="FILE", help="a result of --json; exit 1 if less is proven now than then"),
    ] = None,
    badge: Annotated[
        str | None, typer.Option("--badge", metavar="FILE", help="write the verdict for a shields.io badge")
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option("--checkpoint", metavar="PATH", help="as toolkit compare A B; give it twice"),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", metavar="X", help="relative, for every tensor; with --checkpoint"),
    ] = None,
    time_limit: Annotated[float, typer.Option("--time-limit", metavar="SECONDS", help="limit for each pass")] = 300.0,
) -> None:
    """Prove a recipe equal to a plain PyTorch loop. Where it is not, names the first stage, step and tensor that
    differ."""
    from toolkit.errors import InputError

    if checkpoint:
        others = {"RECIPE": recipe, "--trace": trace, "--fault": fault, "--output": output, "--baseline": baseline,
                  "--badge": badge, "--kill-matrix": kill_matrix or None, "--full-size": full_size or None}  # fmt: skip
        for option, value in others.items():
            if value is not None:
                raise InputError(f"toolkit verify: {option}: not available with --checkpoint")
        from toolkit.verification.checkpoints.command import run_checkpoints

        raise typer.Exit(run_checkpoints(checkpoint, tolerance, json_target))
    if tolerance is not None:
        raise InputError("toolkit verify: --tolerance: only available with --checkpoint")
    if recipe is not None and trace is None:
        from toolkit.launch.forks import begin_imports
        from toolkit.recipe.load import recipe_from

        begin_imports(recipe_from(recipe, overrides or []))  # beside this process's own
    from toolkit.verification.command import run_command, run_matrix, run_trace

    for option, value in {"--baseline": baseline, "--badge": badge}.items():
        if value is not None and (trace is not None or kill_matrix or fault is not None):
            raise InputError(f"toolkit verify: {option}: not available with --trace, --fault or --kill-matrix")
    if trace is not None and output is not None:
        raise InputError("toolkit verify: --output: not available with --trace; use --json FILE")
    if trace is not None:
        raise typer.Exit(run_trace(trace, json_target))
    if recipe is None:
        raise InputError("toolkit verify: expected a recipe, --trace DIR, or --checkpoint twice")
    if kill_matrix:
        code = run_matrix(recipe, overrides or [], fault, json_target, time_limit, output)
    else:
        code = run_command(recipe, overrides or [], fault, full_size, json_target, time_limit, output, baseline, badge)
    raise typer.Exit(code)
