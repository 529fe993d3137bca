"""Tiers behind a device: pinned memory, and copies that are made some time after they were started."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvpool.errors import KVError, TierError
from kvpool.pools.memory import Memory, PinnedMemory, reserve
from kvpool.tiers.base import Status
from kvpool.tiers.base import memory as bytes_of
from kvpool.tiers.host import HostTier
from kvpool.tiers.mover import Copies, DeviceMover, StreamCopies

from . import blocks
from .conformance import TierConformance, put, statuses
from .tiered_world import FULL, KINDS, PROMPT, World


class LateStream:
    """Stands for a stream: makes the copies when they are waited for, and not before."""

    def __init__(self) -> None:
        self.started: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.fill_(0xEE)  # until then the bytes are nobody's
        self.started.append((source, target))

    def wait(self) -> None:
        for source, target in self.started:
            target.copy_(source)
        self.started.clear()


class Pins:
    """Stands for the calls that pin memory: says what is pinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, size: int) -> None:
        bytes_of(address, size)[0] = 0  # there is memory
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        bytes_of(address, 1)[0] = 0  # there still is
        del self.pinned[address]


class LateMover:
    """Between any addresses of the host, late."""

    def reserve(self, num_bytes: int) -> Memory:
        return reserve("cpu", num_bytes)

    def copies(self) -> Copies:
        return StreamCopies(LateStream(), lambda at, size: torch.frombuffer(bytes_of(at, size), dtype=torch.uint8))


class TestHostBehindAStream(TierConformance):
    @pytest.fixture
    def open_tier(self) -> Iterator[Callable[..., HostTier]]:
        opened: list[HostTier] = []

        def opener(*, identity: Any = blocks.IDENTITY, budget_bytes: int = 64 << 20) -> HostTier:
            opened.append(HostTier(budget_bytes, blocks.BLOCK_BYTES, identity, LateMover()))
            return opened[-1]

        yield opener
        for tier in opened:
            tier.close()


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Pins:
    """Every cache moves its blocks as on a device."""
    made = Pins()
    monkeypatch.setattr(
        "kvpool.tiers.below.mover_for",
        lambda device, slabs: DeviceMover(slabs, LateStream, lambda size: PinnedMemory(size, made)),
    )
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_blocks_come_back_from_pinned_memory_bit_for_bit(kind: str, pins: Pins) -> None:
    world = World(KINDS[kind], host_size="4MiB")
    with world.open(PROMPT) as seq:
        world.step(seq)
    world.fill(1, 12)
    assert sum(pins.pinned.values()) == world.stats("host").capacity_bytes
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [4]
        world.verify(seq)
    world.cache.check()
    assert world.cache.close()
    assert not pins.pinned


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_blocks_of_another_codec_and_of_a_disk_pass_through_it_too(kind: str, pins: Pins, tmp_path: Any) -> None:
    for turn in range(2):
        world = World(KINDS[kind], codec="fp32", host_size="4MiB", host_codec="fp32", disk=tmp_path, model="m")
        with world.open(PROMPT) as seq:
            assert world.compute(seq) == (4 if turn else 40)
            world.verify(seq)
        assert world.cache.close()
    assert not pins.pinned


def test_a_batch_that_breaks_leaves_nothing_behind() -> None:
    class Broken(LateStream):
        def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
            if self.started:
                raise OSError("the device is gone")
            super().copy(source, target)

    class BrokenMover(LateMover):
        broken = True

        def copies(self) -> Copies:
            stream = Broken() if self.broken else LateStream()
            return StreamCopies(stream, lambda at, size: torch.frombuffer(bytes_of(at, size), dtype=torch.uint8))

    mover = BrokenMover()
    tier = HostTier(1 << 20, blocks.BLOCK_BYTES, blocks.IDENTITY, mover)
    entries = blocks.chain(1, 3)
    memory, batch = blocks.stored(entries)
    with pytest.raises(OSError, match="gone"):
        tier.put(batch)
    assert not any(tier.exists([e.id for e in entries]))
    assert not tier.num_pinned
    tier.check()
    mover.broken = False
    assert statuses(put(tier, entries)) == [Status.STORED] * 3
    mover.broken = True
    room, wanted = blocks.room(entries)
    with pytest.raises(OSError, match="gone"):
        tier.get(wanted)
    assert not tier.num_pinned
    tier.check()
    del memory, room


def test_an_address_of_nobody_is_refused() -> None:
    world = World(FULL)
    mover = DeviceMover(world.cache.pools.slabs, LateStream, lambda size: reserve("cpu", size))
    address = mover.reserve(1 << 20).address
    copies = mover.copies()
    copies.start(((address, 64),), ((world.cache.pools.slabs[0].address, 64),))
    for bad in (64, address + (1 << 20) - 32, world.cache.pools.slabs[0].address - 64):
        with pytest.raises(TierError, match="neither in a slab of this cache nor in its host memory"):
            copies.start(((bad, 64),), ((address, 64),))


def test_pinned_pages_are_unpinned_before_they_are_given_back() -> None:
    pins = Pins()
    memory = PinnedMemory(1 << 20, pins)
    assert not pins.pinned
    memory.commit(0, 1 << 19)
    assert pins.pinned == {memory.address: 1 << 19}
    with pytest.raises(KVError, match="not pinned by one call"):
        memory.decommit(0, 4096)
    memory = PinnedMemory(1 << 20, pins)  # the first goes, and with it its pages
    gc.collect()
    assert not pins.pinned
    memory.commit(0, 1 << 19)
    memory.commit(1 << 19, 1 << 20)
    memory.decommit(0, 1 << 19)
    assert math.prod(pins.pinned.values()) == 1 << 19
