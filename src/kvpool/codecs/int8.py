"""`int8`: codes -127..127 with one fp32 scale a vector, or one a segment of it. A vector of 128 takes 128 + 4 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.codecs.base import Codec, Counts, PlaneSpec, TritonMaths, Vector

if TYPE_CHECKING:
    import torch


class Int8(Codec):
    """Integer codes `c` and scales `s = amax / 127`; an element is `c * s`."""

    name = "int8"

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        num_scales = len(vector.segments)
        return (
            PlaneSpec("data", "int8", vector.dim),
            PlaneSpec("scale", "fp32", num_scales if num_scales > 1 else 0),
        )

    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        from kvpool.codecs.floats import INT8_MAX, encode_int8
        from kvpool.codecs.scaling import quantise

        y, s = quantise(x, vector, INT8_MAX)
        return {"data": encode_int8(y), "scale": s}

    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        from kvpool.codecs.scaling import dequantise

        return dequantise(planes["data"].float(), planes["scale"], vector)

    def triton(self) -> TritonMaths:
        from kvpool.codecs import jit

        return TritonMaths(jit.int8_value, jit.int8_code, jit.store_scaled, ("bf16", "fp16", "fp32"), largest=127.0)


INT8 = Int8()
