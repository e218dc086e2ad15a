"""Copied as ``sitecustomize.py`` into a folder at the front of PYTHONPATH: Python imports it in every process of a
recorded command. It loads the hooks, then the ``sitecustomize`` that it hides, if there is one. Standard library only;
no error in here reaches the command."""

import os
import sys


def _hooks(here):  # type: ignore[no-untyped-def]
    from importlib.util import module_from_spec, spec_from_file_location

    session = os.path.dirname(here)
    with open(os.path.join(session, "root"), encoding="utf-8") as written:
        root = written.read()
    file = os.path.join(root, "toolkit", "verification", "scripts", "hooks.py")
    spec = spec_from_file_location("_toolkit_hooks", file)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = module_from_spec(spec)
    sys.modules["_toolkit_hooks"] = module
    spec.loader.exec_module(module)
    module.install(session, root)


def _hidden(here):  # type: ignore[no-untyped-def]
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    # Not of a recorded command that runs this one: one process has one recording.
    others = [
        path
        for path in sys.path
        if os.path.abspath(path or ".") != here and not os.path.exists(os.path.join(path, "..", "settings.json"))
    ]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_here = os.path.dirname(os.path.abspath(__file__))
try:
    _hooks(_here)
except Exception as error:
    sys.stderr.write(f"toolkit record: not recording in this process: {error}\n")
_hidden(_here)
