# mypy: ignore-errors
"""Tiles of stored vectors: the one place where a kernel turns (block, token, head) into addresses and values."""

from __future__ import annotations

import triton
import triton.language as tl

#: How loads are cached: as usual; or in L2 alone, which makes a second load of the same bytes one of its own.
USUAL, AGAIN = tl.constexpr(""), tl.constexpr(".cg")


@triton.jit
def vector_offsets(block, inside, head, STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_N: tl.constexpr):
    """Return the offsets of vectors in containers, in 64 bits: a block's stride alone can be a megabyte."""
    return block.to(tl.int64) * STRIDE_B + head.to(tl.int64) * STRIDE_H + inside.to(tl.int64) * STRIDE_N


@triton.jit
def load_values(
    data, block_scale, data_offset, block_offset, rows,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, HARDWARE: tl.constexpr,
    CACHED: tl.constexpr = USUAL,
):  # fmt: skip
    """Return elements `[FIRST, FIRST + COUNT)` of vectors, without the scale of their segment or layer.

    Args:
        data: Plane of containers.
        block_scale: Plane of block scales; unused when BLOCK is 0.
        data_offset: `[N]` int64, first container of every vector.
        block_offset: `[N]` int64, first block scale of every vector.
        rows: `[N]` bool; others are not read and give zeros.
        COUNT: Elements wanted, as far as WIDTH goes; a multiple of BLOCK.
        WIDTH: Power of two they are padded to, with zeros.
        CACHED: `USUAL` or `AGAIN`.

    Returns:
        `[N, WIDTH]`, exact: in the codec's own float type, or fp32 when a block scale needs its range.
    """
    N: tl.constexpr = rows.shape[0]
    if PACKED:
        half = tl.arange(0, WIDTH // 2)
        keep = rows[:, None] & (half < COUNT // 2)[None, :]
        place = data + data_offset[:, None] + (FIRST // 2 + half)[None, :]
        pair = tl.load(place, mask=keep, other=0, cache_modifier=CACHED)
        values = tl.join(VALUE(pair & 15, HARDWARE), VALUE(pair >> 4, HARDWARE))  # [N, WIDTH / 2, 2]
        values = tl.reshape(values, (N, WIDTH))
    else:
        column = tl.arange(0, WIDTH)
        keep = rows[:, None]
        if COUNT < WIDTH:
            keep = keep & (column < COUNT)[None, :]
        place = data + data_offset[:, None] + (FIRST + column)[None, :]
        codes = tl.load(place, mask=keep, other=0, cache_modifier=CACHED)
        values = VALUE(codes, HARDWARE)
    if BLOCK > 0:
        index = tl.arange(0, WIDTH // BLOCK)
        keep = rows[:, None] & (index < COUNT // BLOCK)[None, :]
        place = block_scale + block_offset[:, None] + (FIRST // BLOCK + index)[None, :]
        factor = BLOCK_VALUE(tl.load(place, mask=keep, other=0, cache_modifier=CACHED), HARDWARE)
        blocks = tl.reshape(values, (N, WIDTH // BLOCK, BLOCK))
        if factor.dtype == tl.float32:
            blocks = blocks.to(tl.float32)
        values = tl.reshape(blocks * factor[:, :, None], (N, WIDTH))
    return values


@triton.jit
def load_decoded(
    data, block_scale, scale, data_offset, block_offset, scale_offset, constant, rows,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR_SCALE: tl.constexpr, CONSTANT: tl.constexpr, BOUNDS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return whole vectors in fp32 `[N, WIDTH]`, to the bit as the codec defines them."""
    N: tl.constexpr = rows.shape[0]
    column = tl.arange(0, WIDTH)
    if BLOCK > 0:
        # The block scale is multiplied by the vector's first, as the format says: fl32(e * fl32(bs * g)).
        values = load_values(
            data, block_scale, data_offset, block_offset, rows, VALUE, BLOCK_VALUE, PACKED, 0, 0, D, WIDTH, HARDWARE
        ).to(tl.float32)
        index = tl.arange(0, WIDTH // BLOCK)
        keep = rows[:, None] & (index < D // BLOCK)[None, :]
        codes = tl.load(block_scale + block_offset[:, None] + index[None, :], mask=keep, other=0)
        factor = BLOCK_VALUE(codes, HARDWARE).to(tl.float32)
        if CONSTANT:
            factor = factor * constant
        if VECTOR_SCALE:
            factor = factor * tl.load(scale + scale_offset, mask=rows, other=0.0)[:, None]
        return tl.reshape(tl.reshape(values, (N, WIDTH // BLOCK, BLOCK)) * factor[:, :, None], (N, WIDTH))
    values = load_values(
        data, block_scale, data_offset, block_offset, rows, VALUE, BLOCK_VALUE, PACKED, 0, 0, D, WIDTH, HARDWARE
    ).to(tl.float32)
    if CONSTANT:
        values = values * constant
    if VECTOR_SCALE:
        factor = values * 0.0
        for i in tl.static_range(len(BOUNDS) - 1):
            s = tl.load(scale + scale_offset + i, mask=rows, other=0.0)
            inside = (column >= BOUNDS[i]) & (column < BOUNDS[i + 1])
            factor = tl.where(inside[None, :], s[:, None], factor)
        values = values * factor
    return values
