"""Where blocks are in open segment files, and how one is read and verified. Knows no index and no order."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.tiers.base import BlockId, Entry, Outcome, Pieces, Status, memory
from kvpool.tiers.disk.segment_format import DamagedError, SegmentHeader, decode_record, padded, payload_checksum


@dataclass(slots=True, eq=False)
class Segment:
    """One file.

    Attributes:
        scanned: End of what is known; later bytes are still to be looked at, or torn.
        size: Of the file when it was last looked at.
        live: Blocks whose newest copy is here.
        drops: Blocks that a record here says are gone.
        live_bytes: Bytes of their records.
        users: Reads under way; the file is closed when it is retired and they are 0.
    """

    number: int
    path: Path
    fd: int
    header: SegmentHeader
    scanned: int
    size: int = 0
    live: set[BlockId] = field(default_factory=set)
    drops: set[BlockId] = field(default_factory=set)
    live_bytes: int = 0
    users: int = 0
    retired: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where the newest copy of a block is."""

    segment: Segment
    offset: int
    header_bytes: int
    payload_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the record."""
        return self.header_bytes + padded(self.payload_bytes)


@dataclass(slots=True, eq=False)
class Reading:
    """A block on its way from a file into memory.

    Attributes:
        head: Its record's header, once fetched.
        pad: What fills its last page, once fetched.
        damage: Why it is none, when the file is too short for it.
        failure: What the system said, when it cannot be read.
    """

    place: Place
    entry: Entry
    pieces: Pieces
    head: bytearray = field(init=False)
    pad: bytearray = field(init=False)
    damage: str = ""
    failure: str = ""

    def __post_init__(self) -> None:
        self.head = bytearray(self.place.header_bytes)
        self.pad = bytearray(padded(self.place.payload_bytes) - self.place.payload_bytes)

    @property
    def views(self) -> list[memoryview]:
        """Where the record's bytes go, in order."""
        return [memoryview(self.head), *(memory(a, n) for a, n in self.pieces), memoryview(self.pad)]

    def follows(self, other: Reading) -> bool:
        """True when the block begins where another ends."""
        place = other.place
        return self.place.segment is place.segment and self.place.offset == place.offset + place.num_bytes

    def verify(self) -> Outcome:
        """Check all of what was read.

        Raises:
            DamagedError: It is not what was written.
        """
        if self.failure:
            return Outcome(Status.FAILED, self.failure)
        if self.damage:
            raise DamagedError(self.damage)
        place = self.place
        record = decode_record(bytes(self.head), place.segment.header.segment_id, place.offset)
        if record.payload_bytes != place.payload_bytes:
            raise DamagedError(f"the record at {place.offset} changed its length")
        fields = record.entry.differing(self.entry)
        if fields:
            return Outcome(Status.MISMATCH, f"stored with other {', '.join(fields)}")
        if any(self.pad) or payload_checksum(self.pieces) != record.payload_crc:
            raise DamagedError(f"the checksum of the block at {place.offset} is wrong")
        return Outcome(Status.HIT)


def read_all(fd: int, views: list[memoryview], offset: int) -> None:
    """Fill views from a file.

    Raises:
        DamagedError: The file ends before.
    """
    views = [view for view in views if len(view)]
    while views:
        done = os.preadv(fd, views, offset)
        if not done:
            raise DamagedError(f"the record at {offset} is cut off")
        offset += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]
