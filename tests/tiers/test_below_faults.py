"""A cache over a disk that is late or damaged, and processes that are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvpool.tiers.disk.directory import Directory

from .test_disk_faults import small_disk
from .tiered_world import KINDS, PROMPT, World


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> threading.Event:
    release = threading.Event()
    fetch = Directory.fetch

    def late(self: Directory, *arguments: Any) -> None:
        release.wait(seconds)
        fetch(self, *arguments)

    monkeypatch.setattr(Directory, "fetch", late)
    return release


def stored_prompts(path: Path, prompts: list[list[int]]) -> None:
    world = World(disk=path, model="m", num_blocks=80)
    for prompt in prompts:
        with world.open(prompt) as seq:
            world.step(seq)
    assert world.cache.close()


def stored_prompt(path: Path) -> None:
    stored_prompts(path, [PROMPT])


def test_a_step_waits_for_a_late_disk_no_longer_than_its_deadline_and_never_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT, *([100 * number + i for i in range(40)] for number in range(1, 6))]
    stored_prompts(tmp_path, prompts)
    monkeypatch.setattr("kvpool.tiers.transfer.LATENCY_S", 2.0)
    world = World(disk=tmp_path, model="m", num_blocks=80)
    release = slow_reads(monkeypatch, 60)
    begun = time.perf_counter()
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [40], "late blocks are computed"
        world.verify(seq)
    assert 2.0 < time.perf_counter() - begun < 20
    disk = world.cache.below.transfer.disk
    assert disk is not None
    asked, read = disk.stats(), world.stats("host").written_bytes
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for prompt in prompts[1:]:  # the disk has them and is known to be late: nobody asks it, nobody waits
        with world.open(prompt) as seq:
            assert world.cache.fits([(seq, 100)]) == 1
            assert not any(world.cache.below._waiting.values())
            assert world.step(seq) == [40]
            world.verify(seq)
    assert time.perf_counter() - begun < 2.0, "one deadline would have been as long"
    assert time.process_time() - begun_cpu < 2.0
    after = disk.stats()
    assert (after.hit, after.late, world.stats("host").written_bytes) == (asked.hit, asked.late, read)
    release.set()
    assert world.cache.close()


def test_a_sequence_whose_blocks_are_on_their_way_lets_others_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_prompt(tmp_path)
    world = World(disk=tmp_path, model="m")
    release = slow_reads(monkeypatch, 30)
    slow, quick = world.open(PROMPT), world.open([5, 6, 7])
    begun = time.perf_counter()
    assert world.step(slow, quick) == [0, 3]
    assert time.perf_counter() - begun < 5
    release.set()
    assert world.step(slow) == [4], "it is worth waiting when nobody else can go"
    world.verify(slow)
    world.verify(quick)
    assert world.cache.below.num_deferred == 1
    slow.release()
    quick.release()
    world.cache.check()
    assert world.cache.close()


def test_damaged_blocks_on_disk_are_computed_and_pool_and_counters_are_as_ever(tmp_path: Path) -> None:
    """Report i12: a failed restore must not harm anybody, now or later."""
    stored_prompt(tmp_path)
    for path in tmp_path.glob("segment-*"):
        raw = bytearray(path.read_bytes())
        for at in range(8192, len(raw), 4096):
            raw[at + 100] ^= 1
        path.write_bytes(raw)
    world = World(disk=tmp_path, model="m")
    bystanders = [world.open([number] * 13) for number in (1, 2, 3)]
    world.step(*bystanders)
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [40]
        world.verify(seq)
    for bystander in bystanders:
        world.verify(bystander)
        bystander.release()
    world.cache.check()
    world.cache.close()


def test_a_cache_over_a_full_disk_goes_on_and_keeps_what_the_disk_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[1000 * number + i for i in range(40)] for number in range(80)]
    with small_disk(tmp_path / "disk", 4 << 20):
        world = World(num_blocks=24, disk=tmp_path / "disk", model="m")
        for prompt in prompts:
            with world.open(prompt) as seq:
                world.step(seq)
                world.verify(seq)
        assert not world.cache.flush(0.5), "80 prompts need twice the room"
        assert "its blocks are not kept" in caplog.text
        world.cache.check()
        world.cache.close(0.5)
        again = World(num_blocks=24, disk=tmp_path / "disk", model="m")
        computed = []
        for prompt in prompts:
            with again.open(prompt) as seq:
                computed += again.step(seq)
                again.verify(seq)
        assert 0 < computed.count(4) < len(prompts), "what was stored before the disk was full is found"
        again.cache.check()
        again.cache.close(0.5)


KILLED = """
import os, sys
sys.path[:0] = [{src!r}, {tests!r}]
from tiers.tiered_world import KINDS, PROMPT, World
world = World(KINDS[{kind!r}], disk={path!r}, model="m", host_size="1MiB")
seq = world.open(PROMPT)
world.compute(seq)
if {idle}:
    assert world.cache.flush()
else:
    seq.release()
    world.fill(1, 40)
    until = __import__("time").monotonic() + 10
    while not world.cache.below.transfer.disk.idle and __import__("time").monotonic() < until: pass
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "idle", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["flushed when idle", "evicted"]
)
@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_what_was_evicted_or_flushed_before_a_kill_is_found(tmp_path: Path, kind: str, idle: bool) -> None:
    root = Path(__file__).resolve().parents[2]
    script = KILLED.format(src=str(root / "src"), tests=str(root / "tests"), path=str(tmp_path), kind=kind, idle=idle)
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ}).returncode == -9
    world = World(KINDS[kind], disk=tmp_path, model="m")
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [4]
        world.verify(seq)
    world.cache.close()
