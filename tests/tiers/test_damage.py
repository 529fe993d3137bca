"""Files that were flipped, cut and overwritten: each damage is found, costs its blocks and is reported."""

from __future__ import annotations

import ctypes
import os
import random
from pathlib import Path

from kvpool.tiers.base import Status
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.disk import segment_format as fmt
from kvpool.tiers.disk.directory import Directory

from . import blocks
from .conformance import WAIT_S, get, put, statuses
from .segments import read, write

ROOT = Path(__file__).resolve().parents[2]


def test_every_flipped_bit_is_detected_costs_one_block_and_is_reported(tmp_path: Path) -> None:
    entries = blocks.chain(1, 6, group=2)
    path = write(tmp_path, entries)
    raw = path.read_bytes()
    header = Directory(tmp_path)
    starts = [record.offset for record, _ in header.entries()]
    header.close()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    # Everywhere, and surely in each field of a header, in keys and tokens, in padding and payload.
    bits = [rng.randrange(len(raw) * 8) for _ in range(200)]
    bits += [
        (starts[3] + byte) * 8 + rng.randrange(8) for byte in (*range(0, 180, 3), 4000, 4095, 4096, 4096 + 3327, 8191)
    ]
    bits += [byte * 8 + rng.randrange(8) for byte in range(0, 130, 4)]
    for bit in bits:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found, reasons = read(tmp_path, entries)
        hit = max((i for i, start in enumerate(starts) if start <= bit // 8), default=None)
        want = [False] * 6 if hit is None else [i != hit for i in range(6)]
        torn = hit == 5 and found[5] is Status.MISS
        assert [s is Status.HIT for s in found] == want, f"bit {bit}, {reasons}"
        assert len(reasons) == (0 if torn else 1), f"bit {bit} was reported as {reasons}"
    path.write_bytes(raw)
    assert read(tmp_path, entries) == ([Status.HIT] * 6, [])


def test_a_truncated_file_gives_the_blocks_before_the_cut(tmp_path: Path) -> None:
    entries = blocks.chain(1, 6)
    path = write(tmp_path, entries)
    raw = path.read_bytes()
    directory = Directory(tmp_path)
    ends = [record.offset + record.num_bytes for record, _ in directory.entries()]
    directory.close()
    rng = random.Random(5)
    for size in [0, 1, 47, 4095, 4096, 4097, *ends, *(rng.randrange(len(raw)) for _ in range(60))]:
        path.write_bytes(raw[:size])
        found, _ = read(tmp_path, entries)
        assert [s is Status.HIT for s in found] == [end <= size for end in ends], f"cut at {size}"
        tier = DiskTier(tmp_path, blocks.IDENTITY)
        assert bool(tier.damage) == (size not in (4096, *ends)), f"cut at {size} was reported as {tier.damage}"
        assert statuses(put(tier, entries)) == [Status.STORED] * 6
        assert statuses(get(tier, entries)) == [Status.HIT] * 6
        tier.check()
        assert tier.close(WAIT_S)
        for extra in tmp_path.glob("segment-*"):
            if extra != path:
                extra.unlink()


def test_a_file_overwritten_in_the_middle_gives_what_is_around_it(tmp_path: Path) -> None:
    entries = blocks.chain(1, 30)
    path = write(tmp_path, entries)
    raw = bytearray(path.read_bytes())
    third = len(raw) // 3
    raw[third : 2 * third] = os.urandom(third)
    path.write_bytes(raw)
    found, reasons = read(tmp_path, entries)
    hits = [s is Status.HIT for s in found]
    assert 17 <= sum(hits) <= 20
    assert hits[:9] == [True] * 9
    assert hits[-9:] == [True] * 9
    assert reasons


def test_the_checksum_is_crc32c_and_its_two_forms_agree() -> None:
    from kvpool._native import crc32c

    assert fmt.checksum(b"123456789") == 0xE3069283  # RFC 3720, B.4
    assert fmt.checksum(bytes(32)) == 0x8A9136AA
    assert fmt.checksum(b"\xff" * 32) == 0x62A8AB43
    rng = random.Random(1)
    data = rng.randbytes(100_000)
    buffer = ctypes.create_string_buffer(data, len(data))
    base = ctypes.addressof(buffer)
    for _ in range(300):
        start = rng.randrange(2000)
        size = rng.choice([rng.randrange(64), rng.randrange(98_000)])
        cut = rng.randrange(size + 1)
        want = crc32c(base + start, size, 0, portable=True)
        assert crc32c(base + start, size) == want
        assert crc32c(base + start + cut, size - cut, crc32c(base + start, cut)) == want
