"""How many tokens' logits the fused loss computes at once. Imports no torch: a plan asks too."""

from __future__ import annotations

CHUNK_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
"""Bytes of a chunk's float32 logits. A GPU reads the whole head for every chunk, so chunks have to be large enough for
the products to outweigh that (at 128k tokens of vocabulary, 500 rows); a CPU is better off near its caches."""


def chunk_rows(device: str, vocabulary: int) -> int:
    """Tokens of one chunk on ``device`` («cuda» or «cpu»)."""
    return max(1, CHUNK_BYTES[device] // (4 * vocabulary))
