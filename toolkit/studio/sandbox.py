"""What a worker process may do: read the installed packages and the given folders, write into a folder of its own, and
connect to the hub where that is allowed. Everything else is refused, whatever a recipe or file names.

Python's audit hooks see every open, listing, start of a process and connection before it happens (PEP 578), and cannot
be removed. ``os.stat`` raises no event, so it is replaced: a file outside looks as if it did not exist.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
                     "pty.spawn"})  # fmt: skip
_LISTS = frozenset({"os.listdir", "os.scandir", "glob.glob", "glob.glob/2"})
_CHANGES = frozenset({"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown",
                      "os.truncate", "os.utime", "shutil.rmtree", "shutil.move"})  # fmt: skip
_AT = frozenset({"os.remove", "os.rmdir", "os.mkdir"})
"""Their last argument is the folder's descriptor that a name is relative to, or -1."""
_CONNECTS = frozenset({"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"})
_SYSTEM = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system", "/sys/fs/cgroup",
           "/dev/null", "/dev/urandom", "/etc/mime.types", "/etc/localtime", "/usr/share/zoneinfo")  # fmt: skip


class Sandbox:
    """``own``: the worker's folder. ``roots``: further folders that may be read. ``cache``: the hub's; it is written to
    where there is a network, as by every other program that downloads from the hub."""

    def __init__(self, own: Path, roots: Sequence[Path], cache: Path | None, network: bool) -> None:
        self.own = str(own.resolve())
        self.network = network
        packages = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        packages |= {entry for entry in sys.path if _holds_packages(entry)}
        toolkit = str(Path(__file__).resolve().parents[1])
        # As they are named, and as libraries see them that follow links.
        named = {path.rstrip(os.sep) for path in (*packages, toolkit) if path}
        self._packages = tuple(f"{path}{os.sep}" for path in sorted(named | {os.path.realpath(p) for p in named}))
        hub = () if cache is None else (os.path.realpath(cache),)
        self._readable = (self.own, *hub, *(str(root) for root in roots), *_SYSTEM)
        self._writable = (self.own, *(hub if network else ()))
        self._stat, self._lstat, self._realpath = os.stat, os.lstat, os.path.realpath
        self._thread = threading.local()

    def enter(self) -> None:
        """For the rest of the process."""
        os.stat = self._seen(self._stat)
        os.lstat = self._seen(self._lstat)
        sys.addaudithook(self._heard)

    def may_read(self, path: str) -> bool:
        # With a separator the folders themselves are in it: importlib.metadata lists them.
        if f"{path}{os.sep}".startswith(self._packages) and ".." not in path:
            return True
        real = self._real(path)
        return f"{real}{os.sep}".startswith(self._packages) or self._within(real, self._readable)

    def _real(self, path: str) -> str:
        """Links followed; the replaced ``stat`` and the hook answer to this look-up without judging it."""
        was = self._busy
        self._thread.busy = True
        try:
            return self._realpath(path)
        finally:
            self._thread.busy = was

    @property
    def _busy(self) -> bool:
        return getattr(self._thread, "busy", False)

    @staticmethod
    def _within(real: str, folders: Sequence[str]) -> bool:
        return any(real == folder or real.startswith(folder.rstrip("/") + "/") for folder in folders)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._busy:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int) or path is None:
                return
            self._judge(_named(path), writes=bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)))
        elif event in _LISTS:
            self._judge(_named(arguments[0] if arguments[0] is not None else "."), writes=False)
        elif event in _CHANGES:
            self._judge(_named(arguments[0]), writes=True, beside=arguments[-1] if event in _AT else None)
        elif event in _STARTS:
            raise PermissionError(errno.EACCES, "studio's workers start no program")
        elif event in _CONNECTS and not self.network:
            raise PermissionError(errno.EACCES, "studio's workers have no network")

    def _judge(self, path: str, *, writes: bool, beside: Any = None) -> None:
        if path == os.devnull:
            return
        if isinstance(beside, int) and beside >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{beside}"), path)
        if writes:
            if not self._within(self._real(path), self._writable):
                raise PermissionError(errno.EACCES, "studio writes only into its own folder", path)
        elif not self.may_read(path):
            raise PermissionError(errno.EACCES, "not in a folder that studio was started with", path)

    def _seen(self, original: Any) -> Any:
        def stat(path: Any, *arguments: Any, **options: Any) -> Any:
            if not self._busy and not isinstance(path, int) and options.get("dir_fd") is None:
                name = _named(path)
                if not self.may_read(name) and not self._leads(name):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            return original(path, *arguments, **options)

        return stat

    def _leads(self, path: str) -> bool:
        """Whether a path is on the way to a readable folder: it exists, as everyone knows."""
        real = self._real(path)
        return any(folder.startswith(real.rstrip("/") + "/") for folder in (*self._readable, *self._packages))


def _holds_packages(entry: str) -> bool:
    """Whether an entry of sys.path is a folder of installed packages, by its name or by what is installed there. A
    project's own folder, which an editable install adds with an ``.egg-info`` in it, is none: it holds other files."""
    if entry.endswith(("site-packages", "lib-dynload", "dist-packages")):
        return True
    try:
        return bool(entry) and any(name.endswith(".dist-info") for name in os.listdir(entry))
    except OSError:  # an archive, or a folder that is not there
        return False


def _named(path: Any) -> str:
    return os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)


def limit(memory: int, file_bytes: int = 64 << 20) -> None:
    """Limits of this process: bytes of address space, of a written file, and no core dumps."""
    for what, size in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (size if hard < 0 else min(size, hard), hard))


def own_folder() -> Path:
    """A new folder for a worker; its parent removes it."""
    return Path(tempfile.mkdtemp(prefix="toolkit-studio-"))
