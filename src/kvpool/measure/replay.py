"""Replays of request traces through the real ledger: hit rate by capacity and policy, and how fast it is.

Requests arrive in the order of the file. A prompt is computed in one step; output tokens are not replayed. At most
`live` requests hold blocks, the oldest is released first; it is released too while a prompt does not fit.
"""

from __future__ import annotations

import copy
import gc
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import OutOfBlocks, SpecError
from kvpool.kinds import FULL, Lifetime
from kvpool.ledger import Ledger, Policy, StepArrays
from kvpool.measure.optimum import block_chains, infinite_hits, optimum_hits

#: Tokens that one entry of `hash_ids` stands for in Mooncake's traces.
MOONCAKE_TOKENS = 512
CALLS = ("lookup", "open", "allocate", "commit", "release")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: `tokens` `[n]` int32, of which each stands for `scale` tokens of the trace."""

    tokens: NDArray[np.int32]
    num_tokens: int
    scale: float


@dataclass(frozen=True, slots=True)
class Row:
    """What one replay gave.

    Attributes:
        hit_rate: Tokens found over tokens asked for, of the trace.
        requests_per_s: Over the processor time of a run without clocks, the loop's own included; building ids is
            outside.
        blocks_per_s: Blocks found or computed, over the same time.
        p50_us: Of all calls of one request together, the lookup left out: it is made once more, on its own.
        calls_us: By call, median and 99th percentile: `lookup` (peek), `open`, `allocate` (begin_step, which matches
            again, evicts and fills the tensors), `commit` (end_step), `release`.
        evicted: Blocks evicted.
    """

    policy: str
    blocks: int
    hit_rate: float
    requests_per_s: float
    blocks_per_s: float
    p50_us: float
    p99_us: float
    calls_us: dict[str, tuple[float, float]]
    evicted: int


@dataclass(frozen=True, slots=True)
class Group:
    """What a ledger reads of a group."""

    lifetime: Lifetime | None
    num_blocks: int
    num_blocks_reserved: int
    tokens_per_block: int
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a ledger reads of a plan: for replays there is no model."""

    groups: tuple[Group, ...]
    max_sequences: int
    max_step_tokens: int
    max_seq_len: int
    num_draft: int = 0
    checkpoint_interval: int = 1024


def load_trace(path: Path, *, tokens_per_id: int = 16, limit: int | None = None) -> list[Request]:
    """Read a trace, one JSON object a line: `{"input_length", "hash_ids"}` or `{"token_ids"}`.

    Args:
        path: The file.
        tokens_per_id: Token ids that stand for one hash id.
        limit: Read at most so many requests.

    Raises:
        SpecError: A line is neither.
    """
    requests: list[Request] = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(requests) == limit:
                break
            try:
                entry = json.loads(line)
                requests.append(_request(entry, tokens_per_id))
            except (ValueError, KeyError, TypeError) as error:
                raise SpecError(
                    f"{path}:{number} is no request: {error!r}; a line has hash_ids and input_length, or token_ids"
                ) from None
    return requests


