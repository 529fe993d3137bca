from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import PlanMismatch, TierError
from kvpool.tiers.base import Entry, Identity, Outcome, Status
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.disk import write_queue as writes_module
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.directory_writer import WritableDirectory
from kvpool.tiers.disk.segment_reading import Reading

from . import blocks
from .conformance import WAIT_S, TierConformance, get, put, statuses


class TestDisk(TierConformance):
    @pytest.fixture(params=[True, False], ids=["direct", "page-cache"])
    def open_tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
        opened: list[DiskTier] = []

        def opener(*, identity: Identity = blocks.IDENTITY, budget_bytes: int = 64 << 20) -> DiskTier:
            path = tmp_path / str(len(opened))
            opened.append(DiskTier(path, identity, size_bytes=budget_bytes, direct=request.param))
            return opened[-1]

        yield opener
        for tier in opened:
            tier.close(WAIT_S)


def fill(path: Path, *chains: list[Entry], **options: object) -> None:
    """Write prefixes into a directory and close it."""
    tier = DiskTier(path, blocks.IDENTITY, **options)  # type: ignore[arg-type]
    for entries in chains:
        assert statuses(put(tier, entries)) == [Status.STORED] * len(entries)
    assert tier.close(WAIT_S)


def test_blocks_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    first, second = blocks.chain(1, 20), blocks.chain(2, 20, group=1)
    fill(tmp_path, first)
    fill(tmp_path, second)
    assert len(list(tmp_path.glob("segment-*"))) == 1, "the last segment is written on, not a new one for each opening"
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    assert statuses(get(tier, first) + get(tier, second)) == [Status.HIT] * 40
    assert not tier.damage
    tier.close()


def test_a_drop_outlives_the_process_too(tmp_path: Path) -> None:
    entries = blocks.chain(1, 4)
    fill(tmp_path, entries)
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    tier.drop([entries[3].id, entries[2].id])
    assert tier.close(WAIT_S)
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    assert tier.exists([e.id for e in entries]) == [True, True, False, False]
    assert statuses(put(tier, entries)) == [Status.STORED] * 4
    tier.close(WAIT_S)
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    assert statuses(get(tier, entries)) == [Status.HIT] * 4
    tier.close()


def test_a_drop_survives_the_compaction_of_the_segment_it_stands_in(tmp_path: Path) -> None:
    directory = WritableDirectory(tmp_path, blocks.IDENTITY)
    kept, gone = blocks.chain(1, 3), blocks.chain(2, 2)
    memory, batch = blocks.stored(kept + gone)
    directory.append(batch)
    directory.seal()
    other, more = blocks.stored(blocks.chain(3, 2))
    directory.append(more)
    directory.drop([e.id for e in gone] + [e.id for e, _ in more])
    directory.seal()
    assert directory._compact(), "the second segment holds only a drop and dead blocks"
    assert len(directory) == 3
    directory.close()
    again = Directory(tmp_path)
    assert [e.id in again for e in kept + gone] == [True] * 3 + [False] * 2
    again.check()
    again.close()
    del memory, other


def test_another_plan_or_model_is_refused_by_the_names_of_the_parts(tmp_path: Path) -> None:
    fill(tmp_path, blocks.chain(1, 2))
    before = sorted((p.name, p.stat().st_size) for p in tmp_path.iterdir())
    for name, value in (("model", "other weights"), ("block_format", "bf16 32"), ("constants", "rotated")):
        other = Identity({**blocks.IDENTITY.parts, name: value})
        for read_only in (False, True):
            with pytest.raises(PlanMismatch, match=value) as raised:
                DiskTier(tmp_path, other, read_only=read_only)
            assert raised.value.fields == (name,)
    assert sorted((p.name, p.stat().st_size) for p in tmp_path.iterdir()) == before
    DiskTier(tmp_path, blocks.IDENTITY).close()


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path: Path) -> None:
    writer = DiskTier(tmp_path, blocks.IDENTITY)
    with pytest.raises(TierError, match=f"written by process {os.getpid()}"):
        DiskTier(tmp_path, blocks.IDENTITY)
    reader = DiskTier(tmp_path, blocks.IDENTITY, read_only=True)
    entries = blocks.chain(1, 5)
    put(writer, entries)
    assert statuses(put(reader, entries)) == [Status.REFUSED] * 5
    with pytest.raises(TierError, match="opened for reading"):
        reader.drop([entries[0].id])
    until = time.monotonic() + 10
    while not all(reader.exists([e.id for e in entries])) and time.monotonic() < until:
        time.sleep(0.05)
    assert statuses(get(reader, entries)) == [Status.HIT] * 5
    reader.close()
    writer.close()
    DiskTier(tmp_path, blocks.IDENTITY).close()


