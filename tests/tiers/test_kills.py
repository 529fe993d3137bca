"""Processes killed -9 while they write: what they had published is there, and nothing is wrong."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpool.tiers.base import Entry, Status
from kvpool.tiers.disk import DiskTier

from . import blocks
from .conformance import get, statuses

ROOT = Path(__file__).resolve().parents[2]


#: Writes prefix after prefix for ever, and says which are stored. Every seventh is dropped again.
WRITER = """
import sys
sys.path[:0] = [{src!r}, {tests!r}]
from tiers import blocks
from kvpool.tiers.disk import DiskTier
tier = DiskTier({path!r}, blocks.IDENTITY, size_bytes={size}, direct={direct})
print("open", len(tier.damage), flush=True)
for seed in range({seed}, {seed} + 10**6):
    entries = blocks.chain(seed, 6, group=seed % 3)
    memory, batch = blocks.stored(entries)
    ticket = tier.put(batch, deadline_s=20)
    assert ticket.wait(20) and all(o.ok for o in ticket.outcomes)
    print("put", seed, flush=True)
    if seed % 7 == 0:
        tier.drop([e.id for e in entries])
        assert tier.flush(20)
        print("drop", seed, flush=True)
"""


def run_and_kill(
    path: Path, first: int, seconds: float, *, size: int | None, direct: bool
) -> tuple[list[int], list[int]]:
    """Let a process write and kill it -9 after a while; returns the seeds it said were stored, and dropped."""
    script = WRITER.format(
        src=str(ROOT / "src"), tests=str(ROOT / "tests"), path=str(path), size=size, direct=direct, seed=first
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("open")
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    words = [line.split() for line in process.stdout.read().splitlines() if line.endswith(tuple("0123456789"))]
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    # The last line may be cut: a number that is not the next one says so.
    put_seeds = [int(w[1]) for w in words if w[0] == "put" and len(w) == 2]
    put_seeds = [s for i, s in enumerate(put_seeds) if s == first + i]
    return put_seeds, [int(w[1]) for w in words if w[0] == "drop" and len(w) == 2 and int(w[1]) in put_seeds]


def kill_many_times(path: Path, times: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    acknowledged: set[int] = set()
    dropped: set[int] = set()
    everything: dict[tuple[int, bytes], Entry] = {}
    first = 0
    for turn in range(times):
        size = (16 << 20) if turn % 3 == 2 else None
        put_seeds, drop_seeds = run_and_kill(path, first, rng.uniform(0.0, 0.25), size=size, direct=turn % 2 == 0)
        # A drop under way when the kill came may be there or not.
        acknowledged.update(s for s in put_seeds if s % 7 or s in drop_seeds)
        dropped.update(drop_seeds)
        last = first + len(put_seeds)
        for number in range(first, last + 2):
            everything.update({e.id: e for e in blocks.chain(number, 6, group=number % 3)})
        first = last + 2
        if size is not None:
            acknowledged.clear()  # evicted, perhaps
        tier = DiskTier(path, blocks.IDENTITY)
        tier.check()
        assert all("torn end" in damage.reason for damage in tier.damage), tier.damage
        held = [entry for entry in everything.values() if tier.exists([entry.id])[0]]
        for group in range(3):
            entries = [entry for entry in held if entry.group == group]
            if entries:
                assert set(statuses(get(tier, entries))) == {Status.HIT}  # verifies every byte
        assert tier.stats().num_blocks == len(held), "a block nobody wrote"
        for number in sorted(acknowledged):
            entries = blocks.chain(number, 6, group=number % 3)
            assert tier.exists([e.id for e in entries]) == [number not in dropped] * 6, (
                f"prefix {number} after kill {turn}"
            )
        tier.close()
    assert everything


@pytest.mark.long
def test_a_process_killed_while_it_writes_loses_only_what_it_had_not_published(tmp_path: Path) -> None:
    kill_many_times(tmp_path, 10)


@pytest.mark.slow
def test_a_process_killed_200_times_while_it_writes_never_leaves_a_wrong_block(tmp_path: Path) -> None:
    kill_many_times(tmp_path, 200)
