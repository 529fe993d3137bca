"""The stored formats once more, from the text of their definitions: plain numpy, element tables, no torch.

Slow and literal on purpose. `encode(name, x, scale)` returns the planes DESIGN section 7 asks for; every operation in
fp32 is one numpy operation on float32 arrays, and a code is found by looking for the nearest value in float64.
"""

from __future__ import annotations

import numpy as np

F32 = np.float32
LARGEST_AMAX = F32(2.0**128 - 2.0**120)
SMALLEST = F32(2.0**-126)
BAD_SCALE = np.array(0x7FC00000, np.uint32).view(F32)


def float_values(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Values of the positive codes of a sign-exponent-mantissa format, by code, without special codes."""
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    e, m = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = m / (1 << mantissa_bits)
    return np.where(e == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (e - bias))


#: Positive finite values by code: E4M3 has no infinity and one NaN at the top; E5M2 keeps IEEE's top exponent.
E4M3 = float_values(4, 3, 7)[:0x7F]
E5M2 = float_values(5, 2, 15)[:0x7C]
E2M1 = float_values(2, 1, 1)
INT8 = np.arange(128.0)


def nearest(y: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Code of the value nearest to |y|, the even code of two at the same distance, the last one beyond the range."""
    a = np.abs(y.astype(np.float64)).clip(max=values[-1])
    above = np.searchsorted(values, a).clip(1, len(values) - 1)
    below = above - 1
    up, down = values[above] - a, a - values[below]
    take_up = (up < down) | ((up == down) & (above % 2 == 0))
    return np.where(take_up, above, below)


def signed(y: np.ndarray, values: np.ndarray, sign: int) -> np.ndarray:
    return (nearest(y, values) | np.where(np.signbit(y), sign, 0)).astype(np.uint8)


def pack(codes: np.ndarray) -> np.ndarray:
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // 2), np.uint8)
    for i in range(out.shape[-1]):
        out[..., i] = codes[..., 2 * i] | codes[..., 2 * i + 1] << 4
    return out


def bf16(x: np.ndarray) -> np.ndarray:
    """Round fp32 to bf16 codes (uint16), to nearest even, never to infinity from a finite value."""
    bits = x.astype(F32).view(np.uint32).astype(np.uint64)
    codes = ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    over = np.isfinite(x) & (codes & 0x7FFF == 0x7F80)
    return np.where(np.isnan(x), 0x7FC0, np.where(over, codes - 1, codes)).astype(np.uint16)


def amax_of(x: np.ndarray) -> np.ndarray:
    a = np.abs(x).max(-1)
    return np.where(np.isfinite(a), np.minimum(a, LARGEST_AMAX), F32(np.nan)).astype(F32)


def per_segment(x: np.ndarray, segments: tuple[int, ...], q: float, values: np.ndarray) -> dict[str, np.ndarray]:
    """E4M3 or int8 codes with one scale a segment."""
    codes, scales, begin = [], [], 0
    for length in segments:
        part = x[..., begin : begin + length]
        begin += length
        amax = amax_of(part)
        s = np.maximum(amax / F32(q), SMALLEST)
        y = part * (F32(1) / s)[..., None]
        if values is INT8:
            c = (nearest(y, values) * np.where(np.signbit(y), -1, 1)).astype(np.int8)
        else:
            c = signed(y, values, 0x80)
        good = np.isfinite(amax) & (amax > 0)
        codes.append(np.where(good[..., None], c, 0).astype(c.dtype))
        scales.append(np.where(np.isnan(amax), BAD_SCALE, np.where(amax == 0, F32(0), s)).astype(F32))
    return {"data": np.concatenate(codes, -1), "scale": np.stack(scales, -1) if len(segments) > 1 else scales[0]}


def constant(x: np.ndarray, scale: float, values: np.ndarray) -> dict[str, np.ndarray]:
    """8-bit codes of one constant scale."""
    finite = np.isfinite(x)
    y = np.where(finite, x, 0).astype(F32) * (F32(1) / F32(scale))
    if values is INT8:
        return {"data": np.where(finite, nearest(y, values) * np.where(np.signbit(y), -1, 1), 0).astype(np.int8)}
    return {"data": np.where(finite, signed(y, values, 0x80), 0x7F).astype(np.uint8)}


def nvfp4(x: np.ndarray, g: np.ndarray) -> dict[str, np.ndarray]:
    """E2M1 codes, E4M3 block scales for a decode scale g of `[...]`."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    amax = amax_of(blocks)
    g = np.broadcast_to(g[..., None], amax.shape).astype(F32)
    wanted = amax / (F32(6) * g)
    code = np.where(np.isnan(amax), 0x7F, nearest(np.where(np.isnan(amax), 0, wanted), E4M3)).astype(np.uint8)
    s = (E4M3[np.minimum(code, 0x7E)].astype(F32) * g).astype(F32)
    kept = np.isfinite(amax) & (code != 0) & (s >= SMALLEST)
    y = np.where(kept[..., None], blocks * (F32(1) / s)[..., None], F32(0))
    codes = np.where(kept[..., None], signed(y, E2M1, 8), 0).astype(np.uint8)
    return {"data": pack(codes.reshape(x.shape)), "block_scale": code}


def nvfp4_token(x: np.ndarray) -> dict[str, np.ndarray]:
    amax = amax_of(x.reshape(*x.shape[:-1], -1, 16))
    g = np.maximum(np.where(np.isnan(amax), F32(0), amax).max(-1) / F32(2688), SMALLEST).astype(F32)
    return {**nvfp4(x, g), "scale": g}


def index_fp4(x: np.ndarray) -> dict[str, np.ndarray]:
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    amax = amax_of(blocks)
    wanted = np.maximum(amax / F32(6), SMALLEST).astype(np.float64)
    good = np.isfinite(amax) & (amax > 0)
    exponent = np.ceil(np.log2(np.where(good, wanted, 1.0))).astype(np.int64)
    y = blocks * (2.0 ** -exponent.astype(np.float64)).astype(F32)[..., None]
    limit = np.where(exponent == 126, 3.0, 6.0)[..., None]
    codes = signed(np.clip(np.where(good[..., None], y, 0), -limit, limit), E2M1, 8)
    codes = np.where(good[..., None], codes, 0).astype(np.uint8)
    e = np.where(np.isnan(amax), 255, np.where(amax == 0, 0, exponent + 127)).astype(np.uint8)
    return {"data": pack(codes.reshape(x.shape)), "block_scale": e}


def encode(name: str, x: np.ndarray, segments: tuple[int, ...], scale: float | None = None) -> dict[str, np.ndarray]:
    """Return the planes of fp32 vectors `[..., D]` in the format `name`."""
    x = np.asarray(x, F32)
    with np.errstate(all="ignore"):
        if name == "fp32":
            return {"data": x}
        if name == "fp16":
            largest = F32(65504)
            return {"data": np.where(np.isfinite(x), x.clip(-largest, largest), x).astype(np.float16)}
        if name == "bf16":
            return {"data": bf16(x)}
        if name in ("fp8", "index-fp8"):
            return per_segment(x, segments, 448, E4M3)
        if name == "int8":
            return per_segment(x, segments, 127, INT8)
        if name == "nvfp4-token":
            return nvfp4_token(x)
        if name == "index-fp4":
            return index_fp4(x)
        assert scale is not None
        if name == "nvfp4":
            return nvfp4(x, np.full(x.shape[:-1], scale, F32))
        return constant(x, scale, {"fp8-tensor": E4M3, "fp8e5m2-tensor": E5M2, "int8-tensor": INT8}[name])


def hadamard(x: np.ndarray, block: int) -> np.ndarray:
    """Normalised Walsh-Hadamard transform of blocks of the last axis, butterflies from stride 1 up, in fp32."""
    out = x.astype(F32).reshape(-1, block)
    stride = 1
    while stride < block:
        new = out.copy()
        for i in range(block):
            if not i & stride:
                new[:, i] = out[:, i] + out[:, i + stride]
                new[:, i + stride] = out[:, i] - out[:, i + stride]
        out, stride = new, stride * 2
    return (out * F32(block**-0.5)).reshape(x.shape)


def multiplied(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """`x M` of each head, products rounded to fp32 and added channel after channel: `[T, H, D]`, `[H, D, D]`."""
    out = np.zeros_like(x, F32)
    for h in range(x.shape[1]):
        out[:, h] = x[:, h, :1] * matrix[h, :1]
        for i in range(1, x.shape[-1]):
            out[:, h] += x[:, h, i : i + 1] * matrix[h, i]
    return out


def mapped(x: np.ndarray, smoothing: np.ndarray | None, block: int) -> np.ndarray:
    """What is stored of x with smoothing and rotation."""
    x = np.asarray(x, F32)
    x = np.where(np.isfinite(x), x.clip(-F32(2.0**90), F32(2.0**90)), x)
    if smoothing is not None:
        x = (x / smoothing.astype(F32)).astype(F32)
    return hadamard(x, block) if block else x
