"""`fp8`: E4M3 with one fp32 scale a vector, or one a segment of it. A vector of 128 takes 128 + 4 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.codecs.base import Codec, Counts, PlaneSpec, TritonMaths, Vector

if TYPE_CHECKING:
    import torch


class Fp8(Codec):
    """E4M3 codes `c` and scales `s = amax / 448`; an element is `c * s`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        num_scales = len(vector.segments)
        return (
            PlaneSpec("data", "e4m3", vector.dim),
            PlaneSpec("scale", "fp32", num_scales if num_scales > 1 else 0),
        )

    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        from kvpool.codecs.floats import E4M3_MAX, encode_e4m3
        from kvpool.codecs.scaling import quantise

        y, s = quantise(x, vector, E4M3_MAX)
        return {"data": encode_e4m3(y), "scale": s}

    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        from kvpool.codecs.floats import decode_e4m3
        from kvpool.codecs.scaling import dequantise

        return dequantise(decode_e4m3(planes["data"]), planes["scale"], vector)

    def triton(self) -> TritonMaths:
        from kvpool.codecs import jit

        return TritonMaths(jit.e4m3_value, jit.e4m3_code, jit.store_scaled, ("bf16", "fp16", "fp32"), largest=448.0)


FP8 = Fp8("fp8")
