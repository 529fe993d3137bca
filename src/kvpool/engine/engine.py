"""Continuous batching from Python: requests in, events out, one forward pass a step."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from kvpool import log
from kvpool.cache import KVCache
from kvpool.engine.detokenizer import Detokenizer
from kvpool.engine.flight import Flight, Landed, Lane, fetch
from kvpool.engine.graphs import DecodeGraphs
from kvpool.engine.request import Answer, Event, Params, Request
from kvpool.engine.sampler import Sampler, sample
from kvpool.engine.scheduler import Scheduler
from kvpool.errors import KVError, OutOfBlocks
from kvpool.plan import Plan
from kvpool.step import Step
from kvpool.transformers import PackedCache, register_attention

_log = logging.getLogger("kvpool.engine")


@dataclass(slots=True)
class Timing:
    """Rows and seconds since the engine was made.

    Attributes:
        scheduler_s: Seconds of this thread's CPU for scheduling, the ledger, text and events.
        forward_s: The same for the model's forward, attention included.
        sampling_s: The same for choosing tokens from logits.
        peak_blocks: Most blocks used at once, by group.
    """

    num_steps: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    scheduler_s: float = 0.0
    forward_s: float = 0.0
    sampling_s: float = 0.0
    peak_blocks: tuple[int, ...] = ()


class Engine:
    """Serves many requests on one model and one cache.

    Args:
        model: A transformers causal language model; its attention is set to kvpool's.
        tokenizer: Its tokenizer.
        plan: The cache's plan.
        cache: A cache on that plan; None makes one.
        backend: Of the cache it makes.
        num_threads: Of the cache it makes.
        device: Of the cache it makes; the model's. On CUDA, decode steps are captured once a size and replayed.
        steps_in_flight: 2 plans a step while the one before runs, whose tokens stay on the device until then; on a CPU
            that runs on a thread of its own. By default 2 on CUDA, else 1. With tiers below the device it is 1.
        clock: Seconds, monotonic.

    One thread calls `step`, `stream` and `generate`; see `kvpool.serve` for use from many.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        plan: Plan,
        *,
        cache: KVCache | None = None,
        backend: str = "auto",
        num_threads: int | None = None,
        device: str = "cpu",
        steps_in_flight: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        model.set_attn_implementation(register_attention())
        if cache is None:
            cache = KVCache(plan, device=device, backend=backend, num_threads=num_threads)
        self.cache = cache
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(self.cache)
        self.timing = Timing()
        self._packed = PackedCache(self.cache, model)
        cuda = torch.device(self.cache.device).type == "cuda"
        replay = self.cache.backend.replayable and cuda
        self._graphs = DecodeGraphs(self._packed.forward, plan.max_sequences) if replay else None
        self.steps_in_flight = _in_flight(steps_in_flight, cuda, self.cache)
        self._lane = Lane(threaded=self.steps_in_flight > 1 and not cuda)
        self._flights: deque[Flight] = deque()
        self._clock = clock
        #: Called after every step that computed something, with its share of `Timing.scheduler_s`.
        self.on_step: Callable[[float], None] | None = None
        self._requests: dict[int, Request] = {}
        self._pending: list[Event] = []
        self._next_id = 0
        self._stop_ids = stop_ids(model, tokenizer)

    # --- requests -------------------------------------------------------------------------------------------

    def add(self, prompt: str | SequenceOf[int], params: Params | None = None) -> int:
        """Queue a request and return its id. One that can never be served ends at once with an event.

        Args:
            prompt: Text, or token ids.
            params: How to answer.

        Raises:
            KVError: The prompt is empty.
        """
        params = Params() if params is None else params
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise KVError("the prompt has no tokens")
        request = Request(
            id=self._next_id,
            prompt_ids=ids,
            params=params,
            stop_ids=self._stop_ids if params.stop_ids is None else params.stop_ids,
            sampler=Sampler(params.sampling),
            detokenizer=Detokenizer(self.tokenizer, params.stop),
            arrived_s=self._clock(),
        )
        self._next_id += 1
        self._requests[request.id] = request
        longest = self.cache.plan.max_seq_len
        if len(ids) + params.max_new_tokens > longest:
            self._finish(
                request,
                "error",
                f"{len(ids)} prompt tokens and {params.max_new_tokens} new ones exceed the longest sequence: {longest}",
            )
            return request.id
        try:
            self.scheduler.add(request)
        except OutOfBlocks as error:
            self._finish(request, "error", str(error))
        return request.id

    def abort(self, request_id: int) -> None:
        """End a request; what it computed stays matchable. An unknown or finished one is no error."""
        request = self._requests.get(request_id)
        if request is not None and not request.finish_reason:
            self._finish(request, "abort")
            self._drain()

    def answer(self, request_id: int) -> Answer:
        """Return a finished request and forget it.

        Raises:
            KVError: It is unknown, or still running.
        """
        request = self._requests.get(request_id)
        if request is None or not request.finish_reason:
            raise KVError(f"request {request_id} is {'unknown' if request is None else 'still running'}")
        del self._requests[request_id]
        return request.answer()

    @property
    def idle(self) -> bool:
        """True when no request waits or runs and every event was returned."""
        return not (self.scheduler.running or self.scheduler.waiting or self._pending or self._flights)

    # --- running --------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one forward pass, or plan the next one while it runs, and return what came of it."""
        started, cpu_started, spent = time.perf_counter(), time.thread_time(), self._lane.spent_s
        self._expire()
        while len(self._flights) < self.steps_in_flight and self._launch_next():
            pass
        if self._flights:
            self._land(started)
            self._drain()
            scheduler_s = time.thread_time() - cpu_started - (self._lane.spent_s - spent)
            self.timing.scheduler_s += scheduler_s
            if self.on_step:
                self.on_step(scheduler_s)
        events, self._pending = self._pending, []
        return events

    def _launch_next(self) -> bool:
        """Open the next step with as many as find room; returns whether there is one.

        What `fits` promised may be gone: others use the cache, tiers bring blocks, and memory is resized.
        """
        items = self.scheduler.schedule(in_flight=bool(self._flights))
        while items:
            try:
                self._launch(items)
            except OutOfBlocks as error:
                if self._flights:
                    return False  # their end may bring room
                lone, items = items[0][0], self.scheduler.leave_out(items)
                if not items:
                    self._finish(lone, "error", f"request {lone.id} finds no room, though nothing else runs: {error}")
                    items = self.scheduler.schedule()
            else:
                self.scheduler.admit(items)
                return True
        return False

    def _launch(self, items: list[tuple[Request, int]]) -> None:
        """Open a step and hand its pass to the lane; its samples are tokens nobody knows yet."""
        by_sequence = {r.sequence.id: r for r, _ in items if r.sequence is not None}
        pad_to = self._graphs.pad_to([tokens for _, tokens in items]) if self._graphs else None
        pairs = [(r.sequence, tokens) for r, tokens in items if r.sequence is not None]
        step, opened_s = self.cache.step(pairs, pad_to=pad_to, start=False), self._clock()
        try:
            sampled = tuple(by_sequence[sequence] for sequence in step.decision.sampled)
            before = self._flights[-1] if self._flights else None
            samplers = [request.sampler for request in sampled]
            landing = self._lane.submit(lambda: self._pass(step, samplers), before)
            self.cache.extend(step, None)
        except BaseException:
            step.close(failed=True)
            raise
        rows = step.buffers.arrays.num_tokens[: len(step.sequences)].tolist()
        requests = tuple((by_sequence[sequence], n) for sequence, n in zip(step.sequences, rows, strict=True))
        for request, n in requests:
            request.rows += n
        for request in sampled:
            request.samples += 1
        self._flights.append(Flight(step, requests, sampled, landing, opened_s))

    def _pass(self, step: Step, samplers: list[Sampler]) -> Landed:
        """Compute a step and choose its tokens; on the lane."""
        step.start()
        started = time.thread_time()
        logits = self._graphs.forward(step) if self._graphs else self._packed.forward(step)
        between = time.thread_time()
        step.next_ids = sample(logits, samplers)
        ids, arrived = fetch(step.next_ids)
        return Landed(ids, arrived, between - started, time.thread_time() - between)

    def _land(self, started: float) -> None:
        """Wait for the oldest pass, end its step and give its requests their tokens."""
        flight = self._flights[0]
        try:
            landed, ids = self._lane.wait(flight.landing)
        except Exception:
            self._fall()
            raise
        self.cache.resolve(flight.step, ids)
        flight.step.close()
        self._flights.popleft()
        computed = taken = 0
        for request, rows in flight.requests:
            request.rows -= rows
            if request.finish_reason:
                continue  # it ended while this was computed
            computed += rows
            request.computed_tokens += rows
            if not request.admitted and request.sequence is not None:
                request.admit(flight.opened_s, request.sequence.num_computed_tokens - rows)
        for request, token in zip(flight.sampled, ids, strict=True):
            request.samples -= 1
            if not request.finish_reason:
                taken += 1
                self._take(request, token)
        self.timing.forward_s += landed.forward_s
        self.timing.sampling_s += landed.sampling_s
        self._count(computed, taken, time.perf_counter() - started)

    def _fall(self) -> None:
        """Undo every open step, as the oldest failed; their requests are as they were before."""
        for flight in self._flights:
            flight.landing.exception()  # waits: nothing may run while blocks are given back
            for request, rows in flight.requests:
                request.rows -= rows
            for request in flight.sampled:
                request.samples -= 1
        self._flights[0].step.close(failed=True)
        self._flights.clear()

    def _drain(self) -> None:
        """End the steps that nobody waits for any more."""
        while self._flights and not self.scheduler.running:
            self._land(time.perf_counter())

    def stream(
        self, prompts: SequenceOf[str | SequenceOf[int]], params: Params | SequenceOf[Params] | None = None
    ) -> Iterator[Event]:
        """Queue prompts and yield events until all of them are answered; leaving early aborts the rest."""
        ids = self._add_all(prompts, params)
        try:
            while not self.idle:
                yield from self.step()
        finally:
            for request in ids:
                self.abort(request)

    def generate(
        self, prompts: SequenceOf[str | SequenceOf[int]], params: Params | SequenceOf[Params] | None = None
    ) -> list[Answer]:
        """Answer prompts and return the answers in their order."""
        ids = self._add_all(prompts, params)
        while not self.idle:
            self.step()
        return [self.answer(request) for request in ids]

    def _add_all(
        self, prompts: SequenceOf[str | SequenceOf[int]], params: Params | SequenceOf[Params] | None
    ) -> list[int]:
        if isinstance(prompts, str):
            raise KVError("prompts is one string; give a list of prompts")
        each = [params] * len(prompts) if params is None or isinstance(params, Params) else list(params)
        if len(each) != len(prompts):
            raise KVError(f"{len(prompts)} prompts but {len(each)} params")
        return [self.add(prompt, chosen) for prompt, chosen in zip(prompts, each, strict=True)]

    def _expire(self) -> None:
        now = self._clock()
        for request in [r for r in self.scheduler if r.deadline is not None and r.deadline <= now]:
            self._finish(request, "deadline")

    def _take(self, request: Request, token: int) -> None:
        """Give a request its next token."""
        now = self._clock()
        request.first_token_s = now if request.first_token_s is None else request.first_token_s
        request.last_token_s = now
        request.token_ids.append(token)
        text = request.detokenizer.push(token)
        if token in request.stop_ids or request.detokenizer.stopped:
            self._finish(request, "stop", token=token, text=text)
        elif len(request.token_ids) == request.params.max_new_tokens:
            self._finish(request, "length", token=token, text=text)
        else:
            self._pending.append(Event(request.id, token, text))

    def _finish(
        self, request: Request, reason: str, error: str = "", *, token: int | None = None, text: str = ""
    ) -> None:
        self.scheduler.remove(request)
        request.finish_reason, request.error = reason, error
        self._pending.append(Event(request.id, token, text + request.detokenizer.finish(), reason, error))
        if _log.isEnabledFor(logging.INFO):
            _log_request(request)

    def _count(self, computed: int, sampled: int, seconds: float) -> None:
        timing = self.timing
        timing.num_steps += 1
        if computed > sampled:
            timing.prefill_tokens, timing.prefill_s = timing.prefill_tokens + computed, timing.prefill_s + seconds
        else:
            timing.decode_tokens, timing.decode_s = timing.decode_tokens + computed, timing.decode_s + seconds
        used = [group.used for group in self.cache.stats().groups]
        timing.peak_blocks = tuple(map(max, used, timing.peak_blocks or used))


