"""What the toolkit replaces inside other packages, and their private names that it uses: a module for each package.

Each entry says what is wrong or missing there, in which versions that was seen, and which public way was tried. It asks
whether its cause or name is there: an attribute, a signature, a behaviour tried once, never a version alone. Where it
is not, the toolkit steps aside, and `toolkit doctor` says so in one line. ``tests/replacements`` says of each
replacement when it is no longer needed, and finds private names that are used anywhere else.
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
    from toolkit.upstream import deepspeed, torch, torch_fsdp, transformers

    return [*torch.REPLACEMENTS, *torch_fsdp.REPLACEMENTS, *deepspeed.REPLACEMENTS, *transformers.REPLACEMENTS]
