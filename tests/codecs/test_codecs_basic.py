"""What every registered codec promises, whatever its format."""

from __future__ import annotations

import pytest
import torch

from kvpool.codecs import CODECS, Codec, Counts, PlaneSpec, Vector, get_codec, register
from kvpool.dtypes import dtype
from kvpool.errors import PlanError

#: Relative L2 error of N(0,1) vectors of 128 that a format may show.
ROUND_TRIP = {
    "fp32": 0.0,
    "fp16": 0.0003,
    "bf16": 0.002,
    "fp8": 0.0265,
    "fp8-tensor": 0.0270,
    "fp8e5m2-tensor": 0.0530,
    "int8": 0.0070,
    "int8-tensor": 0.0110,
    "nvfp4": 0.10,
    "nvfp4-token": 0.10,
    "index-fp8": 0.0265,
    "index-fp4": 0.12,
}
VECTORS = [Vector((128,)), Vector((64,)), Vector((96,)), Vector((128, 128, 64)), Vector((32,) * 6)]


def scale_for(codec: Codec, x: torch.Tensor) -> float | None:
    return float(x.abs().max()) / codec.largest if codec.constant_scale else None


def test_the_table_holds_the_formats_of_the_design_and_no_other() -> None:
    assert set(ROUND_TRIP) == set(CODECS)


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_normal_vectors_come_back_within_the_format_s_error(name: str) -> None:
    codec, vector = get_codec(name), Vector((128,))
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    scale = scale_for(codec, x)
    back = codec.decode(codec.encode(x, vector, scale), vector, scale)
    assert back.dtype == torch.float32
    assert (back - x).norm() / x.norm() <= ROUND_TRIP[name]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: "x".join(map(str, v.segments)))
@pytest.mark.parametrize("name", ROUND_TRIP)
def test_encode_returns_exactly_the_planes_it_declares(name: str, vector: Vector) -> None:
    codec = get_codec(name)
    x = torch.randn(3, 5, vector.dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = scale_for(codec, x)
    planes = codec.encode(x, vector, scale)
    specs = codec.planes(vector)
    assert list(planes) == [spec.name for spec in specs]
    for spec in specs:
        plane = planes[spec.name]
        assert plane.shape == ((3, 5, spec.containers) if spec.containers else (3, 5))
        assert plane.dtype == getattr(torch, dtype(spec.dtype).torch_name)
    assert codec.decode(planes, vector, scale).shape == x.shape


@pytest.mark.parametrize("name", [n for n in ROUND_TRIP if get_codec(n).constant_scale])
def test_a_constant_scale_codec_without_its_scale_raises_both_ways(name: str) -> None:
    codec, vector = get_codec(name), Vector((32,))
    planes = codec.encode(torch.ones(32), vector, 1.0)
    with pytest.raises(PlanError, match="set_constants"):
        codec.encode(torch.ones(32), vector)
    with pytest.raises(PlanError, match="set_constants"):
        codec.decode(planes, vector)


def test_a_second_codec_of_the_same_name_is_refused() -> None:
    class Other(Codec):
        name = "fp8"

        def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
            return (PlaneSpec("data", "fp32", vector.dim),)

        def encode(
            self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
        ) -> dict[str, torch.Tensor]:
            return {"data": x.float()}

        def decode(self, planes, vector, scale=None):  # type: ignore[no-untyped-def]
            return planes["data"]

    with pytest.raises(PlanError, match="registered already"):
        register(Other())
    assert type(get_codec("fp8")) is not Other
