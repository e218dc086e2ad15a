"""A folder from which a job on several hosts is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launch_hosts import ADDRESSES, interface
from signalled import write_recipe


@pytest.fixture
def here(tmp_path: Path, tiny_root: Path) -> Path:
    write_recipe(tmp_path, tiny_root, run={"output_dir": "run", "max_steps": 6, "save_every": 3})
    # `accelerate`, as an installed toolkit has it on its path, and with each host's own interface and address
    accelerate = tmp_path / "bin" / "accelerate"
    accelerate.parent.mkdir()
    side = f'[ "$(ip -o -4 addr show | grep -c {ADDRESSES[0]}/)" -gt 0 ] && '
    accelerate.write_text(
        "#!/bin/bash\n"
        f"export GLOO_SOCKET_IFNAME={interface(1)} PET_LOCAL_ADDR={ADDRESSES[1]}\n"
        f"{side}export GLOO_SOCKET_IFNAME={interface(0)} PET_LOCAL_ADDR={ADDRESSES[0]}\n"
        f'exec {sys.executable} -m accelerate.commands.accelerate_cli "$@"\n'
    )
    accelerate.chmod(0o755)
    return tmp_path
