"""The parts by name; each file defines ``PART``."""

from __future__ import annotations

from benchmarks.gpu_evidence.cells import Part
from benchmarks.gpu_evidence.parts import memory, presets, smoke, speed, verify

PARTS: dict[str, Part] = {part.name: part for part in (smoke.PART, verify.PART, memory.PART, speed.PART, presets.PART)}
