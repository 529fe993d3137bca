"""Stores of any codec on torch buffers, poisoned, and what the reference codec would have put there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvpool import _native
from kvpool.backends.cpu import CODEC_IDS
from kvpool.codecs import Counts, Vector, get_codec
from kvpool.codecs.maps import Maps, Mixing, rotation_block
from kvpool.dtypes import dtype


@dataclass
class CodedStore:
    """One part in any codec. Data follows the layout, scales are token-contiguous."""

    codec: str
    num_blocks: int
    num_heads: int
    tokens_per_block: int
    segments: tuple[int, ...]
    layout: str
    scale: float | None = None
    smoothing: torch.Tensor | None = None
    rotation: bool = False
    mixing: torch.Tensor | None = None
    planes: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.vector = Vector(self.segments)
        self.dim = self.vector.dim
        self.maths = get_codec(self.codec)
        places: dict[str, tuple[int, int, int, int]] = {}
        for spec in self.maths.planes(self.vector):
            element = dtype(spec.dtype)
            kind = getattr(torch, element.torch_name)
            shape = [self.num_blocks, self.num_heads, self.tokens_per_block]
            swap = self.layout == "NHD" and spec.name != "scale"
            if swap:
                shape[1:] = reversed(shape[1:])
            if spec.containers:
                shape.append(spec.containers)
            poison = math.nan if kind.is_floating_point else 0x7F
            tensor = torch.full(shape, poison, dtype=kind)
            tensor = tensor.transpose(1, 2) if swap else tensor
            self.planes[spec.name] = tensor
            item = tensor.element_size()
            b, h, n = (s * item for s in tensor.stride()[:3])
            places[spec.name] = (tensor.data_ptr(), b, h, n)
        block = rotation_block(self.vector) if self.rotation else 0
        mixing = None if self.mixing is None else Mixing.of(self.mixing, block)
        self.maps = Maps(self.smoothing, block) if mixing is None else Maps(mixing=mixing)
        self.native = _native.Store(
            CODEC_IDS[self.codec],
            self.num_heads,
            list(self.segments),
            self.tokens_per_block,
            self.num_blocks,
            places["data"],
            places.get("scale"),
            places.get("block_scale"),
            1.0 if self.scale is None else self.scale,
            0 if self.smoothing is None else self.smoothing.data_ptr(),
            self.maps.block > 0,
            *(() if mixing is None else (m.data_ptr() for m in (mixing.store, mixing.restore, mixing.ask))),
        )

    def at(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Stored planes `[n, H(, C)]` of slots."""
        n = self.tokens_per_block
        return {name: plane[slots // n, :, slots % n] for name, plane in self.planes.items()}

    def encode(self, x: torch.Tensor, counts: Counts | None = None) -> dict[str, torch.Tensor]:
        """What the reference stores for `x [n, H, D]`."""
        return self.maths.encode(self.maps.store(x), self.vector, self.scale, counts)

    def decode(self, slots: torch.Tensor) -> torch.Tensor:
        """Stored vectors `[n, H, D]` as fp32, options undone, by the reference."""
        return self.maps.restore(self.maths.decode(self.at(slots), self.vector, self.scale))


def mixing(num_heads: int, dim: int, seed: int = 5) -> torch.Tensor:
    """Matrices `[H, D, D]` that are far from orthogonal."""
    g = torch.Generator().manual_seed(seed)
    return torch.eye(dim) + 0.4 * torch.randn(num_heads, dim, dim, generator=g) / dim**0.5


#: Codec, segments, constant scale: what a layer may hold, with sizes that are no power of two.
CASES = [
    ("fp32", (48,), None),
    ("fp16", (80,), None),
    ("bf16", (100,), None),
    ("fp8", (112,), None),
    ("fp8", (128, 128, 64), None),
    ("fp8-tensor", (80,), 0.037),
    ("fp8e5m2-tensor", (64,), 3.1),
    ("int8", (100,), None),
    ("int8", (128, 64), None),
    ("int8-tensor", (96,), 0.011),
    ("nvfp4", (112,), 0.0021),
    ("nvfp4-token", (48,), None),
    ("nvfp4-token", (128, 64), None),
    ("index-fp8", (128,), None),
    ("index-fp8", (128, 128), None),
    ("index-fp4", (96,), None),
]
