"""`nvfp4`: E2M1, two a byte, an E4M3 scale a block of 16 and one constant decode scale g. 128 elements: 64 + 8 bytes.

Byte i holds element 2i in its low nibble and 2i+1 in its high one; block scales are linear in memory, as NVIDIA's
software and FlashInfer's append write them (swizzled orders are made on export).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.codecs.base import Codec, Counts, PlaneSpec, TritonMaths, Vector, need_multiple, need_scale

if TYPE_CHECKING:
    import torch

#: Elements of one block scale.
BLOCK = 16


def nvfp4_planes(name: str, vector: Vector) -> tuple[PlaneSpec, ...]:
    """Return the planes all NVFP4 codecs have."""
    need_multiple(name, vector, BLOCK, f"NVFP4 keeps one block scale for {BLOCK} elements")
    return (PlaneSpec("data", "e2m1x2", vector.dim // 2), PlaneSpec("block_scale", "e4m3", vector.dim // BLOCK))


def nvfp4_encode(x: torch.Tensor, g: torch.Tensor, counts: Counts | None = None) -> dict[str, torch.Tensor]:
    """Encode blocks for a given decode scale.

    Args:
        x: fp32 `[..., D]`.
        g: fp32, one a vector `[...]`, or 0-dim.
        counts: Elements lost to a saturated block scale and to blocks stored as zero.
    """
    import torch

    from kvpool.codecs import floats
    from kvpool.codecs.scaling import divide, in_blocks, reciprocal, segment_amax

    blocks = in_blocks(x, BLOCK)  # [..., D/16, 16]
    amax = segment_amax(x, Vector((BLOCK,) * (x.shape[-1] // BLOCK)))  # [..., D/16], NaN for a bad block
    g = g[..., None].expand_as(amax)
    wanted = divide(amax, floats.E2M1_MAX * g)
    block_scale = floats.encode_e4m3(wanted)
    s = floats.decode_e4m3(block_scale) * g
    stored = s >= floats.SMALLEST_SCALE  # false for NaN as well: its codes are 0 and the NaN is in the block scale
    y = blocks * reciprocal(torch.where(stored, s, 0.0))[..., None]
    y = torch.where(stored[..., None], y, 0.0)
    if counts is not None:
        beyond = stored & (wanted > floats.E4M3_MAX)
        counts.saturated += int((beyond[..., None] & (y.abs() > floats.E2M1_MAX)).sum())
        counts.flushed += int(((~stored & ~amax.isnan())[..., None] & (blocks != 0)).sum())
    return {"data": floats.pack_e2m1(floats.encode_e2m1(y).flatten(-2)), "block_scale": block_scale}


def nvfp4_decode(planes: Mapping[str, torch.Tensor], g: torch.Tensor) -> torch.Tensor:
    """Decode blocks to fp32 `[..., D]` with the decode scale `g` (`[...]` or 0-dim)."""
    from kvpool.codecs import floats
    from kvpool.codecs.scaling import in_blocks

    s = floats.decode_e4m3(planes["block_scale"]) * g[..., None]  # [..., D/16]
    values = in_blocks(floats.decode_e2m1(floats.unpack_e2m1(planes["data"])), BLOCK)
    return (values * s[..., None]).flatten(-2)


class Nvfp4(Codec):
    """E2M1 codes `c`, block scales `bs`; an element is `c * (bs * scale)`."""

    name = "nvfp4"
    constant_scale = True
    largest = 6.0 * 448.0

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        return nvfp4_planes(self.name, vector)

    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        from kvpool.codecs.scaling import constant

        return nvfp4_encode(x.float(), constant(need_scale(self.name, scale), x), counts)

    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        from kvpool.codecs.scaling import constant

        return nvfp4_decode(planes, constant(need_scale(self.name, scale), planes["data"]))

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


NVFP4 = Nvfp4()
