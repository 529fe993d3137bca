"""Per-layer numbers a codec needs and does not store per token. Frozen by the first write."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Constants:
    """Constants of one part of one layer.

    Attributes:
        scale: Decode scale of codecs with a constant one; None when not set.
        smoothing: `[H, D]` fp32, divided out at write and multiplied back at read; None for none.
        rotation: Rotate by the normalised Hadamard matrix before encoding.
    """

    scale: float | None = None
    smoothing: torch.Tensor | None = None
    rotation: bool = False
