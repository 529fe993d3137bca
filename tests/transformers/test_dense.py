"""Packed rows and dense batches are two views of the same tokens."""

from __future__ import annotations

import torch

from kvpool.transformers.dense import DenseMap


def test_nothing_ragged_packs_without_copying() -> None:
    x = torch.randn(2, 5, 3, 7).transpose(1, 2)  # [B, H, n, D] as models make it
    packed = DenseMap.right_aligned([5, 5]).pack(x)
    assert packed.shape == (10, 3, 7)
    assert packed.data_ptr() == x.data_ptr()


def test_ragged_rows_come_back_to_their_places_with_zeros_elsewhere() -> None:
    x = torch.randn(4, 3, 6, 7)
    counts = [6, 2, 0, 5]
    dense = DenseMap.right_aligned(counts)
    packed = dense.pack(x)
    expected = torch.cat([x[b, :, 6 - n :].transpose(0, 1) for b, n in enumerate(counts)])
    assert torch.equal(packed, expected)
    back = dense.unpack(packed).transpose(1, 2)
    for b, n in enumerate(counts):
        assert torch.equal(back[b, :, 6 - n :], x[b, :, 6 - n :])
        assert not back[b, :, : 6 - n].any()
