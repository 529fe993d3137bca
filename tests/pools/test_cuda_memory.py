"""The device's virtual memory, with the host's in place of the driver's calls: the same mapping of real pages."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.errors import KVError
from kvpool.kinds import KVKind, LayerSpec
from kvpool.plan import make_plan
from kvpool.pools import Pools, cuda
from kvpool.pools.cuda import VirtualMemory
from kvpool.pools.staging import Staging
from kvpool.spec import CacheSpec

FIXED = 0x10
ALL = mmap.PROT_READ | mmap.PROT_WRITE


class HostDriver:
    """Physical memory is a memfd; mapping it is mmap at a fixed address."""

    granularity = 1 << 16

    def __init__(self, physical_bytes: int = 1 << 40) -> None:
        self.left = physical_bytes
        self.mapped: dict[int, int] = {}
        self.freed = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def reserve(self, size: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return int(self._libc.mmap(None, size, 0, flags, -1, 0))

    def free(self, address: int, size: int) -> None:
        assert not self.mapped
        assert not self._libc.munmap(address, size)
        self.freed = True

    def map(self, address: int, size: int) -> object:
        if size > self.left:
            raise KVError("out of memory")
        assert address not in self.mapped
        handle = os.memfd_create("chunk")
        os.truncate(handle, size)
        assert self._libc.mmap(address, size, ALL, mmap.MAP_SHARED | FIXED, handle, 0) == address
        self.left -= size
        self.mapped[address] = size
        return handle

    def unmap(self, address: int, size: int, handle: Any) -> None:
        assert self.mapped.pop(address) == size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
        assert self._libc.mmap(address, size, 0, flags, -1, 0) == address
        os.close(handle)
        self.left += size

    def synchronize(self) -> None:
        pass

    def tensor(self, owner: object, address: int, size: int) -> torch.Tensor:
        class Interface:
            __array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}  # noqa: RUF012

        interface = Interface()
        interface.owner = owner  # type: ignore[attr-defined]
        return torch.from_numpy(np.asarray(interface))


def test_memory_stands_behind_committed_bytes_and_no_others() -> None:
    driver = HostDriver()
    memory = VirtualMemory(driver, 40 << 20)
    assert memory.granule_bytes == 2 << 20
    assert not driver.mapped
    bytes_ = memory.tensor()
    memory.commit(0, 6 << 20)
    assert memory.mapped_bytes == sum(driver.mapped.values()) == 6 << 20
    bytes_[: 6 << 20] = 7
    memory.commit(6 << 20, 8 << 20)
    memory.decommit(4 << 20, 8 << 20)
    assert memory.mapped_bytes == 4 << 20
    assert (bytes_[: 4 << 20] == 7).all()
    memory.commit(4 << 20, 6 << 20)
    assert (bytes_[4 << 20 : 6 << 20] == 0).all()  # new memory, not the old
    assert memory.tensor().data_ptr() == bytes_.data_ptr() == memory.address


def test_a_chunk_that_two_ranges_share_stays_until_both_are_gone() -> None:
    memory = VirtualMemory(HostDriver(), 8 << 20)
    memory.commit(0, 1 << 20)
    memory.commit(1 << 20, 3 << 20)
    assert memory.mapped_bytes == 4 << 20
    memory.decommit(0, 1 << 20)
    assert memory.mapped_bytes == 4 << 20
    memory.decommit(1 << 20, 3 << 20)
    assert memory.mapped_bytes == 0


def test_a_commit_that_does_not_fit_changes_nothing_and_says_so() -> None:
    driver = HostDriver(physical_bytes=5 << 20)
    memory = VirtualMemory(driver, 20 << 20)
    memory.commit(0, 2 << 20)
    with pytest.raises(KVError, match=r"cannot commit 8388608 bytes.*2097152 bytes are behind"):
        memory.commit(2 << 20, 10 << 20)
    assert memory.mapped_bytes == 2 << 20
    memory.decommit(0, 2 << 20)
    assert not driver.mapped


@pytest.mark.parametrize("bad", [(-1, 0), (2, 1), (0, 1 << 40)])
def test_ranges_outside_are_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(KVError, match="not inside a range"):
        VirtualMemory(HostDriver(), 1 << 20).commit(*bad)


def test_everything_is_given_back_when_the_last_tensor_is_gone() -> None:
    driver = HostDriver()
    memory = VirtualMemory(driver, 4 << 20)
    memory.commit(0, 2 << 20)
    view = memory.tensor()[5:9]
    del memory
    gc.collect()
    assert not driver.freed
    view[:] = 1
    del view
    gc.collect()
    assert driver.freed
    assert not driver.mapped


@pytest.mark.parametrize("layer_first", [False, True])
def test_pools_grow_and_shrink_on_it(monkeypatch: pytest.MonkeyPatch, layer_first: bool) -> None:
    drivers: list[HostDriver] = []

    def reserve(device: str, reserved_bytes: int) -> VirtualMemory:
        drivers.append(HostDriver())
        return VirtualMemory(drivers[-1], reserved_bytes)

    monkeypatch.setattr(cuda, "reserve_cuda", reserve)
    spec = CacheSpec(layers=(LayerSpec((KVKind(4, 64),)),) * 3)
    plan = make_plan(spec, 24 << 20, codec="bf16", max_budget=48 << 20, layer_first=layer_first)
    pools = Pools(plan, "cuda")
    slab = pools.slabs[0]
    tensor = pools.part(2, "v").planes["data"].tensor
    last = slab.num_blocks - 1
    tensor[last] = 3.0
    tensor[0] = 5.0
    slab.resize(slab.num_blocks + 5)
    tensor[last + 5] = 4.0
    assert (tensor[last] == 3.0).all()
    slab.resize(1)
    assert (tensor[0] == 5.0).all()
    assert sum(drivers[0].mapped.values()) <= (3 if layer_first else 1) * 2 * (2 << 20)


def test_the_names_of_the_driver_s_calls_exist() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    for name in ("MemGetAllocationGranularity", "MemAddressReserve", "MemAddressFree", "MemCreate", "MemMap"):
        assert callable(getattr(driver, f"cu{name}"))
    for name in ("MemSetAccess", "MemUnmap", "MemRelease", "DeviceGet", "DeviceGetAttribute"):
        assert callable(getattr(driver, f"cu{name}"))


def test_staging_brings_every_array_in_one_copy_to_fixed_addresses() -> None:
    def arrays(seed: int) -> list[Any]:
        random = np.random.default_rng(seed)
        return [
            random.integers(0, 100, 7),
            random.integers(0, 100, (3, 5), np.int32),
            random.integers(0, 9, (0, 4), np.int32),
        ]

    first, second = arrays(0), arrays(1)
    a = Staging(first, "cpu")
    b = Staging(second, "cpu", share=a)
    addresses = [t.data_ptr() for t in a.tensors]
    assert [t.dtype for t in a.tensors] == [torch.int64, torch.int32, torch.int32]
    for staging, host in ((a, first), (b, second), (a, first)):
        staging.upload()
        for tensor, array in zip(b.tensors, host, strict=True):
            assert np.array_equal(tensor.numpy(), array)
    assert [t.data_ptr() for t in b.tensors] == addresses
    with pytest.raises(ValueError, match="cannot share"):
        Staging(first[:1], "cpu", share=a)
