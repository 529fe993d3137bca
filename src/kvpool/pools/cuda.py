"""Device memory whose addresses are reserved once and backed by chunks: CUDA's virtual memory management.

The driver's calls stand behind the protocol `Driver`, so that everything but the calls themselves runs, and is tested,
without a GPU. A range is reserved; a chunk of physical memory is created and mapped when the first byte of it is
committed, and given back when none of its bytes is committed any more.
Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

import numpy as np
import torch

from kvpool.errors import KVError

#: Smallest chunk: fewer, larger ones map faster, smaller ones follow a budget more closely.
CHUNK_BYTES = 2 << 20


class Driver(Protocol):
    """The calls of a device's memory management."""

    granularity: int

    def reserve(self, size: int) -> int:
        """Reserve addresses, a multiple of `granularity`; nothing is behind them."""

    def free(self, address: int, size: int) -> None:
        """Give back what `reserve` returned."""

    def map(self, address: int, size: int) -> object:
        """Create physical memory and put it behind addresses; return its handle."""

    def unmap(self, address: int, size: int, handle: object) -> None:
        """Take the memory of one `map` away and give it back to the device."""

    def synchronize(self) -> None:
        """Wait until nothing the device was given to do can touch the memory."""

    def tensor(self, owner: object, address: int, size: int) -> torch.Tensor:
        """Return a uint8 tensor on mapped or unmapped addresses that keeps `owner` alive."""


