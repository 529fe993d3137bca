"""Memory that moves between groups: content, addresses and the budget stay."""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import pytest
import torch

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec, Lifetime

from .elastic_world import Roomy, resident
from .tiered_world import FULL, WINDOW, N

#: Five window layers to one full layer, as in Gemma 3.
GEMMA = tuple(LayerSpec((KVKind(1, 32),), Lifetime(window=64) if i % 6 < 5 else Lifetime()) for i in range(6))


@pytest.mark.parametrize("layers", [FULL, WINDOW, GEMMA], ids=["full", "window", "gemma"])
def test_resizing_down_and_up_keeps_content_addresses_and_the_budget(layers: Any) -> None:
    """Report j01: no address of a pool, plane or table changes, whatever happens to its memory."""
    world = Roomy(layers, budget=1 << 20)
    before = world.addresses()
    seqs = [world.open([100 * number + i for i in range(30)]) for number in range(4)]
    world.step(*seqs)
    world.fill(50, 6)
    for size in (700_000, 500_000, 1 << 20, 3 << 20, 600_000, 4 << 20):
        done = world.cache.resize(size)
        assert done.committed_bytes <= size
        assert not done.stopped_by
        assert world.addresses() == before
        world.cache.check()
        for seq in seqs:
            world.verify(seq)
        for seq in seqs:
            seq.extend([7])
        world.step(*seqs)
    for seq in seqs:
        world.verify(seq)
        seq.release()
    with pytest.raises(kv.PlanError, match="larger max_budget"):
        world.cache.resize(5 << 20)
    with pytest.raises(kv.PlanError, match="give at least"):
        world.cache.resize(100)


def test_memory_goes_back_to_the_system_within_a_second() -> None:
    world = Roomy(budget=64 << 20)
    for slab in world.cache.pools.slabs:
        slab.bytes[: slab.committed_bytes].fill_(1)
    gc.collect()
    full = resident(world.cache)
    assert full > 60 << 20
    begun = time.perf_counter()
    done = world.cache.resize(8 << 20)
    assert time.perf_counter() - begun < 1
    assert resident(world.cache) <= done.committed_bytes + (2 << 20)
    world.cache.resize(200 << 20)
    assert resident(world.cache) <= done.committed_bytes + (2 << 20), "memory is only promised until it is written"
    world.fill(1, 20)


def test_memory_touched_at_the_start_is_there_before_the_first_step() -> None:
    spec = kv.CacheSpec(layers=FULL, dtype="fp32", max_seq_len=4096)
    plan = kv.make_plan(spec, budget=32 << 20, codec="fp32", tokens_per_block=N)
    gc.collect()
    lazy, touched = (kv.KVCache(plan, backend="reference", touch=touch) for touch in (False, True))
    assert resident(lazy) < 4 << 20
    assert resident(touched) >= touched._elastic.committed_bytes > 28 << 20


def test_a_pinned_block_stops_a_shrink_and_is_named() -> None:
    world = Roomy(budget=1 << 20)
    blocks = world.cache._elastic.num_blocks[0]
    below, prompt = [7] * (N * (blocks - 5)), [40_000 + i for i in range(20)]
    first, last = world.open(below), world.open(prompt)
    world.step(first)
    world.step(last)  # has the five blocks that were left: low ids are handed out first
    pin = world.cache.pin(prompt)
    assert sorted(world.cache.ledger.table(last.id, 0)[0])[-1] == blocks - 1
    first.release()
    last.release()
    done = world.cache.resize(60_000)
    assert done.stopped_by == {"full": blocks - 1}
    assert done.num_blocks == (blocks,)
    assert done.budget_bytes == done.committed_bytes > 60_000
    with world.open([*prompt, 5]) as seq:
        assert world.step(seq) == [1], "what is pinned is still there"
        world.verify(seq)
    world.cache.unpin(pin)
    again = world.cache.resize(60_000)
    assert not again.stopped_by
    assert again.committed_bytes <= 60_000
    world.cache.check()


def test_a_resize_waits_for_every_open_step_and_moves_nothing_under_them() -> None:
    world = Roomy(WINDOW, budget=1 << 20)
    world.fill(1, 30)
    before = world.cache._elastic.num_blocks
    first, second = world.open([1, 2, 3]), world.open([7, 8, 9, 10])
    one, two = world.cache.step([(first, 3)]), world.cache.step([(second, 4)])
    with one:
        world.write(one, first)
        assert world.cache.resize(800_000).waiting
    with two:
        world.write(two, second)
        asked = world.cache.resize(500_000)  # the last one counts
        assert asked.waiting
        assert asked.budget_bytes == 1 << 20
        assert world.cache._elastic.num_blocks == before
        assert world.cache.resized is None
    done = world.cache.resized
    assert done is not None
    assert not done.waiting
    assert done.committed_bytes <= done.budget_bytes == 500_000
    assert world.cache._elastic.num_blocks == done.num_blocks != before
    world.verify(first)
    world.verify(second)
    world.cache.check()
    first.release()
    second.release()


def test_a_resize_that_waits_is_carried_out_after_a_step_that_failed_too() -> None:
    world = Roomy(WINDOW, budget=1 << 20)
    seq = world.open([1, 2, 3])
    with contextlib.suppress(ZeroDivisionError), world.cache.step([(seq, 3)]):
        assert world.cache.resize(500_000).waiting
        raise ZeroDivisionError
    assert world.cache.resized is not None
    assert world.cache.resized.budget_bytes == 500_000
    assert world.step(seq) == [3]
    world.verify(seq)
    seq.release()
    with pytest.raises(kv.PlanError, match="max_budget"), world.cache.step([(world.open([5]), 1)]):
        world.cache.resize(1 << 40)


def test_one_budget_serves_short_and_long_sequences_as_well_as_a_split_made_for_each() -> None:
    torch.manual_seed(0)
    budget = 3 << 20
    world = Roomy(GEMMA, budget=budget)
    before = world.addresses()
    first = world.cache._elastic.num_blocks
    seen = set()
    for length in (16, 1200, 64, 2400, 16):
        held, best = world.hold(length, 60, 64), world.best_split(length, 60)
        assert held >= 0.95 * best, f"sequences of {length}: {held} held, the best split holds {best}"
        seen.add(world.cache._elastic.num_blocks)
    assert len(seen) > 2
    assert first not in seen or len(seen) > 3
    assert world.addresses() == before


def test_a_sequence_may_grow_into_what_another_group_gives_up() -> None:
    world = Roomy(WINDOW, budget=1 << 20)
    with world.open(list(range(100))) as seq:
        world.step(seq)
        full = next(g for g, group in enumerate(world.plan.groups) if group.name == "full")
        world.cache._elastic._shrink(full, 1)
        more = world.cache._elastic.num_blocks[full] * N - len(seq) + 1
        seq.extend(range(max(more, 1)))
        world.step(seq)
        world.verify(seq)
    world.cache.check()
