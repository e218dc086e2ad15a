"""NEFTune in the plain loop: the noise of each sample, from its length counted in Python."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.reference.option import PlainOption


@dataclass(frozen=True)
class PlainNoise(PlainOption):
    """``padded_length``: a mistake, noise of a row's padded length and not of each sample's own."""

    alpha: float
    padded_length: bool = False

    @contextlib.contextmanager
    def around(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
        if not model.training:
            yield
            return

        def add(module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
            rows, length, width = embedded.shape
            scales = [
                [self.alpha / math.sqrt(n * width) if n else 0.0 for n in row]
                for row in ([[length] * length] * rows if self.padded_length else _lengths(inputs))
            ]
            draw = torch.rand(embedded.shape, dtype=torch.float32, device=embedded.device)
            noise = (2 * draw - 1) * torch.tensor(scales, dtype=torch.float32, device=embedded.device)[:, :, None]
            return embedded + noise.to(embedded.dtype)

        handle = model.get_input_embeddings().register_forward_hook(add)
        try:
            yield
        finally:
            handle.remove()

    def mistakes(self) -> list[tuple[str, dict[str, object], PlainOption]]:
        return [("noise-of-padded-length", {}, replace(self, padded_length=True))]


def plain(settings: float) -> PlainNoise:
    return PlainNoise(settings)


def _lengths(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """At each token, the tokens of its sample; 0 at padding."""
    if "attention_mask" in inputs:
        return [[sum(row) if seen else 0 for seen in row] for row in inputs["attention_mask"].tolist()]
    found = []
    for row in inputs["position_ids"].tolist():
        starts = [at for at, position in enumerate(row) if position == 0]
        ends = [*starts[1:], len(row)]
        found.append([end - start for start, end in zip(starts, ends, strict=True) for _ in range(start, end)])
    return found
