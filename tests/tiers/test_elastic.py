from __future__ import annotations

import contextlib
import gc
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec, Lifetime

from .tiered_world import FULL, WINDOW, N, World

#: Five window layers to one full layer, as in Gemma 3.
GEMMA = tuple(LayerSpec((KVKind(1, 32),), Lifetime(window=64) if i % 6 < 5 else Lifetime()) for i in range(6))


class Roomy(World):
    """A world whose budget may grow to four times what it starts with."""

    def __init__(self, layers: Any = FULL, *, budget: int, **options: Any) -> None:
        self.spec = kv.CacheSpec(layers=layers, dtype="fp32", max_seq_len=4096)
        self.plan = kv.make_plan(
            self.spec, budget=budget, max_budget=4 * budget, codec="fp32", tokens_per_block=N, max_sequences=64,
            max_step_tokens=2048, **options,
        )  # fmt: skip
        self.cache = kv.KVCache(self.plan, backend="reference")

    def addresses(self) -> list[tuple[int, ...]]:
        parts = [self.cache.pools.part(layer, part) for layer in range(len(self.spec.layers)) for part in "kv"]
        tables = [t.data_ptr() for b in self.cache._buffers for g in b.groups for t in (g.block_table, g.slots)]
        return [(p.address, *p.strides) for part in parts for p in part.planes.values()] + [tuple(tables)]


def resident(cache: kv.KVCache) -> int:
    """Bytes of the reserved ranges that the system keeps in memory."""
    total = 0
    ranges = [(slab.address, slab.address + slab.memory.reserved_bytes) for slab in cache.pools.slabs]
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            start, stop = int(found[1], 16), int(found[2], 16)
            inside = any(a <= start and stop <= b + (2 << 20) for a, b in ranges)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


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


def test_a_pinned_block_stops_a_shrink_and_is_named() -> None:
    world = Roomy(budget=1 << 20)
    world.fill(1, 40)
    prompt = [40_000 + i for i in range(20)]
    with world.open(prompt) as seq:
        world.step(seq)
    pin = world.cache.ledger.pin(prompt)
    done = world.cache.resize(60_000)
    if done.stopped_by:
        assert done.stopped_by["full"] == done.num_blocks[0] - 1
    world.cache.ledger.unpin(pin)
    again = world.cache.resize(60_000)
    assert not again.stopped_by
    assert again.committed_bytes <= 60_000


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


#: Tokens computed at once: a window needs room for them beside what it sees.
CHUNK = 64


def hold(world: Roomy, length: int) -> int:
    """Open sequences of a length until no more fit; returns the tokens held. All are verified, then released."""
    seqs: list[Any] = []
    while len(seqs) < 60:
        try:
            seq = world.open([len(seqs) * 5000 + i for i in range(length)])
        except kv.OutOfBlocks:
            break
        try:
            for _ in range(-(-length // CHUNK)):
                world.step(seq, most=CHUNK)
        except kv.OutOfBlocks:
            seq.release(keep=False)
            break
        seqs.append(seq)
        assert world.cache._elastic.committed_bytes <= world.plan.budget_bytes
    for seq in seqs[:: max(1, len(seqs) // 3)]:
        world.verify(seq)
    world.cache.check()
    for seq in seqs:
        seq.release()
    return len(seqs) * length


def oracle(budget: int, length: int) -> int:
    """Tokens that the best static split for this length holds, in whole sequences."""
    spec = kv.CacheSpec(layers=GEMMA, dtype="fp32", max_seq_len=4096)
    best = 0
    for share in [i / 40 for i in range(1, 40)]:
        try:
            plan = kv.make_plan(
                spec, budget=budget, codec="fp32", tokens_per_block=N, max_sequences=64, max_step_tokens=2048,
                shares={"full": share, "window-64": 1 - share},
            )  # fmt: skip
        except kv.PlanError:
            continue
        need = [g.blocks_for(length) for g in plan.groups]
        best = max(best, min(g.num_blocks // n for g, n in zip(plan.groups, need, strict=True)))
    return min(best, 60) * length


def test_one_budget_serves_short_and_long_sequences_as_well_as_a_split_made_for_each() -> None:
    torch.manual_seed(0)
    budget = 3 << 20
    world = Roomy(GEMMA, budget=budget)
    before = world.addresses()
    first = world.cache._elastic.num_blocks
    seen = set()
    for length in (16, 1200, 64, 2400, 16):
        held, best = hold(world, length), oracle(budget, length)
        assert held >= 0.95 * best, f"sequences of {length}: {held} tokens held, the best split holds {best}"
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
