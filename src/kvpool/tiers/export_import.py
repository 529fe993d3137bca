"""Prefixes as safetensors files, to carry between machines: written from a directory, read into one.

A file is an ordinary safetensors file: one `U8` tensor a block, `block.0` and so on, and three texts in the metadata:
`format`, `identity` and `blocks` (a list with what each block is and the CRC-32C of its bytes and the zeros up to a
whole page). Any reader of the format shows it; ours believes nothing unchecked.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.errors import TierError
from kvpool.tiers.base import BlockId, Entry, Identity, Pieces, Status, pack_tokens, reason, unpack_tokens
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.directory_writer import WritableDirectory
from kvpool.tiers.disk.segment_format import MAX_PAYLOAD_BYTES, RecordHeader, payload_checksum

FORMAT = "kvpool-prefixes-1"
#: safetensors' own limit on a header.
MAX_HEADER_BYTES = 100_000_000
#: Told of each part that is done how many there are.
Progress = Callable[[int], None]


def _silent(total: int) -> None:
    """Nobody looks."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """How many blocks a transfer moved.

    Attributes:
        num_blocks: Blocks written.
        num_bytes: Their payload.
        skipped: Blocks that were there already, or were found damaged and left out.
    """

    num_blocks: int
    num_bytes: int
    skipped: int


def prefix(directory: Directory, key: bytes) -> list[RecordHeader]:
    """Return the blocks of every group from the start of a sequence to the block with this key, parents first.

    Raises:
        TierError: No block has the key.
    """
    by_id = {record.entry.id: record for record, _ in directory.entries()}
    found: dict[BlockId, RecordHeader] = {}
    for group in sorted({group for group, _ in by_id}):
        block: BlockId = (group, key)
        while block in by_id and block not in found:
            found[block] = by_id[block]
            block = by_id[block].entry.parent_id
    if not found:
        raise TierError(f"{directory.path} holds no block with the key {key.hex()}; `ls` lists keys")
    return sorted(found.values(), key=lambda r: (r.entry.group, r.entry.position))


def export_blocks(
    directory: Directory, records: Iterable[RecordHeader], target: Path, *, progress: Progress = _silent
) -> Exchanged:
    """Write blocks to a new safetensors file; damaged ones are left out and counted.

    Args:
        directory: Holds them.
        records: What to write.
        target: The file.
        progress: Called after each is verified and after each is written, with how often it will be called at most.

    Raises:
        TierError: The file exists or cannot be written; nothing of it is left then.
    """
    if directory.identity is None:
        raise TierError(f"{directory.path} is empty; there is nothing to export")
    buffer = BlockReader()
    wanted = list(records)
    good = []
    for record in wanted:
        if buffer.load(directory, record):
            good.append(record)
        progress(2 * len(wanted))
    blocks, tensors, offset = [], {}, 0
    for index, record in enumerate(good):
        size = record.payload_bytes
        blocks.append(_describe(record))
        tensors[f"block.{index}"] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    texts = {"format": FORMAT, "identity": directory.identity.json, "blocks": json.dumps(blocks)}
    header = json.dumps({"__metadata__": texts, **tensors}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise TierError(
            f"{len(good)} blocks need a header of {len(header)} bytes; safetensors allows {MAX_HEADER_BYTES}"
        )
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for record in good:
                if not buffer.load(directory, record):
                    raise TierError(f"{directory.path} changed while it was exported; try again")
                file.write(buffer.view[: record.payload_bytes])
                progress(2 * len(wanted))
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, target)  # never over a file that is there
    except OSError as error:
        raise TierError(f"cannot write {target}: {reason(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Exchanged(len(good), offset, len(wanted) - len(good))


def import_blocks(
    source: Path, path: Path, *, size_bytes: int | None = None, progress: Progress = _silent
) -> Exchanged:
    """Read the blocks of a file into a directory, which is made when it is missing.

    Args:
        source: The file.
        path: The directory.
        size_bytes: The most the directory may take.
        progress: Called with each block, with how many there are.

    Raises:
        PlanMismatch: The directory belongs to another plan or model than the file; names the differing parts.
        TierError: The file is no export, or damaged; blocks before the damage stay.
    """
    try:
        with source.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, start = _read_header(file.read(8), file, size, source)
            identity, blocks = _read_texts(header, source)
            directory = WritableDirectory(path, identity, size_bytes=size_bytes)
            try:
                located = _located(header, blocks, size - start, source)
                return _import(directory, file.fileno(), located, start, source, advance=lambda: progress(len(blocks)))
            finally:
                directory.close()
    except OSError as error:
        if isinstance(error, TierError):
            raise
        raise TierError(f"cannot read {source}: {reason(error)}") from error


class BlockReader:
    """Reads whole, verified blocks, one at a time, into memory of its own."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def view(self) -> memoryview:
        """The memory; the block last read is at its start."""
        return memoryview(self._map)

    def reserve(self, size: int) -> Pieces:
        """Return memory for `size` bytes, good until the next call."""
        if len(self._map) < size:
            self._map = mmap.mmap(-1, size)
        return ((ctypes.addressof(ctypes.c_char.from_buffer(self._map)), size),)

    def load(self, directory: Directory, record: RecordHeader) -> bool:
        """Read a block and verify it; False when it is damaged or gone."""
        return directory.read(record.entry, self.reserve(record.payload_bytes)).status is Status.HIT


