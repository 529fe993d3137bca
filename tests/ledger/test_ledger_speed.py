"""A decode step of 256 sequences and the length of a call. Processor time, with room for a busy machine.

The goals, on a quiet machine: mean at most 25 us, a step in which all 256 need a block at most 200 us at p99 with
1,000,000 blocks, no call longer than 0.5 ms and 0.3 us a block it touches. What is asserted is four times that:
benchmarks/ledger_decode.py and benchmarks/ledger.py tell the figures.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvpool.kinds import FULL
from kvpool.ledger import Ledger, StepArrays
from kvpool.measure.replay import Capacity, Group

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from ledger_decode import measure

BUSY = 4


@pytest.mark.parametrize(("blocks", "staggered"), [(10_000, True), (1_000_000, False)])
def test_a_decode_step_of_256_sequences_is_short(blocks: int, staggered: bool) -> None:
    results = []
    for _ in range(3):  # the p99 of 25 steps is the longest of them: one stall of the machine is no fault
        results.append(measure(blocks, staggered, 400))
        if results[-1].mean_us <= 25 * BUSY and (staggered or results[-1].due_p99_us <= 200 * BUSY):
            return
    pytest.fail(f"three times too long: {results}")


@pytest.mark.parametrize("tokens", [8_192, 131_072])
def test_no_call_is_longer_than_the_blocks_it_touches_explain(tokens: int) -> None:
    group = Group(FULL, 20_000, 20_000, 16)
    plan = Capacity((group,), 8, tokens, tokens)
    ledger, arrays = Ledger(plan), StepArrays.from_plan(plan)  # type: ignore[arg-type]
    allowed_us = (500 + 0.3 * tokens / 16) * BUSY
    worst: dict[str, float] = {}

    def timed(name: str, start: int) -> int:
        now = time.thread_time_ns()
        worst[name] = max(worst.get(name, 0.0), (now - start) / 1e3)
        return time.thread_time_ns()

    for i in range(6):
        prompt = np.arange(i * tokens, (i + 1) * tokens, dtype=np.int32)
        at = time.thread_time_ns()
        seq = ledger.open(prompt)
        at = timed("open", at)
        decision = ledger.begin_step([(seq, tokens)], arrays)
        at = timed("begin", at)
        ledger.end_step(decision)
        at = timed("end", at)
        ledger.release(seq)
        timed("release", at)
    print(worst)
    # The filling of the step's own rows is not the ledger's: 8 + 4 + 8 bytes a token, at 1 GB/s at least.
    worst["begin"] -= tokens * 20 / 1000
    assert max(worst.values()) <= allowed_us, worst