def test_a_reader_follows_compaction_and_reads_on_while_files_are_deleted(tmp_path: Path) -> None:
    writer = WritableDirectory(tmp_path, blocks.IDENTITY, size_bytes=16 << 20)
    memory, batch = blocks.stored(blocks.chain(0, 40))
    writer.append(batch)
    reader = Directory(tmp_path)
    size = blocks.BLOCK_BYTES[0]
    place = blocks.Memory(1, size)
    for seed in range(1, 60):
        keep, more = blocks.stored(blocks.chain(seed, 40))
        assert all(o.ok for o in writer.append(more))
        if seed % 7 == 0:
            reader.refresh()
            reader.check()
        for entry, _ in batch[:3] + more[:3]:
            outcome = reader.read(entry, place.pieces(0))
            assert outcome.status in (Status.HIT, Status.MISS)
            if outcome.ok:
                assert place.get(0) == blocks.content(entry, size)
        del keep
    assert writer.evicted > 0
    assert writer.total_bytes <= 16 << 20
    assert sum(p.stat().st_size for p in tmp_path.glob("segment-*")) <= 16 << 20
    reader.refresh()
    held = [e for e, _ in reader_entries(writer)]
    assert held
    assert all(e.id in reader for e in held)
    assert not reader.damage
    reader.close()
    writer.close()
    del memory


def reader_entries(directory: Directory) -> list[tuple[Entry, int]]:
    return [(record.entry, record.offset) for record, _ in directory.entries()]


def test_the_cap_holds_at_every_moment_and_survives_reopening_with_a_smaller_one(tmp_path: Path) -> None:
    def on_disk() -> int:
        return sum(p.stat().st_size for p in tmp_path.glob("segment-*"))

    tier = DiskTier(tmp_path, blocks.IDENTITY, size_bytes=32 << 20)
    for seed in range(400):
        put(tier, blocks.chain(seed, 8))
        assert on_disk() <= 32 << 20
    assert on_disk() > 24 << 20, "the cap is hardly used"
    tier.check()
    tier.close(WAIT_S)
    tier = DiskTier(tmp_path, blocks.IDENTITY, size_bytes=16 << 20)
    put(tier, blocks.chain(9999, 8))
    assert on_disk() <= 16 << 20
    assert statuses(get(tier, blocks.chain(9999, 8))) == [Status.HIT] * 8
    tier.check()
    tier.close(WAIT_S)
    with pytest.raises(TierError, match="needs at least"):
        DiskTier(tmp_path, blocks.IDENTITY, size_bytes=1000)


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> threading.Event:
    """Make every read take so long, until the event is set."""
    release = threading.Event()
    fetch = Directory.fetch

    def late(self: Directory, run: Sequence[Reading]) -> None:
        release.wait(seconds)
        fetch(self, run)

    monkeypatch.setattr(Directory, "fetch", late)
    return release


def test_a_slow_disk_is_a_miss_and_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = blocks.chain(1, 6)
    fill(tmp_path, entries)
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    release = slow(monkeypatch, 30)
    memory, batch = blocks.room(entries)
    begun = time.perf_counter()
    ticket = tier.get(batch, deadline_s=0.05)
    assert time.perf_counter() - begun < 5  # the read takes 30
    assert not ticket.wait(0.05)
    ticket.cancel()
    assert statuses(ticket.outcomes) == [Status.LATE] * 6
    # While a read is overdue the tier answers at once and asks the disk for nothing.
    begun = time.perf_counter()
    assert tier.late
    assert tier.exists([e.id for e in entries]) == [False] * 6
    again = tier.get(batch, deadline_s=10)
    assert again.done
    assert statuses(again.outcomes) == [Status.LATE] * 6
    assert time.perf_counter() - begun < 5  # the read takes 30
    assert not ticket.done, "memory under a read that has not returned is still the tier's"
    release.set()
    assert ticket.wait(WAIT_S)
    assert statuses(ticket.outcomes) == [Status.LATE] * 6
    assert statuses(get(tier, entries)) == [Status.HIT] * 6
    assert not tier.late
    tier.close()
    del memory


def test_a_disk_that_never_answers_does_not_hold_close_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    append = WritableDirectory.append

    def stuck(self: WritableDirectory, *arguments: Any) -> list[Outcome]:
        release.wait(30)
        return append(self, *arguments)

    monkeypatch.setattr(WritableDirectory, "append", stuck)
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    memory, batch = blocks.stored(blocks.chain(1, 4))
    ticket = tier.put(batch)
    begun = time.perf_counter()
    assert not tier.flush(0.1)
    assert not tier.close(0.2)
    assert time.perf_counter() - begun < 1.0
    release.set()
    assert ticket.wait(WAIT_S)
    del memory


