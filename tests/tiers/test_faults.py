"""Faults, each injected for real: kills, cut and flipped files, a full disk, lost permissions, hostile files."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.errors import TierError
from kvpool.tiers import segment as fmt
from kvpool.tiers.base import Entry, Identity, Status
from kvpool.tiers.directory import Directory
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.writer import WritableDirectory

from . import blocks
from .conformance import WAIT_S, get, put, statuses

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


def test_a_process_killed_while_it_writes_loses_only_what_it_had_not_published(tmp_path: Path) -> None:
    kill_many_times(tmp_path, 10)


@pytest.mark.slow
def test_a_process_killed_200_times_while_it_writes_never_leaves_a_wrong_block(tmp_path: Path) -> None:
    kill_many_times(tmp_path, 200)


def write(path: Path, *chains: list[Entry]) -> Path:
    """Write prefixes; returns the one segment file."""
    directory = WritableDirectory(path, blocks.IDENTITY)
    for entries in chains:
        memory, batch = blocks.stored(entries)
        assert all(o.ok for o in directory.append(batch))
        del memory
    directory.close()
    return next(path.glob("segment-*"))


def read(path: Path, entries: list[Entry]) -> tuple[list[Status], list[str]]:
    """Open, read and verify everything; returns statuses and the reasons reported."""
    directory = Directory(path, blocks.IDENTITY)
    directory.check()
    size = blocks.BLOCK_BYTES[entries[0].group]
    memory = blocks.Memory(1, size)
    found = []
    for entry in entries:
        outcome = directory.read(entry, memory.pieces(0))
        found.append(outcome.status)
        if outcome.ok:
            assert memory.get(0) == blocks.content(entry, size), "a damaged block was given out"
    directory.check()
    reasons = [damage.reason for damage in directory.damage]
    directory.close()
    return found, reasons


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


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[Callable[[], None]]:
    """A file system of its own, or a limit on file sizes where mounting is not allowed; yields what makes room."""
    path.mkdir()
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
        ).returncode
        == 0
    ):
        filler = path / "filler"
        filler.write_bytes(bytes(size // 2))
        try:
            yield filler.unlink
        finally:
            subprocess.run(["umount", "-l", str(path)], check=True)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
        try:
            yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_what_it_has_and_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvpool.tiers.writes.RETRY_S", 0.1)
    with small_disk(tmp_path / "disk", 4 << 20) as make_room:
        tier = DiskTier(tmp_path / "disk", blocks.IDENTITY)
        kept: list[Entry] = []
        failed: list[Entry] = []
        for seed in range(30):
            entries = blocks.chain(seed, 8)
            for entry, outcome in zip(entries, put(tier, entries), strict=True):
                (kept if outcome.ok else failed).append(entry)
        assert failed
        assert kept
        assert not tier.flush(WAIT_S) or tier.stats().failed
        assert "its blocks are not kept" in caplog.text
        assert len(caplog.records) < 10, "a full disk is said once, not for each block"
        assert statuses(get(tier, kept)) == [Status.HIT] * len(kept)
        assert set(statuses(get(tier, failed))) == {Status.MISS}
        make_room()
        time.sleep(0.15)
        assert statuses(put(tier, failed[-8:])) == [Status.STORED] * 8
        tier.check()
        assert tier.close(WAIT_S)
        tier = DiskTier(tmp_path / "disk", blocks.IDENTITY)
        assert not tier.damage
        assert statuses(get(tier, kept + failed[-8:])) == [Status.HIT] * (len(kept) + 8)
        tier.close()


UNPRIVILEGED = """
import os, sys
sys.path[:0] = [{src!r}, {tests!r}]
from tiers import blocks
from tiers.conformance import get, put
from kvpool.errors import TierError
from kvpool.tiers import writes
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.base import Status
from pathlib import Path
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
writes.RETRY_S = 0.1
path = {path!r}
tier = DiskTier(path, blocks.IDENTITY, size_bytes=16 << 20)
kept = blocks.chain(1, 8)
assert all(o.ok for o in put(tier, kept))
os.chmod(path, 0o500)                       # no new segment can be made
seen = set()
for seed in range(10, 30):
    seen |= {{o.status for o in put(tier, blocks.chain(seed, 8))}}
assert Status.FAILED in seen, seen
assert all(o.ok for o in get(tier, kept))
os.chmod(path, 0o700)
import time; time.sleep(0.15)
assert all(o.ok for o in put(tier, blocks.chain(99, 8)))
tier.close()
os.chmod(next(Path(path).glob("segment-*1.kvpool")), 0)   # the first segment cannot be read any more
tier = DiskTier(path, blocks.IDENTITY)
assert any("Permission denied" in d.reason for d in tier.damage), tier.damage
assert all(o.status is Status.MISS for o in get(tier, kept))
tier.close()
os.chmod(path, 0)
try:
    DiskTier(path, blocks.IDENTITY)
