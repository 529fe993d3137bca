# mypy: ignore-errors
"""The kernel that multiplies vectors by a matrix of their head: mixing, before and behind a stored format."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix_kernel(
    x, matrices, out, num_tokens, x_stride_t, x_stride_h, out_stride_t,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`out [T, Q, D] = x [T, Q, D] M [Q / GROUP, D, D]`, channel after channel as everywhere; ROWS tokens of a head."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    real, inside = token < num_tokens, column < D
    row = x + token * x_stride_t + head * x_stride_h
    matrix = matrices + (head // GROUP) * D * D + column
    first = tl.load(row, mask=real, other=0.0).to(tl.float32)
    total = first[:, None] * tl.load(matrix, mask=inside, other=0.0)[None, :]
    for i in range(1, D):
        channel = tl.load(row + i, mask=real, other=0.0).to(tl.float32)
        total = total + channel[:, None] * tl.load(matrix + i * D, mask=inside, other=0.0)[None, :]
    place = out + (token * out_stride_t + head * D)[:, None] + column[None, :]
    tl.store(place, total, mask=real[:, None] & inside[None, :])
