"""The command lines of `toolkit record` and `toolkit prove`. Imports nothing heavy before they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import typer

from toolkit.command_options import JSON, PathLike

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


@dataclass(eq=False, repr=False)
class ProveOptions:
    """What is recorded of which command."""

    command: Annotated[Sequence[str], typer.Argument(metavar="-- CMD...", help="the training command, unchanged")] = ()
    folder: Annotated[
        PathLike | None, typer.Option("-o", "--output", metavar="DIR", help="keep the recording in this folder")
    ] = None
    _: KW_ONLY
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="optimizer steps to record")] = 3
    after: Annotated[
        int, typer.Option("--after", metavar="K", min=0, help="optimizer steps before the first recorded")
    ] = 0
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="end the command after this time")
    ] = None
    stop: Annotated[bool, typer.Option("--stop", help="end the command once its steps are recorded")] = False
    on_cpu: Annotated[
        bool, typer.Option("--on-cpu", help="without a GPU: have accelerate run FSDP or DeepSpeed where it would not")
    ] = False


@dataclass(eq=False, repr=False)
class RecordOptions(ProveOptions):
    """The same, with a folder in any case."""

    folder: Annotated[PathLike, typer.Option("-o", "--output", metavar="DIR", help="folder for the recording")] = (
        "recording"
    )


@dataclass(eq=False, repr=False, kw_only=True)
class ProveRequest(ProveOptions):
    """Prove your own training command. Its first steps are recorded and compared with a plain loop."""

    json_target: Annotated[str | None, JSON] = None


@dataclass(eq=False, repr=False, kw_only=True)
class RecordRequest(RecordOptions):
    """Run a training command and record its first steps. The command is not changed."""

    json_target: Annotated[str | None, JSON] = None


def record_command(request: RecordRequest) -> None:
    """Record, print and write."""
    from toolkit.results import write_json
    from toolkit.verification.scripts import screen
    from toolkit.verification.scripts.command import record

    options = dict(vars(request))
    json_target = options.pop("json_target")
    found = record(**options, quiet=json_target == "-")
    if json_target:
        write_json(found.to_json(), json_target)
    if json_target != "-":
        print("\n".join(screen.recorded(found)))


def prove_command(request: ProveRequest) -> int:
    """Prove, print and write; returns the exit status."""
    from toolkit.results import write_json
    from toolkit.verification.scripts import screen
    from toolkit.verification.scripts.prove import prove

    options = dict(vars(request))
    json_target = options.pop("json_target")
    found = prove(**options, quiet=json_target == "-")
    if json_target:
        write_json(found.to_json(), json_target)
    if json_target != "-":
        print("\n".join(screen.proven(found, None if request.folder is None else str(request.folder))))
    return found.exit_code
