"""The engine's own thread, and how the event loop talks to it. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.engine import Answer, Engine, Event, Params
from kvpool.errors import KVError

_log = logging.getLogger("kvpool.serve")


#: After so long without a request, what is cached goes to the disk tier, if there is one.
IDLE_S = 0.5
#: How long that may keep the next request waiting.
FLUSH_S = 1.0


class Busy(KVError):
    """The queue is full; come back later."""


class Stopped(KVError):
    """The engine takes no more requests."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a client of the worker receives.

    Attributes:
        event: One event of its request.
        answer: The whole answer, with the last event.
    """

    event: Event
    answer: Answer | None = None


class Ticket:
    """One request's place at the worker: an asynchronous stream of updates.

    Args:
        loop: The event loop that reads it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self.request: int | None = None
        self.cancelled = False

    def put(self, update: Update) -> None:
        """Hand over an update, from the worker's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    async def get(self) -> Update:
        """Wait for the next update."""
        return await self._updates.get()


class Worker:
    """Runs an engine on a thread of its own; it alone touches the engine.

    Args:
        engine: The engine.
        max_waiting: Requests beyond those running that may wait; more are refused.
        observe: Called on the worker's thread with every finished answer.
    """

    def __init__(
        self, engine: Engine, *, max_waiting: int = 256, observe: Callable[[Answer], None] | None = None
    ) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self._observe = observe
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._open = 0  # requests accepted and not finished; changed on the event loop's thread only
        self._thread = threading.Thread(target=self._run, name="kvpool-engine", daemon=True)
        self._gate = threading.Lock()  # of what comes in, against the end of the thread
        self._ended = False
        self._flushed = True  # nothing was computed since the last flush
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while requests can be served."""
        return self._thread.is_alive() and self.failure is None

    @property
    def num_open(self) -> int:
        """Requests accepted and not finished."""
        return self._open

    def submit(self, prompt_ids: Sequence[int], params: Params) -> Ticket:
        """Queue a request, from the event loop.

        Raises:
            Busy: Too many requests wait.
            Stopped: The engine has failed, or was stopped.
        """
        limit = self.engine.cache.plan.max_sequences + self.max_waiting
        if self._open >= limit:
            raise Busy(f"{self._open} requests are open, the most allowed; try again later")
        ticket = Ticket(asyncio.get_running_loop())
        with self._gate:
            if self._ended or not self._thread.is_alive():
                raise Stopped(f"the engine failed: {self.failure}" if self.failure else "the engine has stopped")
            self._inbox.put(lambda: self._add(ticket, prompt_ids, params))
        self._open += 1
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Say that a ticket is read no more, from the event loop; aborts its request if it still runs. Call it once."""
        self._open -= 1
        self._inbox.put(lambda: self._cancel(ticket))

    def ask(self, question: Callable[[Engine], Any]) -> asyncio.Future[Any]:
        """Run a function of the engine on its thread, between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                value, failed = question(self.engine), None
            except Exception as error:
                value, failed = None, error

            def settle() -> None:
                if future.cancelled():
                    return
                if failed is None:
                    future.set_result(value)
                else:
                    future.set_exception(failed)

            loop.call_soon_threadsafe(settle)

        self._inbox.put(run)
        return future

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after its current step; requests still open end with `abort`."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    # --- on the worker's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_mail():
                for event in self.engine.step():
                    self._deliver(event)
        except BaseException as error:
            _log.exception("the engine failed")
            self.failure = error
        with self._gate:
            self._ended = True
        while not self._inbox.empty():  # who came last is answered too
            mail = self._inbox.get()
            if mail is not None:
                mail()
        for request in list(self._tickets):
            self.engine.abort(request)
            reason = "error" if self.failure else "abort"
            self._deliver(Event(request, None, "", reason, str(self.failure or "the server stops")))

    def _take_mail(self) -> bool:
        """Do what was asked; wait for it while there is nothing else to do. False asks the thread to end."""
        while True:
            try:
                mail = self._inbox.get(block=self.engine.idle, timeout=None if self._flushed else IDLE_S)
            except queue.Empty:
                if not self.engine.idle:
                    return True
                self.engine.cache.flush(FLUSH_S)
                self._flushed = True
                continue
            self._flushed = False
            if mail is None:
                return False
            mail()

    def _add(self, ticket: Ticket, prompt_ids: Sequence[int], params: Params) -> None:
        if ticket.cancelled:
            return
        ticket.request = self.engine.add(prompt_ids, params)
        self._tickets[ticket.request] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        if ticket.request is not None and ticket.request in self._tickets:
            self.engine.abort(ticket.request)

    def _deliver(self, event: Event) -> None:
        ticket = self._tickets.get(event.request)
        if ticket is None:
            return
        answer = None
        if event.finish_reason:
            del self._tickets[event.request]
            answer = self.engine.answer(event.request)
            if self._observe:
                self._observe(answer)
        ticket.put(Update(event, answer))