def _describe(record: RecordHeader) -> dict[str, Any]:
    entry = record.entry
    return {
        "group": entry.group,
        "key": entry.key.hex(),
        "parent": entry.parent.hex(),
        "position": entry.position,
        "priority": entry.priority,
        "extras": entry.extras.hex(),
        "tokens": unpack_tokens(entry.tokens),
        "crc32c": record.payload_crc,
    }


def _read_header(prefix_bytes: bytes, file: Any, size: int, source: Path) -> tuple[dict[str, Any], int]:
    if len(prefix_bytes) < 8:
        raise TierError(f"{source} is no safetensors file: {size} bytes")
    (length,) = struct.unpack("<Q", prefix_bytes)
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise TierError(f"{source} is no safetensors file: it announces a header of {length} bytes and has {size}")
    try:
        header = json.loads(file.read(length).decode())
    except (ValueError, RecursionError) as error:
        raise TierError(f"{source} is no safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise TierError(f"{source} is no safetensors file: its header is no object")
    return header, 8 + length


def _read_texts(header: dict[str, Any], source: Path) -> tuple[Identity, list[tuple[Entry, int]]]:
    texts = header.get("__metadata__")
    if not isinstance(texts, dict) or texts.get("format") != FORMAT:
        raise TierError(f"{source} is no export of kvpool: its metadata lack format {FORMAT!r}")
    try:
        identity = Identity(json.loads(texts["identity"]))
        blocks = [
            (
                Entry(
                    block["group"],
                    bytes.fromhex(block["key"]),
                    pack_tokens(block["tokens"]),
                    bytes.fromhex(block["parent"]),
                    block["position"],
                    bytes.fromhex(block["extras"]),
                    block["priority"],
                ),
                int(block["crc32c"]),
            )
            for block in json.loads(texts["blocks"])
        ]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, TierError) as error:
        raise TierError(f"{source}: its list of blocks cannot be understood: {error!r}") from None
    return identity, blocks


def _located(
    header: dict[str, Any], blocks: list[tuple[Entry, int]], data_bytes: int, source: Path
) -> Iterator[tuple[Entry, int, int, int]]:
    """Yield (entry, checksum, offset, bytes) of every block, checked against the file's length."""
    for index, (entry, crc) in enumerate(blocks):
        tensor = header.get(f"block.{index}")
        offsets: Any = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        whole = isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)
        if not whole or not 0 <= offsets[0] < offsets[1] <= data_bytes or offsets[1] - offsets[0] > MAX_PAYLOAD_BYTES:
            raise TierError(f"{source}: block {index} has no place in the file: {tensor!r}")
        yield entry, crc, offsets[0], offsets[1] - offsets[0]


def _import(
    directory: WritableDirectory,
    fd: int,
    blocks: Iterator[tuple[Entry, int, int, int]],
    start: int,
    source: Path,
    *,
    advance: Callable[[], None],
) -> Exchanged:
    buffer = BlockReader()
    count, num_bytes, skipped = 0, 0, 0
    for entry, crc, offset, size in blocks:
        advance()
        if entry.id in directory:
            skipped += 1
            continue
        pieces = buffer.reserve(size)
        done = os.preadv(fd, [buffer.view[:size]], start + offset)
        if done != size or payload_checksum(pieces) != crc:
            raise TierError(f"{source}: the block at {start + offset} is damaged; {count} blocks before it were taken")
        outcome = directory.append([(entry, pieces)])[0]
        if not outcome.ok:
            raise TierError(f"{source}: {outcome.detail}; {count} blocks were taken")
        count, num_bytes = count + 1, num_bytes + size
    return Exchanged(count, num_bytes, skipped)
