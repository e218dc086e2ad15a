"""Offline use of the hub. huggingface_hub retries every file for half a minute, so reachability is checked once."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
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


def hub_problem(repo: str, error: BaseException) -> str | None:
    """What the hub or the way to it did to ``repo``, and what to do, where ``error`` or one of its causes says so; None
    for errors of another kind."""
    from huggingface_hub import constants, errors

    causes = list(_causes(error))

    def one_of(*kinds: type[BaseException]) -> BaseException | None:
        return next((cause for cause in causes if isinstance(cause, kinds)), None)

    where = constants.ENDPOINT
    if one_of(errors.GatedRepoError):
        return f"{repo} is gated: accept its conditions at {where}/{repo}, then run `hf auth login`, or set HF_TOKEN"
    if one_of(errors.RevisionNotFoundError):
        return f"{repo} has no branch, tag or commit of this name at {where}"
    if one_of(errors.RepositoryNotFoundError):
        return (
            f"no folder {repo} here, and {where} has no such repository, or none that this login may read "
            "(`hf auth login`, or HF_TOKEN)"
        )
    if one_of(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE and not _set_here else f"{where} cannot be reached"
        return f"no folder {repo} here, its files are not in the hub's cache, and {why}"
    if (answered := one_of(errors.HfHubHTTPError)) is not None:
        status = getattr(getattr(answered, "response", None), "status_code", "an error")
        return (
            None if isinstance(answered, errors.EntryNotFoundError) else f"{repo}: {where} answered {status}; try again"
        )
    if (lost := next((cause for cause in causes if _of_the_network(cause)), None)) is not None:
        said = str(lost).splitlines()[0] if str(lost) else type(lost).__name__
        return (
            f"{repo}: a download from {where} was interrupted ({said}); start again: files that have arrived are kept"
        )
    return None


def is_refusal(error: BaseException) -> bool:
    """Whether waiting does not help: the hub knows no such repository, or does not give it."""
    from huggingface_hub import errors

    return any(isinstance(cause, errors.RepositoryNotFoundError) for cause in _causes(error))  # gated ones, too


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _of_the_network(error: BaseException) -> bool:
    """An error of a connection: Python's own, or of the packages that huggingface_hub downloads with."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or package.startswith(("httpx", "httpcore", "requests"))
