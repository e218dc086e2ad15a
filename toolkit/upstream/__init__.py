"""What the toolkit replaces inside other packages, a module for each package.

Each replacement says what is wrong there and in which versions that was seen, and asks whether its cause is there: an
attribute, a signature, a behaviour tried once, never a version alone. Where it is not, the replacement steps aside, and
`toolkit doctor` says so in one line. ``tests/replacements`` says of each when it is no longer needed.
"""

from __future__ import annotations

from toolkit.upstream.replacement import Replacement

TESTED = {
    "torch": "2.13.0", "deepspeed": "0.19.8", "accelerate": "1.15.0", "transformers": "5.23.0", "peft": "0.21.2",
    "datasets": "5.2.0",
}  # fmt: skip
"""The newest versions that the tests have passed with."""


def replacements() -> list[Replacement]:
    """All of them. Imports torch."""
    from toolkit.upstream import torch

    return [*torch.REPLACEMENTS]
