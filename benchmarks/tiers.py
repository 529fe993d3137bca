"""How fast do blocks move between device, host tier and disk tier, against memcpy and the disk's own rate?

    python benchmarks/tiers.py [--blocks 256] [--block-bytes 737280] [--directory DIR] [--json FILE]

Rows: offload (device to host), onboard (host to device), disk write and read through the tier, each with the rate of
the plain way measured in the same loop. A block of 737,280 bytes is one of the embedded model's (32 tokens, bf16).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import secrets
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.tiers.base import Batch, Entry, Identity, pack_tokens
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.host import HostTier

IDENTITY = Identity({"block_format": "benchmark", "constants": "none", "model": "none"})
SECONDS = 60.0


def memory(count: int, size: int) -> tuple[mmap.mmap, list[tuple[tuple[int, int], ...]]]:
    """Touched memory for blocks that follow one another."""
    block = mmap.mmap(-1, count * size)
    pattern = secrets.token_bytes(min(1 << 20, len(block)))
    for at in range(0, len(block), len(pattern)):
        block[at : at + len(pattern)] = pattern[: len(block) - at]
    base = ctypes.addressof(ctypes.c_char.from_buffer(block))
    return block, [((base + i * size, size),) for i in range(count)]


def entries(count: int, salt: int) -> list[Entry]:
    """A prefix of blocks with keys of its own."""
    keys = [salt.to_bytes(8, "little") + i.to_bytes(8, "little") for i in range(count)]
    return [
        Entry(0, key, pack_tokens(range(32)), keys[i - 1] if i else b"", 32 * i, priority=35)
        for i, key in enumerate(keys)
    ]


def timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def plain_copy(source: Batch, target: Batch) -> None:
    for (_, a), (_, b) in zip(source, target, strict=True):
        ctypes.memmove(b[0][0], a[0][0], a[0][1])


def finished(ticket: object) -> None:
    assert ticket.wait(SECONDS)
    bad = [o for o in ticket.outcomes if not o.ok]
    assert not bad, bad[0]


def host_rows(count: int, size: int, turns: int) -> list[dict[str, object]]:
    """Offload and onboard against memcpy of the same blocks, in turns."""
    keep, places = memory(count, size)
    back, others = memory(count, size)
    copy, offload, onboard = [], [], []
    tier = HostTier(count * size, [size], IDENTITY)
    for turn in range(turns + 1):
        names = entries(count, turn)
        there = list(zip(names, places, strict=True))
        here = list(zip(names, others, strict=True))
        times = (
            timed(lambda there=there, here=here: plain_copy(there, here)),
            timed(lambda there=there: finished(tier.put(there))),
            timed(lambda here=here: finished(tier.get(here))),
        )
        if turn:  # the first faults pages in
            for into, value in zip((copy, offload, onboard), times, strict=True):
                into.append(value)
    total = count * size
    del keep, back
    return [
        row("offload to host", total, offload, "memcpy", copy),
        row("onboard from host", total, onboard, "memcpy", copy),
    ]


def drop_cached(path: Path) -> None:
    for file in path.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def sequential_write(path: Path, block: mmap.mmap) -> float:
    """Write one file in order, 8 MiB at a time past the page cache, and sync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    view = memoryview(block)
    step = 8 << 20

    def work() -> None:
        for at in range(0, len(view) // 4096 * 4096, step):
            os.pwrite(fd, view[at : at + step], at)
        os.fdatasync(fd)

    seconds = timed(work)
    os.close(fd)
    return seconds


def sequential_read(path: Path, block: mmap.mmap) -> float:
    """Read one file in order, a block at a time, nothing of it cached."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    view = memoryview(block)
    step = 1 << 20

    def work() -> None:
        for at in range(0, len(view), step):
            os.preadv(fd, [view[at : at + step]], at)

    seconds = timed(work)
    os.close(fd)
    return seconds


def disk_rows(count: int, size: int, turns: int, where: Path) -> list[dict[str, object]]:
    """The tier against one file written and read in order, in turns."""
    block, places = memory(count, size)
    back, others = memory(count, size)
    times: dict[str, list[float]] = {"file write": [], "write": [], "file read": [], "read": [], "warm": []}
    for turn in range(turns):
        path = where / f"turn-{turn}"
        path.mkdir(parents=True)
        times["file write"].append(sequential_write(path / "file", block))
        names = entries(count, turn)
        tier = DiskTier(path / "tier", IDENTITY, max_pending_bytes=2 * count * size)

        def write(tier: DiskTier = tier, names: list[Entry] = names) -> None:
            finished(tier.put(list(zip(names, places, strict=True))))
            assert tier.flush(SECONDS)

        def read(tier: DiskTier = tier, names: list[Entry] = names) -> None:
            finished(tier.get(list(zip(names, others, strict=True))))

        times["write"].append(timed(write))
        for counted in (False, True):  # what was just written is slow to read the first time, whoever reads
            seconds = sequential_read(path / "file", back)
            drop_cached(path / "tier")
            cold = timed(read)
            if counted:
                times["file read"].append(seconds)
                times["read"].append(cold)
                times["warm"].append(timed(read))
        assert back[:] == block[:]
        tier.close()
        shutil.rmtree(path)
    total = count * size
    return [
        row("disk write, synced", total, times["write"], "one file, O_DIRECT, synced", times["file write"]),
        row("disk read, cold", total, times["read"], "one file, cold", times["file read"]),
        row("disk read, page cache", total, times["warm"], "one file, cold", times["file read"]),
    ]


def row(case: str, num_bytes: int, seconds: list[float], peer: str, peer_seconds: list[float]) -> dict[str, object]:
    ours, theirs = statistics.median(seconds), statistics.median(peer_seconds)
    allowed = theirs / 0.8 + (0.010 if case.startswith("disk") else 0.0)
    return {
        "case": case,
        "num_bytes": num_bytes,
        "gb_s": num_bytes / ours / 1e9,
        "spread": (max(seconds) - min(seconds)) / ours,
        "peer": peer,
        "peer_gb_s": num_bytes / theirs / 1e9,
        "ratio": theirs / ours,
        "holds": ours <= allowed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-bytes", type=int, default=737_280)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=Path("tiers-benchmark"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = host_rows(args.blocks, args.block_bytes, args.turns)
    try:
        rows += disk_rows(args.blocks, args.block_bytes, args.turns, args.directory)
    finally:
        shutil.rmtree(args.directory, ignore_errors=True)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(f"{args.blocks} blocks of {args.block_bytes:,} bytes, median of {args.turns}")
    print(f"{'case':24}{'GB/s':>8}{'spread':>8}   {'against':28}{'GB/s':>8}{'ratio':>7}")
    for r in rows:
        mark = "" if r["holds"] else "   below 80 %"
        ours = f"{r['case']:24}{r['gb_s']:8.2f}{r['spread']:8.0%}"
        print(f"{ours}   {r['peer']:28}{r['peer_gb_s']:8.2f}{r['ratio']:7.2f}{mark}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
