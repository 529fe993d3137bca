"""Add a stored format from outside the package and use it like any other: `python examples/new_codec.py`.

The format is MXFP8 of the OCP Microscaling specification: E4M3 elements, and one power of two (UE8M0) for 32 of them.
A codec says which planes a vector needs and gives the arithmetic; layouts, plans, copies, prefix sharing and the
reference backend work with it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

import kvpool as kv
from kvpool.codecs import Counts, PlaneSpec, Vector, floats, get_codec
from kvpool.codecs.base import need_multiple
from kvpool.kinds import KVKind, LayerSpec

BLOCK = 32


class Mxfp8(kv.Codec):
    """E4M3 codes `c` and exponents `e`; an element is `c * 2^(e-127)`."""

    name = "mxfp8"

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        need_multiple(self.name, vector, BLOCK, f"it keeps one exponent for {BLOCK} elements")
        return (PlaneSpec("data", "e4m3", vector.dim), PlaneSpec("block_scale", "ue8m0", vector.dim // BLOCK))

    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        amax = blocks.abs().amax(-1)
        amax = torch.where(amax.isfinite(), amax, torch.nan)  # one bad element: its block decodes to NaN
        exponent = floats.encode_ue8m0((amax / floats.E4M3_MAX).clamp(min=floats.SMALLEST_SCALE))
        y = blocks / floats.decode_ue8m0(exponent)[..., None]
        return {"data": floats.encode_e4m3(y).flatten(-2), "block_scale": exponent}

    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        values = floats.decode_e4m3(planes["data"]).unflatten(-1, (-1, BLOCK))
        return (values * floats.decode_ue8m0(planes["block_scale"])[..., None]).flatten(-2)


def main() -> None:
    kv.register(Mxfp8())
    spec = kv.CacheSpec((LayerSpec((KVKind(num_kv_heads=2, head_dim=64),)),))
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 50, 2, 64, generator=generator)
    q = torch.randn(50, 4, 64, generator=generator)
    outputs = {}
    for codec in ("fp32", "mxfp8", "fp8"):
        plan = kv.make_plan(spec, budget=1 << 20, codec=codec, tokens_per_block=16)
        cache = kv.KVCache(plan, backend="reference")
        sequence = cache.sequence(range(50))
        with cache.step([(sequence, 50)]) as step:
            cache.write(0, step, k, v)
            outputs[codec] = cache.attend(0, step, q)
        error = float((outputs[codec] - outputs["fp32"]).norm() / outputs["fp32"].norm())
        bits = get_codec(codec).bits_per_element(Vector((64,)))
        print(f"{codec:6} {bits:5.2f} bits an element, {100 * error:.2f} % error of the attention output")


if __name__ == "__main__":
    main()
