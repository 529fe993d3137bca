"""The format of a segment file: how a header and records become bytes, and back, with nothing believed unchecked.

docs/tiers.md draws it byte by byte. Knows files and bytes; no directory, no index, no thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kvpool._native import crc32c
from kvpool.errors import TierError
from kvpool.tiers.base import MAX_EXTRAS_BYTES, MAX_KEY_BYTES, MAX_TOKENS, Entry, Identity, Pieces

#: Format number; a change of any byte below raises it.
FORMAT = 1
#: Everything starts and ends at a multiple of this, so that direct I/O can be used.
ALIGN = 4096
MAX_HEADER_BYTES = 1 << 20
#: Largest payload a reader believes; a block is far smaller.
MAX_PAYLOAD_BYTES = 1 << 32

_MAGIC = b"KVPOOLSG"
_RECORD_MAGIC = b"KVRC"
_BLOCK, _DROP = 1, 2
#: magic, format, header bytes, number of the segment, its id, identity bytes, CRC-32C of the header with this field 0.
_HEADER = struct.Struct("<8sIIQ16sII")
#: magic, kind, priority, group, segment id, offset of the record, payload bytes, position, time in ns, tokens, key
#: bytes, parent bytes, extras bytes, CRC-32C of payload and padding, CRC-32C of the record's header with this field 0.
_RECORD = struct.Struct("<4sBBH16sQQQQIHHIII")
_CRC_FIELD = struct.Struct("<I")
_MAX_RECORD_HEADER = -(-(_RECORD.size + 2 * MAX_KEY_BYTES + 8 * MAX_TOKENS + MAX_EXTRAS_BYTES) // ALIGN) * ALIGN

ZEROS = bytes(ALIGN)


class DamagedError(Exception):
    """Bytes are not what was written; becomes a miss, never leaves the tier."""


def padded(size: int) -> int:
    """Round up to a multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN


def checksum(data: bytes, crc: int = 0) -> int:
    """CRC-32C of bytes."""
    return crc32c(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, len(data), crc)


def payload_checksum(pieces: Pieces) -> int:
    """CRC-32C of a block's pieces and the zeros that follow them in a file."""
    crc, size = 0, 0
    for address, num_bytes in pieces:
        crc = crc32c(address, num_bytes, crc)
        size += num_bytes
    return checksum(ZEROS[: padded(size) - size], crc)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first bytes of a segment.

    Attributes:
        number: Place in the order of segments; a later one wins.
        segment_id: 16 random bytes that every record repeats, so that old bytes are never taken for records.
        identity: Of all its blocks.
    """

    number: int
    segment_id: bytes
    identity: Identity

    def encode(self) -> bytes:
        """Return the header's bytes, a multiple of `ALIGN`."""
        identity = self.identity.json.encode()
        size = padded(_HEADER.size + len(identity))
        if size > MAX_HEADER_BYTES:
            raise TierError(
                f"an identity of {len(identity)} bytes does not fit a header of {MAX_HEADER_BYTES}; hash its parts"
            )
        fixed = _HEADER.pack(_MAGIC, FORMAT, size, self.number, self.segment_id, len(identity), 0)
        return _with_crc((fixed + identity).ljust(size, b"\0"), _HEADER.size - 4)

    @property
    def num_bytes(self) -> int:
        """Bytes of the header; the first record starts there."""
        return padded(_HEADER.size + len(self.identity.json.encode()))


def read_header(fd: int, name: str) -> SegmentHeader:
    """Read and verify a segment's header.

    Raises:
        DamagedError: It is truncated, has another checksum, or says impossible things.
        TierError: It is whole and of a format this version does not read.
    """
    start = os.pread(fd, ALIGN, 0)
    if len(start) < ALIGN:
        raise DamagedError(f"{name}: {len(start)} bytes, too short for a header")
    magic, number_of_format, size, number, segment_id, identity_bytes, _ = _HEADER.unpack_from(start)
    if magic != _MAGIC:
        raise DamagedError(f"{name}: begins with {magic!r}, not {_MAGIC!r}")
    if size % ALIGN or not ALIGN <= size <= MAX_HEADER_BYTES or identity_bytes > size - _HEADER.size:
        raise DamagedError(f"{name}: impossible header of {size} bytes with an identity of {identity_bytes}")
    raw = start + os.pread(fd, size - ALIGN, ALIGN)
    if len(raw) != size or not _crc_holds(raw, _HEADER.size - 4):
        raise DamagedError(f"{name}: the checksum of the header is wrong")
    if number_of_format != FORMAT:
        raise TierError(
            f"{name} has format {number_of_format}; this version reads format {FORMAT}. Use another directory"
        )
    try:
        text = raw[_HEADER.size : _HEADER.size + identity_bytes].decode()
        identity = Identity(json.loads(text))
        if identity.json != text:
            raise ValueError("not in the one form")
    except (ValueError, TypeError, RecursionError, TierError) as error:
        raise DamagedError(f"{name}: its identity is no object of texts ({error})") from None
    return SegmentHeader(number, segment_id, identity)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What precedes a block's bytes.

    Attributes:
        entry: What the block is; for a drop, key and group say what was dropped.
        is_drop: True for a record that says a block is gone.
        offset: Of the record in its file.
        header_bytes: From the record's start to its payload.
        payload_bytes: Of the block.
        payload_crc: CRC-32C of payload and padding.
        created_ns: When it was written, nanoseconds since 1970.
    """

    entry: Entry
    is_drop: bool
    offset: int
    header_bytes: int
    payload_bytes: int
    payload_crc: int
    created_ns: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole record."""
        return self.header_bytes + padded(self.payload_bytes)


