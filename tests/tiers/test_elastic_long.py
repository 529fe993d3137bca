"""A Gemma-like cache (five windows to one full layer) from short sequences to 100,000 tokens and back."""

from __future__ import annotations

import time

import pytest
import torch

from kvpool.kinds import KVKind, LayerSpec, Lifetime

from .elastic_world import Roomy, resident

#: Gemma 3: window 1024, five to one.
GEMMA = tuple(LayerSpec((KVKind(1, 8),), Lifetime(window=1024) if i % 6 < 5 else Lifetime()) for i in range(6))
CHUNK = 2048
LONGEST = 102_400
#: What the system gives and takes at once.
GRANULE = 2 << 20
#: Most sequences held at once.
MOST = 256


@pytest.mark.slow
def test_a_load_that_moves_to_100000_tokens_and_back_holds_what_the_best_split_for_each_phase_would() -> None:
    torch.manual_seed(0)
    budget = 48 << 20
    world = Roomy(
        GEMMA, budget=budget, room=1, backend="cpu", max_seq_len=LONGEST, tokens_per_block=32, max_sequences=MOST,
        max_step_tokens=CHUNK,
    )  # fmt: skip
    before = world.addresses()
    rows = []
    for length in (500, 4000, LONGEST, 20_000, 500):
        held, best = world.hold(length, MOST, CHUNK), world.best_split(length, MOST)
        split = [n * g.bytes_per_block for n, g in zip(world.cache._elastic.num_blocks, world.plan.groups, strict=True)]
        rows.append((length, held, best, [round(part / sum(split), 2) for part in split]))
        print(rows[-1], flush=True)
        assert held >= 0.95 * best, f"sequences of {length}: {held} held, the best split holds {best}"
        assert resident(world.cache) <= world.cache._elastic.committed_bytes + GRANULE
    assert len({tuple(split) for *_, split in rows}) >= 3, "no static split serves all phases"
    assert world.addresses() == before
    lasting = world.open(list(range(20_000)))  # lives through the resize
    while lasting.num_computed_tokens < len(lasting):
        world.step(lasting, most=CHUNK)
    begun = time.perf_counter()
    done = world.cache.resize(budget // 4)
    assert time.perf_counter() - begun < 1
    assert not done.stopped_by
    assert done.committed_bytes <= budget // 4
    assert resident(world.cache) <= done.committed_bytes + GRANULE
    assert world.addresses() == before
    world.verify(lasting)
    lasting.extend([7] * 40)
    world.step(lasting)
    world.verify(lasting)
    lasting.release()
    world.cache.check()
