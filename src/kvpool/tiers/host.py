"""The host tier: blocks in ordinary memory, kept when they are read, so that a hot prefix is written once.

All groups share one range cut into equal units; a block takes as many units as it needs, anywhere. No split between
groups is chosen, none can go wrong, and nothing fragments.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.errors import TierError
from kvpool.pools.memory import PAGE_BYTES
from kvpool.tiers.base import (
    HIT,
    MISS,
    STORED,
    Batch,
    BlockId,
    Counters,
    Entry,
    Identity,
    Notify,
    Outcome,
    Pieces,
    Status,
    Ticket,
    TierStats,
    payload_bytes,
)
from kvpool.tiers.eviction_order import EvictionOrder
from kvpool.tiers.mover import Copies, HostMover, Mover

#: A block may be cut into at most about so many units; smaller units waste less at its end and cost more copies.
MAX_UNITS = 8


@dataclass(slots=True)
class _Slot:
    """One stored block.

    Attributes:
        units: Numbers of its units, in the order of its bytes.
        pins: Copies from or to it under way; it goes nowhere until 0.
        published: False while its bytes are being written; nobody finds it then.
        doomed: Dropped while pinned; forgotten when the last pin goes.
    """

    entry: Entry
    num_bytes: int
    units: list[int]
    pins: int = 0
    published: bool = False
    doomed: bool = False


def unit_bytes(block_bytes: Sequence[int]) -> int:
    """Choose the unit for blocks of these sizes: whole pages, few a block, little waste.

    The greatest common divisor when it is large enough (groups of equal layers differ by their number), else an eighth
    of the smallest block.
    """
    sizes = [-(-size // PAGE_BYTES) for size in block_bytes]
    common = math.gcd(*sizes)
    return max(common, min(sizes) // MAX_UNITS, 1) * PAGE_BYTES


class HostTier:
    """Blocks in host memory, copied in by `put` and out by `get` at memory speed; both return when that is done.

    Args:
        budget_bytes: The most memory it takes.
        block_bytes: Bytes of a block of each group.
        identity: Of all its blocks.
        mover: Copies blocks in and out; by default between addresses of the host.

    Invariants: every unit is free or belongs to one slot; only published slots without pins are given up; free units
    are handed out last vacated first.
    """

    name = "host"

    def __init__(
        self, budget_bytes: int, block_bytes: Sequence[int], identity: Identity, mover: Mover | None = None
    ) -> None:
        self.identity = identity
        self._mover = HostMover() if mover is None else mover
        self._block_bytes = tuple(block_bytes)
        self._unit = unit_bytes(block_bytes)
        num_units = budget_bytes // self._unit
        largest = max(self.units_for(size) for size in block_bytes)
        if num_units < largest:
            raise TierError(
                f"a host tier of {budget_bytes} bytes holds no block of {max(block_bytes)} bytes; give at least"
                f" {largest * self._unit} bytes, or leave it out"
            )
        self._memory = self._mover.reserve(num_units * self._unit)
        self._memory.commit(0, self._memory.reserved_bytes)
        self._num_units = num_units
        self._free = list(range(num_units - 1, -1, -1))
        self._slots: dict[BlockId, _Slot] = {}
        self._order = EvictionOrder()
        self._lock = threading.RLock()
        self._counters = Counters()
        self._closed = False

    def units_for(self, num_bytes: int) -> int:
        """Return the units a block of so many bytes takes."""
        return -(-num_bytes // self._unit)

    # --- the protocol ---------------------------------------------------------------------------------------

    def exists(self, ids: Sequence[BlockId]) -> list[bool]:
        """Say which blocks are there."""
        with self._lock:
            return [self._published(block) is not None for block in ids]

    def get(self, batch: Batch, *, deadline_s: float | None = None, notify: Notify | None = None) -> Ticket:
        """Copy blocks out; done when it returns. The blocks stay, as the most recently used."""
        ticket = Ticket(len(batch), notify, deadline_s)
        with self._lock:
            for entry, _ in reversed(batch):  # the start of a prefix ends as the newest
                self._order.touch(entry.id, entry.priority)
        copies = self._mover.copies()
        outcomes: list[Outcome] = []
        try:
            for entry, pieces in batch:
                late = ticket.expired()
                outcomes.append(Outcome(Status.LATE, "deadline passed") if late else self._read(entry, pieces, copies))
        finally:
            copies.wait()
            for (entry, _), outcome in zip(batch, outcomes, strict=False):
                if outcome is HIT:
                    self.unpin(entry.id)
        for index, outcome in enumerate(outcomes):
            ticket.finish(index, self._counters.outcome(outcome, payload_bytes(batch[index][1])))
        return ticket

    def put(self, batch: Batch, *, deadline_s: float | None = 0.0, notify: Notify | None = None) -> Ticket:
        """Copy blocks in, giving others up where there is no room; done when it returns."""
        ticket = Ticket(len(batch), notify)
        copies = self._mover.copies()
        begun: dict[BlockId, int] = {}
        outcomes: list[Outcome] = []
        try:
            for entry, pieces in batch:
                outcomes.append(self._write(entry, pieces, copies, begun))
            copies.wait()
        except BaseException:
            copies.wait()
            for block in begun:
                self.abandon(block)
            raise
        with self._lock:
            for block, size in begun.items():
                self.publish(block)
                self.unpin(block)
                self._counters.add("written_bytes", size)
        for index, outcome in enumerate(outcomes):
            ticket.finish(index, self._counters.outcome(outcome, payload_bytes(batch[index][1])))
        return ticket

    def renew(self, entries: Sequence[Entry]) -> list[bool]:
        """Say which blocks are there with this content, as `put` would; they become the most recently used."""
        there = []
        with self._lock:
            for entry in entries:
                slot = self._published(entry.id)
                there.append(slot is not None and not slot.entry.differing(entry))
                if there[-1]:
                    self._order.touch(entry.id, entry.priority)
                    self._counters.outcome(STORED, 0)
        return there

    def drop(self, ids: Sequence[BlockId]) -> int:
        """Forget blocks; one being copied is forgotten as soon as that ends and found by nobody from now on."""
        count = 0
        with self._lock:
            for block in ids:
                slot = self._slots.get(block)
                if slot is not None and not slot.doomed:
                    count += 1
                    slot.doomed = True
                    self._forget_if_doomed(slot)
        return count

    def flush(self, timeout_s: float) -> bool:
        """Nothing to do: memory is as durable as the process."""
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """Forget all blocks and give the memory back; copies under way keep theirs."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.drop(list(self._slots))
                if not self._slots:
                    self._memory.decommit(0, self._memory.reserved_bytes)
        return True

    def stats(self) -> TierStats:
        """Return the counters."""
        with self._lock:
            held = self._num_units - len(self._free)
            return self._counters.stats(len(self._slots), held * self._unit, self._num_units * self._unit)

    def check(self) -> None:
        """Verify the invariants."""
        with self._lock:
            units = sorted(self._free + [unit for slot in self._slots.values() for unit in slot.units])
            if units != list(range(self._num_units)):
                raise TierError("host tier: a unit is free twice, held twice or lost")
            published = {slot.entry.id for slot in self._slots.values() if slot.published}
            if published != set(self._order):
                raise TierError("host tier: the eviction order and the blocks differ")
            if any(slot.doomed and not slot.pins for slot in self._slots.values()):
                raise TierError("host tier: a dropped block is still held")
            self._order.check()

    @property
    def num_pinned(self) -> int:
        """Blocks that some copy or load holds in place."""
        with self._lock:
            return sum(slot.pins > 0 for slot in self._slots.values())

    def find(self, wanted: Callable[[bytes], bool]) -> list[BlockId]:
        """Return the blocks whose extras are wanted."""
        with self._lock:
            return [block for block, slot in self._slots.items() if wanted(slot.entry.extras)]

    # --- for copies that others make: pin, reserve ----------------------------------------------------------

    def pin(self, block: BlockId) -> tuple[Entry, Pieces] | None:
        """Hold a block in place and return what it is and where its bytes are; None when it is not there."""
        with self._lock:
            slot = self._published(block)
            if slot is None:
                return None
            slot.pins += 1
            return slot.entry, self._pieces(slot)

    def unpin(self, block: BlockId) -> None:
        """Let a pinned block go again."""
        with self._lock:
            slot = self._slots[block]
            slot.pins -= 1
            self._forget_if_doomed(slot)

    def reserve(self, entry: Entry, num_bytes: int) -> Pieces | None:
        """Make room for a block whose bytes are still to come; None when there is none or it is there already.

        The block is pinned, and nobody finds it until `publish`; `abandon` gives the room back. Until then its memory
        is the caller's.
        """
        with self._lock:
            if self._closed or entry.id in self._slots:
                return None
            units = self._take_units(self.units_for(num_bytes))
            if units is None:
                return None
            slot = self._slots[entry.id] = _Slot(entry, num_bytes, units, pins=1)
            return self._pieces(slot)

    def publish(self, block: BlockId) -> None:
        """Make a reserved block findable: its bytes are complete. It stays pinned until `unpin`."""
        with self._lock:
            slot = self._slots[block]
            slot.published = True
            self._order.add(slot.entry)

    def abandon(self, block: BlockId) -> None:
        """Give the room of a reserved block back."""
        with self._lock:
            slot = self._slots[block]
            slot.doomed = True
            slot.pins -= 1
            self._forget_if_doomed(slot)

    # --- inside ---------------------------------------------------------------------------------------------

    def _published(self, block: BlockId) -> _Slot | None:
        slot = self._slots.get(block)
        return slot if slot is not None and slot.published and not slot.doomed else None

    def _pieces(self, slot: _Slot) -> Pieces:
        """Return the memory of a slot; neighbouring units are one piece."""
        pieces: list[tuple[int, int]] = []
        left = slot.num_bytes
        for unit in slot.units:
            address, size = self._memory.address + unit * self._unit, min(self._unit, left)
            left -= size
            if pieces and pieces[-1][0] + pieces[-1][1] == address:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + size)
            else:
                pieces.append((address, size))
        return tuple(pieces)

    def _take_units(self, count: int) -> list[int] | None:
        while len(self._free) < count:
            block = self._order.victim(lambda b: not self._slots[b].pins)
            if block is None:
                return None
            self._forget(self._slots[block])
            self._counters.add("evicted")
        units = [self._free.pop() for _ in range(count)]
        return sorted(units)

    def _forget_if_doomed(self, slot: _Slot) -> None:
        if slot.doomed and not slot.pins:
            self._forget(slot)

    def _forget(self, slot: _Slot) -> None:
        del self._slots[slot.entry.id]
        if slot.published:
            self._order.remove(slot.entry.id)
        self._free.extend(reversed(slot.units))

    def _read(self, entry: Entry, pieces: Pieces, copies: Copies) -> Outcome:
        """Start copying a block out; on HIT it stays pinned."""
        found = self.pin(entry.id)
        if found is None:
            return MISS
        stored, source = found
        try:
            fields = stored.differing(entry)
            if not fields:
                copies.start(source, pieces)
                return HIT
        except BaseException:
            self.unpin(entry.id)
            raise
        self.unpin(entry.id)
        return Outcome(Status.MISMATCH, f"stored with other {', '.join(fields)}")

    def _write(self, entry: Entry, pieces: Pieces, copies: Copies, begun: dict[BlockId, int]) -> Outcome:
        """Start copying a block in, and note it in `begun` with its bytes; one that is there is not written again."""
        expected = self._block_bytes[entry.group] if entry.group < len(self._block_bytes) else 0
        if payload_bytes(pieces) != expected:
            raise TierError(f"a block of group {entry.group} has {expected} bytes, got {payload_bytes(pieces)}")
        with self._lock:
            slot = self._slots.get(entry.id) if entry.id in begun else self._published(entry.id)
            if slot is not None:
                fields = slot.entry.differing(entry)
                if fields:
                    return Outcome(Status.MISMATCH, f"stored with other {', '.join(fields)}")
                if slot.published:
                    self._order.touch(entry.id, entry.priority)
                return STORED
            if entry.id in self._slots:
                return Outcome(Status.REFUSED, "another call is writing or dropping it")
            target = self.reserve(entry, expected)
            if target is None:
                return Outcome(Status.REFUSED, "closed" if self._closed else "every block is being copied")
            begun[entry.id] = expected
        copies.start(pieces, target)
        return STORED
