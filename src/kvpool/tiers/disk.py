"""The disk tier: a directory of segments behind worker threads, queues and deadlines, so that no step waits for a disk.

A disk that is late, full or broken costs misses and a line in the log, never an exception in a step and never a wrong
byte.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvpool.errors import TierError
from kvpool.tiers.appender import WRITE_BYTES
from kvpool.tiers.base import (
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
    reason,
)
from kvpool.tiers.directory import Damage, Directory
from kvpool.tiers.writer import WritableDirectory

_log = logging.getLogger("kvpool.tiers.disk")
#: Threads that read; two keep a disk busy while one verifies.
NUM_READERS = 2
#: Bytes given to `put` and not yet written; beyond, back-pressure.
MAX_PENDING_BYTES = 256 << 20
#: After the system refused a write, the next is tried so much later.
RETRY_S = 5.0
#: After so long without a write, what was written is synced.
IDLE_S = 0.5
#: How often a reader looks for what a writer in another process added.
REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class _Job:
    """One block to read or write."""

    ticket: Ticket
    index: int
    entry: Entry
    pieces: Pieces

    @property
    def num_bytes(self) -> int:
        return payload_bytes(self.pieces)


class DiskTier:
    """Blocks in a directory that outlives the process.

    Args:
        path: The directory; made when missing, unless `read_only`.
        identity: Of all its blocks; None takes over the one found there.
        size_bytes: The most it may take; None for no cap.
        read_only: Do not take the writer's lock; `put` and `drop` are refused. What another process writes is found.
        max_pending_bytes: The most `put` holds unwritten.
        direct: Write past the page cache where the file system can.

    Raises:
        PlanMismatch: The directory belongs to another plan or model; names the differing parts.
        TierError: Another process writes it, or it cannot be used.

    Invariants: only workers touch files; memory of a batch is touched by nobody once its ticket is done.
    """

    name = "disk"

    def __init__(
        self,
        path: str | Path,
        identity: Identity | None = None,
        *,
        size_bytes: int | None = None,
        read_only: bool = False,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        direct: bool = True,
    ) -> None:
        self._directory: Directory
        self._writer: WritableDirectory | None = None
        if read_only:
            self._directory = Directory(path, identity)
        else:
            self._directory = self._writer = WritableDirectory(path, identity, size_bytes=size_bytes, direct=direct)
        found = self._directory.identity
        self.identity = Identity({}) if found is None else found
        self._counters = Counters()
        self._condition = threading.Condition()
        self._reads: deque[_Job] = deque()
        #: Blocks to write and ids to forget, in the order they were asked for.
        self._writes: deque[_Job | BlockId] = deque()
        self._drops: set[BlockId] = set()
        self._writing: set[BlockId] = set()
        self._pending_bytes = 0
        self._ending = 0  # writes done whose tickets are not told yet
        self._max_pending_bytes = max_pending_bytes
        self._unsynced = False
        self._flushes_wanted = 0
        self._flushes_done = 0
        self._lost = 0
        #: Deadline of each read under way, by thread; one in the past means that the disk is late now.
        self._busy: dict[int, float | None] = {}
        self._retry_at = 0.0
        self._last_error = ""
        self._closing = False
        work = [self._read_loop] * NUM_READERS + [self._refresh_loop if read_only else self._write_loop]
        self._threads = [
            threading.Thread(target=loop, name=f"kvpool-disk-{i}", daemon=True) for i, loop in enumerate(work)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def damage(self) -> list[Damage]:
        """Everything found in the directory that is not what was written."""
        return list(self._directory.damage)

    @property
    def late(self) -> bool:
        """True while a read is under way whose deadline has passed: until it ends, the disk is asked for nothing."""
        now = time.monotonic()
        with self._condition:
            return any(deadline is not None and deadline < now for deadline in self._busy.values())

    @property
    def idle(self) -> bool:
        """True when nothing is queued or under way."""
        with self._condition:
            return not (self._reads or self._writes or self._busy or self._writing or self._ending)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or under way, within a time; returns whether that is so."""
        until = time.monotonic() + timeout_s
        while not self.idle and time.monotonic() < until:
            time.sleep(0.001)
        return self.idle

    def find(self, wanted: Callable[[bytes], bool]) -> list[BlockId]:
        """Return the blocks whose extras are wanted: reads the headers of all records, seconds for a large tier."""
        return [record.entry.id for record, _ in self._directory.entries() if wanted(record.entry.extras)]

    # --- the protocol ---------------------------------------------------------------------------------------

    def exists(self, ids: Sequence[BlockId]) -> list[bool]:
        """Say which blocks the index has; a disk that is late has none."""
        if self._closing or self.late:
            return [False] * len(ids)
        return [block in self._directory and block not in self._drops for block in ids]

    def get(self, batch: Batch, *, deadline_s: float | None = None, notify: Notify | None = None) -> Ticket:
        """Queue reads; nothing of a block is believed before all of it was verified."""
        ticket = Ticket(len(batch), notify, deadline_s)
        late = self.late
        jobs: list[_Job] = []
        for index, (entry, pieces) in enumerate(batch):
            job = _Job(ticket, index, entry, pieces)
            if self._closing or entry.id not in self._directory or entry.id in self._drops:
                self._end(job, MISS)
            elif late:
                self._end(job, Outcome(Status.LATE, "an earlier read is overdue"))
            else:
                jobs.append(job)
        self._directory.touch([entry.id for entry, _ in batch])
        with self._condition:
            self._reads.extend(jobs)
            self._condition.notify_all()
        return ticket

    def put(self, batch: Batch, *, deadline_s: float | None = 0.0, notify: Notify | None = None) -> Ticket:
        """Queue writes, as far as there is room for them."""
        ticket = Ticket(len(batch), notify)
        until = None if deadline_s is None else time.monotonic() + deadline_s
        for index, (entry, pieces) in enumerate(batch):
            job = _Job(ticket, index, entry, pieces)
            outcome = self._queue_write(job, until)
            if outcome is not None:
                self._end(job, outcome)
        return ticket

    def drop(self, ids: Sequence[BlockId]) -> int:
        """Forget blocks: found by nobody from now on; the record that says so is written in the background."""
        if self._writer is None:
            raise TierError(f"{self._directory.path} was opened for reading; open it for writing to drop blocks")
        with self._condition:
            found = [b for b in ids if (b in self._directory or b in self._writing) and b not in self._drops]
            self._drops.update(found)
            self._writes.extend(found)
            self._condition.notify_all()
        return len(found)

    def flush(self, timeout_s: float) -> bool:
        """Write and sync everything taken so far, within a time; False when it is not all durable by then."""
        if self._writer is None:
            return True
        with self._condition:
            self._flushes_wanted += 1
            mine = self._flushes_wanted
            lost = self._lost
            self._condition.notify_all()
            done = self._condition.wait_for(lambda: self._flushes_done >= mine or not self._alive(), timeout_s)
            return done and self._flushes_done >= mine and self._lost == lost

    def close(self, timeout_s: float = 10.0) -> bool:
        """Flush, stop the threads and give the lock back, within a time.

        A disk that does not answer keeps its threads, which end with the process; what they had not written is lost and
        reported.
        """
        if self._closing:
            return True
        until = time.monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        with self._condition:
            self._closing = True
            waiting = [*self._reads, *(job for job in self._writes if isinstance(job, _Job))]
            self._reads.clear()
            self._writes.clear()
            self._condition.notify_all()
        for job in waiting:
            self._end(job, Outcome(Status.REFUSED, "closed"))
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            _log.warning(
                "%s: the disk did not answer in %.1f s; what it held is left behind", self._directory.path, timeout_s
            )
            return False
        try:
            self._directory.close()
        except OSError as error:
            self._failed(reason(error))
            return False
        if not flushed:
            _log.warning(
                "%s: not everything could be written: %s", self._directory.path, self._last_error or "too slow"
            )
        return flushed

    def stats(self) -> TierStats:
        """Return the counters."""
        writer = self._writer
        size = 0 if writer is None or writer.size_bytes is None else writer.size_bytes
        stats = self._counters.stats(len(self._directory), self._directory.total_bytes, size)
        if writer is None:
            return stats
        return replace(stats, evicted=writer.evicted, moved_bytes=writer.moved_bytes)

    def check(self) -> None:
        """Verify the invariants of index and queues."""
        self._directory.check()
        with self._condition:
            if self._pending_bytes < 0 or (not self._writing and self._pending_bytes):
                raise TierError(f"disk tier: {self._pending_bytes} bytes pending for {len(self._writing)} writes")

    # --- queues ---------------------------------------------------------------------------------------------

    def _end(self, job: _Job, outcome: Outcome) -> None:
        job.ticket.finish(job.index, self._counters.outcome(outcome, job.num_bytes))

    def _queue_write(self, job: _Job, until: float | None) -> Outcome | None:
        """Queue one write, or say why not."""
        entry, size = job.entry, job.num_bytes
        if self._writer is None:
            return Outcome(Status.REFUSED, "opened for reading")
        with self._condition:
            if entry.id in self._directory and entry.id not in self._drops:
                return STORED
            if entry.id in self._writing:
                return Outcome(Status.REFUSED, "another call is writing it")
            while self._pending_bytes and self._pending_bytes + size > self._max_pending_bytes and not self._closing:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return Outcome(Status.REFUSED, f"{self._pending_bytes} bytes wait to be written")
                self._condition.wait(left)
            if self._closing:
                return Outcome(Status.REFUSED, "closed")
            if time.monotonic() < self._retry_at:
                return Outcome(Status.REFUSED, f"the last write failed: {self._last_error}")
            self._writes.append(job)
            self._writing.add(entry.id)
            self._pending_bytes += size
            self._condition.notify_all()
        return None

    def _alive(self) -> bool:
        return not self._closing and all(thread.is_alive() for thread in self._threads)

    # --- workers --------------------------------------------------------------------------------------------

    def _read_loop(self) -> None:
        me = threading.get_ident()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._reads or self._closing)
                if not self._reads:
                    return
                job = self._reads.popleft()
                begun = not job.ticket.expired()
                if begun:
                    self._busy[me] = job.ticket.deadline
            if not begun:
                self._end(job, Outcome(Status.LATE, "its deadline passed before it was begun"))
                continue
            try:
                outcome = self._directory.read(job.entry, job.pieces)
            except Exception as error:  # a thread that dies takes the tier with it
                _log.exception("%s: unexpected failure of a read", self._directory.path)
                outcome = Outcome(Status.FAILED, f"{type(error).__name__}: {error}")
            if outcome.ok and job.ticket.expired():
                outcome = Outcome(Status.LATE, "it came after its deadline")
            self._end(job, outcome)
            with self._condition:
                del self._busy[me]

    def _write_loop(self) -> None:
        while True:
            with self._condition:
                idle_s = IDLE_S if self._unsynced else None
                self._condition.wait_for(
                    lambda: self._writes or self._flushes_done < self._flushes_wanted or self._closing, idle_s
                )
                if self._closing and not self._writes:
                    return
                jobs, drops = self._next_writes()
                flushes = self._flushes_wanted
            if jobs:
                self._write(jobs)
            elif drops:
                self._forget(drops)
            else:
                self._sync(flushes)

    def _next_writes(self) -> tuple[list[_Job], list[BlockId]]:
        """Take the next blocks to write, or the next ids to forget, off the queue."""
        jobs: list[_Job] = []
        drops: list[BlockId] = []
        size = 0
        while self._writes and size < WRITE_BYTES:
            head = self._writes[0]
            if isinstance(head, _Job):
                if drops:
                    break
                jobs.append(head)
                size += head.num_bytes
            else:
                if jobs:
                    break
                drops.append(head)
            self._writes.popleft()
        return jobs, drops

    def _write(self, jobs: list[_Job]) -> None:
        assert self._writer is not None
        wanted = [job for job in jobs if not job.ticket.cancelled]
        try:
            outcomes = self._writer.append([(job.entry, job.pieces) for job in wanted])
        except Exception as error:
            _log.exception("%s: unexpected failure of a write", self._directory.path)
            outcomes = [Outcome(Status.FAILED, f"{type(error).__name__}: {error}")] * len(wanted)
        by_job = {id(job): outcome for job, outcome in zip(wanted, outcomes, strict=True)}
        for job in jobs:
            outcome = by_job.get(id(job), Outcome(Status.LATE, "cancelled before it was begun"))
            if outcome.status is Status.FAILED:
                self._failed(outcome.detail)
            if outcome.status is Status.STORED:
                self._counters.add("written_bytes", job.num_bytes)
            with self._condition:
                self._unsynced = True
                self._lost += not outcome.ok
                self._writing.discard(job.entry.id)
                self._pending_bytes -= job.num_bytes
                self._ending += 1
                self._condition.notify_all()
            self._end(job, outcome)
            with self._condition:
                self._ending -= 1

    def _forget(self, ids: list[BlockId]) -> None:
        """Write down that blocks are gone; those that could not be written stay hidden while this process lives."""
        assert self._writer is not None
        try:
            self._writer.drop(ids)
        except OSError as error:
            self._failed(f"a drop could not be written: {reason(error)}")
            with self._condition:
                self._lost += len(ids)
            return
        with self._condition:
            self._drops.difference_update(ids)
            self._unsynced = True

    def _sync(self, flushes: int) -> None:
        assert self._writer is not None
        lost = 0
        try:
            self._writer.sync()
        except OSError as error:
            lost = 1
            self._failed(f"sync: {reason(error)}")
        with self._condition:
            self._unsynced = False
            self._lost += lost
            self._flushes_done = flushes
            self._condition.notify_all()

    def _failed(self, text: str) -> None:
        """Note a refusal of the system; logged once for each reason, writes pause for `RETRY_S`."""
        with self._condition:
            self._retry_at = time.monotonic() + RETRY_S
            if text != self._last_error:
                self._last_error = text
                _log.warning("%s; its blocks are not kept", text)

    def _refresh_loop(self) -> None:
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._closing, REFRESH_S):
                    return
            try:
                self._directory.refresh()
            except (OSError, ValueError) as error:
                _log.warning("%s: cannot look for new blocks: %s", self._directory.path, error)
