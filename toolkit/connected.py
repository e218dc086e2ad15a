"""A script of your own without a GPU, its processes connected:

    accelerate launch --config_file DIR/accelerate.yaml -m toolkit.connected SCRIPT [ARGUMENTS]

Without a GPU accelerate 1.15.0 leaves the processes unconnected and says nothing: each trains alone. ``SCRIPT`` is a
file, or ``-m`` and a module. `toolkit config` writes launch-script.sh, which starts this, where the device is a CPU.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Run the script as if Python had started it."""
    module = sys.argv[1:2] == ["-m"]
    script = sys.argv[2:] if module else sys.argv[1:]
    if not script:
        print("usage: -m toolkit.connected SCRIPT [ARGUMENTS], or -m MODULE in place of SCRIPT", file=sys.stderr)
        sys.exit(2)
    import accelerate.state

    from toolkit.verification.scripts.on_cpu import connect_first, without_shm_op

    connect_first(accelerate.state)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # a machine without nvcc can still import its Python parts
        import deepspeed

        without_shm_op(deepspeed)
    sys.argv = script
    if module:
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(script[0]))
    runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
