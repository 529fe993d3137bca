"""A disk that is full or forbidden: misses and a line in the log."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.tiers.base import Entry, Status
from kvpool.tiers.disk import DiskTier

from . import blocks
from .conformance import WAIT_S, get, put, statuses

ROOT = Path(__file__).resolve().parents[2]


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
    monkeypatch.setattr("kvpool.tiers.disk.write_queue.RETRY_S", 0.1)
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
from kvpool.tiers.disk import write_queue as writes
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
