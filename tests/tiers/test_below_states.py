"""Recurrent states below the device: a prefix comes back with the checkpoint at its end, or not at all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import kvpool as kv
from kvpool.tiers.base import BlockId

from .tiered_world import HYBRID, KINDS, PROMPT, RECURRENT, World

STATE = 1  # the group of the states in HYBRID


def stored(world: World, group: int) -> list[BlockId]:
    """Ids of a group's blocks of the prompt."""
    with world.open(PROMPT) as seq:
        return [(group, key) for key in world.cache.ledger.keys(seq.id)]


def test_blocks_without_the_state_at_their_end_are_of_no_use() -> None:
    world = World(HYBRID, host_size="4MiB")
    with world.open(PROMPT) as seq:
        assert world.compute(seq) == 40
    world.fill(1, 12)
    host = world.cache.below.transfer.host
    assert any(host.exists(stored(world, 0)))
    states = stored(world, STATE)
    assert any(host.exists(states))
    host.drop(states)
    with world.open(PROMPT) as seq:
        assert world.compute(seq) == 40
        world.verify(seq)
    world.cache.check()


def test_a_state_without_the_blocks_before_it_is_of_no_use() -> None:
    world = World(HYBRID, host_size="4MiB")
    with world.open(PROMPT) as seq:
        assert world.compute(seq) == 40
    world.fill(1, 12)
    assert world.cache.below.transfer.host.drop(stored(world, 0)[3:4]) == 1
    with world.open(PROMPT) as seq:
        assert world.compute(seq) == 40
        world.verify(seq)
    world.cache.check()


def test_only_the_state_comes_up_where_the_device_has_the_blocks() -> None:
    """States are evicted long before blocks: there are few of them."""
    world = World(HYBRID, host_size="4MiB", num_blocks=60, num_states=8)
    with world.open(PROMPT) as seq:
        assert world.compute(seq) == 40
    world.fill(1, 8, length=1)
    with world.open(PROMPT) as seq:
        have = world.cache.ledger.in_tree(seq.id)
        assert all(have[0]), "the test needs all blocks on the device"
        assert not any(have[STATE]), "the test needs no state on the device"
        before = world.stats("host").read_bytes
        assert world.step(seq) == [4]
        assert world.stats("host").read_bytes - before == world.plan.groups[STATE].bytes_per_block
        world.verify(seq)
        world.cache.check()
    assert world.cache.peek(PROMPT) == 36, "the state is on the device again"


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_state_that_vanishes_between_promise_and_copy_is_computed_instead(kind: str) -> None:
    world = World(KINDS[kind], host_size="4MiB")
    with world.open(PROMPT) as seq:
        world.compute(seq)
    world.fill(1, 12)
    onboard = world.cache.below.transfer.onboard
    calls: list[int] = []

    def fail_once(blocks: list[object]) -> list[bool]:
        calls.append(len(blocks))
        return [False] * len(blocks) if len(calls) == 1 else onboard(blocks)  # type: ignore[arg-type]

    world.cache.below.transfer.onboard = fail_once  # type: ignore[method-assign,assignment]
    with world.open(PROMPT) as seq:
        assert world.compute(seq) == 40
        world.verify(seq)
    assert calls
    world.cache.check()


@pytest.mark.parametrize("limit", range(0, 41, 3))
def test_a_capped_match_takes_a_checkpoint_below_the_cap_or_none(limit: int, tmp_path: Path) -> None:
    with World(HYBRID, disk=tmp_path, model="m", checkpoint_interval=8).cache as cache:
        world = World.of(cache)
        with world.open(PROMPT) as seq:
            assert world.compute(seq) == 40
    world = World(HYBRID, disk=tmp_path, model="m", checkpoint_interval=8)
    with world.open(PROMPT, max_cached_tokens=limit) as seq:
        world.compute(seq)
        assert seq.num_cached_tokens == min(limit, 36) // 8 * 8 if limit < 36 else 36
        world.verify(seq)
    world.cache.check()
    world.cache.close()


def test_equal_prompts_of_one_step_both_come_up() -> None:
    world = World(HYBRID, host_size="4MiB", num_blocks=48)
    with world.open(PROMPT) as seq:
        world.compute(seq)
    world.fill(1, 24)
    first, second = world.open(PROMPT), world.open([*PROMPT, 5])
    assert world.step(first, second) == [4, 1], "the second has the checkpoint of a release"
    for seq in (first, second):
        world.verify(seq)
        seq.release()
    world.cache.check()


def test_a_paused_sequence_with_states_goes_down_and_comes_back_at_its_checkpoint() -> None:
    world = World(HYBRID, host_size="4MiB")
    seq = world.open(PROMPT)
    world.compute(seq)
    seq.pause()
    world.fill(1, 12)
    assert world.cache.peek(PROMPT) == 0
    seq.resume()
    assert world.compute(seq) == 4
    world.verify(seq)
    seq.release()
    world.cache.check()


@pytest.mark.parametrize("layers", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])
def test_restarts_at_random_lengths_find_the_longest_checkpoint(layers: kv.CacheSpec, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    longest = 0
    for _ in range(12):
        length = rng.randrange(9, 120)
        world = World(layers, disk=tmp_path, model="m", num_blocks=60, checkpoint_interval=8)
        with world.open(list(range(length))) as seq:
            world.compute(seq)
            assert seq.num_cached_tokens >= min(longest, length - 1) // 8 * 8
            world.verify(seq)
        longest = max(longest, length)
        world.cache.check()
        assert world.cache.close()
