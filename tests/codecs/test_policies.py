"""What every codec does with zeros, tiny, huge and broken vectors, with outliers, and with scales far off."""

from __future__ import annotations

import math

import pytest
import torch

from kvpool.codecs import CODECS, Codec, Counts, Vector, get_codec
from kvpool.codecs.floats import SMALLEST_SCALE
from kvpool.codecs.maps import rotation_block
from kvpool.errors import PlanError

PLAIN = ("fp32", "fp16", "bf16")
QUANTISED = [n for n in CODECS if n not in PLAIN]
OWN_SCALE = [n for n in QUANTISED if not get_codec(n).constant_scale]
LARGEST = torch.finfo(torch.float32).max
D = 128
VECTOR = Vector((D,))


def scale_of(codec: Codec, amax: float = 4.0) -> float | None:
    return amax / codec.largest if codec.constant_scale else None


def round_trip(codec: Codec, x: torch.Tensor, scale: float | None, vector: Vector = VECTOR) -> torch.Tensor:
    return codec.decode(codec.encode(x, vector, scale), vector, scale)


def normal(n: int, seed: int = 0, dim: int = D) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CODECS)
def test_zeros_come_back_as_zeros_and_so_does_cleared_memory(name: str) -> None:
    codec = get_codec(name)
    scale = scale_of(codec)
    planes = codec.encode(torch.tensor([0.0, -0.0]).repeat(3, 64), VECTOR, scale)
    back = codec.decode(planes, VECTOR, scale)
    assert (back == 0).all()
    cleared = {k: torch.zeros_like(p) for k, p in planes.items()}
    assert torch.equal(codec.decode(cleared, VECTOR, scale), torch.zeros(3, D))
    if name in OWN_SCALE:
        assert not planes["data"].any()


@pytest.mark.parametrize("value", [1.0, -3.0, 0.02, 1e4, -1e-5])
@pytest.mark.parametrize("name", [n for n in CODECS if n != "fp16"])
def test_constant_vectors_come_back_within_half_a_step(name: str, value: float) -> None:
    codec = get_codec(name)
    # One code for all: E4M3 and E2M1 grids put amax on their largest code, a power of two scale within its step.
    back = round_trip(codec, torch.full((2, D), value), scale_of(codec, abs(value)))
    step = {"bf16": 2.0**-8, "index-fp4": 0.25}.get(name, 2.0**-4)
    assert ((back - value).abs() <= step * abs(value)).all()
    assert (back == back[0, 0]).all()


@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 1e-37])
@pytest.mark.parametrize("name", QUANTISED)
def test_subnormal_vectors_stay_finite_and_never_grow(name: str, amax: float) -> None:
    codec = get_codec(name)
    x = normal(50) / normal(50).abs().amax(-1, keepdim=True) * amax
    x = x.clamp(-amax, amax)
    scale = SMALLEST_SCALE if codec.constant_scale else None
    back = round_trip(codec, x, scale)
    assert back.isfinite().all()
    # Half a unit of the smallest scale, in the coarsest format's largest step.
    assert (back.abs() <= max(2 * amax, SMALLEST_SCALE)).all()
    assert (back * x >= 0).all()


@pytest.mark.parametrize("value", [3e38, -3e38, 3.3895313892515355e38, LARGEST])
@pytest.mark.parametrize("name", [n for n in CODECS if n != "fp32"])
def test_no_huge_finite_vector_becomes_an_infinity_or_nan(name: str, value: float) -> None:
    codec = get_codec(name)
    x = normal(8)
    x[1] = value
    x[2, ::7] = value
    x[3] = torch.linspace(-1, 1, D) * value
    for scale in (1.0, 2.0**-126, 2.0**100) if codec.constant_scale else (None,):
        assert round_trip(codec, x, scale).isfinite().all()
    if name in OWN_SCALE:
        back = round_trip(codec, x, None)[1]
        assert ((back / value - 1).abs() <= (0.26 if name == "index-fp4" else 0.005)).all()


