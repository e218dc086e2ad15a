"""Activations in host memory in the files of other tools."""

from __future__ import annotations

from toolkit.importing.table import nothing

RULES = {
    "axolotl": nothing("recomputation and offload: memory and time", "activation_offloading"),
    "torchtune": nothing("memory", "enable_activation_offloading"),
    "trl": nothing("memory: set activation_offload", "activation_offloading"),
}
"""By the id of the tool's table (toolkit/importing)."""
