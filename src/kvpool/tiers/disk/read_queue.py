"""Reading from a disk behind the caller's back: one thread reads in the order of the files, another verifies.

One thread, because the system reads ahead of a file that is read in order, and of no other: two threads in one file get
half of what one gets, and direct I/O of any depth no more than that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvpool.tiers.base import Outcome, Status
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.job import Job
from kvpool.tiers.disk.segment_appender import MAX_PIECES
from kvpool.tiers.disk.segment_reading import Reading

_log = logging.getLogger("kvpool.tiers.disk")
#: Blocks that lie one after another are read in one call of about so many bytes: small ones cost little then, and the
#: other thread verifies while more is read.
READ_BYTES = 4 << 20


class ReadQueue:
    """Blocks to be read from one directory.

    Args:
        directory: It is asked by the two threads only.

    Invariants: a job is queued, being read, being verified or ended; memory of a job is touched until it has ended.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._condition = threading.Condition()
        self._queued: deque[Job] = deque()
        self._read: deque[tuple[Job, Reading]] = deque()
        self._verifying = 0
        #: Earliest deadline of what is being read, None for none at all; in the past when the disk is late now.
        self._deadline: float | None = None
        self._reading = False
        self._closing = False
        loops: tuple[tuple[str, Callable[[], None]], ...] = (("read", self._read_loop), ("verify", self._verify_loop))
        self.threads = [threading.Thread(target=loop, name=f"kvpool-{name}", daemon=True) for name, loop in loops]
        for thread in self.threads:
            thread.start()

    @property
    def late(self) -> bool:
        """True while a read is under way whose deadline has passed."""
        deadline = self._deadline
        return deadline is not None and deadline < time.monotonic()

    @property
    def idle(self) -> bool:
        """True when nothing is queued or under way."""
        with self._condition:
            return not (self._queued or self._reading or self._read or self._verifying)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue a batch; it is read in the order in which it lies in the files."""
        ordered = sorted(jobs, key=lambda job: self._directory.position(job.entry.id))
        with self._condition:
            self._queued.extend(ordered)
            self._condition.notify_all()

    def close(self) -> None:
        """Begin nothing more; what was not begun is REFUSED. The threads end when the disk answers."""
        with self._condition:
            self._closing = True
            waiting = list(self._queued)
            self._queued.clear()
            self._condition.notify_all()
        for job in waiting:
            job.end(Outcome(Status.REFUSED, "closed"))

    # --- the thread that reads ------------------------------------------------------------------------------

    def _read_loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queued or self._closing)
                if not self._queued:
                    return
                run, ended = self._next_run()
                deadlines = [job.ticket.deadline for job, _ in run if job.ticket.deadline is not None]
                self._reading, self._deadline = True, min(deadlines, default=None)
            for job, outcome in ended:
                job.end(outcome)
            try:
                self._directory.fetch([reading for _, reading in run])
            except Exception as error:  # a thread that dies takes the tier with it
                _log.exception("%s: unexpected failure of a read", self._directory.path)
                for _, reading in run:
                    reading.failure = f"{type(error).__name__}: {error}"
            with self._condition:
                self._read.extend(run)
                self._reading, self._deadline = False, None
                self._condition.notify_all()

    def _next_run(self) -> tuple[list[tuple[Job, Reading]], list[tuple[Job, Outcome]]]:
        """Take blocks that lie one after another off the queue, and others that need no reading."""
        run: list[tuple[Job, Reading]] = []
        ended: list[tuple[Job, Outcome]] = []
        size = ranges = 0
        while self._queued:
            job = self._queued[0]
            if job.ticket.expired():
                ended.append((job, Outcome(Status.LATE, "its deadline passed before it was begun")))
            else:
                reading = self._directory.begin(job.entry, job.pieces)
                if isinstance(reading, Outcome):
                    ended.append((job, reading))
                elif run and (
                    size >= READ_BYTES or ranges + len(job.pieces) + 2 > MAX_PIECES or not reading.follows(run[-1][1])
                ):
                    self._directory.leave(reading)
                    break
                else:
                    run.append((job, reading))
                    size, ranges = size + reading.place.num_bytes, ranges + len(job.pieces) + 2
            self._queued.popleft()
        return run, ended

    # --- the thread that verifies ---------------------------------------------------------------------------

    def _verify_loop(self) -> None:
        while True:
            with self._condition:
                self._verifying = 0
                self._condition.wait_for(lambda: self._read or (self._closing and not self._alive()))
                if not self._read:
                    return
                job, reading = self._read.popleft()
                self._verifying = 1
            try:
                outcome = self._directory.finish(reading)
            except Exception as error:
                _log.exception("%s: unexpected failure of a check", self._directory.path)
                outcome = Outcome(Status.FAILED, f"{type(error).__name__}: {error}")
            if outcome.ok and job.ticket.expired():
                outcome = Outcome(Status.LATE, "it came after its deadline")
            job.end(outcome)

    def _alive(self) -> bool:
        return self._reading or bool(self._queued)
