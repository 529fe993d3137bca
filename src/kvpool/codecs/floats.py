"""Elements of the 8-bit and 4-bit float formats to and from fp32, in torch. Knows no scale and no plane.

    E4M3   s eeee mmm   bias 7, largest 448, NaN s1111111, no infinity          (OCP FP8, revision 1.0; torch e4m3fn)
    E5M2   s eeeee mm   bias 15, largest 57344, infinity s1111100, NaN above it (OCP FP8, revision 1.0)
    E2M1   s ee m       0 .5 1 1.5 2 3 4 6, neither NaN nor infinity            (OCP MX, revision 1.0)
    UE8M0  eeeeeeee     2^(e-127), NaN 255                                      (OCP MX, revision 1.0)

Encoding rounds to nearest even and saturates at the largest finite code; every NaN becomes code 0x7F.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E2M1_MAX = 6.0
INT8_MAX = 127.0
#: The one NaN that E4M3 and E5M2 planes ever hold.
NAN_CODE = 0x7F
#: Smallest normal fp32: the smallest scale, so that neither it nor its reciprocal is subnormal or infinite.
SMALLEST_SCALE = 2.0**-126

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _float8(y: torch.Tensor, target: torch.dtype, largest: float) -> torch.Tensor:
    """Round fp32 to an 8-bit float; torch's cast is round-to-nearest-even for everything in range."""
    codes = y.clamp(-largest, largest).to(target).view(torch.uint8)
    return torch.where(y.isnan(), NAN_CODE, codes)


def encode_e4m3(y: torch.Tensor) -> torch.Tensor:
    """Return the E4M3 codes (uint8) of fp32 `y`."""
    return _float8(y, torch.float8_e4m3fn, E4M3_MAX)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of E4M3 codes (uint8)."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def encode_e5m2(y: torch.Tensor) -> torch.Tensor:
    """Return the E5M2 codes (uint8) of fp32 `y`."""
    return _float8(y, torch.float8_e5m2, E5M2_MAX)


def decode_e5m2(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of E5M2 codes (uint8)."""
    return codes.contiguous().view(torch.float8_e5m2).float()


def encode_int8(y: torch.Tensor) -> torch.Tensor:
    """Return int8 codes -127..127 of fp32 `y`; NaN becomes 0."""
    return torch.where(y.isnan(), 0.0, y.clamp(-INT8_MAX, INT8_MAX)).round().to(torch.int8)


def encode_e2m1(y: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 codes (uint8, 0..15) of fp32 `y`; NaN becomes 0.

    Between two codes the even one owns the tie: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4.
    """
    a = y.abs()
    code = torch.zeros_like(a, dtype=torch.uint8)
    for tie in (0.25, 1.25, 2.5, 5.0):
        code += a > tie
    for tie in (0.75, 1.75, 3.5):
        code += a >= tie
    return torch.where(y.isnan(), 0, code | y.signbit().to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of E2M1 codes (uint8, 0..15)."""
    table = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=codes.device)
    return table[codes.int()]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Put codes `[..., D]` into bytes `[..., D/2]`: element 2i in the low nibble, 2i+1 in the high one."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(data: torch.Tensor) -> torch.Tensor:
    """Undo `pack_e2m1`: bytes `[..., D/2]` to codes `[..., D]`."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def encode_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Return the UE8M0 code (uint8) of the least power of two that is not below `scale`.

    Args:
        scale: fp32, from 2^-126 to 2^127, or NaN (code 255).
    """
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return torch.where(scale.isnan(), 255, exponent).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return 2^(e-127) in fp32 of UE8M0 codes (uint8); 255 is NaN."""
    exponent = codes.int()
    power = torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)
    return torch.where(exponent == 255, torch.nan, power)