def test_a_full_queue_refuses_at_once_or_after_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    append = WritableDirectory.append

    def held(self: WritableDirectory, *arguments: Any) -> list[Outcome]:
        release.wait(30)
        return append(self, *arguments)

    monkeypatch.setattr(WritableDirectory, "append", held)
    tier = DiskTier(tmp_path, blocks.IDENTITY, max_pending_bytes=4 * blocks.BLOCK_BYTES[0])
    entries = blocks.chain(1, 8)
    memory, batch = blocks.stored(entries)
    ticket = tier.put(batch)
    assert [o.status is Status.REFUSED for o in ticket.outcomes] == [False] * 4 + [True] * 4
    begun = time.perf_counter()
    late = tier.put(batch[7:], deadline_s=0.1)
    assert 0.09 < time.perf_counter() - begun < 1.0
    assert statuses(late.outcomes) == [Status.REFUSED]
    threading.Timer(0.05, release.set).start()
    assert statuses(put(tier, entries[4:])) == [Status.STORED] * 4
    assert ticket.wait(WAIT_S)
    assert statuses(get(tier, entries)) == [Status.HIT] * 8
    tier.check()
    tier.close()
    del memory


def test_the_bytes_stored_are_those_from_before_the_caller_was_told_it_may_overwrite(tmp_path: Path) -> None:
    """Report i01: a store not ordered after compute wrote what came later."""
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    entries = blocks.chain(1, 50)
    memory, batch = blocks.stored(entries)

    def overwrite(index: int, outcome: Outcome) -> None:
        memory.set(index, b"\x00" * memory.num_bytes)

    ticket = tier.put(batch, deadline_s=WAIT_S, notify=overwrite)
    assert ticket.wait(WAIT_S)
    assert statuses(get(tier, entries)) == [Status.HIT] * 50
    tier.close()


def test_damage_found_while_reading_is_a_miss_and_the_block_can_be_stored_again(tmp_path: Path) -> None:
    entries = blocks.chain(1, 10)
    fill(tmp_path, entries)
    path = next(tmp_path.glob("segment-*"))
    raw = bytearray(path.read_bytes())
    at = raw.index(blocks.content(entries[4], blocks.BLOCK_BYTES[0])[:64])
    raw[at + 1000] ^= 4
    path.write_bytes(raw)
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    assert [o.status is Status.DAMAGED for o in get(tier, entries)] == [i == 4 for i in range(10)]
    assert "checksum" in tier.damage[0].reason
    assert tier.exists([entries[4].id]) == [False]
    assert statuses(put(tier, [entries[4]])) == [Status.STORED]
    assert statuses(get(tier, entries)) == [Status.HIT] * 10
    tier.close(WAIT_S)
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    assert statuses(get(tier, entries)) == [Status.HIT] * 10
    tier.close()


def test_a_key_that_collides_never_shares_a_block(tmp_path: Path) -> None:
    entry = blocks.chain(1, 1)[0]
    fill(tmp_path, [entry])
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    other = dataclasses.replace(entry, tokens=bytes(len(entry.tokens)))
    outcome = get(tier, [other])[0]
    assert outcome == Outcome(Status.MISMATCH, "stored with other tokens")
    tier.close()


def test_writes_are_tried_again_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes_module, "RETRY_S", 0.2)
    broken = [True]
    pwritev = os.pwritev

    def fail(fd: int, views: list[memoryview], offset: int) -> int:
        if broken[0]:
            raise OSError(5, "Input/output error")
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", fail)
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    entries = blocks.chain(1, 3)
    first = put(tier, entries)
    assert {o.status for o in first} <= {Status.FAILED, Status.REFUSED}
    assert first[0].status is Status.FAILED
    assert "Input/output error" in first[0].detail
    assert statuses(put(tier, entries)) == [Status.REFUSED] * 3
    broken[0] = False
    time.sleep(0.25)
    assert statuses(put(tier, entries)) == [Status.STORED] * 3
    assert statuses(get(tier, entries)) == [Status.HIT] * 3
    assert tier.close(WAIT_S)


def test_random_operations_agree_with_a_dictionary(tmp_path: Path) -> None:
    """Put, get, drop, evict under a cap, close and open again; every read verified."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    dropped: set[Entry] = set()
    everything = [e for s in range(60) for e in blocks.chain(s, 6)]
    tier = DiskTier(tmp_path, blocks.IDENTITY, size_bytes=16 << 20)
    hits = 0
    for step in range(600):
        some = rng.sample(everything, rng.randrange(1, 9))
        choice = rng.random()
        if choice < 0.5:
            put(tier, some)
            dropped.difference_update(some)
        elif choice < 0.85:
            for entry, outcome in zip(some, get(tier, some), strict=True):
                assert not (outcome.ok and entry in dropped)
                hits += outcome.ok
        elif choice < 0.97:
            tier.drop([e.id for e in some])
            dropped.update(some)
        else:
            assert tier.close(WAIT_S)
            tier = DiskTier(tmp_path, blocks.IDENTITY, size_bytes=16 << 20)
            assert not tier.damage
        if step % 50 == 0:
            tier.check()
    assert hits > 200
    tier.close()
