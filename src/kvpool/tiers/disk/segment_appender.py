"""Writing records at the end of one segment file: in one piece, past the page cache where that is possible."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Sequence

from kvpool.tiers.base import Batch, Pieces, memory, payload_bytes, reason
from kvpool.tiers.disk.segment_format import ALIGN, encode_record, header_bytes, padded
from kvpool.tiers.pieces import move

_log = logging.getLogger("kvpool.tiers.disk")
#: One write covers at most about so many bytes: larger ones gain nothing, and a kill loses what one holds.
WRITE_BYTES = 16 << 20
#: The system takes at most 1024 ranges in a write.
MAX_PIECES = 1000


def record_bytes(num_bytes: int, head: int) -> int:
    """Return the bytes of a record with such a payload and header."""
    return head + padded(num_bytes)


def chunk(batch: Batch, room: int) -> tuple[int, int]:
    """Return how many leading blocks of a batch one write takes, and their bytes; at least one block.

    Args:
        batch: Blocks in order.
        room: Bytes left in the file.
    """
    count, size, ranges = 0, 0, 0
    for entry, pieces in batch:
        more = record_bytes(payload_bytes(pieces), header_bytes(entry))
        if count and (size + more > min(room, WRITE_BYTES) or ranges + len(pieces) + 2 > MAX_PIECES):
            break
        count, size, ranges = count + 1, size + more, ranges + len(pieces) + 2
    return count, size


class Appender:
    """The end of one file.

    Args:
        path: Of the segment, whose header is written.
        segment_id: From its header.
        offset: Where the next record goes; what the file holds behind it is cut off.
        direct: Ask for direct I/O; without it where the file system has none.

    Invariants: the file ends at `offset` unless a write is under way or the system forbade cutting it.
    """

    def __init__(self, path: os.PathLike[str], segment_id: bytes, offset: int, *, direct: bool) -> None:
        self.segment_id = segment_id
        self.offset = offset
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.direct = direct and hasattr(os, "O_DIRECT")
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            if not self.direct or error.errno != errno.EINVAL:
                raise
            _log.info("%s: this file system has no direct I/O; writing through the page cache", path)
            self.direct = False
            self._fd = os.open(path, flags)
        os.ftruncate(self._fd, offset)
        self._scratch = mmap.mmap(-1, ALIGN)

    def write(
        self, batch: Batch, checksums: Sequence[int], created_ns: int, *, is_drop: bool = False
    ) -> list[tuple[int, int]]:
        """Append the records of a batch that `chunk` measured, in one write.

        Args:
            batch: Entries and their bytes.
            checksums: `payload_checksum` of each.
            created_ns: Time of writing.
            is_drop: The records say that the blocks are gone.

        Returns:
            (offset, header bytes) of each.

        Raises:
            OSError: Nothing of it can be found; the file ends where it did.
        """
        heads = [header_bytes(entry) for entry, _ in batch]
        sizes = [payload_bytes(pieces) for _, pieces in batch]
        straight = [self._straight(pieces) for _, pieces in batch]
        need = sum(h + (0 if s else padded(n)) for h, n, s in zip(heads, sizes, straight, strict=True))
        if len(self._scratch) < need:
            self._scratch = mmap.mmap(-1, max(need, 2 * len(self._scratch)))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._scratch))
        views: list[memoryview] = []
        places: list[tuple[int, int]] = []
        used, offset = 0, self.offset
        for (entry, pieces), crc, head, size, by_pieces in zip(batch, checksums, heads, sizes, straight, strict=True):
            if not by_pieces:
                move(pieces, ((base + used + head, size),))
                ctypes.memset(base + used + head + size, 0, padded(size) - size)
            raw = encode_record(entry, self.segment_id, offset, created_ns, size, crc, is_drop=is_drop)
            self._scratch[used : used + head] = raw
            views.append(memory(base + used, head))
            used += head
            if by_pieces:
                views.extend(memory(address, n) for address, n in pieces)
            else:
                views.append(memory(base + used, padded(size)))
                used += padded(size)
            places.append((offset, head))
            offset += record_bytes(size, head)
        self._write_all([view for view in views if len(view)])
        self.offset = offset
        return places

    def _straight(self, pieces: Pieces) -> bool:
        """True when direct I/O can take the bytes from where they are."""
        return all(address % ALIGN == 0 and size % ALIGN == 0 for address, size in pieces)

    def _write_all(self, views: list[memoryview]) -> None:
        offset = self.offset
        try:
            while views:
                done = os.pwritev(self._fd, views, offset)
                offset += done
                while views and done >= len(views[0]):
                    done -= len(views.pop(0))
                if done:
                    if self.direct and done % ALIGN:
                        raise OSError(errno.ENOSPC, "the disk took part of a page")
                    views[0] = views[0][done:]
        except OSError:
            try:
                os.ftruncate(self._fd, self.offset)
            except OSError as error:
                _log.warning("cannot cut a torn record off: %s", reason(error))
            raise

    def sync(self) -> None:
        """Wait until what was written is on the medium."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file; what was written stays."""
        os.close(self._fd)
