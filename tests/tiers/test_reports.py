"""Faults that other caches had with restores and with addresses, each as a test of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvpool as kv
from kvpool.codecs import CODECS
from kvpool.kinds import KVKind, LayerSpec, Lifetime

from .tiered_world import FULL, N, World

STORED = sorted(name for name in CODECS if not name.startswith("index"))


def raw(world: World, seq: kv.Sequence) -> list[bytes]:
    """The bytes of a sequence's whole blocks, all planes and layers."""
    found = []
    for group in range(len(world.plan.groups)):
        table, length = world.cache.ledger.table(seq.id, group)
        for block in table[: length // N]:
            pieces = world.cache.pools.slabs[group].block_bytes(block)
            found.append(b"".join(bytes(piece.numpy()) for piece in pieces))
    return found


@pytest.mark.parametrize("length", [1, 5, 8, 13, 29])
@pytest.mark.parametrize("codec", STORED)
def test_every_format_comes_back_bit_for_bit_with_its_scales_at_any_length(
    codec: str, length: int, tmp_path: Path
) -> None:
    """Report i15: sizes counted by element broke what is stored in fewer bits, or beside scales."""
    tiers = {"codec": codec, "disk": tmp_path, "model": "m", "host_size": "4MiB"}
    scales = "unit" if CODECS[codec].constant_scale else None
    prompt = [7 * i for i in range(length)]
    first = World(FULL, scales=scales, **tiers)
    with first.open(prompt) as seq:
        first.step(seq)
        want, read = raw(first, seq), [first.cache.read(layer, seq) for layer in range(len(FULL))]
    assert first.cache.close()
    second = World(FULL, scales=scales, **tiers)
    with second.open([*prompt, 999_999]) as seq:
        assert second.step(seq) == [length % N + 1], "whole blocks come back, the rest is computed"
        assert raw(second, seq)[: len(want)] == want
        for layer, parts in enumerate(read):
            for stored, back in zip(parts, second.cache.read(layer, seq), strict=True):
                assert torch.equal(back[:length], stored)
    second.cache.check()
    second.cache.close()


def test_the_tables_of_a_step_stay_as_they_are_while_the_next_is_planned() -> None:
    """Report i03: one staging buffer was filled again while the copy from it was under way."""
    world = World(FULL, num_blocks=40)
    seqs = [world.open([100 * i + j for j in range(9 + i)]) for i in range(3)]
    first = world.cache.step([(seqs[0], 100)])
    tensors = [first.token_ids, first.positions, first.cu_seqlens]
    tensors += [t for group in first.groups for t in (group.slots, group.block_table, group.seq_lens)]
    before = [t.clone() for t in tensors]
    second = world.cache.step([(seqs[1], 100)])
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    with pytest.raises((kv.KVError, ValueError)):  # a third set there is not
        world.cache.step([(seqs[2], 100)])
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    for step, seq in ((first, seqs[0]), (second, seqs[1])):
        with step:
            world.write(step, seq)
    for seq in seqs[:2]:
        world.verify(seq)


def test_what_was_captured_before_a_window_moved_on_reads_what_it_sees_now() -> None:
    """Report j03: a graph read where the window had been. Here no address moves, only what stands there."""
    layers = (LayerSpec((KVKind(2, 8),), Lifetime(window=10)),)
    world = World(layers, num_blocks=16)
    part = world.cache.pools.part(0, "k")
    captured = [buffers.groups[part.group] for buffers in world.cache._buffers]  # what a graph would hold
    addresses = [(t.block_table.data_ptr(), t.slots.data_ptr(), t.seq_lens.data_ptr()) for t in captured]
    plane = part.planes["data"]
    seq = world.open(list(range(6)))
    for turn in range(60):
        step = world.cache.step([(seq, 100)])
        with step:
            world.write(step, seq)
            tables = next(
                t for t in captured if t.block_table.data_ptr() == step.groups[part.group].block_table.data_ptr()
            )
            length = int(tables.seq_lens[0])
            token = torch.arange(max(0, length - 10), length)
            slots = tables.block_table[0].long()[token // N] * N + token % N
            assert bool((slots >= 0).all())
            got = plane.tensor[slots // N, :, slots % N]  # [n, H, D], by the addresses captured at first
            want, _ = world.vectors(0, world.links(seq))
            assert torch.equal(got, want[token])
        seq.extend([500 + turn])
    assert [(t.block_table.data_ptr(), t.slots.data_ptr(), t.seq_lens.data_ptr()) for t in captured] == addresses
    assert plane.address == world.cache.pools.part(0, "k").planes["data"].address
