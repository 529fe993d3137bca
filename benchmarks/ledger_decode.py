"""How long does the ledger keep a decode step of 256 sequences waiting, and how long one call at most?

One call ends the last step, appends a token to each sequence, takes blocks where due and fills the index tensors.
The cache is full: every new block evicts. Times are processor times of the calling thread.
Run: `python benchmarks/ledger_decode.py [--blocks 1000000] [--json] [--output FILE]`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvpool.kinds import FULL
from kvpool.ledger import Ledger, StepArrays
from kvpool.measure.replay import Capacity, Group

SEQUENCES = 256
TOKENS_PER_BLOCK = 16


@dataclass(frozen=True)
class Result:
    blocks: int
    staggered: bool
    steps: int
    mean_us: float
    p50_us: float
    due_p99_us: float
    max_us: float


def fill(ledger: Ledger, arrays: StepArrays, blocks: int, tokens: int) -> None:
    """Fill the cache with prefixes that nobody uses."""
    per_call = tokens // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    for i in range(blocks * TOKENS_PER_BLOCK // per_call + 1):
        seq = ledger.open(np.arange(i * per_call, (i + 1) * per_call, dtype=np.int32) % 2**30)
        ledger.end_step(ledger.begin_step([(seq, per_call)], arrays))
        ledger.release(seq)


def measure(blocks: int, staggered: bool, steps: int) -> Result:
    """Time `steps` decode steps; a due step is one in which blocks are taken."""
    steps = min(steps, int(blocks * 0.95) * TOKENS_PER_BLOCK // SEQUENCES - 144)  # running sequences keep their blocks
    group = Group(FULL, blocks, blocks, TOKENS_PER_BLOCK)
    plan = Capacity((group,), SEQUENCES, 8192, 8192)
    ledger, arrays = Ledger(plan), [StepArrays.from_plan(plan), StepArrays.from_plan(plan)]  # type: ignore[arg-type]
    fill(ledger, arrays[0], blocks, 8192)
    sequences = []
    for i in range(SEQUENCES):
        length = 128 + (i % TOKENS_PER_BLOCK if staggered else 0)
        seq = ledger.open(np.random.default_rng(i).integers(0, 30000, length, dtype=np.int32))
        ledger.end_step(ledger.begin_step([(seq, length)], arrays[0]))
        sequences.append(seq)
    ids = np.array(sequences, np.int64)
    decision = None
    times, due = np.zeros(steps), np.zeros(steps, bool)
    gc.collect()
    gc.disable()
    for i in range(steps):
        tokens = np.full(SEQUENCES, i, np.int32)
        before = ledger.stats().allocated_blocks if not staggered else 0
        start = time.thread_time_ns()
        decision = ledger.decode_step(decision, ids, tokens, arrays[i & 1])
        times[i] = time.thread_time_ns() - start
        due[i] = staggered or ledger.stats().allocated_blocks > before
    gc.enable()
    assert decision is not None
    ledger.end_step(decision)
    ledger.check()
    times /= 1e3
    return Result(
        blocks, staggered, steps, float(times.mean()), float(np.median(times)),
        float(np.percentile(times[due], 99)), float(times.max()),
    )  # fmt: skip


def cpu_name() -> str:
    """The processor as Linux names it."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def median_of(runs: list[Result]) -> dict[str, object]:
    """The median of every time, and the means of all runs."""
    times = ("mean_us", "p50_us", "due_p99_us", "max_us")
    row: dict[str, object] = dict(asdict(runs[0]))
    row |= {name: statistics.median(getattr(r, name) for r in runs) for name in times}
    return row | {"means_us": [r.mean_us for r in runs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", default="10000,1000000")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    cases = [(int(b), s) for b in given.blocks.split(",") for s in (True, False)]
    runs = [[measure(b, s, given.steps) for b, s in cases] for _ in range(given.rounds)]
    rows = [median_of(list(of_case)) for of_case in zip(*runs, strict=True)]
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    result = {"machine": machine, "sequences": SEQUENCES, "tokens_per_block": TOKENS_PER_BLOCK, "rows": rows}
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    if given.json:
        print(json.dumps(result))
        return
    for r in rows:
        due = "staggered" if r["staggered"] else "all due at once"
        print(
            f"{r['blocks']:>9,} blocks, {due}: mean {r['mean_us']:.1f} us, p50 {r['p50_us']:.1f}, p99 of due steps "
            f"{r['due_p99_us']:.1f}, longest {r['max_us']:.1f}; medians of {given.rounds} runs"
        )


if __name__ == "__main__":
    main()