class VirtualMemory:
    """A reserved range of a device, backed by chunks.

    Invariants: `address` never changes; chunk i is mapped exactly while bytes of it are committed.
    """

    def __init__(self, driver: Driver, reserved_bytes: int) -> None:
        self._driver = driver
        self.granule_bytes = -(-CHUNK_BYTES // driver.granularity) * driver.granularity
        chunks = max(-(-reserved_bytes // self.granule_bytes), 1)
        self.reserved_bytes = chunks * self.granule_bytes
        self.address = driver.reserve(self.reserved_bytes)
        self._committed = np.zeros(chunks, np.int64)  # bytes of each chunk
        self._handles: dict[int, object] = {}
        self._release = weakref.finalize(
            self, _release, driver, self.address, self.reserved_bytes, self.granule_bytes, self._handles
        )

    @property
    def mapped_bytes(self) -> int:
        """Bytes of physical memory behind the range."""
        return len(self._handles) * self.granule_bytes

    def commit(self, start: int, stop: int) -> None:
        for chunk, size in self._overlaps(start, stop):
            if chunk not in self._handles:
                try:
                    self._handles[chunk] = self._driver.map(
                        self.address + chunk * self.granule_bytes, self.granule_bytes
                    )
                except KVError as error:
                    self.decommit(start, max(start, chunk * self.granule_bytes))
                    raise KVError(
                        f"cannot commit {stop - start} bytes: {error}; {self.mapped_bytes} bytes are behind this range."
                        " Lower the budget, or free memory of other users of the device"
                    ) from error
            self._committed[chunk] += size

    def decommit(self, start: int, stop: int) -> None:
        emptied = []
        for chunk, size in self._overlaps(start, stop):
            self._committed[chunk] -= size
            if self._committed[chunk] < 0:
                raise KVError(f"bytes [{start}, {stop}) were not all committed")
            if self._committed[chunk] == 0 and chunk in self._handles:
                emptied.append(chunk)
        if emptied:
            self._driver.synchronize()
        for chunk in emptied:
            address = self.address + chunk * self.granule_bytes
            self._driver.unmap(address, self.granule_bytes, self._handles.pop(chunk))

    def tensor(self) -> torch.Tensor:
        return self._driver.tensor(self, self.address, self.reserved_bytes)

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return (chunk, bytes of it) for every chunk that `[start, stop)` touches."""
        if not 0 <= start <= stop <= self.reserved_bytes:
            raise KVError(f"bytes [{start}, {stop}) are not inside a range of {self.reserved_bytes}")
        g = self.granule_bytes
        return [(i, min(stop, (i + 1) * g) - max(start, i * g)) for i in range(start // g, -(-stop // g))]


def _release(driver: Driver, address: int, size: int, granule: int, handles: dict[int, object]) -> None:
    driver.synchronize()
    for chunk, handle in handles.items():
        driver.unmap(address + chunk * granule, granule, handle)
    driver.free(address, size)


class _Interface:
    """What `torch.as_tensor` takes: addresses of a device, and their owner."""

    def __init__(self, owner: object, address: int, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class CudaDriver:
    """The driver API of one CUDA device, through the package `cuda-bindings`."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        self._cuda = driver
        self.index = index
        torch.empty(1, device=f"cuda:{index}")  # makes the device's primary context, which torch uses, current
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = index
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity: int = self._call("cuMemGetAllocationGranularity", self._properties, recommended)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            raise KVError(f"{name} failed with {error.name} on cuda:{self.index}")
        return results[0] if results else None

    @staticmethod
    def supported(index: int) -> str:
        """Return why virtual memory management cannot be used on a device; empty when it can."""
        try:
            from cuda.bindings import driver
        except ImportError as missing:
            return f"the package cuda-bindings is missing ({missing})"
        torch.empty(1, device=f"cuda:{index}")  # initialises the driver
        wanted = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        error, device = driver.cuDeviceGet(index)
        if error == driver.CUresult.CUDA_SUCCESS:
            error, value = driver.cuDeviceGetAttribute(wanted, device)
            if error == driver.CUresult.CUDA_SUCCESS and value:
                return ""
        return f"cuda:{index} has no virtual memory management ({error.name})"

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> object:
        handle = self._call("cuMemCreate", size, self._properties, 0)
        self._call("cuMemMap", address, size, 0, handle, 0)
        access = self._cuda.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1)
        return handle

    def unmap(self, address: int, size: int, handle: object) -> None:
        self._call("cuMemUnmap", address, size)
        self._call("cuMemRelease", handle)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def tensor(self, owner: object, address: int, size: int) -> torch.Tensor:
        # torch asks the driver which device an address belongs to, and a reserved one has no answer yet.
        handle = (
            self.map(address, self.granularity) if isinstance(owner, VirtualMemory) and not owner.mapped_bytes else None
        )
        made = torch.as_tensor(_Interface(owner, address, size), device=f"cuda:{self.index}")
        if handle is not None:
            self.unmap(address, self.granularity, handle)
        if made.data_ptr() != address:
            raise KVError(f"torch copied the range at {address} instead of taking it as it is")
        return made


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CudaPinning:
    """Pins host memory with the CUDA runtime that torch brings."""

    def pin(self, address: int, size: int) -> None:
        error = _runtime().cudaHostRegister(address, size, 0)
        if int(error):
            raise KVError(
                f"cannot pin {size} bytes of host memory: {error}; lower the host budget or raise `ulimit -l`"
            )

    def unpin(self, address: int) -> None:
        _runtime().cudaHostUnregister(address)


class PlainMemory:
    """One allocation of the whole range, where addresses and memory cannot be had apart."""

    granule_bytes = 512

    def __init__(self, device: str, reserved_bytes: int) -> None:
        self.reserved_bytes = max(-(-reserved_bytes // self.granule_bytes), 1) * self.granule_bytes
        try:
            self._bytes = torch.empty(self.reserved_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise KVError(
                f"cannot allocate {self.reserved_bytes} bytes on {device}: {error}; lower max_budget"
            ) from error
        self.address = self._bytes.data_ptr()

    def commit(self, start: int, stop: int) -> None:
        """Do nothing: all is there from the start."""

    def decommit(self, start: int, stop: int) -> None:
        """Do nothing: what was allocated stays until the end."""

    def tensor(self) -> torch.Tensor:
        return self._bytes


def reserve_cuda(device: str, reserved_bytes: int) -> VirtualMemory | PlainMemory:
    """Reserve a range on a CUDA device; says in the log when it has to be allocated whole."""
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    reason = CudaDriver.supported(index)
    if not reason:
        return VirtualMemory(CudaDriver(index), reserved_bytes)
    logging.getLogger("kvpool").warning(
        "%s: all %d bytes of max_budget are allocated now, and resize frees none", reason, reserved_bytes
    )
    return PlainMemory(device, reserved_bytes)