except TierError as error:
    assert "Permission denied" in str(error), error
    print("done")
"""


def test_lost_permissions_are_misses_and_a_clear_error_at_opening(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    for parent in (tmp_path, *tmp_path.parents):
        with contextlib.suppress(OSError):
            parent.chmod(parent.stat().st_mode | 0o011)
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
    script = UNPRIVILEGED.format(src=str(ROOT / "src"), tests=str(ROOT / "tests"), path=str(path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    path.chmod(0o700)
    assert done.stdout == "done\n", done.stderr


# --- hostile files ------------------------------------------------------------------------------------------


def forge(header: fmt.SegmentHeader, place: int, fields: dict[str, int]) -> bytes:
    """A record with valid checksums and impossible numbers."""
    entry = blocks.chain(1, 1)[0]
    raw = bytearray(fmt.encode_record(entry, header.segment_id, place, 0, 4096, 0))
    places = {
        "kind": ("<B", 4), "priority": ("<B", 5), "group": ("<H", 6), "offset": ("<Q", 24), "payload": ("<Q", 32),
        "position": ("<Q", 40), "tokens": ("<I", 56), "key": ("<H", 60), "parent": ("<H", 62), "extras": ("<I", 64),
    }  # fmt: skip
    for name, value in fields.items():
        kind, at = places[name]
        struct.pack_into(kind, raw, at, value)
    struct.pack_into("<I", raw, 72, 0)
    struct.pack_into("<I", raw, 72, fmt.checksum(bytes(raw)))
    return bytes(raw)


@pytest.mark.parametrize(
    "fields",
    [
        {"payload": 1 << 63}, {"payload": (1 << 64) - 1}, {"payload": (1 << 64) - 4096}, {"payload": 1 << 40},
        {"tokens": (1 << 32) - 1}, {"tokens": 0}, {"tokens": 1 << 17}, {"key": 65535}, {"key": 0}, {"parent": 65535},
        {"extras": (1 << 32) - 1}, {"position": 1 << 63}, {"priority": 255}, {"kind": 3}, {"kind": 0}, {"offset": 0},
        {"tokens": (1 << 32) - 1, "extras": (1 << 32) - 1, "key": 65535, "parent": 65535},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_numbers_with_valid_checksums_are_skipped(tmp_path: Path, fields: dict[str, int]) -> None:
    entries = blocks.chain(7, 2)
    path = write(tmp_path, entries)
    raw = path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    header = fmt.read_header(fd, path.name)
    os.close(fd)
    path.write_bytes(raw + forge(header, len(raw), fields) + bytes(8192))
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    assert tier.damage
    assert tier.stats().num_blocks == 2
    assert statuses(get(tier, entries)) == [Status.HIT] * 2
    tier.close()


@pytest.mark.parametrize(
    "identity",
    [b"", b"[]", b"7", b'{"model": 3}', b'{"model": {"a": "b"}}', b"[" * 100_000, b"\xff\xfe", b'{"a": "\\ud800"}',
     b"cos\nsystem\n(S'touch pwned'\ntR.", b'[["model", "m"]]'],
    ids=lambda raw: raw[:12].decode("latin1"),
)  # fmt: skip
def test_identities_that_are_no_objects_of_texts_are_damage(tmp_path: Path, identity: bytes) -> None:
    size = fmt.padded(48 + len(identity))
    raw = bytearray(struct.pack("<8sIIQ16sII", b"KVPOOLSG", 1, size, 1, bytes(16), len(identity), 0) + identity)
    raw = raw.ljust(size, b"\0")
    struct.pack_into("<I", raw, 44, fmt.checksum(bytes(raw)))
    (tmp_path / "segment-0000000000000001.kvpool").write_bytes(raw)
    before = set(tmp_path.iterdir())
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    assert len(tier.damage) == 1
    assert statuses(put(tier, blocks.chain(1, 2))) == [Status.STORED] * 2
    tier.close(WAIT_S)
    assert {p.name for p in before} <= {p.name for p in tmp_path.iterdir()}
    assert not Path("pwned").exists()


@pytest.mark.parametrize("sizes", [(1 << 31, 5), (4096, 1 << 31), (4095, 5), (0, 0), (1 << 21, 5), (8192, 5)])
def test_headers_with_impossible_lengths_are_damage(tmp_path: Path, sizes: tuple[int, int]) -> None:
    raw = struct.pack("<8sIIQ16sII", b"KVPOOLSG", 1, sizes[0], 1, bytes(16), sizes[1], 0).ljust(4096, b"\0")
    (tmp_path / "segment-0000000000000001.kvpool").write_bytes(raw)
    directory = Directory(tmp_path, blocks.IDENTITY)
    assert len(directory.damage) == 1
    directory.close()


def test_a_future_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, blocks.chain(1, 1))
    raw = bytearray(path.read_bytes())
    struct.pack_into("<I", raw, 8, 2)
    struct.pack_into("<I", raw, 44, 0)
    struct.pack_into("<I", raw, 44, fmt.checksum(bytes(raw[:4096])))
    path.write_bytes(raw)
    with pytest.raises(TierError, match="has format 2; this version reads format 1"):
        DiskTier(tmp_path, blocks.IDENTITY)
    assert path.read_bytes() == raw


def test_links_pipes_directories_and_foreign_names_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    path = write(outside, blocks.chain(1, 2))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "segment-0000000000000001.kvpool").symlink_to(path)
    os.mkfifo(inside / "segment-0000000000000002.kvpool")
    (inside / "segment-0000000000000003.kvpool").mkdir()
    shutil.copy(path, inside / "segment-0000000000000004.kvpool")  # a segment under another number
    shutil.copy(path, inside / "segment-..%2f..%2fx.kvpool")
    (inside / "segment-0000000000000009.tmp").write_bytes(b"left by a kill")
    begun = time.perf_counter()
    tier = DiskTier(inside, blocks.IDENTITY)
    assert time.perf_counter() - begun < 5
    assert tier.stats().num_blocks == 0
    assert len(tier.damage) == 4
    assert statuses(put(tier, blocks.chain(2, 2))) == [Status.STORED] * 2
    tier.close(WAIT_S)
    assert path.stat().st_size > 4096
    assert not (inside / "segment-0000000000000009.tmp").exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "writer.lock").symlink_to(victim)
    with pytest.raises(TierError, match="cannot write in"):
        DiskTier(cache, blocks.IDENTITY)
    assert victim.read_text() == "precious"


def test_keys_and_extras_never_become_names(tmp_path: Path) -> None:
    """Report i21: path tricks in keys, salts and names."""
    tier = DiskTier(tmp_path / "cache", blocks.IDENTITY)
    entries = [
        Entry(0, key.ljust(16, b"\0"), bytes(8), extras=extras)
        for key in (b"../../../x", b"/etc/passwd\0", b"a" * 64, b"\0" * 16, b"C:\\..\\x")
        for extras in (b"../../../../tmp/x" * 20,)
    ]
    put(tier, entries)
    assert statuses(get(tier, entries)) == [Status.HIT] * 5
    tier.close(WAIT_S)
    names = {p.name for p in tmp_path.rglob("*")}
    assert names == {"cache", "writer.lock", "segment-0000000000000001.kvpool"}


def test_the_highest_segment_number_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "segment-ffffffffffffffff.kvpool").write_bytes(b"junk")
    tier = DiskTier(tmp_path, blocks.IDENTITY)
    outcome = put(tier, blocks.chain(1, 1))[0]
    assert outcome.status is Status.FAILED
    assert "move it away" in outcome.detail
    tier.close(WAIT_S)


def test_random_bytes_as_segments_never_crash(tmp_path: Path) -> None:
    rng = random.Random(3)
    valid = write(tmp_path / "valid", blocks.chain(1, 3)).read_bytes()
    for _ in range(60):
        path = tmp_path / "fuzz"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        raw = bytearray(valid)
        for _ in range(rng.randrange(1, 30)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randrange(1, 64)] = rng.randbytes(rng.randrange(1, 64))
        (path / "segment-0000000000000001.kvpool").write_bytes(raw)
        with contextlib.suppress(TierError):
            read(path, blocks.chain(1, 3))


def test_no_file_of_the_tiers_can_run_what_it_reads() -> None:
    """Report i16: no pickle, marshal, eval or exec anywhere near stored bytes."""
    for path in (ROOT / "src" / "kvpool" / "tiers").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [node.func.id]
            bad = {
                "pickle",
                "marshal",
                "shelve",
                "dill",
                "cloudpickle",
                "joblib",
                "eval",
                "exec",
                "compile",
                "__import__",
            }
            assert not bad & {name.split(".")[0] for name in names}, f"{path.name}:{node.lineno}"


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


def test_an_identity_too_large_for_a_header_raises(tmp_path: Path) -> None:
    directory = WritableDirectory(tmp_path, Identity({"model": "x" * (2 << 20)}))
    memory, batch = blocks.stored(blocks.chain(1, 1))
    assert "does not fit a header" in directory.append(batch)[0].detail
    directory.close()
    del memory
