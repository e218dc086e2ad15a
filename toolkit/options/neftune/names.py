"""NEFTune in the files of other tools."""

from __future__ import annotations

from toolkit.importing.table import off

_TRAINER = off(
    "noise scaled by padded lengths; model.neftune_alpha scales it by each sample's own", "neftune_noise_alpha"
)
RULES = {
    "trainer": _TRAINER,
    "trl": _TRAINER,
    "llamafactory": _TRAINER,
    "swift": _TRAINER,
    "axolotl": off("noise added to embeddings", "neftune_noise_alpha noisy_embedding_alpha"),
}
"""By the id of the tool's table (toolkit/importing)."""
