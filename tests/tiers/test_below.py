"""A whole cache with tiers below it: every block that comes back is read and compared with what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvpool as kv

from .tiered_world import KINDS, PROMPT, N, World


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_blocks_come_back_from_the_host_bit_for_bit(kind: str) -> None:
    world = World(KINDS[kind], host_size="4MiB")
    with world.open(PROMPT) as seq:
        assert world.compute(seq) == 40
    world.fill(1, 12)
    assert world.cache.ledger.peek(PROMPT) < 36, "the device still has it: the test shows nothing"
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [4], "all whole blocks but the one of the last token come back"
        assert seq.num_cached_tokens == 36
        world.verify(seq)
    assert world.stats("host").hit > 0
    world.cache.check()
    assert world.cache.close()


@pytest.mark.parametrize("more", [[7, 8, 9], []], ids=["longer", "the same"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_process_finds_what_the_first_computed(kind: str, more: list[int], tmp_path: Path) -> None:
    tiers = {"disk": tmp_path, "model": "m"}
    with World(KINDS[kind], **tiers).cache as cache:
        world = World.of(cache)
        with world.open(PROMPT) as seq:
            assert world.compute(seq) == 40
    again = World(KINDS[kind], **tiers)
    with again.open([*PROMPT, *more]) as seq:
        assert again.step(seq) == [len(more) or N], "only what is new is computed, or the last token's block"
        again.verify(seq)
    assert again.stats("disk").hit > 0
    again.cache.check()
    assert again.cache.close()


def test_a_hot_prefix_is_written_to_the_host_once() -> None:
    world = World(host_size="4MiB")
    for turn in range(5):
        with world.open(PROMPT) as seq:
            world.step(seq)
            world.verify(seq)
        written = world.stats("host").written_bytes
        world.fill(1 + 12 * turn, 12)
        if turn:
            fresh = world.stats("host").written_bytes - written
            assert fresh <= 12 * 5 * world.plan.groups[0].bytes_per_block, "blocks that were there were written again"


def test_blocks_of_low_priority_are_not_kept() -> None:
    world = World(host_size="4MiB")
    with world.open(PROMPT, retention=[kv.Retention(0, 40, priority=29)]) as seq:
        world.step(seq)
    world.fill(1, 12)
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [40]


def test_a_paused_sequence_goes_down_and_comes_back() -> None:
    world = World(host_size="4MiB")
    seq = world.open(PROMPT)
    world.step(seq)
    seq.pause()
    world.fill(1, 12)
    assert world.cache.ledger.peek(PROMPT) < 36
    seq.resume()
    assert world.step(seq) == [4]
    world.verify(seq)
    seq.release()
    world.cache.check()


def test_a_block_that_vanishes_between_promise_and_copy_is_computed_instead() -> None:
    world = World(host_size="4MiB")
    with world.open(PROMPT) as seq:
        world.step(seq)
    world.fill(1, 12)
    onboard = world.cache.below.transfer.onboard
    calls = []

    def fail_once(blocks: Any) -> list[bool]:
        calls.append(len(blocks))
        return [False] * len(blocks) if len(calls) == 1 else onboard(blocks)

    world.cache.below.transfer.onboard = fail_once  # type: ignore[method-assign]
    with world.open(PROMPT) as seq:
        computed = world.step(seq)[0]
        assert computed > 4
        world.verify(seq)
    world.cache.check()
    world.fill(100, 3)


def test_a_host_smaller_than_a_prompt_brings_back_what_it_can(tmp_path: Path) -> None:
    world = World(disk=tmp_path, model="m", num_blocks=100)
    with world.open(list(range(300))) as seq:
        world.step(seq)
    world.cache.close()
    size = -(-world.plan.groups[0].bytes_per_block // 4096) * 4096
    small = World(disk=tmp_path, model="m", num_blocks=100, host_size=10 * size)
    with small.open(list(range(300))) as seq:
        assert small.step(seq) == [260]
        small.verify(seq)
    small.cache.check()
    small.cache.close()


def test_a_waiting_sequence_that_is_rewound_never_gets_what_it_had_before() -> None:
    """What was asked of the tiers for the old tokens must not come up for the new ones."""
    world = World(host_size="4MiB")
    with world.open(PROMPT) as seq:
        world.step(seq)
    world.fill(1, 12)
    with world.open(PROMPT) as seq:
        assert world.cache.fits([(seq, 1000)]) == 1  # asks the tiers
        seq.rewind(20)
        seq.extend([7] * 20)
        assert world.step(seq) == [20], "what still is its own comes back"
        world.verify(seq)
    world.cache.check()


def test_options_that_make_no_sense_raise(tmp_path: Path) -> None:
    with pytest.raises(kv.TierError, match="give model="):
        World(disk=tmp_path)
    with pytest.raises(kv.TierError, match="there is no directory"):
        World(disk_size="1GiB")
    with pytest.raises(kv.PlanError, match="no tiers"):
        _ = World().cache.below
    with pytest.raises(kv.TierError, match="holds no block"):
        World(host_size=100).open([1])


def test_the_copy_of_a_sequence_that_waits_is_restored_as_well() -> None:
    world = World(host_size="1MiB")
    with world.open(PROMPT) as seq:
        world.step(seq)
    world.fill(100, 8)  # nothing of it is left on the device
    waiting = world.open(PROMPT)
    assert world.cache.fits([(waiting, 1000)]) == 1  # asks the tiers
    copy = waiting.fork()
    assert world.step(copy) == [len(PROMPT) % N or N]
    world.verify(copy)
    copy.release()
    world.step(waiting)
    world.verify(waiting)
    waiting.release()
    world.cache.check()
