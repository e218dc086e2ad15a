"""Whether the hub can be reached, asked once for all that is taken from it: its packages would each retry for half a
minute."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

_ATTEMPTS = (2.0, 5.0)
"""Seconds for a connection, before it is tried again. A name that is not resolved is told at once."""
_LASTS = 60.0
"""Seconds until a hub that was out of reach is asked again: a notebook outlives its missing network."""

_asked: dict[str, tuple[bool, float]] = {}
_ours = False
"""Whether it was this module that turned the hub off."""


def cache_alone_without_network(name: str | None) -> None:
    """Where ``name`` is not a folder here and the hub cannot be reached, have this process and those that it starts
    take from the hub's cache what is there (``HF_HUB_OFFLINE``). What is not is then told within a second."""
    from huggingface_hub import constants

    if name is None or (constants.HF_HUB_OFFLINE and not _ours) or Path(name).expanduser().exists():
        return
    _turn(not reachable(constants.ENDPOINT))


def _turn(off: bool) -> None:
    from huggingface_hub import constants

    global _ours
    if off == constants.HF_HUB_OFFLINE:
        return
    _ours = off
    if off:
        os.environ["HF_HUB_OFFLINE"] = "1"
    else:
        os.environ.pop("HF_HUB_OFFLINE", None)
    constants.HF_HUB_OFFLINE = off
    if (config := sys.modules.get("datasets.config")) is not None:  # has its own copy (datasets 5.2.0)
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = off  # type: ignore[attr-defined]


def reachable(endpoint: str) -> bool:
    """Whether the hub's address takes a connection. With a proxy, which alone would know, it is supposed to."""
    if getproxies():
        return True
    known, since = _asked.get(endpoint, (False, -_LASTS))
    if not known and time.monotonic() - since >= _LASTS:
        _asked[endpoint] = (_connects(endpoint), time.monotonic())
    return _asked[endpoint][0]


def _connects(endpoint: str) -> bool:
    url = urlsplit(endpoint)
    port = url.port or (80 if url.scheme == "http" else 443)
    for seconds in _ATTEMPTS:
        try:
            with socket.create_connection((url.hostname or "", port), timeout=seconds):
                return True
        except TimeoutError:
            continue
        except OSError:
            return False
    return False
