"""Segment files written for a test, and read again with all that is said of them."""

from __future__ import annotations

from pathlib import Path

from kvpool.tiers.base import Entry, Status
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.directory_writer import WritableDirectory

from . import blocks

ROOT = Path(__file__).resolve().parents[2]


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
