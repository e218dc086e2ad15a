"""A process of its own that rehearses one cell after another: what is put in torch's place stays there.

Nothing here imports torch at its top: the shim is loaded before it.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing.util
import os
import warnings
from typing import Any

from rehearsal.cells import Call


def start() -> None:
    """Make this process one that believes in its GPUs; call it once, before anything imports torch."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_SKIP_CUDA_CHECK": "1"}
    warnings.simplefilter("ignore")
    from rehearsal import shim

    library = shim.load()
    # Imported while CUDA is not there yet: they ask for parts of torch's library that a CPU build lacks.
    import torch
    import torch._dynamo
    import torch._inductor
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import transformers  # noqa: F401

    from rehearsal import agreement, device, fake, groups, reducer, safe_files, slices

    # The pretended device is not taken down: torch's own end would ask it for things that it has not.
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=-100)
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what it refuses is reported
    device.install(library)
    fake.install()
    groups.install()
    reducer.install()
    safe_files.install()
    slices.install()
    agreement.install()


def make(call: Call, root: str) -> Any:
    """Make a call; the folder with the tests' data comes last."""
    module, _, function = call.function.rpartition(".")
    return getattr(importlib.import_module(f"rehearsal.{module}"), function)(*call.args, root)
