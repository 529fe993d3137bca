# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton concatenates tuples; it does not unpack them)
"""Attention over paged vectors: one kernel for decode, prefill, latents and sparse slots, and the merge of its splits.

A program takes one work item (a sequence, a tile of its rows, a range of its tokens) for one tile of query heads of one
KV head. The rows of a tile are (token, head) pairs, so that grouped heads fill tensor-core tiles. K's codec drives the
score stage and V's the accumulate stage; neither knows the other.

A key is some pieces of equal width, each with its scale, and perhaps a rest (the rope part of a latent; what a head
size has beyond a power of two), read from the same part or from another. With SHARED_V its pieces are the value: those
stored in bytes are loaded once for each of the two products, since no tile of bytes can be laid out for both, and only
what is laid out for one is loaded ahead of its turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvpool.backends.triton.tiles import AGAIN, load_values, vector_offsets

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_kernel(
    q, out, lse, partial, partial_lse, items, cu_seqlens, seq_lens, table, indices, tree, sinks,
    k_data, k_block, k_scale, r_data, r_block, r_scale, v_data, v_block, v_scale,
    logit_scale, softcap, r_factor, v_constant,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, table_stride, indices_stride, tree_stride,
    # what is asked
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, SPARSE: tl.constexpr, TREE: tl.constexpr,
    # shapes
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    K_COUNT: tl.constexpr, K_WIDTH: tl.constexpr, K_PIECES: tl.constexpr,
    R_FIRST: tl.constexpr, R_COUNT: tl.constexpr, R_WIDTH: tl.constexpr,
    V_COUNT: tl.constexpr, V_WIDTH: tl.constexpr, V_PIECES: tl.constexpr, V_TOTAL: tl.constexpr, SHARED_V: tl.constexpr,
    DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, PRECISION: tl.constexpr, CAST: tl.constexpr,
    HARDWARE: tl.constexpr,
    # codecs: SCALES is 0 without scales in memory, 1 for one of all pieces, else one for every SCALED pieces
    K_VALUE: tl.constexpr, K_BLOCK_VALUE: tl.constexpr, K_PACKED: tl.constexpr, K_BLOCK: tl.constexpr,
    K_SCALES: tl.constexpr, K_SCALED: tl.constexpr,
    R_VALUE: tl.constexpr, R_BLOCK_VALUE: tl.constexpr, R_PACKED: tl.constexpr, R_BLOCK: tl.constexpr,
    R_SCALES: tl.constexpr, R_SCALE_FIRST: tl.constexpr,
    V_VALUE: tl.constexpr, V_BLOCK_VALUE: tl.constexpr, V_PACKED: tl.constexpr, V_BLOCK: tl.constexpr,
    V_SCALES: tl.constexpr,
    # strides in containers
    K_DATA_B: tl.constexpr, K_DATA_H: tl.constexpr, K_DATA_N: tl.constexpr,
    K_BLOCK_B: tl.constexpr, K_BLOCK_H: tl.constexpr, K_BLOCK_N: tl.constexpr,
    K_SCALE_B: tl.constexpr, K_SCALE_H: tl.constexpr, K_SCALE_N: tl.constexpr,
    R_DATA_B: tl.constexpr, R_DATA_H: tl.constexpr, R_DATA_N: tl.constexpr,
    R_BLOCK_B: tl.constexpr, R_BLOCK_H: tl.constexpr, R_BLOCK_N: tl.constexpr,
    R_SCALE_B: tl.constexpr, R_SCALE_H: tl.constexpr, R_SCALE_N: tl.constexpr,
    V_DATA_B: tl.constexpr, V_DATA_H: tl.constexpr, V_DATA_N: tl.constexpr,
    V_BLOCK_B: tl.constexpr, V_BLOCK_H: tl.constexpr, V_BLOCK_N: tl.constexpr,
    V_SCALE_B: tl.constexpr, V_SCALE_H: tl.constexpr, V_SCALE_N: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of rows to one range of tokens.

    Args:
        q: `[T, Q, D]`.
        out: `[T, Q, Dv]`, written where a tile has one range.
        lse: `[T, Q]` fp32, natural logarithm.
        partial: `[slots, H * head tiles, BLOCK_M, V_TOTAL]` fp32, written where a tile has several ranges.
        partial_lse: `[slots, H * head tiles, BLOCK_M]` fp32, base 2.
        items: `[I, 5]` int32: sequence (-1: nothing to do), tile, first token, end, slot of `partial` or -1.
        logit_scale: Factor on `q . k`, K's constant scale included.
        r_factor: Constant scale of the second piece over the first's.
        v_constant: Constant scale of V.
    """
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    TWICE: tl.constexpr = SHARED_V and K_BLOCK == 0 and k_data.dtype.element_ty.primitive_bitwidth == 8
    item = items + (tl.program_id(0) // (NUM_HEADS * HEAD_TILES)).to(tl.int64) * 5
    sequence = tl.load(item).to(tl.int64)
    if sequence < 0:
        return
    head_tile = tl.program_id(0) % (NUM_HEADS * HEAD_TILES)
    tile = tl.load(item + 1)
    kv_start = tl.load(item + 2)
    kv_stop = tl.load(item + 3)
    if not SHARED_V:
        slot = tl.load(item + 4).to(tl.int64)
    head = head_tile // HEAD_TILES
    first_row = tl.load(cu_seqlens + sequence)
    num_rows = tl.load(cu_seqlens + sequence + 1) - first_row
    length = tl.load(seq_lens + sequence)
    drafts = length - num_rows

    row = tl.arange(0, BLOCK_M)
    row_token = tile * TILE_TOKENS + row // TILE_HEADS
    row_head = (head_tile % HEAD_TILES) * TILE_HEADS + row % TILE_HEADS
    row_ok = (row // TILE_HEADS < TILE_TOKENS) & (row_token < num_rows) & (row_head < GROUP)
    position = drafts + row_token
    token = (first_row + row_token).to(tl.int64)
    query_head = head * GROUP + row_head
    # The least position any row of the tile sees: below it nothing may be read, though its block may be held.
    lowest = 0
    tile_position = drafts + tile * TILE_TOKENS
    if WINDOW > 0:
        lowest = tile_position - WINDOW + 1
    if CHUNK > 0:
        lowest = tile_position // CHUNK * CHUNK

    q_row = q + token * q_stride_t + query_head.to(tl.int64) * q_stride_h
    queries = ()
    for i in tl.static_range(K_PIECES):
        column = i * K_WIDTH + tl.arange(0, K_WIDTH)
        keep = row_ok[:, None] & (column < K_COUNT)[None, :]
        queries = queries + (tl.load(q_row[:, None] + column[None, :], mask=keep, other=0.0).to(DTYPE),)
    if R_COUNT > 0:
        column = tl.arange(0, R_WIDTH)
        keep = row_ok[:, None] & (column < R_COUNT)[None, :]
        rest = tl.load(q_row[:, None] + (K_COUNT + column)[None, :], mask=keep, other=0.0).to(DTYPE)

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # base 2
    total = tl.zeros((BLOCK_M,), tl.float32)
    accs = ()
    for _ in tl.static_range(V_PIECES):
        accs = accs + (tl.zeros((BLOCK_M, V_WIDTH), tl.float32),)
    for start in range(kv_start, kv_stop, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        held = j < kv_stop
        if SPARSE:
            kv_slot = tl.load(indices + (first_row + tile).to(tl.int64) * indices_stride + j, mask=held, other=-1)
            held = kv_slot >= 0
            kv_slot = tl.where(held, kv_slot, 0)
            block = (kv_slot // TOKENS_PER_BLOCK).to(tl.int32)
            inside = (kv_slot % TOKENS_PER_BLOCK).to(tl.int32)
        else:
            if WINDOW > 0:
                held = held & ((j >= lowest) | (j < SINK_TOKENS))
            if CHUNK > 0:
                held = held & (j >= lowest)
            entry = table + sequence * table_stride
            if TOKENS_PER_BLOCK >= BLOCK_N:
                block = tl.load(entry + start // TOKENS_PER_BLOCK)  # one block holds the whole tile
                inside = start % TOKENS_PER_BLOCK + tl.arange(0, BLOCK_N)
            else:
                block = tl.load(entry + j // TOKENS_PER_BLOCK, mask=held, other=-1)
                inside = j % TOKENS_PER_BLOCK
            held = held & (block + tl.zeros((BLOCK_N,), tl.int32) >= 0)
            block = tl.maximum(block, 0)

        # --- scores: K's codec
        k_offset = vector_offsets(block, inside, head, K_DATA_B, K_DATA_H, K_DATA_N)
        k_block_offset = vector_offsets(block, inside, head, K_BLOCK_B, K_BLOCK_H, K_BLOCK_N)
        k_scale_offset = vector_offsets(block, inside, head, K_SCALE_B, K_SCALE_H, K_SCALE_N)
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        keys = ()
        for i in tl.static_range(K_PIECES):
            k_tile = load_values(
                k_data, k_block, k_offset, k_block_offset, held, K_VALUE, K_BLOCK_VALUE, K_PACKED, K_BLOCK,
                i * K_WIDTH, K_COUNT - i * K_WIDTH, K_WIDTH, HARDWARE,
            ).to(DTYPE)  # fmt: skip
            if K_SCALES > 1:
                dots = tl.dot(queries[i], tl.trans(k_tile), input_precision=PRECISION)
                scores += dots * tl.load(k_scale + k_scale_offset + i // K_SCALED, mask=held, other=0.0)[None, :]
            else:
                scores = tl.dot(queries[i], tl.trans(k_tile), scores, input_precision=PRECISION)
            if SHARED_V and not TWICE:
                keys = keys + (k_tile,)
        if K_SCALES == 1:
            scores = scores * tl.load(k_scale + k_scale_offset, mask=held, other=0.0)[None, :]
        if R_COUNT > 0:
            r_tile = load_values(
                r_data, r_block, vector_offsets(block, inside, head, R_DATA_B, R_DATA_H, R_DATA_N),
                vector_offsets(block, inside, head, R_BLOCK_B, R_BLOCK_H, R_BLOCK_N), held,
                R_VALUE, R_BLOCK_VALUE, R_PACKED, R_BLOCK, R_FIRST, R_COUNT, R_WIDTH, HARDWARE,
            ).to(DTYPE)  # fmt: skip
            dots = tl.dot(rest, tl.trans(r_tile), input_precision=PRECISION)
            if R_SCALES > 0:
                r_offset = vector_offsets(block, inside, head, R_SCALE_B, R_SCALE_H, R_SCALE_N)
                dots = dots * tl.load(r_scale + r_offset + R_SCALE_FIRST, mask=held, other=0.0)[None, :]
            scores += dots * r_factor

        # --- online softmax
        scores = scores * logit_scale
        if SOFTCAP:
            x = scores / softcap
            power = tl.exp2(tl.minimum(x * (2.0 * LOG2E), 120.0))  # e^2x, kept finite
            scores = softcap * (1.0 - 2.0 / (power + 1.0))  # tanh
        seen = row_ok[:, None] & held[None, :]
        if not SPARSE:
            seen = seen & (j[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & ((j[None, :] > position[:, None] - WINDOW) | (j < SINK_TOKENS)[None, :])
            if CHUNK > 0:
                seen = seen & (j[None, :] >= (position // CHUNK * CHUNK)[:, None])
        if TREE:
            draft = j - drafts
            word = tl.load(
                tree + token[:, None] * tree_stride + (draft // 64)[None, :],
                mask=seen & (draft >= 0)[None, :], other=-1,
            )  # fmt: skip
            seen = seen & (((word >> (draft % 64)[None, :].to(tl.int64)) & 1) != 0)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(maximum - reference)
        total = total * decay + tl.sum(p, 1)
        maximum = new_maximum

        # --- weighted sum: V's codec
        if SHARED_V and K_SCALES == 1:
            p = p * tl.load(k_scale + k_scale_offset, mask=held, other=0.0)[None, :]
        if V_SCALES > 0:
            v_scale_offset = vector_offsets(block, inside, head, V_SCALE_B, V_SCALE_H, V_SCALE_N)
            p = p * tl.load(v_scale + v_scale_offset, mask=held, other=0.0)[None, :]
        summed = ()
        for i in tl.static_range(V_PIECES):
            weights = p
            if SHARED_V:
                if K_SCALES > 1:
                    weights = p * tl.load(k_scale + k_scale_offset + i // K_SCALED, mask=held, other=0.0)[None, :]
                if TWICE:
                    v_tile = load_values(
                        k_data, k_block, k_offset, k_block_offset, held, K_VALUE, K_BLOCK_VALUE, K_PACKED, K_BLOCK,
                        i * K_WIDTH, K_COUNT - i * K_WIDTH, K_WIDTH, HARDWARE, AGAIN,
                    ).to(V_DTYPE)  # fmt: skip
                else:
                    v_tile = keys[i].to(V_DTYPE)
            else:
                v_tile = load_values(
                    v_data, v_block, vector_offsets(block, inside, head, V_DATA_B, V_DATA_H, V_DATA_N),
                    vector_offsets(block, inside, head, V_BLOCK_B, V_BLOCK_H, V_BLOCK_N), held,
                    V_VALUE, V_BLOCK_VALUE, V_PACKED, V_BLOCK,
                    i * V_WIDTH, V_COUNT - i * V_WIDTH, V_WIDTH, HARDWARE,
                ).to(V_DTYPE)  # fmt: skip
            piece = tl.dot(CAST(weights, V_DTYPE), v_tile, accs[i] * decay[:, None], input_precision=PRECISION)
            summed = summed + (piece,)
        accs = summed

    if SHARED_V:  # not before, as latents leave the loop no register for it
        slot = tl.load(item + 4).to(tl.int64)
    for i in tl.static_range(V_PIECES):
        column = i * V_WIDTH + tl.arange(0, V_WIDTH)
        acc = accs[i] * v_constant
        if slot >= 0:
            where = (slot * (NUM_HEADS * HEAD_TILES) + head_tile) * BLOCK_M + row
            safe = tl.where(total > 0.0, total, 1.0)
            tl.store(partial + where[:, None] * V_TOTAL + column[None, :], acc / safe[:, None])
            if i == 0:
                tl.store(partial_lse + where, tl.where(total > 0.0, maximum + tl.log2(safe), maximum))
        else:
            finish(
                acc, maximum, total, out, lse, sinks, token, query_head, row_ok, column, out_stride_t, out_stride_h,
                HAS_SINKS, HAS_LSE and i == 0, NUM_HEADS * GROUP, V_COUNT, CAST,
            )  # fmt: skip


@triton.jit
def finish(
    acc, maximum, total, out, lse, sinks, token, query_head, row_ok, column, out_stride_t, out_stride_h,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, NUM_Q_HEADS: tl.constexpr, V_COUNT: tl.constexpr,
    CAST: tl.constexpr,
):  # fmt: skip
    """Divide by the total (with the sink in it) and store a tile of rows; a row that saw nothing gives 0 and -inf."""
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=row_ok, other=0.0) * LOG2E
        higher = tl.maximum(maximum, sink)
        decay = tl.exp2(maximum - higher)
        total = total * decay + tl.exp2(sink - higher)
        acc = acc * decay[:, None]
        maximum = higher
    safe = tl.where(total == 0.0, 1.0, total)
    target = out + token * out_stride_t + query_head.to(tl.int64) * out_stride_h
    keep = row_ok[:, None] & (column < V_COUNT)[None, :]
    tl.store(target[:, None] + column[None, :], CAST(acc / safe[:, None], out.dtype.element_ty), mask=keep)
    if HAS_LSE:
        tl.store(lse + token * NUM_Q_HEADS + query_head, (maximum + tl.log2(safe)) * LN2, mask=row_ok)


@triton.jit
def merge_kernel(
    partial, partial_lse, merges, cu_seqlens, out, lse, sinks, out_stride_t, out_stride_h,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    V_COUNT: tl.constexpr, V_TOTAL: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Join the ranges of tiles that were split; the grid is (merges * H * head tiles, BLOCK_M / ROWS).

    Args:
        merges: `[M, 4]` int32: sequence (-1: nothing to do), tile, first slot, number of slots.
    """
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    entry = merges + (tl.program_id(0) // (NUM_HEADS * HEAD_TILES)).to(tl.int64) * 4
    sequence = tl.load(entry).to(tl.int64)
    if sequence < 0:
        return
    head_tile = tl.program_id(0) % (NUM_HEADS * HEAD_TILES)
    tile = tl.load(entry + 1)
    first = tl.load(entry + 2)
    count = tl.load(entry + 3)
    first_row = tl.load(cu_seqlens + sequence)
    num_rows = tl.load(cu_seqlens + sequence + 1) - first_row
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_token = tile * TILE_TOKENS + row // TILE_HEADS
    row_head = (head_tile % HEAD_TILES) * TILE_HEADS + row % TILE_HEADS
    row_ok = (row // TILE_HEADS < TILE_TOKENS) & (row_token < num_rows) & (row_head < GROUP)
    token = (first_row + row_token).to(tl.int64)
    query_head = head_tile // HEAD_TILES * GROUP + row_head
    column = tl.arange(0, V_TOTAL)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V_TOTAL), tl.float32)
    for i in range(count):
        where = ((first + i).to(tl.int64) * (NUM_HEADS * HEAD_TILES) + head_tile) * BLOCK_M + row
        piece_lse = tl.load(partial_lse + where)
        piece = tl.load(partial + where[:, None] * V_TOTAL + column[None, :])
        new_maximum = tl.maximum(maximum, piece_lse)
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(piece_lse - reference)
        decay = tl.exp2(maximum - reference)
        total = total * decay + weight
        acc = acc * decay[:, None] + piece * weight[:, None]
        maximum = new_maximum
    finish(
        acc, maximum, total, out, lse, sinks, token, query_head, row_ok, column, out_stride_t, out_stride_h,
        HAS_SINKS, HAS_LSE, NUM_HEADS * GROUP, V_COUNT, CAST,
    )  # fmt: skip
