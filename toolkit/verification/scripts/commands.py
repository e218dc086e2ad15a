"""The command lines of `toolkit record` and `toolkit prove`. Imports nothing heavy before they run."""

from __future__ import annotations

from typing import Annotated

import typer

Command = Annotated[list[str] | None, typer.Argument(metavar="-- CMD...", help="the training command, unchanged")]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="optimizer steps to record")]
After = Annotated[int, typer.Option("--after", metavar="K", min=0, help="optimizer steps before the first recorded")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="end the command after this time")
]
Stop = Annotated[bool, typer.Option("--stop", help="end the command once its steps are recorded")]
OnCpu = Annotated[
    bool, typer.Option("--on-cpu", help="without a GPU: have accelerate run FSDP or DeepSpeed where it would not")
]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="write the result as JSON; - for standard output")
]
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add the commands to the toolkit's."""
    app.command(name="record", context_settings=SETTINGS)(record_command)
    app.command(name="prove", context_settings=SETTINGS)(prove_command)


def record_command(
    command: Command = None,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="DIR", help="folder for the recording")
    ] = "recording",
    steps: Steps = 3,
    after: After = 0,
    timeout: Timeout = None,
    stop: Stop = False,
    on_cpu: OnCpu = False,
    json_target: Json = None,
) -> None:
    """Run a training command and record its first steps. The command is not changed."""
    from toolkit.results import write_json
    from toolkit.verification.scripts import screen
    from toolkit.verification.scripts.command import record

    found = record(
        command or [], output, steps=steps, after=after, timeout=timeout, stop=stop, on_cpu=on_cpu,
        quiet=json_target == "-",
    )  # fmt: skip
    if json_target:
        write_json(found.to_json(), json_target)
    if json_target != "-":
        print("\n".join(screen.recorded(found)))


def prove_command(
    command: Command = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="DIR", help="keep the recording in this folder")
    ] = None,
    steps: Steps = 3,
    after: After = 0,
    timeout: Timeout = None,
    stop: Stop = False,
    on_cpu: OnCpu = False,
    json_target: Json = None,
) -> None:
    """Prove your own training command. Its first steps are recorded and compared with a plain loop."""
    from toolkit.results import write_json
    from toolkit.verification.scripts import screen
    from toolkit.verification.scripts.prove import prove

    found = prove(
        command or [], output, steps=steps, after=after, timeout=timeout, stop=stop, on_cpu=on_cpu,
        quiet=json_target == "-",
    )  # fmt: skip
    if json_target:
        write_json(found.to_json(), json_target)
    if json_target != "-":
        print("\n".join(screen.proven(found, output)))
    raise typer.Exit(found.exit_code)
