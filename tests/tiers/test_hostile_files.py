"""Files made to do harm: impossible lengths, foreign names, links, whatever bytes."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import shutil
import struct
import time
from pathlib import Path

import pytest

from kvpool.errors import TierError
from kvpool.tiers.base import Entry, Identity, Status
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.disk import segment_format as fmt
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.directory_writer import WritableDirectory

from . import blocks
from .conformance import WAIT_S, get, put, statuses
from .segments import read, write

ROOT = Path(__file__).resolve().parents[2]


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
    for path in (ROOT / "src" / "kvpool" / "tiers").rglob("*.py"):
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


def test_an_identity_too_large_for_a_header_raises(tmp_path: Path) -> None:
    directory = WritableDirectory(tmp_path, Identity({"model": "x" * (2 << 20)}))
    memory, batch = blocks.stored(blocks.chain(1, 1))
    assert "does not fit a header" in directory.append(batch)[0].detail
    directory.close()
    del memory
