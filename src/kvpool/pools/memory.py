"""Address ranges that are reserved once and backed by memory from their start: the only file with system calls.

A range never moves. `commit` puts memory behind its first bytes, `decommit` gives it back to the system.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Protocol

import torch

from kvpool.errors import KVError

HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = mmap.PAGESIZE

# Linux and macOS values; Python's mmap module exports what it can.
_PROT_NONE = 0
_PROT_RW = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 0)


class Memory(Protocol):
    """A reserved address range of one device."""

    address: int
    reserved_bytes: int
    granule_bytes: int

    def commit(self, start: int, stop: int) -> None:
        """Put memory behind the bytes `[start, stop)`; raises `KVError` when there is none."""

    def decommit(self, start: int, stop: int) -> None:
        """Give the memory behind `[start, stop)` back; reading it afterwards is a fault."""

    def tensor(self) -> torch.Tensor:
        """Return the whole range as a uint8 tensor that keeps the range alive; nothing is touched."""


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    for call in (libc.mprotect, libc.madvise):
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class CpuMemory:
    """Anonymous pages, huge where the system grants them.

    Invariants: `address` is a multiple of a huge page; bytes outside committed ranges cannot be read.
    """

    granule_bytes = PAGE_BYTES

    def __init__(self, reserved_bytes: int) -> None:
        self.reserved_bytes = max(-(-reserved_bytes // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES)
        self._libc = _libc()
        length = self.reserved_bytes + HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = self._libc.mmap(None, length, _PROT_NONE, flags, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise KVError(
                f"cannot reserve {length} bytes of addresses: {os.strerror(ctypes.get_errno())}; lower max_budget"
            )
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._release = weakref.finalize(self, self._libc.munmap, start, length)

    def commit(self, start: int, stop: int) -> None:
        self._check(start, stop)
        if start == stop:
            return
        if self._libc.mprotect(self.address + start, stop - start, _PROT_RW):
            raise KVError(f"cannot commit {stop - start} bytes: {os.strerror(ctypes.get_errno())}; lower the budget")
        # Only whole huge pages inside the range, so that nothing becomes resident behind its end.
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if _MADV_HUGEPAGE and first < last:
            self._libc.madvise(self.address + first, last - first, _MADV_HUGEPAGE)  # advice: refusal is no error

    def decommit(self, start: int, stop: int) -> None:
        self._check(start, stop)
        if start == stop:
            return
        if self._libc.madvise(self.address + start, stop - start, _MADV_DONTNEED) or self._libc.mprotect(
            self.address + start, stop - start, _PROT_NONE
        ):
            raise KVError(f"cannot give back {stop - start} bytes: {os.strerror(ctypes.get_errno())}")

    def tensor(self) -> torch.Tensor:
        class Buffer(ctypes.c_uint8 * self.reserved_bytes):  # type: ignore[misc]
            owner: CpuMemory

        buffer = Buffer.from_address(self.address)
        buffer.owner = self
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.reserved_bytes or start % PAGE_BYTES or stop % PAGE_BYTES:
            raise KVError(
                f"bytes [{start}, {stop}) are not whole pages of {PAGE_BYTES} inside a range of {self.reserved_bytes}"
            )


class Pinning(Protocol):
    """The calls that let a device copy from and to host memory by itself."""

    def pin(self, address: int, size: int) -> None:
        """Pin pages; raises `KVError` when the system refuses."""

    def unpin(self, address: int) -> None:
        """Undo one `pin`."""


class PinnedMemory(CpuMemory):
    """Pages that are pinned while they are committed.

    Invariants: what is given back was committed by one call; no page is given back before it is unpinned.
    """

    def __init__(self, reserved_bytes: int, calls: Pinning) -> None:
        super().__init__(reserved_bytes)
        self._calls = calls
        self._pinned: dict[int, tuple[int, weakref.finalize[..., PinnedMemory]]] = {}

    def commit(self, start: int, stop: int) -> None:
        super().commit(start, stop)
        if start < stop:
            self._calls.pin(self.address + start, stop - start)
            # Run before the pages are unmapped: of an object's finalizers the last made is the first called.
            self._pinned[start] = stop, weakref.finalize(self, self._calls.unpin, self.address + start)

    def decommit(self, start: int, stop: int) -> None:
        if start < stop:
            end, unpin = self._pinned.pop(start, (start, None))
            if end != stop or unpin is None:
                raise KVError(f"bytes [{start}, {stop}) were not pinned by one call")
            unpin()
        super().decommit(start, stop)


def reserve_pinned(reserved_bytes: int) -> Memory:
    """Reserve host memory that a CUDA device copies from and to by itself."""
    from kvpool.pools.cuda import CudaPinning

    return PinnedMemory(reserved_bytes, CudaPinning())


def reserve(device: str, reserved_bytes: int) -> Memory:
    """Reserve an address range on a device (`cpu`, `cuda`, `cuda:1`)."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return CpuMemory(reserved_bytes)
    if kind == "cuda":
        from kvpool.pools.cuda import reserve_cuda

        return reserve_cuda(device, reserved_bytes)
    raise KVError(f"no memory for device {device!r}; known: cpu, cuda")
