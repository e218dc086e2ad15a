"""Memory, shared memory, limits and kernel of this machine."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.doctor.model import Condition, check
from toolkit.machine import cpu_count

_GIB = 1 << 30


@check
def host() -> Iterator[Condition]:
    """Cores and memory available to this container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _container_limit()
    usable = min(memory, limit) if limit else memory
    yield Condition(
        "host",
        "ok",
        f"{platform.system()} {platform.release()}, {cpu_count()} cores, {usable / _GIB:.0f} GiB of memory",
    )
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    # accelerate utils/other.py:check_os_kernel
    if platform.system() == "Linux" and match and (int(match[1]), int(match[2])) < (5, 5):
        yield Condition(
            "kernel", "warning", f"{platform.release()}: processes may hang below 5.5", "use a newer kernel"
        )


def _container_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


@check
def shared_memory() -> Iterator[Condition]:
    """/dev/shm: data loader workers, NCCL and DeepSpeed's CPU collectives exchange tensors there."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Condition(
            "/dev/shm",
            "warning",
            "missing: data loader workers and NCCL need it",
            "mount a tmpfs at /dev/shm",
        )
        return
    found = f"{usage.total / _GIB:.1f} GiB, {usage.free / _GIB:.1f} free"
    if usage.total < _GIB:
        advice = "docker run --shm-size=8g (or --ipc=host); until then dataloader_num_workers 0"
        yield Condition("/dev/shm", "warning", f"{found}: workers and NCCL fail with bus errors", advice)
    else:
        yield Condition("/dev/shm", "ok", found)


@check
def limits() -> Iterator[Condition]:
    """The ulimits that matter for training."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < 4096:
        found = f"{files} open files: sharded checkpoints and data loader workers need more"
        yield Condition("ulimit -n", "warning", found, "ulimit -n 65536")
    else:
        yield Condition("ulimit -n", "ok", "unlimited" if files == resource.RLIM_INFINITY else str(files))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        found = f"{locked / _GIB:.2f} GiB may be locked: RDMA and pinned offload buffers may be refused"
        yield Condition("ulimit -l", "note", found, "ulimit -l unlimited; in docker --ulimit memlock=-1")


@check
def disk() -> Iterator[Condition]:
    """Free disk space for checkpoints and for the model cache."""
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    for name, folder in (("disk here", Path.cwd()), ("model cache", cache)):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free / _GIB
        low = free < 10
        yield Condition(
            name,
            "warning" if low else "ok",
            f"{free:.0f} GiB free at {folder}",
            "an 8B model takes 16 GiB" if low else "",
        )


@check
def left_behind() -> Iterator[Condition]:
    """Settings outside of the project that a launch silently uses."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "accelerate"
    for name in ("default_config.yaml", "default_config.json"):
        file = home / name
        if file.is_file():
            found = f"{file}: accelerate launch reads it without --config_file"
            yield Condition("accelerate default", "note", found, f"toolkit lint {file}")
    ours = sorted(key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")))
    if ours:
        found = f"{', '.join(ours)} set in this shell: they affect every run started without accelerate launch"
        yield Condition("environment", "warning", found, f"unset {' '.join(ours)}")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Condition("CUDA_VISIBLE_DEVICES", "warning", "hides every GPU", "unset CUDA_VISIBLE_DEVICES")
