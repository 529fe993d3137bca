"""Parts: K, V, latent, rope part, indexer keys or a state of one layer, as strided views of its planes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpool.codecs import Codec, Vector
from kvpool.pools.constants import Constants


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of a part.

    Attributes:
        tensor: `[B, H, N, C]`, or `[B, H, N]` for one value a vector; a view of the slab, never a copy.
        address: Of element zero.
        strides: Bytes, in the order of `tensor`'s axes.
    """

    tensor: torch.Tensor
    address: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What a kernel needs to know of one part of one layer.

    Attributes:
        group: Index of the group, hence of the step's tables.
        name: `k`, `v`, `latent`, `rope`, `index`, or a state's name.
        planes: By plane name, `data` first.
        constants: Numbers the codec needs and does not store; frozen by the first write.
    """

    group: int
    layer: int
    name: str
    codec: Codec
    vector: Vector
    num_heads: int
    tokens_per_block: int
    planes: dict[str, Plane]
    constants: Constants