def _log_request(request: Request) -> None:
    answer = request.answer()
    log.say(
        _log,
        logging.INFO,
        "request",
        id=request.id,
        reason=answer.finish_reason,
        prompt=answer.prompt_tokens,
        cached=answer.cached_tokens,
        computed=answer.computed_tokens,
        recomputed=answer.recomputed_tokens,
        generated=len(answer.token_ids),
        preemptions=answer.num_preemptions,
        waited_ms=_milliseconds(answer.waited_s),
        first_token_ms=_milliseconds(answer.time_to_first_token_s),
        between_tokens_ms=_milliseconds(answer.time_between_tokens_s),
        **({"error": answer.error} if answer.error else {}),
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _in_flight(asked: int | None, cuda: bool, cache: KVCache) -> int:
    if asked not in (None, 1, 2):
        raise KVError(f"steps_in_flight must be 1 or 2, got {asked}")
    if asked == 2 and cache.has_tiers:  # what comes up for a step would be written while the one before still runs
        raise KVError("two steps in flight need a cache without tiers below its device; use steps_in_flight=1")
    return asked or (2 if cuda and not cache.has_tiers else 1)


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, from the generation configuration and the tokenizer."""
    ids = model.generation_config.eos_token_id
    found = {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id}
    return frozenset(int(i) for i in found if i is not None)
