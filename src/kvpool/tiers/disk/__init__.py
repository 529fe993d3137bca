"""Blocks in a directory that outlives the process.

`tier` is what the rest sees. It hands reads to `read_queue` and writes to `write_queue`, threads that ask a `directory`
(the index, verified reads) or its `directory_writer` (lock, cap, compaction). Those know segment files: how they look
(`segment_format`), how a record is read (`segment_reading`) and how one is written (`segment_appender`).
"""

from __future__ import annotations

from kvpool.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
