"""How blocks get into host memory and out of it: by the host itself, or by a device beside its other work."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvpool.errors import TierError
from kvpool.pools import Slab
from kvpool.pools.memory import Memory, reserve, reserve_pinned
from kvpool.pools.streams import CudaStream, SideStream
from kvpool.tiers.base import Pieces
from kvpool.tiers.pieces import cuts, move


class Copies(Protocol):
    """Copies of one batch, made by one thread."""

    def start(self, source: Pieces, target: Pieces) -> None:
        """Start copying a block between two places of equal size; raises `TierError` when they are not."""

    def wait(self) -> None:
        """Wait until all that was started is copied."""


class Mover(Protocol):
    """What a tier in host memory asks for."""

    def reserve(self, num_bytes: int) -> Memory:
        """Return host memory of which copies can be made."""

    def copies(self) -> Copies:
        """Begin a batch; any thread may."""


class HostCopies:
    """Copies the calling thread makes, each before `start` returns."""

    def start(self, source: Pieces, target: Pieces) -> None:
        move(source, target)

    def wait(self) -> None:
        pass


class HostMover:
    """Between addresses of the host."""

    def reserve(self, num_bytes: int) -> Memory:
        return reserve("cpu", num_bytes)

    def copies(self) -> Copies:
        return HostCopies()


class StreamCopies:
    """Copies on a side stream.

    Args:
        stream: Of this batch.
        bytes_at: Address and size to the uint8 tensor of what lies there.
    """

    def __init__(self, stream: SideStream, bytes_at: Callable[[int, int], torch.Tensor]) -> None:
        self._stream = stream
        self._bytes_at = bytes_at

    def start(self, source: Pieces, target: Pieces) -> None:
        for to, at, size in cuts(source, target):
            self._stream.copy(self._bytes_at(at, size), self._bytes_at(to, size))

    def wait(self) -> None:
        self._stream.wait()


class DeviceMover:
    """Between slabs of a device and pinned host memory, on side streams.

    Args:
        slabs: What blocks lie in.
        stream: Makes the stream of a batch.
        memory: Reserves host memory the device can copy from and to by itself.

    Invariants: ranges are in the order of their addresses.
    """

    def __init__(
        self, slabs: Sequence[Slab], stream: Callable[[], SideStream], memory: Callable[[int], Memory] = reserve_pinned
    ) -> None:
        self._stream = stream
        self._memory = memory
        self._ranges = sorted(((slab.address, slab.bytes) for slab in slabs), key=lambda pair: pair[0])

    def reserve(self, num_bytes: int) -> Memory:
        memory = self._memory(num_bytes)
        self._ranges = sorted([*self._ranges, (memory.address, memory.tensor())], key=lambda pair: pair[0])
        return memory

    def copies(self) -> Copies:
        return StreamCopies(self._stream(), self._bytes_at)

    def _bytes_at(self, address: int, size: int) -> torch.Tensor:
        index = bisect_right(self._ranges, address, key=lambda pair: pair[0]) - 1
        start, tensor = self._ranges[max(index, 0)]
        if not 0 <= address - start <= tensor.numel() - size:
            raise TierError(f"{size} bytes at {address:#x} lie neither in a slab of this cache nor in its host memory")
        return tensor[address - start : address - start + size]


def mover_for(device: str, slabs: Sequence[Slab]) -> Mover:
    """Return what moves blocks between slabs on a device and host memory."""
    if torch.device(device).type == "cpu":
        return HostMover()
    stream = torch.cuda.Stream(slabs[0].bytes.device)  # type: ignore[no-untyped-call]
    return DeviceMover(slabs, lambda: CudaStream(stream))
