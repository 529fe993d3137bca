from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from kvpool.errors import TierError
from kvpool.tiers.base import Identity, Status
from kvpool.tiers.host import HostTier, unit_bytes

from . import blocks
from .conformance import TierConformance, get, put, statuses


def open_host(*, identity: Identity = blocks.IDENTITY, budget_bytes: int = 64 << 20) -> HostTier:
    return HostTier(budget_bytes, blocks.BLOCK_BYTES, identity)


class TestHost(TierConformance):
    @pytest.fixture
    def open_tier(self) -> Iterator[Callable[..., HostTier]]:
        opened: list[HostTier] = []

        def opener(**options: object) -> HostTier:
            opened.append(open_host(**options))  # type: ignore[arg-type]
            return opened[-1]

        yield opener
        for tier in opened:
            tier.close()


def test_vacated_memory_is_used_again_before_memory_never_touched() -> None:
    tier = open_host()
    for seed in range(200):
        entries = blocks.chain(seed, 4)
        put(tier, entries)
        tier.drop([e.id for e in entries])
    pinned = []
    for entry in blocks.chain(7, 4):
        put(tier, [entry])
        found = tier.pin(entry.id)
        assert found is not None
        pinned += [address for address, _ in found[1]]
    spread = max(pinned) - min(pinned)
    assert spread <= 4 * blocks.BLOCK_BYTES[0] + 4 * 4096, f"4 blocks lie {spread} bytes apart"


def test_a_pinned_block_is_never_given_up_and_a_dropped_one_lives_until_it_is_let_go() -> None:
    tier = open_host(budget_bytes=40 * 4096)
    entries = blocks.chain(1, 3)
    put(tier, entries)
    held = tier.pin(entries[2].id)
    assert held is not None
    for seed in range(20):
        put(tier, blocks.chain(seed + 50, 3))
    assert tier.exists([entries[2].id]) == [True]
    tier.drop([entries[2].id])
    assert tier.exists([entries[2].id]) == [False]
    for seed in range(20):
        put(tier, blocks.chain(seed + 90, 3))
    memory = blocks.memory_of(held[1])
    assert memory == blocks.content(entries[2], blocks.BLOCK_BYTES[0])
    tier.unpin(entries[2].id)
    tier.check()


def test_a_full_tier_of_pinned_blocks_refuses_and_does_not_wait() -> None:
    tier = open_host(budget_bytes=16 * 4096)
    entries = blocks.chain(1, 4)
    assert statuses(put(tier, entries)) == [Status.STORED] * 4
    for entry in entries:
        assert tier.pin(entry.id)
    assert statuses(put(tier, blocks.chain(2, 1))) == [Status.REFUSED]
    assert tier.stats().refused == 1


def test_a_reserved_block_is_found_by_nobody_until_it_is_published() -> None:
    tier = open_host()
    first, second = blocks.chain(1, 2)
    size = blocks.BLOCK_BYTES[0]
    place = tier.reserve(first, size)
    assert place is not None
    assert tier.exists([first.id]) == [False]
    assert statuses(get(tier, [first])) == [Status.MISS]
    assert tier.reserve(first, size) is None
    blocks.fill(place, blocks.content(first, size))
    tier.publish(first.id)
    tier.unpin(first.id)
    assert statuses(get(tier, [first])) == [Status.HIT]
    assert tier.reserve(second, size) is not None
    tier.abandon(second.id)
    assert tier.exists([second.id]) == [False]
    tier.check()


def test_a_budget_below_one_block_and_a_block_of_the_wrong_size_raise() -> None:
    with pytest.raises(TierError, match="holds no block"):
        HostTier(4096, blocks.BLOCK_BYTES, blocks.IDENTITY)
    entry = blocks.chain(1, 1)[0]
    memory = blocks.Memory(1, 100)
    with pytest.raises(TierError, match="has 12800 bytes, got 100"):
        open_host().put([(entry, memory.pieces(0))])


def test_units_are_whole_pages_and_waste_little() -> None:
    rng = random.Random(0)
    for _ in range(300):
        sizes = [256 * rng.randrange(1, 40_000) for _ in range(rng.randrange(1, 4))]
        unit = unit_bytes(sizes)
        assert unit % 4096 == 0
        for size in sizes:
            held = -(-size // unit) * unit
            assert held - size < max(4096, min(sizes) // 8 + 4096, unit if len(sizes) == 1 else 0)
    assert unit_bytes([737_280]) == 737_280
    assert unit_bytes([5 * 737_280, 737_280]) == 737_280
