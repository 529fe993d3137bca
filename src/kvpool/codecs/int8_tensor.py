"""`int8-tensor`: codes -127..127 of one constant decode scale a layer and plane. One byte an element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.codecs.base import Codec, Counts, PlaneSpec, TritonMaths, Vector, need_scale

if TYPE_CHECKING:
    import torch


class Int8Tensor(Codec):
    """Integer codes `c`; an element is `c * scale`. There is no code for NaN: it is stored as 0 and counted."""

    name = "int8-tensor"
    constant_scale = True
    largest = 127.0

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec("data", "int8", vector.dim),)

    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        import torch

        from kvpool.codecs.floats import encode_int8
        from kvpool.codecs.scaling import constant, count_elements, reciprocal

        x = x.float()
        y = x * reciprocal(constant(need_scale(self.name, scale), x))
        codes = encode_int8(torch.where(x.isfinite(), y, 0.0))
        count_elements(counts, x, y, codes, self.largest)
        if counts is not None:
            counts.nonfinite += int((~x.isfinite()).sum())
        return {"data": codes}

    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        from kvpool.codecs.scaling import constant

        data = planes["data"]
        return data.float() * constant(need_scale(self.name, scale), data)

    def triton(self) -> TritonMaths:
        from kvpool.codecs import jit

        exact = ("bf16", "fp16", "fp32")
        return TritonMaths(jit.int8_value, jit.int8_code, jit.store_constant, exact, largest=127.0, has_nan=False)


INT8_TENSOR = Int8Tensor()
