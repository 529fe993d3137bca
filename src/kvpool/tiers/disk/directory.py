"""A directory of segment files, found again by reading it: index, order and verified reads.

Synchronous: whoever calls waits for the disk. Threads, queues and deadlines are `tier.py`'s. Index and eviction order
live in memory and are rebuilt from the segments; nothing on disk is ever changed in place.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import TierError
from kvpool.tiers.base import MISS, BlockId, Entry, Identity, Outcome, Pieces, Status, payload_bytes, reason
from kvpool.tiers.disk.segment_format import DamagedError, DamagedRange, RecordHeader, read_header, scan
from kvpool.tiers.disk.segment_reading import Place, Reading, Segment, read_all
from kvpool.tiers.eviction_order import EvictionOrder

_log = logging.getLogger("kvpool.tiers.disk")
_NAME = re.compile(r"segment-([0-9a-f]{16})\.kvpool")


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in a directory that is not what was written."""

    file: str
    offset: int
    reason: str


class Directory:
    """The blocks in one directory, for reading; `directory_writer.WritableDirectory` adds to them.

    Args:
        path: Must exist.
        identity: Of all its blocks; None takes over the one found there.

    Raises:
        PlanMismatch: Blocks there have another identity; names the differing parts.
        TierError: The directory cannot be used, or is of another format.

    Invariants: what is indexed had a whole header when it was found, and is verified whole when it is read; blocks of
    another identity are never indexed.
    """

    writable = False

    def __init__(self, path: str | Path, identity: Identity | None = None) -> None:
        self.path = Path(path)
        self.identity = identity
        self.damage: list[Damage] = []
        self._lock = threading.RLock()
        self._index: dict[BlockId, Place] = {}
        self._order = EvictionOrder()
        self._segments: dict[int, Segment] = {}
        #: Files that are no segments of ours, with their sizes.
        self._unreadable: dict[str, int] = {}
        try:
            self.refresh()
        except Exception as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, TierError):
                raise TierError(
                    f"cannot open {self.path}: {reason(error)}; give a directory that can be read"
                ) from error
            raise

    # --- finding --------------------------------------------------------------------------------------------

    def __contains__(self, block: BlockId) -> bool:
        return block in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def live_bytes(self) -> int:
        """Bytes of the records that can be found."""
        with self._lock:
            return sum(segment.live_bytes for segment in self._segments.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(segment.size for segment in self._segments.values()) + sum(self._unreadable.values())

    def touch(self, ids: Sequence[BlockId]) -> None:
        """Make blocks the most recently used, the first of them the newest."""
        with self._lock:
            for block in reversed(ids):
                self._order.touch(block)

    def refresh(self) -> None:
        """Look for what was written since: new files, longer files, files that are gone."""
        names = sorted(name for name in os.listdir(self.path) if _NAME.fullmatch(name))
        with self._lock:
            for name in names:
                number = int(name[8:24], 16)
                if number in self._segments:
                    self._scan(self._segments[number])
                elif name not in self._unreadable:
                    self._open_segment(name, number)
            there = {int(name[8:24], 16) for name in names}
            for number in [n for n in self._segments if n not in there]:
                self._retire(self._segments[number])

    def _open_segment(self, name: str, number: int) -> None:
        path = self.path / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # compacted since we looked
        except OSError as error:
            self._report(name, 0, f"cannot be opened: {reason(error)}")
            self._unreadable[name] = 0
            return
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise DamagedError(f"{name}: no regular file")
            header = read_header(fd, name)
            if header.number != number:
                raise DamagedError(f"{name}: was written as number {header.number}")
            if self.identity is None:
                self.identity = header.identity
            self.identity.require(header.identity, str(path))
        except DamagedError as error:
            self._unreadable[name] = os.fstat(fd).st_size
            os.close(fd)
            self._report(name, 0, str(error))
            return
        except Exception:
            os.close(fd)
            raise
        segment = self._segments[number] = Segment(number, path, fd, header, header.num_bytes)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a scan looks at a page of each record
        self._scan(segment)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def _scan(self, segment: Segment) -> None:
        """Index what a file holds behind what is known of it. A torn end is left for the next look."""
        size = segment.size = os.fstat(segment.fd).st_size
        if size <= segment.scanned:
            return
        for found in scan(segment.fd, segment.header, segment.scanned, size):
            if isinstance(found, RecordHeader):
                self._apply(segment, found)
                segment.scanned = found.offset + found.num_bytes
            elif found.stop < size:
                self._report(segment.path.name, found.start, found.reason)
            elif self.writable:  # a reader may be watching a write under way
                self._report(segment.path.name, found.start, f"torn end: {found.reason}")

    def _apply(self, segment: Segment, record: RecordHeader) -> None:
        self._unindex(record.entry.id)
        if record.is_drop:
            segment.drops.add(record.entry.id)
        else:
            self._add(record.entry, Place(segment, record.offset, record.header_bytes, record.payload_bytes))

    def _add(self, entry: Entry, place: Place) -> None:
        self._unindex(entry.id)
        self._index[entry.id] = place
        place.segment.live.add(entry.id)
        place.segment.live_bytes += place.num_bytes
        self._order.add(entry)

    def _unindex(self, block: BlockId) -> None:
        place = self._index.pop(block, None)
        if place is not None:
            place.segment.live.discard(block)
            place.segment.live_bytes -= place.num_bytes
            self._order.remove(block)

    def _retire(self, segment: Segment) -> None:
        """Forget a file; its memory of blocks too, and the descriptor once nobody reads from it."""
        for block in list(segment.live):
            self._unindex(block)
        del self._segments[segment.number]
        segment.retired = True
        if not segment.users:
            os.close(segment.fd)

    def _report(self, file: str, offset: int, reason: str) -> None:
        self.damage.append(Damage(file, offset, reason))
        _log.warning("%s/%s at %d: %s; treated as a miss", self.path, file, offset, reason)

    # --- reading --------------------------------------------------------------------------------------------

    def read(self, entry: Entry, pieces: Pieces) -> Outcome:
        """Read a block, verify all of it and compare tokens and extras.

        A damaged block is forgotten and reported. The memory may hold anything unless the outcome is HIT.
        """
        reading = self.begin(entry, pieces)
        if isinstance(reading, Outcome):
            return reading
        self.fetch([reading])
        return self.finish(reading)

    def position(self, block: BlockId) -> tuple[int, int]:
        """Return where a block lies: blocks read in this order are read as fast as the files can be."""
        place = self._index.get(block)
        return (0, 0) if place is None else (place.segment.number, place.offset)

    def begin(self, entry: Entry, pieces: Pieces) -> Reading | Outcome:
        """Find a block and hold its file open, for `fetch` and `finish`; or say why it cannot be read."""
        with self._lock:
            place = self._index.get(entry.id)
            if place is None:
                return MISS
            size = payload_bytes(pieces)
            if place.payload_bytes != size:
                return Outcome(Status.MISMATCH, f"stored with {place.payload_bytes} bytes, {size} expected")
            place.segment.users += 1
        return Reading(place, entry, pieces)

    def fetch(self, run: Sequence[Reading]) -> None:
        """Read blocks that lie one after another, in one call; `finish` says what came of each."""
        if not run:
            return
        try:
            read_all(run[0].place.segment.fd, [view for reading in run for view in reading.views], run[0].place.offset)
        except DamagedError as error:  # the file ends before the last of them does
            if len(run) == 1:
                run[0].damage = str(error)
            for reading in run if len(run) > 1 else ():
                self.fetch([reading])
        except OSError as error:
            for reading in run:
                reading.failure = f"{reading.place.segment.path}: {reason(error)}"

    def finish(self, reading: Reading) -> Outcome:
        """Verify what was fetched and let the file go."""
        place = reading.place
        try:
            return reading.verify()
        except DamagedError as error:
            with self._lock:
                if self._index.get(reading.entry.id) is place:
                    self._unindex(reading.entry.id)
                    self._report(place.segment.path.name, place.offset, str(error))
            return Outcome(Status.DAMAGED, str(error))
        finally:
            self.leave(reading)

    def leave(self, reading: Reading) -> None:
        """Let a file go again; `finish` does it too."""
        with self._lock:
            segment = reading.place.segment
            segment.users -= 1
            if segment.retired and not segment.users:
                os.close(segment.fd)

    def records(self) -> Iterator[tuple[Segment, RecordHeader | DamagedRange]]:
        """Walk over every file as it is now, records that were superseded and damage included."""
        with self._lock:
            segments = list(self._segments.values())
        for segment in segments:
            size = os.fstat(segment.fd).st_size
            for found in scan(segment.fd, segment.header, segment.header.num_bytes, size):
                yield segment, found

    def torn_ends(self) -> Iterator[tuple[Segment, DamagedRange]]:
        """Yield what is cut off at the end of a file: a write under way, or one that was killed."""
        for segment, found in self.records():
            if isinstance(found, DamagedRange) and found.start >= segment.scanned:
                yield segment, found

    def entries(self) -> Iterator[tuple[RecordHeader, Segment]]:
        """Walk over the newest copy of every block, in the order written."""
        for segment, found in self.records():
            if isinstance(found, RecordHeader) and not found.is_drop:
                place = self._index.get(found.entry.id)
                if place is not None and place.segment is segment and place.offset == found.offset:
                    yield found, segment

    def check(self) -> None:
        """Verify the invariants."""
        with self._lock:
            self._order.check()
            if set(self._order) != set(self._index):
                raise TierError(f"{self.path}: the eviction order and the index differ")
            for segment in self._segments.values():
                places = [self._index[block] for block in segment.live]
                if (
                    any(p.segment is not segment for p in places)
                    or sum(p.num_bytes for p in places) != segment.live_bytes
                ):
                    raise TierError(f"{segment.path}: its live blocks or bytes are wrong")
            if sum(len(segment.live) for segment in self._segments.values()) != len(self._index):
                raise TierError(f"{self.path}: a block is live in no file")

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for segment in list(self._segments.values()):
                self._retire(segment)