def _request(entry: dict[str, object], tokens_per_id: int) -> Request:
    ids = entry.get("token_ids")
    if ids is not None:
        tokens = np.asarray(ids, np.int32)
        return Request(tokens, len(tokens), 1.0)
    length = int(str(entry["input_length"]))
    hashes = np.asarray(entry["hash_ids"], np.int64)
    tokens = (hashes[:, None] * tokens_per_id + np.arange(tokens_per_id)).reshape(-1).astype(np.int32)
    kept = max(1, length * tokens_per_id // MOONCAKE_TOKENS)
    return Request(np.ascontiguousarray(tokens[:kept]), length, MOONCAKE_TOKENS / tokens_per_id)


def save_trace(path: Path, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> None:
    """Write requests in order of arrival as `load_trace` reads them: `{"token_ids", "output_length"}` a line."""
    rows = zip(prompts, output_lengths, strict=True)
    lines = [json.dumps({"token_ids": list(ids), "output_length": length}) + "\n" for ids, length in rows]
    path.write_text("".join(lines), encoding="utf-8")


def make_capacity(requests: Sequence[Request], num_blocks: int, tokens_per_block: int, window: int | None) -> Capacity:
    """Return what a ledger needs for these requests: one full group, and a window group of the same size if asked."""
    longest = max(len(r.tokens) for r in requests) + 1
    lifetimes = [FULL] if window is None else [FULL, Lifetime(window=window)]
    groups = tuple(Group(life, num_blocks, num_blocks, tokens_per_block) for life in lifetimes)
    return Capacity(groups, 8, longest, longest)


def replay(
    requests: Sequence[Request],
    num_blocks: int,
    *,
    policy: str | Policy = "lru",
    tokens_per_block: int = 16,
    window: int | None = None,
    live: int = 8,
    whole_blocks: bool = False,
    as_lists: bool = False,
    portable_sha: bool = False,
) -> Row:
    """Run every request through a ledger and return hit rate and times.

    Args:
        requests: In order of arrival.
        num_blocks: Blocks of the cache.
        policy: Of the ledger.
        tokens_per_block: Tokens of a block.
        window: Add a group of layers with a sliding window of so many tokens.
        live: Requests that hold blocks at once.
        whole_blocks: Store and find whole blocks only, the prompt's last one too: how simulators count. One block
            more is given for the token that must be left to compute.
        as_lists: Give token ids as lists instead of arrays.
        portable_sha: Do not use SHA instructions.
    """
    extra = np.array([-1], np.int32)
    prompts: list[NDArray[np.int32] | list[int]] = []
    for r in requests:
        tokens = r.tokens
        if whole_blocks:
            extra[0] = 2**31 - 1
            tokens = np.concatenate([tokens[: len(tokens) // tokens_per_block * tokens_per_block], extra])
        prompts.append(tokens.tolist() if as_lists else tokens)
    plan = make_capacity(requests, num_blocks + whole_blocks, tokens_per_block, window)
    arrays = StepArrays.from_plan(plan)  # type: ignore[arg-type]
    keep = not whole_blocks
    ledger = Ledger(plan, policy=_again(policy), portable_sha=portable_sha)  # type: ignore[arg-type]
    seconds = _seconds(ledger, arrays, prompts, live, keep)
    ledger = Ledger(plan, policy=_again(policy), portable_sha=portable_sha)  # type: ignore[arg-type]
    times, hit, rejected = _run(ledger, arrays, prompts, live, keep)
    done = [i for i in range(len(requests)) if i not in rejected]
    total = sum(requests[i].num_tokens for i in done)
    found = sum(hit[i] * requests[i].scale for i in done)
    blocks = sum(-(-len(prompts[i]) // tokens_per_block) for i in done)
    each = times[done, 1:].sum(1) / 1e3
    return Row(
        policy if isinstance(policy, str) else type(policy).__name__,
        num_blocks,
        found / max(total, 1),
        len(done) / seconds,
        blocks / seconds,
        float(np.percentile(each, 50)),
        float(np.percentile(each, 99)),
        {
            name: (float(np.percentile(times[done, i], 50)) / 1e3, float(np.percentile(times[done, i], 99)) / 1e3)
            for i, name in enumerate(CALLS)
        },
        ledger.stats().evicted_blocks,
    )


def _again(policy: str | Policy) -> str | Policy:
    """A policy may remember: every run gets its own."""
    return copy.deepcopy(policy)


def _run(
    ledger: Ledger,
    arrays: StepArrays,
    prompts: Sequence[NDArray[np.int32] | list[int]],
    live: int,
    keep: bool,
) -> tuple[NDArray[np.int64], list[int], set[int]]:
    """Return nanoseconds `[requests, calls]`, tokens found, which never fitted."""
    times = np.zeros((len(prompts), len(CALLS)), np.int64)
    hit = [0] * len(prompts)
    rejected: set[int] = set()
    running: deque[tuple[int, int]] = deque()  # (sequence, request)
    clock = time.perf_counter_ns

    def drop_oldest() -> None:
        sequence, request = running.popleft()
        start = clock()
        ledger.release(sequence, keep)
        times[request, 4] = clock() - start

    gc.collect()
    gc.disable()
    try:
        for i, prompt in enumerate(prompts):
            if len(running) >= live:
                drop_oldest()
            asked = clock()
            ledger.peek(prompt)
            start = clock()
            try:
                sequence = ledger.open(prompt)
            except OutOfBlocks:
                rejected.add(i)
                continue
            opened = clock()
            while True:
                before = clock()
                try:
                    decision = ledger.begin_step([(sequence, len(prompt))], arrays)
                    break
                except OutOfBlocks:
                    if not running:
                        raise
                    drop_oldest()
            begun = clock()
            ledger.end_step(decision)
            ended = clock()
            times[i, :4] = start - asked, opened - start, begun - before, ended - begun
            found = decision.admitted[0]
            hit[i] = found.num_cached_tokens - (0 if keep else found.num_partial_tokens)
            running.append((sequence, i))
        while running:
            drop_oldest()
    finally:
        gc.enable()
    return times, hit, rejected


def _seconds(
    ledger: Ledger, arrays: StepArrays, prompts: Sequence[NDArray[np.int32] | list[int]], live: int, keep: bool
) -> float:
    """Return the processor seconds of the same calls without a clock between them."""
    running: deque[int] = deque()
    gc.collect()
    gc.disable()
    begin = time.thread_time_ns()
    try:
        for prompt in prompts:
            if len(running) >= live:
                ledger.release(running.popleft(), keep)
            try:
                sequence = ledger.open(prompt)
            except OutOfBlocks:
                continue
            while True:
                try:
                    decision = ledger.begin_step([(sequence, len(prompt))], arrays)
                    break
                except OutOfBlocks:
                    ledger.release(running.popleft(), keep)
            ledger.end_step(decision)
            running.append(sequence)
        while running:
            ledger.release(running.popleft(), keep)
        return (time.thread_time_ns() - begin) / 1e9
    finally:
        gc.enable()


def optimum_rates(
    requests: Sequence[Request], capacities: Sequence[int], tokens_per_block: int
) -> tuple[dict[int, float], float]:
    """Return the offline optimum's hit rate by capacity, and that of a cache without end; whole blocks, one by one."""
    chains = block_chains([r.tokens for r in requests], tokens_per_block)
    total = sum(r.num_tokens for r in requests)

    def rate(hits: Sequence[int]) -> float:
        return sum(h * r.scale for h, r in zip(hits, requests, strict=True)) * tokens_per_block / max(total, 1)

    return {c: rate(optimum_hits(chains, c)) for c in capacities}, rate(infinite_hits(chains))
