"""Blocks whose bytes say what they are, and memory to hold them: what all tier tests read back."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import random

from kvpool.tiers.base import Entry, Identity, Pieces, pack_tokens
from kvpool.tiers.base import memory as view

IDENTITY = Identity({"block_format": "test", "constants": "none", "model": "m"})
#: Bytes of a block of each group: one not a multiple of a page, none equal.
BLOCK_BYTES = (12_800, 4_096, 3_328)


def key_of(parent: bytes, tokens: bytes, extras: bytes = b"") -> bytes:
    return hashlib.sha256(parent + b"/" + tokens + b"/" + extras).digest()[:16]


def chain(
    seed: int, length: int, *, group: int = 0, tokens_per_block: int = 4, extras: bytes = b"", priority: int = 35
) -> list[Entry]:
    """A prefix of `length` blocks with tokens of its own."""
    rng = random.Random(seed)
    entries: list[Entry] = []
    parent = b""
    for index in range(length):
        tokens = pack_tokens(rng.randrange(50_000) for _ in range(tokens_per_block))
        key = key_of(parent, tokens, extras)
        entries.append(Entry(group, key, tokens, parent, index * tokens_per_block, extras, priority))
        parent = key
    return entries


def content(entry: Entry, num_bytes: int) -> bytes:
    """The bytes a block must hold: a stream seeded by all that names it."""
    seed = hashlib.sha256(repr((entry.group, entry.key, entry.tokens, entry.extras)).encode()).digest()
    return random.Random(seed).randbytes(num_bytes)


class Memory:
    """Memory for `count` blocks of one size, cut into `cuts` pieces each with a gap behind every piece."""

    def __init__(self, count: int, num_bytes: int, *, cuts: int = 1, offset: int = 0) -> None:
        self.num_bytes = num_bytes
        size = num_bytes // cuts
        self._sizes = [size] * (cuts - 1) + [num_bytes - size * (cuts - 1)]
        self._stride = sum(self._sizes) + 64 * cuts
        self._map = mmap.mmap(-1, count * self._stride + offset + 4096)
        self._offset = offset
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def pieces(self, index: int) -> Pieces:
        found = []
        at = self._offset + index * self._stride
        for size in self._sizes:
            found.append((self._address + at, size))
            at += size + 64
        return tuple(found)

    def set(self, index: int, data: bytes) -> None:
        assert len(data) == self.num_bytes
        fill(self.pieces(index), data)

    def get(self, index: int) -> bytes:
        return memory_of(self.pieces(index))


def stored(entries: list[Entry], *, cuts: int = 1) -> tuple[Memory, list[tuple[Entry, Pieces]]]:
    """Memory with the content of entries of one group, as a batch to put; keep the memory."""
    size = BLOCK_BYTES[entries[0].group]
    memory = Memory(len(entries), size, cuts=cuts)
    for index, entry in enumerate(entries):
        memory.set(index, content(entry, size))
    return memory, [(entry, memory.pieces(index)) for index, entry in enumerate(entries)]


def room(entries: list[Entry], *, cuts: int = 1) -> tuple[Memory, list[tuple[Entry, Pieces]]]:
    """Poisoned memory for entries of one group, as a batch to get; keep the memory."""
    size = BLOCK_BYTES[entries[0].group]
    memory = Memory(len(entries), size, cuts=cuts)
    for index in range(len(entries)):
        memory.set(index, b"\xee" * size)
    return memory, [(entry, memory.pieces(index)) for index, entry in enumerate(entries)]


def memory_of(pieces: Pieces) -> bytes:
    """Read memory at addresses."""
    return b"".join(bytes(view(address, size)) for address, size in pieces)


def fill(pieces: Pieces, data: bytes) -> None:
    """Write memory at addresses."""
    for address, size in pieces:
        view(address, size)[:] = data[:size]
        data = data[size:]
