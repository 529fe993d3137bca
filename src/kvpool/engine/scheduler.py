"""Which requests take part in the next step: decode first, then prefill chunks, then newcomers. Knows no model."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator

from kvpool import log
from kvpool.cache import KVCache
from kvpool.engine.request import Request
from kvpool.errors import OutOfBlocks

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
        """Return `(request, most tokens to compute)` for the next step; newcomers in it count as running.

        Args:
            in_flight: A step is open. Who runs and does not fit beside it waits for its end: nothing is returned, and
                nobody is preempted.

        Raises:
            OutOfBlocks: A request that runs alone does not fit any more; `.sequences` names it.
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
            self._preempt()
        admitted = newcomers[: fitting - len(items)]
        self.running += admitted
        del self.waiting[: len(admitted)]
        return candidates[:fitting]

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

    def _preempt(self) -> None:
        """Pause the request that matters least: what it computed stays matchable, and goes to the tiers below."""
        victim = max(self.running, key=lambda r: r.order)
        assert victim.sequence is not None
        if len(self.running) == 1:
            raise OutOfBlocks(
                f"request {victim.id} has {len(victim.sequence)} tokens and nothing else runs, yet it needs more blocks"
                " than the plan has; raise the budget or lower max_new_tokens",
                (victim.sequence.id,),
            )
        self._full = True
        self.running.remove(victim)
        victim.preempt()
        log.say(_log, logging.DEBUG, "preempt", id=victim.id, tokens=victim.lost_tokens, running=len(self.running))
        victim.sequence.pause()
        victim.sequence.resume()
        bisect.insort(self.waiting, victim, key=lambda r: r.order)

    def _open(self, request: Request) -> None:
        request.sequence = self.cache.sequence(
            [*request.prompt_ids, *request.token_ids], salt=request.params.salt, retention=request.params.retention
        )