def test_fp16_saturates_at_65504_and_keeps_infinities() -> None:
    x = torch.tensor([65504.0, 65520.0, -1e6, 3e38, math.inf, -math.inf, math.nan])
    back = round_trip(get_codec("fp16"), x, None, Vector((7,)))
    assert back[:4].tolist() == [65504.0, 65504.0, -65504.0, 65504.0]
    assert back[4:6].tolist() == [math.inf, -math.inf]
    assert back[6].isnan()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_bad_element_spoils_its_own_place_and_no_neighbour(name: str, bad: float) -> None:
    codec, vector = get_codec(name), Vector((128, 64))
    scale = scale_of(codec)
    x = normal(6, dim=192)
    good = round_trip(codec, x, scale, vector)
    for position in (0, 17, 127, 128, 191):
        y = x.clone()
        y[3, position] = bad
        back = round_trip(codec, y, scale, vector)
        spoiled = back.isnan()
        same = ~spoiled & (y == x)
        if name == "nvfp4-token":  # its scale comes from the blocks that are finite, so the vector's own rest may move
            assert (back - x)[3][same[3]].norm() < 0.12 * x[3][same[3]].norm()
            same[3] = False
        assert torch.equal(back[same], good[same])
        where = torch.zeros_like(spoiled)
        if name in ("fp8", "int8", "index-fp8"):
            where[3, slice(0, 128) if position < 128 else slice(128, 192)] = True
        elif name in ("nvfp4", "nvfp4-token", "index-fp4"):
            block = 32 if name == "index-fp4" else 16
            where[3, position // block * block : position // block * block + block] = True
        elif name != "int8-tensor":
            where[3, position] = True
        assert torch.equal(spoiled, where)


def test_int8_tensor_stores_zero_for_what_it_has_no_code_for_and_counts_it() -> None:
    codec, counts = get_codec("int8-tensor"), Counts()
    x = normal(4)
    x[1, 3], x[2, 5], x[2, 6] = math.nan, math.inf, -math.inf
    planes = codec.encode(x, VECTOR, 1.0, counts)
    assert (planes["data"][1, 3], planes["data"][2, 5], planes["data"][2, 6]) == (0, 0, 0)
    assert (counts.nonfinite, counts.saturated) == (3, 0)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8e5m2-tensor", "int8-tensor"])
def test_saturated_and_flushed_elements_are_counted_exactly(name: str) -> None:
    codec, counts = get_codec(name), Counts()
    x = torch.zeros(2, D)
    x[0, :5] = torch.tensor([1.0, -1.0, 0.999, 1.01, -7.0]) * codec.largest
    x[1, :3] = torch.tensor([1e-9, -1e-9, 2.0])
    back = codec.decode(codec.encode(x, VECTOR, 1.0, counts), VECTOR, 1.0)
    assert counts == Counts(saturated=2, flushed=2)
    assert back[0, 3:5].tolist() == [codec.largest, -codec.largest]
    codec.encode(x, VECTOR, 1.0, counts)
    assert counts == Counts(saturated=4, flushed=4)


def test_nvfp4_counts_what_a_global_scale_far_off_destroys_and_nvfp4_token_needs_none() -> None:
    codec, x = get_codec("nvfp4"), normal(64)
    losses = {}
    for scale in (1e-4, scale_of(codec, float(x.abs().max())), 1e4):
        assert scale is not None
        counts = Counts()
        back = codec.decode(codec.encode(x, VECTOR, scale, counts), VECTOR, scale)
        losses[scale] = (float((back - x).norm() / x.norm()), counts)
    small, fitting, large = losses.values()
    assert small[1].saturated > 0.3 * x.numel()
    assert small[0] > 0.3
    assert fitting[1] == Counts()
    assert fitting[0] < 0.1
    assert large[1].flushed == x.numel()
    assert large[0] == 1.0
    own = get_codec("nvfp4-token")
    for factor in (1e-4, 1.0, 1e4, 1e30, 1e-30):
        assert (round_trip(own, x * factor, None) / factor - x).norm() / x.norm() < 0.1


@pytest.mark.parametrize("name", OWN_SCALE)
def test_an_outlier_token_leaves_the_error_of_the_others_unchanged(name: str) -> None:
    codec, x = get_codec(name), normal(64)
    alone = round_trip(codec, x, None)
    x[10] *= 60
    together = round_trip(codec, x, None)
    others = torch.arange(64) != 10
    assert torch.equal(alone[others], together[others])
    assert (together[10] - x[10]).norm() / x[10].norm() < 0.15


def test_an_outlier_token_ruins_the_others_of_a_constant_int8_scale() -> None:
    codec, x = get_codec("int8-tensor"), normal(64)
    x[10] *= 60
    back = round_trip(codec, x, float(x.abs().max()) / 127)
    others = torch.arange(64) != 10
    assert (back[others] - x[others]).norm() / x[others].norm() > 0.2


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 100, 112, 128, 192, 256, 512, 576])
@pytest.mark.parametrize("name", CODECS)
def test_a_head_size_works_or_is_refused_with_the_reason(name: str, dim: int) -> None:
    codec, vector = get_codec(name), Vector((dim,))
    multiple = {"nvfp4": 16, "nvfp4-token": 16, "index-fp4": 32}.get(name, 1)
    if dim % multiple:
        with pytest.raises(PlanError, match=f"multiple of {multiple}"):
            codec.planes(vector)
        return
    x = normal(16, dim=dim)
    assert (round_trip(codec, x, scale_of(codec), vector) - x).norm() / x.norm() < (
        0.13 if name == "index-fp4" else 0.11
    )


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 100, 112, 128, 192, 256, 512, 576])
def test_a_head_size_can_be_rotated_or_is_refused_with_the_reason(dim: int) -> None:
    if dim in (80, 100, 112):
        with pytest.raises(PlanError, match="power of two of at least 32"):
            rotation_block(Vector((dim,)))
    else:
        assert rotation_block(Vector((dim,))) == dim & -dim


def test_codes_truncated_toward_zero_have_nearly_twice_the_error_of_rounded_ones() -> None:
    # What vLLM's CPU store did: fp32 to E4M3 by dropping bits.
    x = normal(2000)
    s = x.abs().amax(-1, keepdim=True) / 448
    grid = get_codec("fp8-tensor").decode({"data": torch.arange(127, dtype=torch.uint8)}, Vector((127,)), 1.0)
    y = x / s
    truncated = grid[torch.searchsorted(grid, y.abs().contiguous(), right=True) - 1] * y.sign() * s
    rounded = round_trip(get_codec("fp8"), x, None)
    ratio = float((truncated - x).norm() / (rounded - x).norm())
    assert 1.7 < ratio < 2.1, ratio
