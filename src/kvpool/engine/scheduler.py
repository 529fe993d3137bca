"""Which requests take part in the next step: decode first, then prefill chunks, then newcomers. Knows no model."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator

from kvpool import log
from kvpool.cache import KVCache
from kvpool.engine.request import Request

_log = logging.getLogger("kvpool.engine")


class Scheduler:
    """Continuous batching over one cache.

    Invariants: a request is in `waiting` or in `running` or in neither; `waiting` is sorted by `order`; every request
    in `running` holds an admitted sequence.

    The oldest request of the highest priority is never preempted, so some request always advances. After a preemption
    nobody is admitted until a request ends: else the one that just left would come back to be preempted again.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._full = False
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def add(self, request: Request) -> None:
        """Put a request in the queue.

        Raises:
            OutOfBlocks: Its prompt can never fit.
        """
        self._open(request)
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def remove(self, request: Request, *, keep: bool = True) -> None:
        """Take a request out, wherever it is, and give its blocks back."""
        self._full = False
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.sequence is not None:
            request.sequence.release(keep=keep)
            request.sequence = None

    def schedule(self, *, in_flight: bool = False) -> list[tuple[Request, int]]:
        """Return `(request, most tokens to compute)` for the next step; those who run stand before newcomers.

        Where only one is left and does not fit, it is returned all the same: opening the step says what is missing.

        Args:
            in_flight: A step is open. Who runs and does not fit beside it waits for its end: nothing is returned, and
                nobody is preempted.
        """
        while True:
            items = self._running_items()
            newcomers = [] if self._full else self.waiting[: self.cache.plan.max_sequences - len(items)]
            candidates = [*items, *((r, r.remaining) for r in newcomers)]
            fitting = self.cache.fits([(r.sequence, tokens) for r, tokens in candidates if r.sequence is not None])
            if fitting >= len(items):
                break
            if in_flight:
                return []
            if len(self.running) == 1:
                break
            self._preempt()
        return candidates[: fitting if in_flight else max(fitting, 1)]

    def admit(self, items: list[tuple[Request, int]]) -> None:
        """Count the newcomers in a step that was opened as running."""
        for request, _ in items:
            if request not in self.running:
                self.waiting.remove(request)
                self.running.append(request)

    def leave_out(self, items: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Return the items of a step that could not be opened without the one that matters least; none if one is left.

        A newcomer stays in the queue; one that runs is preempted.
        """
        if items[-1][0] not in self.running:
            return items[:-1]
        if len(self.running) == 1:
            return []
        victim = self._preempt()
        return [item for item in items if item[0] is not victim]

    def _running_items(self) -> list[tuple[Request, int]]:
        """Running requests for which the step has room, decode rows first: they are short."""
        self.running.sort(key=lambda r: (r.remaining > 1, r.order))
        items, room = [], self.cache.plan.max_step_tokens
        for request in self.running[: self.cache.plan.max_sequences]:
            if room == 0:
                break
            tokens = min(request.remaining, room)
            if tokens:
                items.append((request, tokens))
                room -= tokens
        return items

    def _preempt(self) -> Request:
        """Pause the request that matters least: what it computed stays matchable, and goes to the tiers below."""
        victim = max(self.running, key=lambda r: r.order)
        assert victim.sequence is not None
        self._full = True
        self.running.remove(victim)
        victim.preempt()
        log.say(_log, logging.DEBUG, "preempt", id=victim.id, tokens=victim.lost_tokens, running=len(self.running))
        victim.sequence.pause()
        victim.sequence.resume()
        bisect.insort(self.waiting, victim, key=lambda r: r.order)
        return victim

    def _open(self, request: Request) -> None:
        request.sequence = self.cache.sequence(
            [*request.prompt_ids, *request.token_ids], salt=request.params.salt, retention=request.params.retention
        )
