"""`fp32`, `fp16`, `bf16`: elements stored as they are. fp16 saturates finite values at 65,504."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.codecs.base import Codec, Counts, PlaneSpec, TritonMaths, Vector
from kvpool.dtypes import dtype

if TYPE_CHECKING:
    import torch


class Plain(Codec):
    """Elements as they are, in one IEEE or brain format."""

    quantised = False

    def __init__(self, name: str) -> None:
        self.name = name

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec("data", self.name, vector.dim),)

    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        import torch

        target: torch.dtype = getattr(torch, dtype(self.name).torch_name)
        largest = torch.finfo(target).max
        x = x.float()
        # Infinities stay what they are; finite values never become one.
        return {"data": torch.where(x.isfinite(), x.clamp(-largest, largest), x).to(target)}

    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        return planes["data"].float()

    def triton(self) -> TritonMaths:
        from kvpool.codecs import jit

        exact = {"fp32": ("fp32",), "fp16": ("fp16", "fp32"), "bf16": ("bf16", "fp32")}[self.name]
        return TritonMaths(jit.plain_value, jit.plain_value, jit.store_plain, exact)


PLAIN = (Plain("fp32"), Plain("fp16"), Plain("bf16"))
