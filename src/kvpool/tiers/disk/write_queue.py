"""Writing to a disk behind the caller's back: one thread makes checksums, another writes, so that the disk never waits.

What was asked for happens in that order. A disk that refuses is said once in the log and left alone for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.errors import TierError
from kvpool.tiers.base import BlockId, Outcome, Status, reason
from kvpool.tiers.disk.directory_writer import WritableDirectory
from kvpool.tiers.disk.job import Job
from kvpool.tiers.disk.segment_appender import WRITE_BYTES
from kvpool.tiers.disk.segment_format import payload_checksum

_log = logging.getLogger("kvpool.tiers.disk")
#: After the system refused a write, the next is tried so much later.
RETRY_S = 5.0
#: After so long without a write, what was written is synced.
IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Write:
    """A block to write and the checksum of its bytes."""

    job: Job
    checksum: int


class WriteQueue:
    """Blocks to be written to one directory, and ids to be forgotten there.

    Args:
        directory: Its one writer is this queue's second thread.
        max_pending_bytes: The most it holds unwritten; beyond, back-pressure.

    Invariants: `_given`, `_ready` and what the threads hold are in the order in which it was asked for; bytes of a job
    are pending until it has ended.
    """

    def __init__(self, directory: WritableDirectory, max_pending_bytes: int) -> None:
        self._directory = directory
        self._max_pending_bytes = max_pending_bytes
        self._condition = threading.Condition()
        self._given: deque[Job | BlockId] = deque()
        self._ready: deque[_Write | BlockId] = deque()
        self._drops: set[BlockId] = set()
        self._writing: set[BlockId] = set()
        self._pending_bytes = 0
        self._in_hand = [0, 0]  # of each thread: what it took off a queue and is not done with
        self._unsynced = False
        self._flushes_wanted = self._flushes_done = 0
        self._lost = 0
        self._retry_at = 0.0
        self.last_error = ""
        self._closing = False
        loops: tuple[tuple[str, Callable[[], None]], ...] = (("sum", self._checksum_loop), ("write", self._write_loop))
        self.threads = [threading.Thread(target=loop, name=f"kvpool-{name}", daemon=True) for name, loop in loops]
        for thread in self.threads:
            thread.start()

    @property
    def idle(self) -> bool:
        """True when nothing is queued or under way."""
        with self._condition:
            return not (self._given or self._ready or any(self._in_hand))

    def dropped(self, block: BlockId) -> bool:
        """True for a block that was dropped and may still be in the directory's index."""
        return block in self._drops

    def put(self, job: Job, until: float | None) -> Outcome | None:
        """Queue one write, or say why not.

        Args:
            job: The block.
            until: How long to wait for room, on the monotonic clock; None for ever.
        """
        block, size = job.entry.id, job.num_bytes
        with self._condition:
            if block in self._directory and block not in self._drops:
                return Outcome(Status.STORED)
            if block in self._writing:
                return Outcome(Status.REFUSED, "another call is writing it")
            while self._pending_bytes and self._pending_bytes + size > self._max_pending_bytes and not self._closing:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return Outcome(Status.REFUSED, f"{self._pending_bytes} bytes wait to be written")
                self._condition.wait(left)
            if self._closing:
                return Outcome(Status.REFUSED, "closed")
            if time.monotonic() < self._retry_at:
                return Outcome(Status.REFUSED, f"the last write failed: {self.last_error}")
            self._given.append(job)
            self._writing.add(block)
            self._pending_bytes += size
            self._condition.notify_all()
        return None

    def drop(self, ids: Sequence[BlockId]) -> int:
        """Hide blocks from now on, and queue the record that says so; returns how many were there."""
        with self._condition:
            found = [b for b in ids if (b in self._directory or b in self._writing) and b not in self._drops]
            self._drops.update(found)
            self._given.extend(found)
            self._condition.notify_all()
        return len(found)

    def flush(self, timeout_s: float) -> bool:
        """Write and sync everything queued so far, within a time; False when it is not all durable by then."""
        with self._condition:
            self._flushes_wanted += 1
            mine, lost = self._flushes_wanted, self._lost
            self._condition.notify_all()
            done = self._condition.wait_for(lambda: self._flushes_done >= mine or not self._alive(), timeout_s)
            return done and self._flushes_done >= mine and self._lost == lost

    def close(self) -> None:
        """Begin nothing more; what was not begun is REFUSED. The threads end when the disk answers."""
        with self._condition:
            self._closing = True
            given = [item for item in self._given if isinstance(item, Job)]
            waiting = given + [item.job for item in self._ready if isinstance(item, _Write)]
            self._given.clear()
            self._ready.clear()
            self._condition.notify_all()
        for job in waiting:
            job.end(Outcome(Status.REFUSED, "closed"))

    def failed(self, text: str) -> None:
        """Note a refusal of the system; logged once for each reason, writes pause for `RETRY_S`."""
        with self._condition:
            self._retry_at = time.monotonic() + RETRY_S
            if text != self.last_error:
                self.last_error = text
                _log.warning("%s; its blocks are not kept", text)

    def check(self) -> None:
        """Verify the invariants."""
        with self._condition:
            if self._pending_bytes < 0 or (not self._writing and self._pending_bytes):
                raise TierError(f"disk tier: {self._pending_bytes} bytes pending for {len(self._writing)} writes")

    def _alive(self) -> bool:
        return not self._closing and all(thread.is_alive() for thread in self.threads)

    # --- the thread that makes checksums --------------------------------------------------------------------

    def _checksum_loop(self) -> None:
        while True:
            with self._condition:
                self._in_hand[0] = 0
                self._condition.wait_for(lambda: self._given or self._closing)
                if not self._given:
                    return
                item = self._given.popleft()
                self._in_hand[0] = 1
            ready = _Write(item, payload_checksum(item.pieces)) if isinstance(item, Job) else item
            with self._condition:
                self._ready.append(ready)
                self._condition.notify_all()

    # --- the thread that writes -----------------------------------------------------------------------------

    def _write_loop(self) -> None:
        while True:
            with self._condition:
                self._in_hand[1] = 0
                idle_s = IDLE_S if self._unsynced else None
                self._condition.wait_for(lambda: self._ready or self._flush_now() or self._closing, idle_s)
                if self._closing and not self._ready and not self._in_hand[0]:
                    return
                writes, drops = self._next_writes()
                flushes = self._flushes_wanted if self._flush_now() else self._flushes_done
                self._in_hand[1] = len(writes) + len(drops)
                sync = not (writes or drops) and (self._unsynced or flushes > self._flushes_done)
            if writes:
                self._write(writes)
            elif drops:
                self._forget(drops)
            elif sync:
                self._sync(flushes)

    def _flush_now(self) -> bool:
        """True when somebody waits for a sync and everything before it is written."""
        return self._flushes_done < self._flushes_wanted and not (self._given or self._ready or self._in_hand[0])

    def _next_writes(self) -> tuple[list[_Write], list[BlockId]]:
        """Take the next blocks to write, or the next ids to forget, off the queue."""
        writes: list[_Write] = []
        drops: list[BlockId] = []
        size = 0
        while self._ready and size < WRITE_BYTES:
            head = self._ready[0]
            if isinstance(head, _Write):
                if drops:
                    break
                writes.append(head)
                size += head.job.num_bytes
            else:
                if writes:
                    break
                drops.append(head)
            self._ready.popleft()
        return writes, drops

    def _write(self, writes: list[_Write]) -> None:
        wanted = [write for write in writes if not write.job.ticket.cancelled]
        batch = [(write.job.entry, write.job.pieces) for write in wanted]
        try:
            outcomes = self._directory.append(batch, [write.checksum for write in wanted])
        except Exception as error:
            _log.exception("%s: unexpected failure of a write", self._directory.path)
            outcomes = [Outcome(Status.FAILED, f"{type(error).__name__}: {error}")] * len(wanted)
        by_write = {id(write): outcome for write, outcome in zip(wanted, outcomes, strict=True)}
        for write in writes:
            job = write.job
            outcome = by_write.get(id(write), Outcome(Status.LATE, "cancelled before it was begun"))
            if outcome.status is Status.FAILED:
                self.failed(outcome.detail)
            if outcome.status is Status.STORED:
                job.counters.add("written_bytes", job.num_bytes)
            with self._condition:
                self._unsynced = True
                self._lost += not outcome.ok
                self._writing.discard(job.entry.id)
                self._pending_bytes -= job.num_bytes
                self._condition.notify_all()
            job.end(outcome)

    def _forget(self, ids: list[BlockId]) -> None:
        """Write down that blocks are gone; those that could not be written stay hidden while this process lives."""
        try:
            self._directory.drop(ids)
        except OSError as error:
            self.failed(f"a drop could not be written: {reason(error)}")
            with self._condition:
                self._lost += len(ids)
            return
        with self._condition:
            self._drops.difference_update(ids)
            self._unsynced = True

    def _sync(self, flushes: int) -> None:
        lost = 0
        try:
            self._directory.sync()
        except OSError as error:
            lost = 1
            self.failed(f"sync: {reason(error)}")
        with self._condition:
            self._unsynced = False
            self._lost += lost
            self._flushes_done = flushes
            self._condition.notify_all()
