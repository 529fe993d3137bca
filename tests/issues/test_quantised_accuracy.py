"""Faults of quantised caches that other projects shipped, at the level of one vector. Each names its report."""

from __future__ import annotations

import math

import pytest
import torch

from kvpool.codecs import CODECS, Counts, Vector, get_codec
from kvpool.codecs.maps import Maps
from kvpool.errors import PlanError
from kvpool.pools.calibration import smoothing_from
from kvpool.pools.constants import Constants, check_scale

OWN_SCALE = ("fp8", "int8", "nvfp4-token", "index-fp8", "index-fp4")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(name: str, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    codec, vector = get_codec(name), Vector((x.shape[-1],))
    return codec.decode(codec.encode(x, vector, scale), vector, scale)


def error(back: torch.Tensor, x: torch.Tensor) -> float:
    return float((back.double() - x).norm() / x.double().norm())


def test_given_scales_reach_the_stored_bytes() -> None:
    """SGLang issue 18818: scales of a file never arrived and 1.0 was used."""
    codec, vector = get_codec("fp8-tensor"), Vector((64,))
    k, v = normal(32, 64).clamp(-4, 4) * 3.75, normal(32, 64, seed=1).clamp(-4, 4) * 3.75
    for x, scale in ((k, 0.04), (v, 0.05)):
        planes = codec.encode(x, vector, scale)
        back = codec.decode(planes, vector, scale)
        large = x.abs() > scale * 2.0**-6
        assert ((back - x).abs()[large] <= 2.0**-4 * x.abs()[large] * 1.0001).all()
        wrong = codec.decode(planes, vector, 0.04 if scale == 0.05 else 0.05)
        assert error(wrong, x) > 0.15


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_wrong_scale_is_refused_by_argument_as_by_file(bad: float) -> None:
    """Mobius pull request 447: only the file path was checked. The file path is in tests/pools/test_constants.py."""
    constants = Constants(get_codec("fp8-tensor"), Vector((64,)), 2, 0, "k")
    constants.set(scale=0.5)
    with pytest.raises(PlanError):
        constants.set(scale=bad)
    assert constants.scale == 0.5
    with pytest.raises(PlanError):
        check_scale(bad, "a tensor of a file")


@pytest.mark.parametrize("name", OWN_SCALE)
def test_a_zero_vector_reads_zero_and_its_scale_is_finite(name: str) -> None:
    """aiter issue 4289, OpenVINO issue 28326: 0/0 from a zero vector spread NaN."""
    codec, vector, x = get_codec(name), Vector((128,)), normal(4, 3, 128)
    x[2, 1] = 0
    planes = codec.encode(x, vector)
    back = codec.decode(planes, vector)
    assert (back[2, 1] == 0).all()
    assert back.isfinite().all()
    assert all(p.isfinite().all() for p in planes.values() if p.is_floating_point())
    x[2, 1] = 1
    others = torch.ones(4, 3, dtype=torch.bool)
    others[2, 1] = False
    assert torch.equal(codec.decode(codec.encode(x, vector), vector)[others], back[others])


def test_values_around_448_saturate_and_never_become_nan() -> None:
    """ml_dtypes issue 147: 449 rounds to 448, larger ones became NaN."""
    x = torch.tensor([448.0, 449.0, 464.0, 465.0, 1e4, -1e4])
    assert round_trip("fp8-tensor", x, 1.0).tolist() == [448.0] * 5 + [-448.0]
    assert round_trip("fp8-tensor", torch.tensor([math.inf, math.nan, 1.0]), 1.0)[:2].isnan().all()


@pytest.mark.parametrize("name", OWN_SCALE)
@pytest.mark.parametrize("amax", [3e7, 6e4, 3e38])
def test_a_large_amax_has_a_finite_scale_and_a_bounded_error(name: str, amax: float) -> None:
    """FBGEMM pull request 4237: a scale kept in fp16 overflowed."""
    x = normal(64, 128)
    x = x / x.abs().max() * amax
    planes = get_codec(name).encode(x, Vector((128,)))
    assert all(p.isfinite().all() for p in planes.values() if p.is_floating_point())
    assert error(round_trip(name, x), x) < 0.13


def logit_correlation(q: torch.Tensor, k: torch.Tensor, stored: torch.Tensor, asked: torch.Tensor) -> float:
    want, got = q @ k.T, asked @ stored.T
    pair = torch.stack([(want - want.mean(1, True)).flatten(), (got - got.mean(1, True)).flatten()])
    return float(torch.corrcoef(pair)[0, 1])


#: With four of 128 channels 600 times the rest, a symmetric format loses what those four tell apart: the correlation is
#: then (124/128)^0.5 = 0.984 at most. Only int8 with both maps keeps some of it.
@pytest.mark.parametrize(
    ("name", "knows_queries", "rotates", "least"),
    [("int8", True, True, 0.99), ("int8", False, False, 0.97), ("nvfp4-token", False, False, 0.96)],
)
def test_keys_with_constant_outlier_channels_keep_their_logits_by_smoothing(
    name: str, knows_queries: bool, rotates: bool, least: float
) -> None:
    """transformers issue 35185: Qwen2.5's 4-bit cache went from 98 of 120 right answers to none."""
    k, q = normal(512, 1, 128), normal(64, 1, 128, seed=1)
    k[:, :, [3, 40, 77, 120]] += 600.0
    codec, vector = get_codec(name), Vector((128,))

    def correlation(smoothing: torch.Tensor | None, block: int) -> float:
        stored = codec.decode(codec.encode(Maps(smoothing, block).store(k), vector), vector)
        return logit_correlation(q[:, 0], k[:, 0], stored[:, 0], Maps(smoothing, block).ask(q)[:, 0])

    assert correlation(None, 0) < 0.8
    assert correlation(smoothing_from(k, q if knows_queries else None), 128 if rotates else 0) > least


def test_rotating_four_bit_keys_with_outlier_channels_is_worse_than_nothing() -> None:
    """The other side of it: what `kvpool quality` is there to measure before anyone turns it on."""
    k, q = normal(512, 1, 128), normal(64, 1, 128, seed=1)
    k[:, :, [3, 40, 77, 120]] += 600.0
    codec, vector = get_codec("nvfp4-token"), Vector((128,))
    correlations = []
    for block in (0, 128):
        stored = codec.decode(codec.encode(Maps(block=block).store(k), vector), vector)
        correlations.append(logit_correlation(q[:, 0], k[:, 0], stored[:, 0], Maps(block=block).ask(q)[:, 0]))
    assert correlations[1] < 0.3 < 0.6 < correlations[0]


def test_a_scale_of_one_is_worse_than_a_calibrated_one_and_says_so() -> None:
    """vLLM pull request 11906: with scale 1.0 a perplexity of 22.6 became 34.8."""
    k = normal(256, 128) * 100
    k[::64, 5] = 600.0
    errors, counts = [], Counts()
    for name, scale in (("fp8", None), ("fp8-tensor", float(k.abs().max()) / 448), ("fp8-tensor", 1.0)):
        codec = get_codec(name)
        back = codec.decode(codec.encode(k, Vector((128,)), scale, counts), Vector((128,)), scale)
        errors.append(error(back, k))
    assert errors == sorted(errors)
    assert counts.saturated == int((k.abs() > 448).sum()) > 0


@pytest.mark.parametrize("name", [n for n in CODECS if get_codec(n).constant_scale])
def test_no_scale_means_refused_and_never_one(name: str) -> None:
    """InfiniLM pull request 553: int8 with the default scale 1.0 collapsed."""
    with pytest.raises(PlanError, match="set_constants"):
        get_codec(name).encode(normal(4, 64).clamp(-5, 5), Vector((64,)))


@pytest.mark.parametrize("seed", [0, 1])
def test_permuted_block_scales_do_not_pass_for_right_ones(seed: int) -> None:
    """vLLM pull request 50336: a wrong order of scales passed a test with a loose tolerance."""
    codec, vector, x = get_codec("nvfp4-token"), Vector((128,)), normal(64, 128, seed=seed)
    x = x * 2.0 ** normal(64, 8, seed=seed + 9).repeat_interleave(16, 1)
    planes = codec.encode(x, vector)
    assert error(codec.decode(planes, vector), x) <= 0.15
    planes["block_scale"] = planes["block_scale"].reshape(64, 2, 4).transpose(1, 2).reshape(64, 8)
    assert error(codec.decode(planes, vector), x) > 0.3


@pytest.mark.parametrize("dim", [80, 96, 112, 192])
@pytest.mark.parametrize("name", [n for n in CODECS if not get_codec(n).constant_scale])
def test_odd_head_sizes_round_trip_within_the_format_or_are_refused(name: str, dim: int) -> None:
    """vLLM pull request 38479: a bit width and a head size were hard-coded, and output was garbage."""
    codec, vector, x = get_codec(name), Vector((dim,)), normal(64, dim)
    if dim % {"index-fp4": 32, "nvfp4-token": 16}.get(name, 1):
        with pytest.raises(PlanError, match="multiple of"):
            codec.planes(vector)
        return
    assert error(round_trip(name, x), x) < 0.13


def test_a_rotated_vector_is_not_read_as_an_unrotated_one() -> None:
    """llama.cpp pull request 28498: a rotated cache was restored into an unrotated one; here the hash differs."""
    codec, vector = get_codec("int8"), Vector((64,))
    plain, rotated = Constants(codec, vector, 1, 0, "k"), Constants(codec, vector, 1, 0, "k")
    rotated.set(rotation=True)
    assert plain.digest() != rotated.digest()
    x = normal(16, 1, 64)
    stored = codec.decode(codec.encode(rotated.maps.store(x), vector), vector)
    assert error(rotated.maps.restore(stored), x) < 0.01
    assert error(stored, x) > 0.5
