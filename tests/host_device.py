"""What stands for a CUDA device where there is none: memory behind reserved addresses, and passes that are recorded."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from kvpool.errors import KVError

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


#: What a stream that is captured cannot do: the host waits for a number, or brings one.
HOST = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "lift_fresh", "_unique2"}


class HostRecorder:
    """Keeps what a pass does to tensors and does it again, as a CUDA graph: at the same addresses, with no Python of
    ours, nothing read or brought by the host.

    Attributes:
        num_replays: Passes made again.
    """

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> Any:
        made: list[Callable[[], object]] = []
        with _Operations(made), kernel_launches(made):
            output = run()

        @torch.inference_mode()
        def replay() -> torch.Tensor:
            self.num_replays += 1
            for again in made:
                again()
            return output

        return SimpleNamespace(replay=replay)


class _Operations(TorchDispatchMode):
    """Notes torch's operations."""

    def __init__(self, made: list[Callable[[], object]]) -> None:
        super().__init__()
        self.made = made

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in HOST or masks:
            raise AssertionError(f"{function} makes the host wait for the device, or brings it a number")
        result = function(*args, **kwargs)
        old = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]

        def again() -> None:
            new = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for a, b in zip(old, new, strict=True):
                if a.data_ptr() != b.data_ptr():
                    a.copy_(b)

        if "empty" not in name:
            self.made.append(again)
        return result


@contextmanager
def kernel_launches(made: list[Callable[[], object]]) -> Iterator[None]:
    """Note launches of interpreted kernels, with their arguments, while they are made."""
    original = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        def launch() -> None:
            with _disable_current_modes():
                original(self, *args, **kwargs)

        made.append(launch)
        launch()

    InterpretedFunction.run = run
    try:
        yield
    finally:
        InterpretedFunction.run = original
