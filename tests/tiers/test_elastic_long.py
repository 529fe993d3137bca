"""A Gemma-like cache (five windows to one full layer) from short sequences to 100,000 tokens and back."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec, Lifetime

from .test_elastic import Roomy, resident
from .tiered_world import World

#: Gemma 3: window 1024, five to one.
GEMMA = tuple(LayerSpec((KVKind(1, 8),), Lifetime(window=1024) if i % 6 < 5 else Lifetime()) for i in range(6))
BLOCK = 32
CHUNK = 2048
LONGEST = 102_400
#: Most sequences held at once.
MOST = 256


class Long(Roomy):
    """Room for a few sequences of 100,000 tokens."""

    def __init__(self, budget: int) -> None:
        self.spec = kv.CacheSpec(layers=GEMMA, dtype="fp32", max_seq_len=LONGEST)
        self.plan = kv.make_plan(self.spec, budget=budget, **options())
        self.cache = kv.KVCache(self.plan, backend="cpu")


def options() -> dict[str, Any]:
    return {"codec": "fp32", "tokens_per_block": BLOCK, "max_sequences": MOST, "max_step_tokens": CHUNK}


def hold(world: World, length: int) -> int:
    """Open sequences of a length until no more fit; returns how many. Some are verified, all released."""
    seqs: list[Any] = []
    while len(seqs) < MOST:
        try:
            seq = world.open([len(seqs) * LONGEST + i for i in range(length)])
        except kv.OutOfBlocks:
            break
        try:
            while seq.num_computed_tokens < length:
                world.step(seq, most=CHUNK)
        except kv.OutOfBlocks:
            seq.release(keep=False)
            break
        seqs.append(seq)
        assert world.cache._elastic.committed_bytes <= world.plan.budget_bytes
    for seq in seqs[:: max(1, len(seqs) // 2)]:
        world.verify(seq)
    world.cache.check()
    for seq in seqs:
        seq.release()
    return len(seqs)


def oracle(budget: int, length: int) -> int:
    """Sequences that the best static split for this length holds."""
    spec = kv.CacheSpec(layers=GEMMA, dtype="fp32", max_seq_len=LONGEST)
    best = 0
    for share in [i / 100 for i in range(1, 100)]:
        try:
            plan = kv.make_plan(spec, budget=budget, shares={"full": share, "window-1024": 1 - share}, **options())
        except kv.PlanError:
            continue
        need = [group.blocks_for(length) for group in plan.groups]
        best = max(best, min(group.num_blocks // n for group, n in zip(plan.groups, need, strict=True)))
    return min(best, MOST)


@pytest.mark.slow
def test_a_load_that_moves_to_100000_tokens_and_back_holds_what_the_best_split_for_each_phase_would() -> None:
    torch.manual_seed(0)
    budget = 48 << 20
    world = Long(budget)
    before = world.addresses()
    rows = []
    for length in (500, 4000, LONGEST, 20_000, 500):
        held, best = hold(world, length), oracle(budget, length)
        split = [n * g.bytes_per_block for n, g in zip(world.cache._elastic.num_blocks, world.plan.groups, strict=True)]
        rows.append((length, held, best, [round(part / sum(split), 2) for part in split]))
        print(rows[-1], flush=True)
        assert held >= 0.95 * best, f"sequences of {length}: {held} held, the best split holds {best}"
    assert len({tuple(split) for *_, split in rows}) >= 3, "no static split serves all phases"
    assert world.addresses() == before
    world.cache.clear()
    begun = time.perf_counter()
    done = world.cache.resize(budget // 4)
    assert time.perf_counter() - begun < 1
    assert done.committed_bytes <= budget // 4
    assert resident(world.cache) <= done.committed_bytes + (2 << 20)
    assert world.addresses() == before
