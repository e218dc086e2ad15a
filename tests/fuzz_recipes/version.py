"""Which code gave a verdict: counts of verdicts mean something for one version only."""

from __future__ import annotations

import hashlib
from pathlib import Path

import toolkit

PACKAGES = (
    "recipe", "tasks", "optimizers", "strategies", "data", "model", "optim", "launch", "training", "reference",
    "verification",
)  # fmt: skip
"""What trains a recipe and judges it. Plans, linting, pages and commands take no part in a verdict."""


def version() -> str:
    """Twelve hexadecimal digits of the hash of the source of ``PACKAGES``."""
    root, digest = Path(toolkit.__file__).parent, hashlib.sha256()
    for path in sorted(path for name in PACKAGES for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
