"""The disk tier: a directory of segments behind worker threads, queues and deadlines, so that no step waits for a disk.

A disk that is late, full or broken costs misses and a line in the log, never an exception in a step and never a wrong
byte.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvpool.errors import TierError
from kvpool.tiers.base import (
    MISS,
    Batch,
    BlockId,
    Counters,
    Identity,
    Notify,
    Outcome,
    Status,
    Ticket,
    TierStats,
    reason,
)
from kvpool.tiers.disk.directory import Damage, Directory
from kvpool.tiers.disk.directory_writer import WritableDirectory
from kvpool.tiers.disk.job import Job
from kvpool.tiers.disk.read_queue import ReadQueue
from kvpool.tiers.disk.write_queue import WriteQueue

_log = logging.getLogger("kvpool.tiers.disk")
#: Bytes given to `put` and not yet written; beyond, back-pressure.
MAX_PENDING_BYTES = 256 << 20
#: How often a reader looks for what a writer in another process added.
REFRESH_S = 1.0


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
        self._writes: WriteQueue | None = None
        self._writer: WritableDirectory | None = None
        if read_only:
            self._directory = Directory(path, identity)
        else:
            self._directory = self._writer = WritableDirectory(path, identity, size_bytes=size_bytes, direct=direct)
            self._writes = WriteQueue(self._writer, max_pending_bytes)
        found = self._directory.identity
        self.identity = Identity({}) if found is None else found
        self._counters = Counters()
        self._reads = ReadQueue(self._directory)
        self._closing = threading.Event()
        self._threads = [*self._reads.threads, *(self._writes.threads if self._writes else ())]
        if read_only:
            self._threads.append(threading.Thread(target=self._refresh_loop, name="kvpool-refresh", daemon=True))
            self._threads[-1].start()

    @property
    def damage(self) -> list[Damage]:
        """Everything found in the directory that is not what was written."""
        return list(self._directory.damage)

    @property
    def late(self) -> bool:
        """True while a read is under way whose deadline has passed: until it ends, the disk is asked for nothing."""
        return self._reads.late

    @property
    def idle(self) -> bool:
        """True when nothing is queued or under way."""
        return self._reads.idle and (self._writes is None or self._writes.idle)

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
        if self._closing.is_set() or self.late:
            return [False] * len(ids)
        return [self._has(block) for block in ids]

    def _has(self, block: BlockId) -> bool:
        return block in self._directory and not (self._writes and self._writes.dropped(block))

    def get(self, batch: Batch, *, deadline_s: float | None = None, notify: Notify | None = None) -> Ticket:
        """Queue reads; nothing of a block is believed before all of it was verified."""
        ticket = Ticket(len(batch), notify, deadline_s)
        late = self.late
        jobs: list[Job] = []
        for index, (entry, pieces) in enumerate(batch):
            job = Job(ticket, index, entry, pieces, self._counters)
            if self._closing.is_set() or not self._has(entry.id):
                job.end(MISS)
            elif late:
                job.end(Outcome(Status.LATE, "an earlier read is overdue"))
            else:
                jobs.append(job)
        self._directory.touch([entry.id for entry, _ in batch])
        self._reads.submit(jobs)
        return ticket

    def put(self, batch: Batch, *, deadline_s: float | None = 0.0, notify: Notify | None = None) -> Ticket:
        """Queue writes, as far as there is room for them."""
        ticket = Ticket(len(batch), notify)
        until = None if deadline_s is None else time.monotonic() + deadline_s
        for index, (entry, pieces) in enumerate(batch):
            job = Job(ticket, index, entry, pieces, self._counters)
            refused = Outcome(Status.REFUSED, "opened for reading")
            outcome = refused if self._writes is None else self._writes.put(job, until)
            if outcome is not None:
                job.end(outcome)
        return ticket

    def drop(self, ids: Sequence[BlockId]) -> int:
        """Forget blocks: found by nobody from now on; the record that says so is written in the background."""
        if self._writes is None:
            raise TierError(f"{self._directory.path} was opened for reading; open it for writing to drop blocks")
        return self._writes.drop(ids)

    def flush(self, timeout_s: float) -> bool:
        """Write and sync everything taken so far, within a time; False when it is not all durable by then."""
        return self._writes is None or self._writes.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Flush, stop the threads and give the lock back, within a time.

        A disk that does not answer keeps its threads, which end with the process; what they had not written is lost and
        reported.
        """
        if self._closing.is_set():
            return True
        until = time.monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        self._closing.set()
        self._reads.close()
        if self._writes is not None:
            self._writes.close()
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        path, writes = self._directory.path, self._writes
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("%s: the disk did not answer in %.1f s; what it held is left behind", path, timeout_s)
            return False
        try:
            self._directory.close()
        except OSError as error:
            _log.warning("%s: cannot be closed: %s", path, reason(error))
            return False
        if not flushed:
            _log.warning("%s: not everything could be written: %s", path, (writes and writes.last_error) or "too slow")
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
        if self._writes is not None:
            self._writes.check()

    def _refresh_loop(self) -> None:
        while not self._closing.wait(REFRESH_S):
            try:
                self._directory.refresh()
            except (OSError, ValueError) as error:
                _log.warning("%s: cannot look for new blocks: %s", self._directory.path, error)
