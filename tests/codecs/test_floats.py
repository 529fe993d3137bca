"""Element formats: every code and every boundary, against the definitions in float64."""

from __future__ import annotations

import codec_definitions as define
import numpy as np
import pytest
import torch

from kvpool.codecs import floats

FORMATS = {
    "e4m3": (floats.encode_e4m3, floats.decode_e4m3, define.E4M3, 0x80),
    "e5m2": (floats.encode_e5m2, floats.decode_e5m2, define.E5M2, 0x80),
    "e2m1": (floats.encode_e2m1, floats.decode_e2m1, define.E2M1, 8),
}
ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def test_the_definitions_are_those_of_the_specifications() -> None:
    assert (define.E4M3[1], define.E4M3[8], define.E4M3[-1]) == (2.0**-9, 2.0**-6, 448.0)
    assert (define.E5M2[1], define.E5M2[4], define.E5M2[-1]) == (2.0**-16, 2.0**-14, 57344.0)
    assert define.E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_to_its_definition(name: str) -> None:
    _, decode, values, sign = FORMATS[name]
    got = decode(torch.arange(2 * sign, dtype=torch.uint8)).numpy()
    for code, value in enumerate(values):
        assert got[code] == value
        assert got[code | sign] == -value
        assert np.signbit(got[code | sign])
    special = {"e4m3": [0x7F, 0xFF], "e5m2": [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], "e2m1": []}[name]
    assert np.isnan(got[special]).all()
    if name == "e5m2":
        assert (got[0x7C], got[0xFC]) == (np.inf, -np.inf)


@pytest.mark.parametrize("name", FORMATS)
def test_every_finite_code_survives_a_round_trip(name: str) -> None:
    encode, decode, values, sign = FORMATS[name]
    codes = torch.tensor([c | s for s in (0, sign) for c in range(len(values))], dtype=torch.uint8)
    assert torch.equal(encode(decode(codes)), codes)


@pytest.mark.parametrize("name", FORMATS)
def test_every_tie_goes_to_the_even_code_and_its_neighbours_to_the_nearest(name: str) -> None:
    encode, _, values, sign = FORMATS[name]
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    for shifted, up in ((ties, None), (np.nextafter(ties, np.float32(0)), 0), (np.nextafter(ties, np.float32(1e9)), 1)):
        lower = np.arange(len(ties))
        want = (lower + 1) // 2 * 2 if up is None else lower + up
        assert encode(torch.from_numpy(shifted)).tolist() == want.tolist()
        assert encode(torch.from_numpy(-shifted)).tolist() == (want | sign).tolist()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 0.0371, 3.3, 448.0, 1e-30, 1e30])
def test_every_bf16_value_goes_to_the_nearest_code(name: str, scale: float) -> None:
    encode, _, values, sign = FORMATS[name]
    y = ALL_BF16.float() * (torch.tensor(1.0) / torch.tensor(scale))
    finite = ALL_BF16.float().isfinite()
    got = encode(y)[finite].numpy()
    assert np.array_equal(got, define.signed(y[finite].numpy(), values, sign))


def test_infinities_saturate_and_nan_has_one_code() -> None:
    special = torch.tensor([np.inf, -np.inf, np.nan, -np.nan])
    assert floats.encode_e4m3(special).tolist() == [0x7E, 0xFE, 0x7F, 0x7F]
    assert floats.encode_e5m2(special).tolist() == [0x7B, 0xFB, 0x7F, 0x7F]
    assert floats.encode_e2m1(special).tolist() == [7, 15, 0, 0]
    assert floats.encode_int8(special).tolist() == [127, -127, 0, 0]


def test_449_and_all_beyond_become_448_and_never_nan() -> None:
    beyond = torch.tensor([448.0, 449.0, 463.9, 464.0, 464.1, 480.0, 1e6, 3e38])
    assert (floats.encode_e4m3(beyond) == 0x7E).all()


def test_int8_rounds_halves_to_even_and_never_gives_minus_128() -> None:
    y = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -127.5, -128.0, -1e9])
    assert floats.encode_int8(y).tolist() == [0, 2, 2, 0, -2, 126, 127, -127, -127, -127]


def test_every_power_of_two_code_decodes_to_its_definition() -> None:
    got = floats.decode_ue8m0(torch.arange(256, dtype=torch.uint8)).numpy()
    assert got[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert np.isnan(got[255])


def test_a_power_of_two_code_is_the_least_that_is_not_below() -> None:
    exact = 2.0 ** np.arange(-126.0, 127.0)
    for factor, more in ((1.0, 0), (1 + 2.0**-23, 1), (1.5, 1), (2 - 2.0**-23, 1)):
        got = floats.encode_ue8m0(torch.from_numpy((exact * factor).astype(np.float32)))
        assert got.tolist() == [e + more for e in range(1, 254)]
    assert floats.encode_ue8m0(torch.tensor([np.nan], dtype=torch.float32)).item() == 255


def test_element_2i_lies_in_the_low_nibble() -> None:
    codes = torch.tensor([1, 2, 3, 4, 15, 0], dtype=torch.uint8)
    assert floats.pack_e2m1(codes).tolist() == [0x21, 0x43, 0x0F]
    assert torch.equal(floats.unpack_e2m1(floats.pack_e2m1(codes)), codes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_fp32_value_goes_to_the_nearest_code(name: str) -> None:
    encode, _, values, _ = FORMATS[name]
    midpoints = torch.from_numpy(((values[1:] + values[:-1]) / 2).astype(np.float32))
    for begin in range(0, 0x7F800000, 1 << 24):
        bits = torch.arange(begin, min(begin + (1 << 24), 0x7F800000), dtype=torch.int32)
        y = bits.view(torch.float32)
        # A tie belongs to the even code: the lower one of an even midpoint, the upper one of an odd one.
        want = torch.bucketize(y, midpoints)
        tie = y == midpoints[want.clamp(max=len(midpoints) - 1)]
        want += (tie & (want % 2 == 1)).long()
        assert torch.equal(encode(y), want.to(torch.uint8))
        assert torch.equal(encode(-y), want.to(torch.uint8) | 0x80)
