"""Numbers of parameters, as screens and pages show them."""

from __future__ import annotations


def count(number: int) -> str:
    """Four digits and a unit: 886.7 k, 1.236 B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return str(number)


def trained_share(trainable: int, total: int) -> str:
    """How many of a model's parameters train, in words."""
    what = f"all {count(total)}" if trainable == total else f"{count(trainable)} of {count(total)}"
    return f"{what} parameters trainable"
