"""Installed versions, and whether they are compatible."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from toolkit.doctor.model import Condition, check
from toolkit.linting import keys
from toolkit.rooms import all_options
from toolkit.upstream import TESTED

NEEDED = ("torch", "accelerate", "deepspeed", "transformers", "peft", "datasets", "safetensors")
OPTIONAL = {
    "flash-attn": "attention: flash_attention_2",
    "ninja": "compiler for DeepSpeed's ops",
}


def version(name: str) -> str | None:
    """The installed version of a distribution, from its metadata alone."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@check
def installed() -> Iterator[Condition]:
    """The installed packages."""
    found = {name: version(name) for name in NEEDED}
    shown = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    yield Condition("packages", "ok", f"Python {platform.python_version()}, {shown}")
    for name, number in found.items():
        if number is None:
            yield Condition(name, "error", "not installed", f"pip install {name}")
    of_options = {name: purpose for option in all_options().values() for name, purpose in option.packages.items()}
    for name, purpose in sorted((OPTIONAL | of_options).items()):
        if version(name) is None:
            yield Condition(name, "note", f"not installed: no {purpose}", f"pip install {name}")


@check
def requirements() -> Iterator[Condition]:
    """Every package's own requirements of the others, against what is installed."""
    for name in (*NEEDED, "deepspeed-accelerate-toolkit"):
        if version(name) is None:
            continue
        for text in importlib.metadata.requires(name) or ():
            problem = _unmet(text)
            if problem:
                wanted, there = problem
                yield Condition(name, "error", f"requires {wanted}, {there} is installed", f"pip install '{wanted}'")


def _unmet(text: str) -> tuple[str, str] | None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    there = version(requirement.name)
    if there is None or requirement.specifier.contains(Version(there), prereleases=True):
        return None
    return f"{requirement.name}{requirement.specifier}", f"{requirement.name} {there}"


@check
def untested() -> Iterator[Condition]:
    """Versions that are newer than those that the toolkit's tests have passed with."""
    newer = [
        f"{name} {there} (tested: {tested})"
        for name, tested in TESTED.items()
        if (there := version(name)) is not None and Version(Version(there).base_version) > Version(tested)
    ]
    if newer:
        yield Condition("newer than tested", "note", ", ".join(newer), "toolkit doctor --self-test")


@check
def clashes() -> Iterator[Condition]:
    """Pairs of versions that can be installed together but do not work together."""
    torch, accelerate, deepspeed = version("torch"), version("accelerate"), version("deepspeed")
    # accelerate utils/constants.py: FSDP2_PYTORCH_VERSION
    if torch and Version(torch) < Version("2.6.0"):
        yield Condition("torch", "error", f"{torch}: accelerate refuses FSDP2 below 2.6.0", "pip install 'torch>=2.6'")
    # deepspeed 0.19.6 rejects warmup_num_steps 0, which an accelerate before 1.15 may hand it
    # (accelerate 1.15.0 accelerator.py:_prepare_deepspeed keeps it positive).
    if deepspeed and accelerate and Version(deepspeed) >= Version("0.19.6") and Version(accelerate) < Version("1.15"):
        advice = "pip install 'accelerate>=1.15'"
        yield Condition(
            "accelerate",
            "warning",
            f"{accelerate} may give DeepSpeed {deepspeed} a warm-up of 0, which it refuses",
            advice,
        )
    for name in keys.PACKAGES:
        there, known = version(name), keys.versions(name)
        if there is not None and there not in known:
            found = f"{there}: toolkit lint knows the keys of {', '.join(known)}"
            yield Condition(name, "note", found, "a key that came since is called unknown")
