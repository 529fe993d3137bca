"""`nvfp4-token`: NVFP4 with a decode scale of its own for every vector, so that none has to be calibrated.

128 elements take 64 + 8 + 4 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.codecs.base import Codec, Counts, PlaneSpec, TritonMaths, Vector
from kvpool.codecs.nvfp4 import BLOCK, nvfp4_decode, nvfp4_encode, nvfp4_planes

if TYPE_CHECKING:
    import torch


class Nvfp4Token(Codec):
    """E2M1 codes `c`, block scales `bs`, vector scale `g = amax / (6 * 448)`; an element is `c * (bs * g)`."""

    name = "nvfp4-token"

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        return (*nvfp4_planes(self.name, vector), PlaneSpec("scale", "fp32", 0))

    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        import torch

        from kvpool.codecs.floats import E2M1_MAX, E4M3_MAX, SMALLEST_SCALE
        from kvpool.codecs.scaling import divide, segment_amax

        x = x.float()
        amax = segment_amax(x, Vector((BLOCK,) * (vector.dim // BLOCK)))
        # One bad block must not take the others with it: amax over the finite ones.
        amax = torch.where(amax.isnan(), 0.0, amax).amax(-1)
        g = divide(amax, E2M1_MAX * E4M3_MAX).clamp(min=SMALLEST_SCALE)
        return {**nvfp4_encode(x, g), "scale": g}

    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        return nvfp4_decode(planes, planes["scale"])

    def triton(self) -> TritonMaths:
        from kvpool.codecs import jit

        return TritonMaths(
            jit.e2m1_value,
            jit.e2m1_code,
            jit.store_nvfp4,
            ("bf16", "fp16", "fp32"),
            block_value=jit.e4m3_value,
            block=BLOCK,
            packed=True,
        )


NVFP4_TOKEN = Nvfp4Token()
