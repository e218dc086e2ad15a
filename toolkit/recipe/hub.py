"""Offline use of the hub. huggingface_hub retries every file for half a minute, so reachability is checked once."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

_TIMEOUTS = (2.0, 5.0)
"""Timeout of each connection attempt in seconds. A failed name lookup is not retried."""
_RETRY_AFTER = 60.0
"""Seconds before an unreachable hub is checked again: in a notebook the network may come back."""

_checks: dict[str, tuple[bool, float]] = {}
"""Result and time of the last check, by endpoint."""
_set_here = False
"""Whether offline mode was set by this module, not by the user."""


def use_cache_if_offline(name: str | None) -> None:
    """Set ``HF_HUB_OFFLINE`` for this process and its children if ``name`` is not a local path and the hub is
    unreachable: cached files load at once, and a missing file is an immediate error."""
    from huggingface_hub import constants

    if name is None or (constants.HF_HUB_OFFLINE and not _set_here) or Path(name).expanduser().exists():
        return
    _set_offline(not is_reachable(constants.ENDPOINT))


def cached_file(repo: str, name: str) -> Path | None:
    """A file of a hub repository that is in the cache; None where it is not. Asks no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(repo, name)
    except HFValidationError:  # a folder that is not there
        return None
    return Path(cached) if isinstance(cached, str) else None


def _set_offline(off: bool) -> None:
    from huggingface_hub import constants

    global _set_here
    if off == constants.HF_HUB_OFFLINE:
        return
    _set_here = off
    if off:
        os.environ["HF_HUB_OFFLINE"] = "1"
    else:
        os.environ.pop("HF_HUB_OFFLINE", None)
    constants.HF_HUB_OFFLINE = off
    if (config := sys.modules.get("datasets.config")) is not None:  # keeps a copy (datasets 5.2.0)
        vars(config).update(HF_HUB_OFFLINE=off, HF_DATASETS_OFFLINE=off)


def is_reachable(endpoint: str) -> bool:
    """Whether ``endpoint`` accepts a connection; assumed if a proxy is configured."""
    if getproxies():
        return True
    known, since = _checks.get(endpoint, (False, -_RETRY_AFTER))
    if not known and time.monotonic() - since >= _RETRY_AFTER:
        _checks[endpoint] = (_connects(endpoint), time.monotonic())
    return _checks[endpoint][0]


def _connects(endpoint: str) -> bool:
    url = urlsplit(endpoint)
    port = url.port or (80 if url.scheme == "http" else 443)
    for seconds in _TIMEOUTS:
        try:
            with socket.create_connection((url.hostname or "", port), timeout=seconds):
                return True
        except TimeoutError:
            continue
        except OSError:
            return False
    return False
