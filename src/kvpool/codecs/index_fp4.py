"""`index-fp4`: indexer keys of sparse attention, E2M1 with a power-of-two scale (UE8M0) for 32 channels.

At 128 channels a token is 64 + 4 bytes (the 4-bit record of DeepGEMM's tests). The scale is the least power of two
that is not below amax/6, so that no element saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.codecs.base import Codec, Counts, PlaneSpec, TritonMaths, Vector, need_multiple

if TYPE_CHECKING:
    import torch

#: Channels of one block scale.
BLOCK = 32


class IndexFp4(Codec):
    """E2M1 codes `c` and exponents `e`; an element is `c * 2^(e-127)`."""

    name = "index-fp4"

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        need_multiple(self.name, vector, BLOCK, f"it keeps one exponent for {BLOCK} channels")
        return (PlaneSpec("data", "e2m1x2", vector.dim // 2), PlaneSpec("block_scale", "ue8m0", vector.dim // BLOCK))

    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        import torch

        from kvpool.codecs import floats
        from kvpool.codecs.scaling import in_blocks, reciprocal, scale_from_amax, segment_amax

        x = x.float()
        s = scale_from_amax(segment_amax(x, Vector((BLOCK,) * (vector.dim // BLOCK))), floats.E2M1_MAX)
        # Zeros have exponent 0 (2^-127, which no other block has) and codes 0, so that cleared memory reads as zeros.
        exponent = torch.where(s == 0, 0, floats.encode_ue8m0(s))
        power = torch.where(s > 0, floats.decode_ue8m0(exponent), 0.0)
        y = in_blocks(x, BLOCK) * reciprocal(power)[..., None]
        # 4 * 2^126 is beyond fp32: the largest finite code there is 3.
        largest = torch.where(power < 2.0**126, floats.E2M1_MAX, 3.0)[..., None]
        y = torch.where((power > 0)[..., None], y.clamp(-largest, largest), 0.0)
        return {"data": floats.pack_e2m1(floats.encode_e2m1(y).flatten(-2)), "block_scale": exponent}

    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        from kvpool.codecs import floats
        from kvpool.codecs.scaling import in_blocks

        values = in_blocks(floats.decode_e2m1(floats.unpack_e2m1(planes["data"])), BLOCK)
        return (values * floats.decode_ue8m0(planes["block_scale"])[..., None]).flatten(-2)

    def triton(self) -> TritonMaths:
        from kvpool.codecs import jit

        return TritonMaths(
            jit.e2m1_value,
            jit.e2m1_code,
            jit.store_mxfp4,
            ("bf16", "fp32"),
            block_value=jit.ue8m0_value,
            block=BLOCK,
            packed=True,
            largest=6.0,
        )


INDEX_FP4 = IndexFp4()
