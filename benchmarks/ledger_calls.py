"""What is the longest call of the ledger: its own work, or the machine standing still under it?

The conversation trace in interleaved copies with shifted ids, the cache full, every call timed by processor and by wall
time. A virtual machine that is not run for a while counts that time as its thread's, so neither clock can tell. Two
things can: the runs make the same calls in the same order, so work of the core is long in every run at the same call,
and a stall is not; and after each call the thread's clock alone is read for as long as the call took, so stalls come as
often there. Page faults and switches of the longest calls are told beside.
Run: `python benchmarks/ledger_calls.py --trace conversation_trace.jsonl [--runs 5] [--output FILE]`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ledger_decode import cpu_name

from kvpool.errors import OutOfBlocks
from kvpool.ledger import Ledger, StepArrays
from kvpool.measure.replay import Request, load_trace, make_capacity

#: Blocks, interleaved copies of the trace, requests of each.
CASES = ((10_000, 1, 3_000), (1_000_000, 100, 900))
TOKENS_PER_BLOCK = 16
#: What a call may take: so much, and so much for each block of its prompt.
ALLOWED_US, ALLOWED_US_PER_BLOCK = 500.0, 0.3
LIVE = 8
NAMES = ("open", "begin_step", "end_step", "release")


def copies(requests: list[Request], num_copies: int, per_copy: int) -> list[Request]:
    """Interleave copies of the trace with shifted ids, so that a large cache is full."""
    out = []
    for request in requests[:per_copy]:
        for c in range(num_copies):
            out.append(Request(request.tokens + np.int32(c * 20_000_000), request.num_tokens, request.scale))
    return out


@dataclass
class Calls:
    """Every call of one run, in order.

    Attributes:
        names: Places in `NAMES`.
        blocks: Blocks of the prompt it concerns.
        cpu_us: Time of the thread.
        wall_us: Time.
        idle_us: The longest time of the thread between two readings of its clock, for as long right behind the call.
        faults: Page faults inside.
        switches: How often the thread left the processor inside.
    """

    names: array[int] = field(default_factory=lambda: array("b"))
    blocks: array[int] = field(default_factory=lambda: array("i"))
    cpu_us: array[float] = field(default_factory=lambda: array("d"))
    wall_us: array[float] = field(default_factory=lambda: array("d"))
    idle_us: array[float] = field(default_factory=lambda: array("d"))
    faults: array[int] = field(default_factory=lambda: array("i"))
    switches: array[int] = field(default_factory=lambda: array("i"))

    def timed(self, name: str, num_tokens: int, call: Callable[[], Any]) -> Any:
        """Make a call and write down what it took, then read the thread's clock for as long."""
        before = resource.getrusage(resource.RUSAGE_THREAD)
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return call()
        finally:
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
            after = resource.getrusage(resource.RUSAGE_THREAD)
            self.names.append(NAMES.index(name))
            self.blocks.append(-(-num_tokens // TOKENS_PER_BLOCK))
            self.cpu_us.append(cpu / 1e3)
            self.wall_us.append(wall / 1e3)
            self.faults.append(after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt)
            self.switches.append(after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw)
            self.idle_us.append(longest_gap(cpu) / 1e3)


def longest_gap(duration_ns: int) -> int:
    """Read the thread's clock until so much has passed; return the longest time between two readings."""
    start = last = time.thread_time_ns()
    longest = 0
    while last - start < duration_ns:
        now = time.thread_time_ns()
        longest, last = max(longest, now - last), now
    return longest


def run(requests: list[Request], blocks: int) -> tuple[Calls, float]:
    """Time every call of a replay; return them, and the bytes of bookkeeping a block."""
    plan = make_capacity(requests, blocks, TOKENS_PER_BLOCK, None)
    ledger, arrays, calls = Ledger(plan), StepArrays.from_plan(plan), Calls()
    live: deque[tuple[int, int]] = deque()
    gc.collect()
    gc.disable()
    for request in requests:
        prompt = request.tokens
        while len(live) >= LIVE:
            sequence, size = live.popleft()
            calls.timed("release", size, lambda s=sequence: ledger.release(s))
        sequence = calls.timed("open", len(prompt), lambda p=prompt: ledger.open(p))
        items = [(sequence, len(prompt))]
        while True:
            try:
                decision = calls.timed("begin_step", len(prompt), lambda i=items: ledger.begin_step(i, arrays))
                break
            except OutOfBlocks:
                sequence, size = live.popleft()
                calls.timed("release", size, lambda s=sequence: ledger.release(s))
        calls.timed("end_step", len(prompt), lambda d=decision: ledger.end_step(d))
        live.append((items[0][0], len(prompt)))
    gc.enable()
    return calls, ledger.stats().bookkeeping_bytes / blocks


@dataclass(frozen=True)
class Longest:
    """One run's longest call.

    Attributes:
        name: What was called.
        num_blocks: Blocks of its prompt.
        cpu_us: Time of the thread.
        wall_us: Time.
        other_runs_us: Time of the thread in the other runs, for the same call.
        faults: Page faults inside.
        switches: How often the thread left the processor inside.
        num_over: Calls of the run that took longer than allowed.
        stall_us: The longest time of the thread between two readings of its clock, over as long as all calls took.
        num_stalls: Such times of more than 500 us.
    """

    name: str
    num_blocks: int
    cpu_us: float
    wall_us: float
    other_runs_us: tuple[float, ...]
    faults: int
    switches: int
    num_over: int
    stall_us: float
    num_stalls: int


def report(runs: list[Calls]) -> dict[str, Any]:
    """Tell what the core's calls take, the least of all runs for each call, and each run's longest beside it."""
    same = all(calls.names == runs[0].names and calls.blocks == runs[0].blocks for calls in runs)
    assert same, "the runs did not make the same calls: nothing can be told of one by another"
    cpu = np.array([np.frombuffer(calls.cpu_us) for calls in runs])  # [runs, calls]
    allowed = ALLOWED_US + ALLOWED_US_PER_BLOCK * np.frombuffer(runs[0].blocks, np.int32)
    least = cpu.min(axis=0)
    at = int((least - allowed).argmax())
    longest = []
    for number, calls in enumerate(runs):
        i = int((cpu[number] - allowed).argmax())
        idle = np.frombuffer(calls.idle_us)
        longest.append(
            Longest(
                NAMES[calls.names[i]],
                calls.blocks[i],
                calls.cpu_us[i],
                calls.wall_us[i],
                tuple(np.delete(cpu[:, i], number).tolist()),
                calls.faults[i],
                calls.switches[i],
                int((cpu[number] > allowed).sum()),
                float(idle.max()),
                int((idle > ALLOWED_US).sum()),
            )
        )
    return {
        "num_calls": len(least),
        "longest_call_us": float(least.max()),
        "closest_to_its_limit": {
            "name": NAMES[runs[0].names[at]],
            "num_blocks": runs[0].blocks[at],
            "us": float(least[at]),
            "allowed_us": float(allowed[at]),
        },
        "runs": [asdict(row) for row in longest],
    }


def measure(requests: list[Request], blocks: int, num_runs: int) -> dict[str, Any]:
    """Run a replay several times and tell its longest calls."""
    runs = [run(requests, blocks) for _ in range(num_runs)]
    return report([calls for calls, _ in runs]) | {"bookkeeping_bytes_a_block": runs[0][1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    trace = load_trace(given.trace)
    rows = []
    for blocks, num_copies, per_copy in CASES:
        rows.append({"blocks": blocks} | measure(copies(trace, num_copies, per_copy), blocks, given.runs))
        print(json.dumps(rows[-1], indent=1))
    if given.output:
        machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
        given.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
