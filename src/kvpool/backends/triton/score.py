# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton concatenates tuples; it does not unpack them)
"""Indexer scores of sparse attention: how much each token matters to a row, before any softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpool.backends.triton.tiles import load_values, vector_offsets


@triton.jit
def score_kernel(
    q, weights, scores, items, cu_seqlens, seq_lens, table, k_data, k_block, k_scale, constant,
    q_stride_t, q_stride_h, weights_stride, scores_stride, table_stride,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr, K_COUNT: tl.constexpr, K_WIDTH: tl.constexpr, K_PIECES: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
    K_VALUE: tl.constexpr, K_BLOCK_VALUE: tl.constexpr, K_PACKED: tl.constexpr, K_BLOCK: tl.constexpr,
    K_SCALES: tl.constexpr,
    K_DATA_B: tl.constexpr, K_DATA_H: tl.constexpr, K_DATA_N: tl.constexpr,
    K_BLOCK_B: tl.constexpr, K_BLOCK_H: tl.constexpr, K_BLOCK_N: tl.constexpr,
    K_SCALE_B: tl.constexpr, K_SCALE_H: tl.constexpr, K_SCALE_N: tl.constexpr,
):  # fmt: skip
    """Write `sum over h of w[t, h] * relu(q[t, h] . k[j])` for the tokens `j` that row `t` sees.

    Args:
        q: `[T, Hi, Di]`.
        weights: `[T, Hi]` fp32.
        scores: `[T, M]` fp32; tokens a row does not see are left as they are.
        items: `[I, 5]` int32 as of the attention kernel; ranges are never joined.
    """
    item = items + tl.program_id(0).to(tl.int64) * 5
    sequence = tl.load(item).to(tl.int64)
    if sequence < 0:
        return
    tile = tl.load(item + 1)
    kv_start = tl.load(item + 2)
    kv_stop = tl.load(item + 3)
    first_row = tl.load(cu_seqlens + sequence)
    num_rows = tl.load(cu_seqlens + sequence + 1) - first_row
    length = tl.load(seq_lens + sequence)
    row = tl.arange(0, TILE_TOKENS * TILE_HEADS)
    row_token = tile * TILE_TOKENS + row // TILE_HEADS
    head = row % TILE_HEADS
    row_ok = (row_token < num_rows) & (head < Q_HEADS)
    token = (first_row + row_token).to(tl.int64)
    q_row = q + token * q_stride_t + head.to(tl.int64) * q_stride_h
    queries = ()
    for i in tl.static_range(K_PIECES):
        column = i * K_WIDTH + tl.arange(0, K_WIDTH)
        keep = row_ok[:, None] & (column < K_COUNT)[None, :]
        queries = queries + (tl.load(q_row[:, None] + column[None, :], mask=keep, other=0.0).to(DTYPE),)
    weight = tl.load(weights + token * weights_stride + head, mask=row_ok, other=0.0).to(tl.float32) * constant
    tile_token = tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    position = length - num_rows + tile_token
    for start in range(kv_start, kv_stop, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        held = j < kv_stop
        block = tl.load(table + sequence * table_stride + j // TOKENS_PER_BLOCK, mask=held, other=-1)
        held = held & (block >= 0)
        block = tl.maximum(block, 0)
        inside = j % TOKENS_PER_BLOCK
        zero = j * 0
        k_offset = vector_offsets(block, inside, zero, K_DATA_B, K_DATA_H, K_DATA_N)
        k_block_offset = vector_offsets(block, inside, zero, K_BLOCK_B, K_BLOCK_H, K_BLOCK_N)
        offset = vector_offsets(block, inside, zero, K_SCALE_B, K_SCALE_H, K_SCALE_N)
        dots = tl.zeros((TILE_TOKENS * TILE_HEADS, BLOCK_N), tl.float32)
        for i in tl.static_range(K_PIECES):
            k = load_values(
                k_data, k_block, k_offset, k_block_offset, held, K_VALUE, K_BLOCK_VALUE, K_PACKED, K_BLOCK,
                i * K_WIDTH, K_COUNT - i * K_WIDTH, K_WIDTH, HARDWARE,
            ).to(DTYPE)  # fmt: skip
            if K_SCALES > 1:
                part = tl.dot(queries[i], tl.trans(k), input_precision=PRECISION)
                dots += part * tl.load(k_scale + offset + i, mask=held, other=0.0)[None, :]
            else:
                dots = tl.dot(queries[i], tl.trans(k), dots, input_precision=PRECISION)
        dots = tl.maximum(dots, 0.0) * weight[:, None]
        summed = tl.sum(tl.reshape(dots, (TILE_TOKENS, TILE_HEADS, BLOCK_N)), 1)
        if K_SCALES == 1:
            summed = summed * tl.load(k_scale + offset, mask=held, other=0.0)[None, :]
        seen = (tile_token < num_rows)[:, None] & held[None, :] & (j[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & ((j[None, :] > position[:, None] - WINDOW) | (j < SINK_TOKENS)[None, :])
        if CHUNK > 0:
            seen = seen & (j[None, :] >= (position // CHUNK * CHUNK)[:, None])
        where = (first_row + tile_token).to(tl.int64) * scores_stride
        tl.store(scores + where[:, None] + j[None, :], summed, mask=seen)
