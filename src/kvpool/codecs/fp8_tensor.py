"""`fp8-tensor`, `fp8e5m2-tensor`: 8-bit floats of one constant decode scale a layer and plane. One byte an element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.codecs.base import Codec, Counts, PlaneSpec, TritonMaths, Vector, need_scale

if TYPE_CHECKING:
    import torch


class Fp8Tensor(Codec):
    """E4M3 or E5M2 codes `c`; an element is `c * scale`. A NaN or an infinity is stored as NaN, alone."""

    constant_scale = True

    def __init__(self, name: str, element: str, largest: float) -> None:
        self.name = name
        self.largest = largest
        self._element = element

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec("data", self._element, vector.dim),)

    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        import torch

        from kvpool.codecs import floats
        from kvpool.codecs.scaling import constant, count_elements, reciprocal

        encode = {"e4m3": floats.encode_e4m3, "e5m2": floats.encode_e5m2}[self._element]
        x = x.float()
        y = x * reciprocal(constant(need_scale(self.name, scale), x))
        codes = encode(torch.where(x.isfinite(), y, torch.nan))
        count_elements(counts, x, y, codes & 0x7F, self.largest)
        return {"data": codes}

    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        from kvpool.codecs import floats
        from kvpool.codecs.scaling import constant

        decode = {"e4m3": floats.decode_e4m3, "e5m2": floats.decode_e5m2}[self._element]
        data = planes["data"]
        return decode(data) * constant(need_scale(self.name, scale), data)

    def triton(self) -> TritonMaths:
        from kvpool.codecs import jit

        value, code, largest = {
            "e4m3": (jit.e4m3_value, jit.e4m3_code, 448.0),
            "e5m2": (jit.e5m2_value, jit.e5m2_code, 57344.0),
        }[self._element]
        return TritonMaths(value, code, jit.store_constant, ("bf16", "fp16", "fp32"), largest=largest)


FP8_TENSOR = (Fp8Tensor("fp8-tensor", "e4m3", 448.0), Fp8Tensor("fp8e5m2-tensor", "e5m2", 57344.0))
