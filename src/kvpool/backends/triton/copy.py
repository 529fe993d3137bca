# mypy: ignore-errors
"""Kernels that copy bytes: whole blocks, and single tokens. No codec runs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_kernel(slab, pairs, BLOCK_WORDS: tl.constexpr, PITCH_WORDS: tl.constexpr, CHUNK: tl.constexpr):
    """Copy blocks `pairs [n, 2]` int64 (source, destination) of a slab of 8-byte words.

    The grid is (chunks of a block's piece, pairs, pieces of a block); a piece is PITCH_WORDS from the next.
    """
    word = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    source = tl.load(pairs + 2 * tl.program_id(1)).to(tl.int64)
    destination = tl.load(pairs + 2 * tl.program_id(1) + 1).to(tl.int64)
    piece = slab + tl.program_id(2).to(tl.int64) * PITCH_WORDS
    keep = word < BLOCK_WORDS
    words = tl.load(piece + source * BLOCK_WORDS + word, mask=keep)
    tl.store(piece + destination * BLOCK_WORDS + word, words, mask=keep)


@triton.jit
def move_kernel(
    plane, pairs, STRIDE_B: tl.constexpr, STRIDE_L: tl.constexpr, STRIDE_F: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_N: tl.constexpr, NUM_FACTORS: tl.constexpr, NUM_HEADS: tl.constexpr, COUNT: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one vector's containers from slot to slot; the grid is (pairs, layers * factors * heads)."""
    source = tl.load(pairs + 2 * tl.program_id(0)).to(tl.int64)
    destination = tl.load(pairs + 2 * tl.program_id(0) + 1).to(tl.int64)
    index = tl.program_id(1).to(tl.int64)
    inside = (
        index // (NUM_FACTORS * NUM_HEADS) * STRIDE_L
        + index // NUM_HEADS % NUM_FACTORS * STRIDE_F
        + index % NUM_HEADS * STRIDE_H
    )
    column = tl.arange(0, WIDTH)
    keep = column < COUNT
    start = plane + inside + source // TOKENS_PER_BLOCK * STRIDE_B + source % TOKENS_PER_BLOCK * STRIDE_N
    values = tl.load(start + column, mask=keep)
    start = plane + inside + destination // TOKENS_PER_BLOCK * STRIDE_B + destination % TOKENS_PER_BLOCK * STRIDE_N
    tl.store(start + column, values, mask=keep)
