"""Blocks and tokens are copied whole, one after another, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from scene import INDEXER, KV, WIDE_LATENT, Scene

from kvpool.backends.reference import ReferenceBackend
from kvpool.backends.triton import TritonBackend
from kvpool.backends.triton.backend import batches

PAIRS = [(3, 5), (5, 1), (2, 3), (7, 6), (0, 7), (0, 2)]


@pytest.mark.parametrize("operation", ["copy", "move"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_copies_and_moves_are_those_of_the_reference(operation: str, layout: str) -> None:
    for kind, codec in ((KV, "nvfp4-token"), ((WIDE_LATENT, INDEXER), {"latent": "fp8", "rope": "bf16"})):
        scene = Scene(kind, codec, layout)
        slab = scene.pools.slabs[0]
        view = slab.bytes[: slab.group.bytes_per_block * 12]
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=scene.random))
        before = view.clone()
        pairs = [(a * 9, b * 9) for a, b in PAIRS] if operation == "move" else PAIRS
        getattr(ReferenceBackend(), operation)(scene.pools, 0, pairs)
        want = view.clone()
        view.copy_(before)
        getattr(TritonBackend("cpu"), operation)(scene.pools, 0, pairs)
        assert torch.equal(view, want)


def test_copies_that_depend_on_each_other_are_not_made_at_once() -> None:
    assert batches([(1, 2), (3, 4), (1, 5)]) == [[(1, 2), (3, 4), (1, 5)]]
    assert batches([(1, 2), (2, 3)]) == [[(1, 2)], [(2, 3)]]  # reads what was written
    assert batches([(1, 2), (3, 1)]) == [[(1, 2)], [(3, 1)]]  # writes what is read
    assert batches([(1, 2), (3, 2)]) == [[(1, 2)], [(3, 2)]]  # the last one wins
    assert batches([]) == []


def test_no_launch_has_more_copies_than_a_grid_s_axis_can_be_long() -> None:
    pairs = [(i, 100_000 + i) for i in range(70_000)]
    cut = batches(pairs)
    assert [len(batch) for batch in cut] == [65_535, 4_465]
    assert [pair for batch in cut for pair in batch] == pairs
