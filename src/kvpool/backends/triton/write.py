# mypy: ignore-errors
"""Kernels that store vectors, read them back, and turn one stored format into another."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpool.backends.triton.tiles import load_decoded, vector_offsets
from kvpool.codecs.jit import widened


@triton.jit
def write_kernel(
    x, slots, data, block_scale, scale, constant, losses, num_tokens, x_stride_t, x_stride_h,
    STORE: tl.constexpr, CODE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BOUNDS: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr, VECTOR_SCALE: tl.constexpr, HAS_NAN: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr, NUM_HEADS: tl.constexpr, ROWS: tl.constexpr,
    DATA_B: tl.constexpr, DATA_H: tl.constexpr, DATA_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALE_B: tl.constexpr, SCALE_H: tl.constexpr, SCALE_N: tl.constexpr,
):  # fmt: skip
    """Encode `x [T, H, D]` into `slots [T]`; a program takes ROWS (token, head) pairs, heads of a token adjacent."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    keep = slot >= 0
    block = tl.where(keep, slot // TOKENS_PER_BLOCK, 0)
    inside = tl.where(keep, slot % TOKENS_PER_BLOCK, 0)
    column = tl.arange(0, WIDTH)
    loaded = keep[:, None] & (column < D)[None, :]
    raw = tl.load(x + (token * x_stride_t + head * x_stride_h)[:, None] + column[None, :], mask=loaded, other=0.0)
    STORE(
        widened(raw),
        raw,
        keep,
        column,
        data + vector_offsets(block, inside, head, DATA_B, DATA_H, DATA_N),
        block_scale + vector_offsets(block, inside, head, BLOCK_B, BLOCK_H, BLOCK_N),
        scale + vector_offsets(block, inside, head, SCALE_B, SCALE_H, SCALE_N),
        constant,
        losses,
        CODE, D, BOUNDS, LARGEST, BLOCK, VECTOR_SCALE, HAS_NAN,
    )  # fmt: skip


@triton.jit
def read_kernel(
    out, slots, data, block_scale, scale, constant, num_tokens, out_stride_t, out_stride_h,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR_SCALE: tl.constexpr, CONSTANT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BOUNDS: tl.constexpr,
    CAST: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, NUM_HEADS: tl.constexpr, ROWS: tl.constexpr,
    HARDWARE: tl.constexpr,
    DATA_B: tl.constexpr, DATA_H: tl.constexpr, DATA_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALE_B: tl.constexpr, SCALE_H: tl.constexpr, SCALE_N: tl.constexpr,
):  # fmt: skip
    """Decode the vectors at `slots [T]` into `out [T, H, D]`; a slot of -1 gives zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    real = token < num_tokens
    slot = tl.load(slots + token, mask=real, other=-1)
    held = slot >= 0
    block = tl.where(held, slot // TOKENS_PER_BLOCK, 0)
    inside = tl.where(held, slot % TOKENS_PER_BLOCK, 0)
    values = load_decoded(
        data, block_scale, scale,
        vector_offsets(block, inside, head, DATA_B, DATA_H, DATA_N),
        vector_offsets(block, inside, head, BLOCK_B, BLOCK_H, BLOCK_N),
        vector_offsets(block, inside, head, SCALE_B, SCALE_H, SCALE_N),
        constant, held, VALUE, BLOCK_VALUE, PACKED, BLOCK, VECTOR_SCALE, CONSTANT, BOUNDS, D, WIDTH, HARDWARE,
    )  # fmt: skip
    column = tl.arange(0, WIDTH)
    keep = real[:, None] & (column < D)[None, :]
    target = out + (token * out_stride_t + head * out_stride_h)[:, None] + column[None, :]
    tl.store(target, CAST(tl.where(held[:, None], values, 0.0), out.dtype.element_ty), mask=keep)
