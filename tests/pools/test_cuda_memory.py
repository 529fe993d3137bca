"""The device's virtual memory, with the host's in place of the driver's calls: the same mapping of real pages."""
# ruff: noqa: N802 (the driver names its calls)

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from host_device import HostDriver
from kvpool.errors import KVError
from kvpool.kinds import KVKind, LayerSpec
from kvpool.plan import make_plan
from kvpool.pools import Pools, cuda
from kvpool.pools.cuda import CudaDriver, VirtualMemory
from kvpool.pools.staging import Staging
from kvpool.spec import CacheSpec

#: Where `make test` puts CUDA's Python bindings, which need no GPU to be imported.
BINDINGS = Path(__file__).parents[2] / "build" / "cuda-bindings-13.5.0"


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


class Calls:
    """The driver API's calls that `CudaDriver` makes, with the names, types and results of the real bindings."""

    def __init__(self, bindings: Any, host: HostDriver) -> None:
        self.bindings, self.host = bindings, host
        self.ok = bindings.CUresult.CUDA_SUCCESS
        self.mapped: dict[int, Any] = {}
        self.accessible: set[int] = set()
        self.held: list[int] = []

    def cuMemGetAllocationGranularity(self, properties: Any, flags: Any) -> Any:
        assert flags == self.bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return self.ok, self.host.granularity

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        return self.ok, self.bindings.CUdeviceptr(self.host.reserve(size))

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        self.host.free(address, size)
        return (self.ok,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        assert properties.type == self.bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        assert (properties.location.id, flags) == (1, 0)
        if size > self.host.left:
            return self.bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.held.append(len(self.held))
        return self.ok, self.held[-1]

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        assert handle in self.held
        self.mapped[address] = self.host.map(address, size)
        return (self.ok,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> Any:
        assert [a.location.id for a in access] == [1] * count
        assert access[0].flags == self.bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.accessible.add(address)
        return (self.ok,)

    def cuMemUnmap(self, address: int, size: int) -> Any:
        self.host.unmap(address, size, self.mapped.pop(address))
        self.accessible.remove(address)
        return (self.ok,)

    def cuMemRelease(self, handle: int) -> Any:
        self.held.remove(handle)
        return (self.ok,)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    if BINDINGS.exists():
        monkeypatch.syspath_prepend(str(BINDINGS))
    bindings = pytest.importorskip("cuda.bindings.driver", reason=f"`make test` fetches {BINDINGS.name} where it can")
    made = Calls(bindings, HostDriver(physical_bytes=6 << 20))
    for name in (name for name in vars(Calls) if name.startswith("cu")):
        assert callable(getattr(bindings, name))
        monkeypatch.setattr(bindings, name, getattr(made, name))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(CudaDriver, "synchronize", lambda self: None)
    monkeypatch.setattr(CudaDriver, "tensor", lambda self, *where: made.host.tensor(*where))
    return made


def test_the_driver_is_asked_for_what_is_committed_and_given_it_back(calls: Calls) -> None:
    memory = VirtualMemory(CudaDriver(1), 16 << 20)
    bytes_ = memory.tensor()
    memory.commit(0, 3 << 20)
    assert calls.accessible == {memory.address, memory.address + (2 << 20)} == set(calls.mapped)
    bytes_[: 3 << 20] = 9
    with pytest.raises(KVError, match=r"cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY on cuda:1; 4194304 bytes"):
        memory.commit(3 << 20, 9 << 20)
    assert len(calls.held) == len(calls.mapped) == 2
    assert (bytes_[: 3 << 20] == 9).all()
    memory.decommit(1 << 20, 3 << 20)
    assert calls.accessible == {memory.address}
    del bytes_, memory
    gc.collect()
    assert calls.host.freed
    assert not calls.held


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


def test_what_a_forward_made_is_filled_outside_it() -> None:
    array = np.arange(4)
    with torch.inference_mode():
        staging = Staging([array], "cpu")
    staging.upload()
    array += 1
    staging.upload()
    assert staging.tensors[0].tolist() == [1, 2, 3, 4]
