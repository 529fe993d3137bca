"""Slabs, planes and parts: addresses, strides, commit and give back."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kvpool.errors import KVError
from kvpool.kinds import KVKind, LayerSpec, StateKind
from kvpool.plan import make_plan
from kvpool.pools import Pools
from kvpool.pools.memory import PAGE_BYTES, CpuMemory
from kvpool.spec import CacheSpec

H, N, D = 3, 8, 16


def hybrid_plan(layout: str):
    layers = tuple(LayerSpec((KVKind(H, D), StateKind("conv", (5, 3)))) for _ in range(4))
    return make_plan(CacheSpec(layers, max_seq_len=4096), 1 << 22, layout=layout, tokens_per_block=N)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_every_element_of_a_part_lies_at_the_address_its_strides_say(layout):
    pools = Pools(hybrid_plan(layout))
    part = pools.part(2, "v")
    plane = part.planes["data"]
    assert plane.tensor.shape[1:] == (H, N, D)
    assert plane.tensor.data_ptr() == plane.address
    value = torch.arange(H * N * D, dtype=torch.float32).view(H, N, D).bfloat16()
    plane.tensor[5] = value
    for h, n, d in [(0, 0, 0), (2, 7, 15), (1, 3, 9)]:
        address = plane.address + sum(i * s for i, s in zip((5, h, n, d), plane.strides, strict=True))
        raw = (ctypes.c_uint16 * 1).from_address(address)[0]
        assert raw == value.view(torch.int16)[h, n, d].item() & 0xFFFF


def test_layouts_differ_in_strides_and_agree_in_contents():
    hnd, nhd = (Pools(hybrid_plan(name)).part(1, "k").planes["data"] for name in ("HND", "NHD"))
    assert hnd.strides[1:3] == (N * D * 2, D * 2)
    assert nhd.strides[1:3] == (D * 2, H * D * 2)


def test_parts_of_different_layers_and_factors_never_overlap():
    pools = Pools(hybrid_plan("HND"))
    parts = [pools.part(layer, name) for layer in range(4) for name in ("k", "v", "conv")]
    for index, part in enumerate(parts):
        part.planes["data"].tensor[:4] = index
    for index, part in enumerate(parts):
        assert (part.planes["data"].tensor[:4].float() == index).all()


def test_a_layer_that_shares_reads_the_same_part():
    pools = Pools(hybrid_plan("HND"))
    assert pools.part(1, "k") is pools.part(1, "k")
    with pytest.raises(KVError, match="stores no 'latent'"):
        pools.part(1, "latent")


def test_a_slab_keeps_its_address_and_contents_when_it_grows_and_shrinks():
    slab = Pools(hybrid_plan("NHD")).slabs[0]
    address, blocks = slab.address, slab.num_blocks
    slab.block_bytes(3)[0].fill_(7)
    slab.resize(4)
    assert slab.committed_bytes < slab.group.bytes_per_block * blocks
    slab.resize(blocks)
    assert slab.address == address
    assert (slab.block_bytes(3)[0] == 7).all()
    assert (slab.block_bytes(blocks - 1)[0] == 0).all()  # given back, so it comes back as zeros
    with pytest.raises(ValueError, match="have addresses"):
        slab.resize(slab.group.num_blocks_reserved + 1)


def test_a_state_block_is_one_piece_a_layer():
    slab = Pools(hybrid_plan("HND")).slabs[1]
    pieces = slab.block_bytes(1)
    assert len(pieces) == 4
    assert sum(p.numel() for p in pieces) == slab.group.bytes_per_block


def test_views_keep_their_memory_alive():
    tensor = Pools(hybrid_plan("HND")).part(0, "k").planes["data"].tensor
    tensor[1] = 3.0
    assert (tensor[1] == 3.0).all()


def test_a_range_far_larger_than_memory_costs_only_addresses():
    memory = CpuMemory(1 << 42)
    memory.commit(0, PAGE_BYTES)
    assert memory.tensor()[:PAGE_BYTES].sum() == 0
    with pytest.raises(KVError, match="whole pages"):
        memory.commit(0, 100)
