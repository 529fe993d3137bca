"""Random operations over all tiers of a cache; every read is verified. The seed is printed."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
import torch

import kvpool as kv
from kvpool.sequence import Sequence

from .tiered_world import KINDS, World


def test_random_prompts_over_all_tiers_read_what_was_written(tmp_path: Path) -> None:
    storm(tmp_path, 400)


@pytest.mark.slow
def test_100000_operations_over_all_tiers_read_what_was_written(tmp_path: Path) -> None:
    storm(tmp_path, 100_000)


def change(rng: random.Random, seq: Sequence, live: list[Sequence]) -> None:
    """Pause and resume a sequence, let it grow, fork it, or take tokens back."""
    what = rng.randrange(4)
    if what == 0:
        seq.pause()
        seq.resume()
    elif what == 1:
        seq.extend([rng.randrange(5) for _ in range(rng.randrange(1, 6))])
    elif what == 2 and len(live) < 4:
        live.append(seq.fork())
    elif what == 3 and seq.num_computed_tokens > 2:
        with contextlib.suppress(kv.UnsupportedError):  # what a window saw there may be gone
            seq.rewind(rng.randrange(1, min(6, seq.num_computed_tokens)))


def resize(rng: random.Random, world: World, live: list[Sequence]) -> None:
    """Less memory, or all of it again; now and then while a step is open."""
    budget = int(world.plan.budget_bytes * rng.choice([0.5, 0.8, 1.0, 1.0]))
    ready = [seq for seq in live if seq.num_computed_tokens < len(seq)]
    if not ready or rng.random() < 0.5:
        world.cache.resize(budget)
        return
    with contextlib.suppress(kv.OutOfBlocks), world.cache.step([(ready[0], 1000)]) as step:
        assert world.cache.resize(budget).waiting
        world.write(step, ready[0])


def storm(path: Path, operations: int) -> None:
    """Open, step, fork, rewind, pause, resize, flush, close, open again; prompts share prefixes; all reads verified."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    hits = {"host": 0, "disk": 0}

    def make() -> World:
        kind = ("full", "window", "chunk", "hybrid")[seed % 4]
        return World(KINDS[kind], num_blocks=40, host_size="1MiB", disk=path, disk_size="16MiB", model="m")

    def close() -> None:
        for seq in live:
            seq.release()
        live.clear()
        for name in hits:
            hits[name] += world.stats(name).hit
        assert world.cache.close()

    world, live = make(), []
    for number in range(operations):
        choice = rng.random()
        if choice < 0.35 and len(live) < 4:
            stem = rng.randrange(30)
            tokens = [stem * 1000 + i for i in range(rng.randrange(1, 60))] + [rng.randrange(5) for _ in range(3)]
            live.append(world.open(tokens, salt=None))
        elif choice < 0.7 and live:
            some = rng.sample(live, rng.randrange(1, len(live) + 1))
            try:
                world.step(*some, most=rng.choice([3, 1000]))
            except kv.OutOfBlocks:
                live.pop(rng.randrange(len(live))).release()
        elif choice < 0.82 and live:
            change(rng, rng.choice(live), live)
        elif choice < 0.96 and live:
            world.verify(rng.choice(live))
            live.pop(rng.randrange(len(live))).release()
        elif choice < 0.97:
            resize(rng, world, live)
        elif choice < 0.985:
            world.cache.flush()
        elif choice < 0.99:
            close()
            world = make()
        if number % 25 == 0:
            world.cache.check()
        for seq in live:
            if rng.random() < 0.2:
                world.verify(seq)
    close()
    torch.set_num_threads(before)
    assert hits["host"] > operations / 200
    assert hits["disk"] > operations / 400
