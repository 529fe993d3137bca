"""The one writer of a directory of segments: lock, appending, eviction under a cap, compaction."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from kvpool.errors import TierError
from kvpool.tiers.base import Batch, BlockId, Entry, Identity, Outcome, Pieces, Status, memory, payload_bytes, reason
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.segment_appender import WRITE_BYTES, Appender, chunk
from kvpool.tiers.disk.segment_format import DamagedError, SegmentHeader, decode_record, payload_checksum
from kvpool.tiers.disk.segment_reading import Place, Segment, read_all

MAX_SEGMENT_BYTES = 256 << 20
MIN_SEGMENT_BYTES = 1 << 20
#: A cap is worked on in so many segments: two of them are room to move blocks in.
SEGMENTS_OF_CAP = 16
_LAST_NUMBER = (1 << 63) - 1


class WritableDirectory(Directory):
    """A directory this process may write. One thread at a time calls what writes.

    Args:
        path: Made when it is missing, readable by its owner only: it holds what users wrote.
        identity: Of all its blocks; None takes over the one found there.
        size_bytes: The most all files may take, while blocks are moved too; None for no cap.
        direct: Write past the page cache where the file system can.

    Raises:
        PlanMismatch: Blocks there have another identity; names the differing parts.
        TierError: Another process writes it, it is of another format, or the system refused.

    Invariants: all files together stay within the cap; a file is deleted only after what is live in it is on the medium
    elsewhere; nothing on disk is changed in place.
    """

    writable = True

    def __init__(
        self,
        path: str | Path,
        identity: Identity | None = None,
        *,
        size_bytes: int | None = None,
        direct: bool = True,
    ) -> None:
        if size_bytes is not None and size_bytes < SEGMENTS_OF_CAP * MIN_SEGMENT_BYTES:
            raise TierError(f"a disk tier needs at least {SEGMENTS_OF_CAP * MIN_SEGMENT_BYTES} bytes, got {size_bytes}")
        self.size_bytes = size_bytes
        cap = SEGMENTS_OF_CAP * MAX_SEGMENT_BYTES if size_bytes is None else size_bytes
        self.segment_bytes = min(MAX_SEGMENT_BYTES, cap // SEGMENTS_OF_CAP)
        self.evicted = 0
        self.moved_bytes = 0
        self._direct = direct
        self._resumable = True
        self._end: Appender | None = None
        self._end_segment: Segment | None = None
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)
        self._lock_fd = _take_lock(Path(path))
        super().__init__(path, identity)
        for stray in self.path.glob("segment-*.tmp"):
            stray.unlink()

    # --- appending ------------------------------------------------------------------------------------------

    def append(self, batch: Batch, checksums: Sequence[int] | None = None) -> list[Outcome]:
        """Write blocks at the end; a block that is there already counts as stored.

        Args:
            batch: Entries and their bytes.
            checksums: `payload_checksum` of each, where the caller has them.

        Returns:
            STORED for what can be found from now on, REFUSED where the cap leaves no room, FAILED where the system
            refused; nothing of those is left.
        """
        outcomes = [Outcome(Status.STORED)] * len(batch)
        todo = {e.id: i for i, (e, _) in reversed(list(enumerate(batch))) if e.id not in self}
        indexes = sorted(todo.values())
        while indexes:
            count, _ = chunk([batch[i] for i in indexes], self.segment_bytes)
            part, indexes = indexes[:count], indexes[count:]
            outcome = self._append_chunk(
                [batch[i] for i in part], None if checksums is None else [checksums[i] for i in part]
            )
            for i in part:
                outcomes[i] = outcome
        return outcomes

    def _append_chunk(self, batch: Batch, checksums: Sequence[int] | None) -> Outcome:
        size = chunk(batch, self.segment_bytes)[1]
        try:
            if not self._make_room(size):
                return Outcome(Status.REFUSED, f"{self.path} is full: {self.total_bytes} bytes of {self.size_bytes}")
            self._write(batch, checksums)
        except OSError as error:
            return Outcome(Status.FAILED, f"{self.path}: {reason(error)}")
        return Outcome(Status.STORED)

    def _write(
        self, batch: Batch, checksums: Sequence[int] | None = None, *, is_drop: bool = False, moving: bool = False
    ) -> None:
        """Write one chunk and index it. Raises OSError; nothing is changed then."""
        size = chunk(batch, self.segment_bytes)[1]
        end, segment = self._open_end(size)
        if checksums is None:
            checksums = [payload_checksum(pieces) for _, pieces in batch]
        places = end.write(batch, checksums, time.time_ns(), is_drop=is_drop)
        with self._lock:
            segment.scanned = segment.size = end.offset
            for (entry, pieces), (offset, head) in zip(batch, places, strict=True):
                if is_drop:
                    segment.drops.add(entry.id)
                elif moving:
                    self._relocate(entry.id, Place(segment, offset, head, payload_bytes(pieces)))
                else:
                    self._add(entry, Place(segment, offset, head, payload_bytes(pieces)))

    def _relocate(self, block: BlockId, place: Place) -> None:
        """Point at a new copy of a block; its turn in the eviction order stays."""
        old = self._index[block]
        old.segment.live.discard(block)
        old.segment.live_bytes -= old.num_bytes
        self._index[block] = place
        place.segment.live.add(block)
        place.segment.live_bytes += place.num_bytes

    def _open_end(self, size: int) -> tuple[Appender, Segment]:
        """Return a file with room for `size` more bytes, or an empty one."""
        if self._resumable:
            self._resume()
        if self._end is not None and self._end_segment is not None:
            empty = self._end.offset == self._end_segment.header.num_bytes
            if empty or self._end.offset + size <= self.segment_bytes:
                return self._end, self._end_segment
            self.seal()
        segment = self._new_segment()
        self._end, self._end_segment = self._appender(segment), segment
        return self._end, segment

    def _appender(self, segment: Segment) -> Appender:
        return Appender(segment.path, segment.header.segment_id, segment.scanned, direct=self._direct)

    def _resume(self) -> None:
        """Go on writing the last file of an earlier process if it has room; its torn end is cut off."""
        self._resumable = False
        last = self._segments.get(self._last_number())
        if last is not None and last.scanned < self.segment_bytes:
            self._end, self._end_segment = self._appender(last), last
            last.size = last.scanned

    def _last_number(self) -> int:
        named = [int(name[8:24], 16) for name in self._unreadable]
        return max([0, *self._segments, *named])

    def _new_segment(self) -> Segment:
        """Publish an empty segment: header in a temporary file, synced, renamed, directory synced."""
        if self.identity is None:
            raise TierError(f"{self.path} is empty and no identity was given; give one")
        number = self._last_number() + 1
        if number > _LAST_NUMBER:
            raise TierError(f"{self.path} has a segment numbered {number - 1}; move it away")
        header = SegmentHeader(number, secrets.token_bytes(16), self.identity)
        name = f"segment-{number:016x}"
        temporary, path = self.path / f"{name}.tmp", self.path / f"{name}.kvpool"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            raw = header.encode()
            if os.write(fd, raw) != len(raw):
                raise OSError(28, "no space for a segment's header")
            os.fsync(fd)
            os.rename(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self._sync_directory()
        segment = Segment(number, path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), header, len(raw), len(raw))
        with self._lock:
            self._segments[number] = segment
        return segment

    def _sync_directory(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def seal(self) -> None:
        """Sync the file at the end and write no more to it."""
        self._resumable = False
        if self._end is not None:
            end, self._end, self._end_segment = self._end, None, None
            try:
                end.sync()
            finally:
                end.close()

    def sync(self) -> None:
        """Wait until everything written is on the medium."""
        if self._end is not None:
            self._end.sync()

    def drop(self, ids: Sequence[BlockId]) -> int:
        """Forget blocks for good: a record says so, which every later opening obeys.

        Raises:
            OSError: The system refused the record; the blocks are forgotten here and may come back at the next opening.
        """
        found = [block for block in ids if block in self]
        with self._lock:
            for block in found:
                self._unindex(block)
        self._write_drops(found)
        return len(found)

    def _write_drops(self, ids: Sequence[BlockId]) -> None:
        batch: Batch = [(Entry(group, key, bytes(8)), ()) for group, key in ids]
        while batch:
            count, _ = chunk(batch, self.segment_bytes)
            self._write(batch[:count], is_drop=True)
            batch = batch[count:]

    # --- eviction and compaction ----------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Evict and compact until `size` more bytes fit, one segment kept free to move blocks into."""
        if self.size_bytes is None:
            return True
        room = self.size_bytes - self.segment_bytes
        while self.live_bytes + size > room - self.segment_bytes and self._evict_one():
            pass
        while self.total_bytes + size > room:
            if not self._compact():
                return False
        return True

    def _evict_one(self) -> bool:
        with self._lock:
            block = self._order.victim(lambda _: True)
            if block is None:
                return False
            self._unindex(block)
            self.evicted += 1
            return True

    def shrink(self, size_bytes: int) -> None:
        """Evict and compact until all files together take at most `size_bytes`."""
        while self.live_bytes > size_bytes and self._evict_one():
            pass
        while self.total_bytes > size_bytes:
            if not self._compact() and not self._evict_one():
                return

    def _compact(self) -> bool:
        """Give bytes back; False when there are none to give.

        What is live in the emptiest file moves to the end and the file is deleted; files with a damaged header, of
        which nothing can be read, go first.
        """
        if self._unreadable:
            name = next(iter(self._unreadable))
            os.unlink(self.path / name)
            del self._unreadable[name]
            return True
        if self._resumable:
            self._resume()  # or the file emptied here would be the one that is written on
        candidates = [s for s in self._segments.values() if s is not self._end_segment and _dead_bytes(s)]
        if not candidates:
            if self._end_segment is None or not _dead_bytes(self._end_segment):
                return False
            candidates = [self._end_segment]
            self.seal()
        segment = min(candidates, key=lambda s: s.live_bytes / s.size)
        self._move(sorted(segment.live, key=lambda block: self._index[block].offset))
        if any(number < segment.number for number in self._segments):
            self._write_drops([block for block in segment.drops if block not in self])
        self.sync()
        os.unlink(segment.path)
        with self._lock:
            self._retire(segment)
        return True

    def _move(self, ids: Sequence[BlockId]) -> None:
        """Append new copies of blocks, verified; damaged ones are forgotten and reported."""
        batch: list[tuple[Entry, Pieces]] = []
        used = 0
        for block in ids:
            place = self._index[block]
            if used and used + place.num_bytes > len(self._scratch):
                self._write_moved(batch)
                batch, used = [], 0
            if len(self._scratch) < place.num_bytes:
                self._scratch = mmap.mmap(-1, max(place.num_bytes, WRITE_BYTES))
            base = ctypes.addressof(ctypes.c_char.from_buffer(self._scratch)) + used
            try:
                batch.append(self._read_record(place, base))
                used += place.num_bytes
            except DamagedError as error:
                with self._lock:
                    self._unindex(block)
                self._report(place.segment.path.name, place.offset, str(error))
        self._write_moved(batch)

    def _read_record(self, place: Place, address: int) -> tuple[Entry, Pieces]:
        read_all(place.segment.fd, [memory(address, place.num_bytes)], place.offset)
        head = bytes(memory(address, place.header_bytes))
        record = decode_record(head, place.segment.header.segment_id, place.offset)
        pieces = ((address + place.header_bytes, place.payload_bytes),)
        if record.payload_bytes != place.payload_bytes or payload_checksum(pieces) != record.payload_crc:
            raise DamagedError(f"the checksum of the block at {place.offset} is wrong")
        return record.entry, pieces

    def _write_moved(self, batch: Batch) -> None:
        while batch:
            count, _ = chunk(batch, self.segment_bytes)
            self._write(batch[:count], moving=True)
            self.moved_bytes += sum(payload_bytes(pieces) for _, pieces in batch[:count])
            batch = batch[count:]

    def close(self) -> None:
        """Sync, close all files and give the lock back."""
        try:
            self.seal()
        finally:
            super().close()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1


def _dead_bytes(segment: Segment) -> int:
    """Bytes of a file that compaction would give back; all of it when nothing in it is live."""
    if not segment.live:
        return segment.size
    return segment.size - segment.header.num_bytes - segment.live_bytes


def _take_lock(path: Path) -> int:
    """Make the directory and lock it against other writers; the lock ends with the descriptor."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TierError(f"cannot write in {path}: {reason(error)}; give a directory of your own") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise TierError(
            f"{path} is being written by process {holder}; wait for it, or open the directory for reading"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
