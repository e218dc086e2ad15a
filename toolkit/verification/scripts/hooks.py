"""Actions after imports, in a process of a recorded command. Standard library only: a process that imports none of the
watched modules pays for this file and a finder."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

WATCHED = {
    "torch": "after_torch",
    "torch.distributed.fsdp": "after_fsdp",
    "accelerate.state": "after_accelerate_state",
    "accelerate.accelerator": "after_accelerate",
    "deepspeed": "after_deepspeed",
}
"""By module: the function of ``catch`` that is called once it is imported."""


def install(session: str, root: str) -> None:
    """Watch the imports of this process. ``session``: the folder of the recording; ``root``: where ``toolkit`` is."""
    hook = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _report_failure(session, root, error, trace)
        hook(kind, error, trace)

    sys.excepthook = report
    sys.meta_path.insert(0, Finder(session, root))


def _report_failure(session: str, root: str, error: BaseException, trace: Any) -> None:
    """Leave the error for the command that records. The first failure of any rank is the cause."""
    if isinstance(error, KeyboardInterrupt):
        return
    lines, kind = str(error).strip().splitlines(), type(error).__name__
    text = f"{kind}: {lines[0].strip()}" if lines else kind
    rank = os.environ.get("RANK")
    try:
        with open(os.path.join(session, "failure"), "x", encoding="utf-8") as file:
            file.write(f"rank {rank}: {text}" if rank is not None else text)
        memory = _memory(root, error, trace)
        if memory is not None:
            import json

            with open(os.path.join(session, "memory.json"), "x", encoding="utf-8") as file:
                file.write(json.dumps(memory))
    except OSError:
        return


def _memory(root: str, error: BaseException, trace: Any) -> dict[str, Any] | None:
    """Where the process was, if it had no memory; None for any other error, and where nothing is recorded."""
    catch = sys.modules.get("_toolkit_recorder.verification.scripts.catch")
    if catch is None or not _by_file("no_memory", root, "no_memory.py").is_out_of_memory(error):
        return None
    found: dict[str, Any] | None = catch.whereabouts(trace)
    return found


class Finder:
    """Finds watched modules as everyone else does, and has an action follow their import."""

    def __init__(self, session: str, root: str) -> None:
        self.session, self.root = session, root
        self.looking: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name not in WATCHED or name in self.looking:
            return None
        self.looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking.discard(name)
        if spec is None or spec.loader is None:
            return None
        _followed(spec.loader, lambda module: self.act(WATCHED[name], module))
        return spec

    def act(self, action: str, module: ModuleType) -> None:
        """Call a function of ``catch``; an error in it ends the recording, never the command."""
        try:
            getattr(_catch(self.session, self.root), action)(module)
        except Exception as error:
            sys.stderr.write(f"toolkit record: not recording in this process: {type(error).__name__}: {error}\n")
            with open(os.path.join(self.session, "refused"), "a", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}\n")


def _followed(loader: Any, action: Callable[[ModuleType], None]) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        action(module)

    loader.exec_module = exec_module


def _catch(session: str, root: str) -> Any:
    """``catch`` of the toolkit that records, under a name that no package of the script has."""
    catch = _by_file("renamed", root, "verification", "scripts", "renamed.py").catch(root)
    catch.begin(session)
    return catch


def _by_file(name: str, root: str, *place: str) -> Any:
    """A module of the toolkit that needs no other."""
    name = f"_toolkit_{name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, os.path.join(root, "toolkit", *place))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
