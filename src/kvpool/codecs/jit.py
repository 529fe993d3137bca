# mypy: ignore-errors
"""Triton maths that the codecs share: elements to and from fp32, and the ways a tile of vectors is stored.

The counterpart of `floats` and `scaling`, imported on use. Every rounding is done on integers or by one fp32 addition,
so that the interpreter and the GPU agree to the bit with torch (the interpreter's own casts truncate, and a GPU's
saturate in other places). Kernels that store are compiled without fused multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

# --- elements: containers to values -------------------------------------------------------------------------
# Each returns a float type in which the value is exact: fp16 for E4M3, E5M2, E2M1 and int8, fp32 for exponents.
# HARDWARE says what converts: 0 the interpreter (whose conversions flush and truncate), 1 a GPU, 2 one that knows E4M3.


@triton.jit
def widened(x):
    """Return a plain element in fp32, subnormals included."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def plain_value(x, HARDWARE: tl.constexpr):
    """Return the element as it is."""
    return x if HARDWARE > 0 else widened(x)


@triton.jit
def int8_value(codes, HARDWARE: tl.constexpr):
    """Return -127..127."""
    return codes.to(tl.float16)


@triton.jit
def e4m3_value(codes, HARDWARE: tl.constexpr):
    """Return the values of E4M3 codes; 0x7F and 0xFF are NaN."""
    if HARDWARE == 2:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    c = codes.to(tl.int16)
    # The code's bits in place of fp16's, whose exponent bias is larger by 8; fp16 has its subnormals.
    value = (((c & 0x80) << 8) | ((c & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((c & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def e5m2_value(codes, HARDWARE: tl.constexpr):
    """Return the values of E5M2 codes: the high byte of an fp16."""
    return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def e2m1_value(codes, HARDWARE: tl.constexpr):
    """Return the values of E2M1 codes 0..15."""
    c = codes.to(tl.int16)
    value = (((c & 8) << 12) | ((c & 7) << 9)).to(tl.float16, bitcast=True)
    return (value.to(tl.float32) * 16384.0).to(tl.float16)


@triton.jit
def ue8m0_value(codes, HARDWARE: tl.constexpr):
    """Return 2^(e-127) in fp32; 255 is NaN."""
    e = codes.to(tl.int32)
    value = tl.where(e == 0, 1 << 22, e << 23).to(tl.float32, bitcast=True)
    return tl.where(e == 255, float("nan"), value)


# --- elements: fp32 to codes --------------------------------------------------------------------------------


@triton.jit
def e4m3_code(y):
    """Return E4M3 codes (int32): nearest even, saturating at 448, 0x7F for NaN."""
    bits = y.to(tl.int32, bitcast=True)
    a = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    ab = a.to(tl.int32, bitcast=True)
    normal = ((ab + 0x7FFFF + ((ab >> 20) & 1)) >> 20) - (120 << 3)
    small = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # one unit in the last place there is 2^-9
    code = tl.where(ab < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)


@triton.jit
def e5m2_code(y):
    """Return E5M2 codes (int32): nearest even, saturating at 57344, 0x7F for NaN."""
    bits = y.to(tl.int32, bitcast=True)
    a = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 57344.0)
    ab = a.to(tl.int32, bitcast=True)
    normal = ((ab + 0xFFFFF + ((ab >> 21) & 1)) >> 21) - (112 << 2)
    small = (a + 128.0).to(tl.int32, bitcast=True) - 0x43000000  # one unit in the last place there is 2^-16
    code = tl.where(ab < 0x38800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)


@triton.jit
def int8_code(y):
    """Return codes -127..127 (int32): nearest even; NaN becomes 0."""
    a = tl.minimum(tl.maximum(y, -127.0), 127.0)
    code = (a + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2^23: the unit there is 1
    return tl.where(y != y, 0, code)


@triton.jit
def e2m1_code(y):
    """Return E2M1 codes 0..15 (int32); between two codes the even one owns the tie; NaN becomes 0."""
    bits = y.to(tl.int32, bitcast=True)
    a = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return tl.where(y != y, 0, code | ((bits >> 28) & 8))


@triton.jit
def bf16_round(y):
    """Round fp32 to bf16, nearest even."""
    bits = y.to(tl.int32, bitcast=True)
    high = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    high = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, high)
    return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def cast(y, DTYPE: tl.constexpr):
    """Convert fp32 to a plain type as the GPU does: nearest even, infinite beyond its range."""
    return y.to(DTYPE)


@triton.jit
def cast_interpreted(y, DTYPE: tl.constexpr):
    """The same in the interpreter, whose own cast to bf16 truncates."""
    if tl.bfloat16 == DTYPE:
        return bf16_round(y)
    return y.to(DTYPE)


@triton.jit
def rounded(y, DTYPE: tl.constexpr):
    """Round fp32 to a plain type, nearest even; finite values never become infinite."""
    finite = (y.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    if tl.bfloat16 == DTYPE:
        clamped = tl.minimum(tl.maximum(y, -3.3895313892515355e38), 3.3895313892515355e38)
        result = bf16_round(tl.where(finite, clamped, y))
    elif tl.float16 == DTYPE:
        clamped = tl.minimum(tl.maximum(y, -65504.0), 65504.0)
        result = tl.where(finite, clamped, y).to(tl.float16)
    else:
        result = y
    return result


# --- scales -------------------------------------------------------------------------------------------------


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x|: ordered as the values are, and at least 0x7F800000 for NaN and infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_from_bits(bits):
    """Return the largest magnitude in fp32: at most the largest bf16, NaN when it is not finite."""
    amax = tl.minimum(bits, 0x7F7F0000).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, amax, float("nan"))


@triton.jit
def divide(a, b):
    """Return fl32(a / b)."""
    return tl.div_rn(a.to(tl.float32), b.to(tl.float32))


@triton.jit
def scale_from_amax(amax, LARGEST: tl.constexpr):
    """Return max(amax / LARGEST, 2^-126); 0 where amax is 0, NaN where it is NaN."""
    s = divide(amax, amax * 0.0 + LARGEST)
    s = tl.where(s < 1.1754943508222875e-38, 1.1754943508222875e-38, s)
    return tl.where(amax == 0.0, 0.0, s)


@triton.jit
def reciprocal(s):
    """Return fl32(1 / s); 0 where s is 0."""
    safe = tl.where(s == 0.0, 1.0, s)
    return tl.where(s == 0.0, 0.0, divide(safe * 0.0 + 1.0, safe))


# --- storing a tile of vectors ------------------------------------------------------------------------------
# All take x [R, P] fp32 (zero beyond D), raw (x as it was loaded), rows [R] bool, cols [P], a pointer to the first
# container of every row in each plane [R], the constant scale, where to count what it loses (`Counts`), CODE (the
# element function) and BOUNDS (where the segments start, and D).


@triton.jit
def count(losses, saturated, flushed, nonfinite):
    """Add the numbers of true elements of three tiles to their counters, by one sum: a tile has fewer than 2^15."""
    packed = saturated.to(tl.int64) + (flushed.to(tl.int64) << 16) + (nonfinite.to(tl.int64) << 32)
    total = tl.sum(tl.sum(packed, 1), 0)
    if total != 0:
        tl.atomic_add(losses, total & 0xFFFF)
        tl.atomic_add(losses + 1, (total >> 16) & 0xFFFF)
        tl.atomic_add(losses + 2, total >> 32)


@triton.jit
def store_plain(
    x, raw, rows, cols, data, block_scale, scale, constant, losses, CODE: tl.constexpr, D: tl.constexpr,
    BOUNDS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, VECTOR_SCALE: tl.constexpr, HAS_NAN: tl.constexpr,
):  # fmt: skip
    """Store elements as they are, rounded to the plane's type."""
    keep = rows[:, None] & (cols < D)[None, :]
    if raw.dtype == data.dtype.element_ty:
        tl.store(data[:, None] + cols[None, :], raw, mask=keep)
    else:
        tl.store(data[:, None] + cols[None, :], rounded(x, data.dtype.element_ty), mask=keep)


@triton.jit
def store_constant(
    x, raw, rows, cols, data, block_scale, scale, constant, losses, CODE: tl.constexpr, D: tl.constexpr,
    BOUNDS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, VECTOR_SCALE: tl.constexpr, HAS_NAN: tl.constexpr,
):  # fmt: skip
    """Store 8-bit codes of a constant scale; what is not finite becomes the code of NaN, alone."""
    keep = rows[:, None] & (cols < D)[None, :]
    y = x * reciprocal(constant)
    finite = magnitude_bits(x) < 0x7F800000
    codes = CODE(tl.where(finite, y, float("nan")))
    flushed = keep & finite & (x != 0.0) & ((codes & 0x7F) == 0)
    count(losses, keep & finite & (tl.abs(y) > LARGEST), flushed, keep & (not HAS_NAN) & (finite == 0))
    tl.store(data[:, None] + cols[None, :], codes.to(data.dtype.element_ty), mask=keep)


@triton.jit
def store_scaled(
    x, raw, rows, cols, data, block_scale, scale, constant, losses, CODE: tl.constexpr, D: tl.constexpr,
    BOUNDS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, VECTOR_SCALE: tl.constexpr, HAS_NAN: tl.constexpr,
):  # fmt: skip
    """Store 8-bit codes, with one fp32 scale a segment."""
    keep = rows[:, None] & (cols < D)[None, :]
    bits = magnitude_bits(x)
    factor = x * 0.0
    stored = bits < 0
    for i in tl.static_range(len(BOUNDS) - 1):
        inside = (cols >= BOUNDS[i]) & (cols < BOUNDS[i + 1])
        s = scale_from_amax(amax_from_bits(tl.max(tl.where(inside[None, :], bits, 0), 1)), LARGEST)
        good = s > 0.0
        inverse = reciprocal(tl.where(good, s, 0.0))
        factor = tl.where(inside[None, :], inverse[:, None], factor)
        stored = stored | (inside[None, :] & good[:, None])
        tl.store(scale + i, s, mask=rows)
    y = tl.where(stored, x * factor, 0.0)
    tl.store(data[:, None] + cols[None, :], CODE(y).to(data.dtype.element_ty), mask=keep)


@triton.jit
def store_packed(codes, rows, cols, data, D: tl.constexpr):
    """Store 4-bit codes `[R, P]`, element 2i in the low nibble."""
    R: tl.constexpr = codes.shape[0]
    P: tl.constexpr = codes.shape[1]
    low, high = tl.split(tl.reshape(codes, (R, P // 2, 2)))
    half = tl.arange(0, P // 2)
    keep = rows[:, None] & (half < D // 2)[None, :]
    tl.store(data[:, None] + half[None, :], (low | (high << 4)).to(tl.uint8), mask=keep)


@triton.jit
def store_nvfp4(
    x, raw, rows, cols, data, block_scale, scale, constant, losses, CODE: tl.constexpr, D: tl.constexpr,
    BOUNDS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, VECTOR_SCALE: tl.constexpr, HAS_NAN: tl.constexpr,
):  # fmt: skip
    """Store E2M1 codes with an E4M3 scale a block, for a decode scale that is constant or the vector's own."""
    R: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, (R, P // BLOCK, BLOCK))
    amax = amax_from_bits(tl.max(magnitude_bits(blocks), 2))  # [R, P / BLOCK]
    if VECTOR_SCALE:
        g = divide(tl.max(tl.where(amax == amax, amax, 0.0), 1), tl.full((R,), 2688.0, tl.float32))
        g = tl.where(g < 1.1754943508222875e-38, 1.1754943508222875e-38, g)
        tl.store(scale, g, mask=rows)
        g = g[:, None] + amax * 0.0
    else:
        g = constant + amax * 0.0
    g = tl.where(amax == amax, g, 1.0)
    wanted = divide(amax, g * 6.0)
    block_code = e4m3_code(wanted)
    s = e4m3_value(block_code.to(tl.uint8), 0).to(tl.float32) * g
    good = s >= 1.1754943508222875e-38
    inverse = reciprocal(tl.where(good, s, 0.0))
    y = tl.where(good[:, :, None], blocks * inverse[:, :, None], 0.0)
    if not VECTOR_SCALE:
        real = rows[:, None] & (cols < D)[None, :]
        beyond = (good & (wanted > 448.0))[:, :, None] & (tl.abs(y) > 6.0)
        gone = (~good & (amax == amax))[:, :, None] & (blocks != 0.0)
        count(losses, real & tl.reshape(beyond, (R, P)), real & tl.reshape(gone, (R, P)), real & False)
    index = tl.arange(0, P // BLOCK)
    keep = rows[:, None] & (index < D // BLOCK)[None, :]
    tl.store(block_scale[:, None] + index[None, :], block_code.to(tl.uint8), mask=keep)
    store_packed(tl.reshape(CODE(y), (R, P)), rows, cols, data, D)


@triton.jit
def store_mxfp4(
    x, raw, rows, cols, data, block_scale, scale, constant, losses, CODE: tl.constexpr, D: tl.constexpr,
    BOUNDS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, VECTOR_SCALE: tl.constexpr, HAS_NAN: tl.constexpr,
):  # fmt: skip
    """Store E2M1 codes with the least power of two that is not below amax / 6, a block."""
    R: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, (R, P // BLOCK, BLOCK))
    s = scale_from_amax(amax_from_bits(tl.max(magnitude_bits(blocks), 2)), LARGEST)
    bits = s.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    exponent = tl.where(s == 0.0, 0, tl.where(s != s, 255, exponent))
    power = tl.where(s > 0.0, ue8m0_value(exponent, 0), 0.0)
    y = blocks * reciprocal(power)[:, :, None]
    # 4 * 2^126 is beyond fp32: the largest finite code there is 3.
    largest = tl.where(exponent < 253, 6.0, 3.0)[:, :, None]
    y = tl.where((power > 0.0)[:, :, None], tl.minimum(tl.maximum(y, -largest), largest), 0.0)
    index = tl.arange(0, P // BLOCK)
    keep = rows[:, None] & (index < D // BLOCK)[None, :]
    tl.store(block_scale[:, None] + index[None, :], exponent.to(tl.uint8), mask=keep)
    store_packed(tl.reshape(CODE(y), (R, P)), rows, cols, data, D)
