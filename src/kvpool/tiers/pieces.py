"""Copies of blocks between two places of memory that may be cut differently."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool._native import copy_bytes
from kvpool.errors import TierError
from kvpool.tiers.base import Pieces, payload_bytes


def move(source: Pieces, target: Pieces) -> None:
    """Copy a block between two places of the host; releases the GIL in each copy. Raises as `cuts`."""
    for to, at, size in cuts(source, target):
        copy_bytes(to, at, size)


def cuts(source: Pieces, target: Pieces) -> Iterator[tuple[int, int, int]]:
    """Yield `(to, from, bytes)` of the copies between two places of equal size that may be cut differently.

    Raises:
        TierError: The sizes differ.
    """
    if payload_bytes(source) != payload_bytes(target):
        raise TierError(
            f"a block of {payload_bytes(source)} bytes does not fit {payload_bytes(target)} bytes of memory"
        )
    outs = iter(target)
    out, room = 0, 0
    for address, size in source:
        while size:
            if not room:
                out, room = next(outs)
                continue
            step = min(size, room)
            yield out, address, step
            address, out, size, room = address + step, out + step, size - step, room - step