def header_bytes(entry: Entry) -> int:
    """Return the bytes from a record's start to its payload."""
    return padded(_RECORD.size + len(entry.key) + len(entry.parent) + len(entry.tokens) + len(entry.extras))


def encode_record(
    entry: Entry, segment_id: bytes, offset: int, created_ns: int, num_bytes: int, crc: int, *, is_drop: bool = False
) -> bytes:
    """Return the header of a record, a multiple of `ALIGN`; the payload follows it."""
    fixed = _RECORD.pack(
        _RECORD_MAGIC, _DROP if is_drop else _BLOCK, entry.priority, entry.group, segment_id, offset, num_bytes,
        entry.position, created_ns, entry.num_tokens, len(entry.key), len(entry.parent), len(entry.extras), crc, 0,
    )  # fmt: skip
    raw = fixed + entry.key + entry.parent + entry.tokens + entry.extras
    return _with_crc(raw.ljust(header_bytes(entry), b"\0"), _RECORD.size - 4)


def decode_record(raw: bytes, segment_id: bytes, offset: int) -> RecordHeader:
    """Verify a record's header.

    Args:
        raw: At least the header; what follows is not looked at.
        segment_id: Of the file it comes from.
        offset: Where in the file it comes from.

    Raises:
        DamagedError: It is no record of this file at this place, too short, or has another checksum.
    """
    size = record_header_bytes(raw)
    if len(raw) < size or not _crc_holds(raw[:size], _RECORD.size - 4):
        raise DamagedError(f"the checksum of the record at {offset} is wrong")
    (
        _, kind, priority, group, found_id, found_offset, num_bytes, position, created_ns, _, key_bytes, parent_bytes,
        extras_bytes, crc, _,
    ) = _RECORD.unpack_from(raw)  # fmt: skip
    if found_id != segment_id or found_offset != offset:
        raise DamagedError(f"the record at {offset} was written for another place")
    if kind not in (_BLOCK, _DROP) or num_bytes > MAX_PAYLOAD_BYTES:
        raise DamagedError(f"the record at {offset} has kind {kind} and {num_bytes} bytes")
    a = _RECORD.size
    b = a + key_bytes
    c = b + parent_bytes
    d = record_body_bytes(raw) + _RECORD.size
    try:
        entry = Entry(
            group, raw[a:b], raw[c : d - extras_bytes], raw[b:c], position, raw[d - extras_bytes : d], priority
        )
    except TierError as error:
        raise DamagedError(f"the record at {offset} holds no entry: {error}") from None
    return RecordHeader(entry, kind == _DROP, offset, size, num_bytes, crc, created_ns)


def record_body_bytes(raw: bytes) -> int:
    """Return the bytes of key, parent, tokens and extras that a record's first bytes announce."""
    num_tokens, key_bytes, parent_bytes, extras_bytes = struct.unpack_from("<IHHI", raw, _RECORD.size - 20)
    return int(key_bytes + parent_bytes + 8 * num_tokens + extras_bytes)


def record_header_bytes(raw: bytes) -> int:
    """Return the header bytes that a record's first bytes announce.

    Raises:
        DamagedError: They are no record, or announce more than any record has.
    """
    if len(raw) < _RECORD.size or raw[:4] != _RECORD_MAGIC:
        raise DamagedError("no record")
    size = padded(_RECORD.size + record_body_bytes(raw))
    if size > _MAX_RECORD_HEADER:
        raise DamagedError(f"a record header of {size} bytes")
    return size


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Bytes of a file that are no record."""

    start: int
    stop: int
    reason: str


def scan(fd: int, header: SegmentHeader, start: int, stop: int) -> Iterator[RecordHeader | DamagedRange]:
    """Walk over the records of a file by their headers; payloads are not read.

    Behind damage it goes on at the next place where a whole record header stands. What is cut off by the end of the
    file is a last damaged range.

    Args:
        fd: Open for reading.
        header: Of the file.
        start: Where a record begins.
        stop: End of the file.
    """
    offset, damaged_from, reason = start, -1, ""
    while offset < stop:
        try:
            record = _read_record(fd, header.segment_id, offset, stop)
        except DamagedError as error:
            if damaged_from < 0:
                damaged_from, reason = offset, str(error)
            offset += ALIGN
            continue
        if damaged_from >= 0:
            yield DamagedRange(damaged_from, offset, reason)
            damaged_from = -1
        yield record
        offset += record.num_bytes
    if damaged_from >= 0:
        yield DamagedRange(damaged_from, stop, reason)


def _read_record(fd: int, segment_id: bytes, offset: int, stop: int) -> RecordHeader:
    raw = os.pread(fd, ALIGN, offset)
    size = record_header_bytes(raw)
    if size > stop - offset:
        raise DamagedError(f"the record at {offset} is cut off")
    if size > ALIGN:
        raw += os.pread(fd, size - ALIGN, offset + ALIGN)
    record = decode_record(raw, segment_id, offset)
    if record.num_bytes > stop - offset:
        raise DamagedError(f"the record at {offset} is cut off")
    return record


def _with_crc(raw: bytes, at: int) -> bytes:
    return raw[:at] + _CRC_FIELD.pack(checksum(raw)) + raw[at + 4 :]


def _crc_holds(raw: bytes, at: int) -> bool:
    return bool(_CRC_FIELD.unpack_from(raw, at)[0] == checksum(raw[:at] + ZEROS[:4] + raw[at + 4 :]))
