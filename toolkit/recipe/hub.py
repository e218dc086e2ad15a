"""Whether the hub can be reached, asked once per process: its packages would each retry for half a minute."""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

_ATTEMPTS = (2.0, 5.0)
"""Seconds for a connection, before it is tried again. A name that is not resolved is told at once."""


def cache_alone_without_network(name: str | None) -> None:
    """Where ``name`` is not a folder here and the hub cannot be reached, have this process and those that it starts
    take from the hub's cache what is there (``HF_HUB_OFFLINE``). What is not is then told within a second."""
    from huggingface_hub import constants

    if name is None or constants.HF_HUB_OFFLINE or Path(name).expanduser().exists() or reachable(constants.ENDPOINT):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if (config := sys.modules.get("datasets.config")) is not None:  # has its own copy (datasets 5.2.0)
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = True  # type: ignore[attr-defined]


@functools.cache
def reachable(endpoint: str) -> bool:
    """Whether the hub's address takes a connection. With a proxy, which alone would know, it is supposed to."""
    if getproxies():
        return True
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
