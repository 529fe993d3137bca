"""The table of backends. One file or package a backend; the rest of kvpool asks this table only."""

from __future__ import annotations

import logging
from importlib import import_module

import torch

from kvpool import log
from kvpool.backends.base import Attention, Backend
from kvpool.errors import UnsupportedError

__all__ = ["BACKENDS", "Attention", "Backend", "get_backend"]

_log = logging.getLogger("kvpool.backends")

#: Backend name -> (module, class, device types it runs on, may `auto` choose it, has threads of its own), best first.
BACKENDS: dict[str, tuple[str, str, tuple[str, ...], bool, bool]] = {
    "cpu": ("kvpool.backends.cpu", "CpuBackend", ("cpu",), True, True),
    "triton": ("kvpool.backends.triton", "TritonBackend", ("cuda",), True, False),
    "flashinfer": ("kvpool.backends.flashinfer", "FlashInferBackend", ("cuda",), False, False),
    "reference": ("kvpool.backends.reference", "ReferenceBackend", ("cpu", "cuda"), False, False),
}


def get_backend(name: str, device: str, num_threads: int | None = None) -> Backend:
    """Return the backend called `name` (`auto` takes the best for `device`); never falls back.

    Args:
        name: As in the table, or `auto`.
        device: `cpu`, `cuda` or `cuda:1`.
        num_threads: Of a backend that has threads of its own; the others run on torch's, or on a device's.

    Raises:
        UnsupportedError: The name is unknown, the backend does not run on the device, or the threads are out of range.
    """
    kind = device.split(":")[0]
    fitting = [n for n, (_, _, devices, auto, _) in BACKENDS.items() if auto and kind in devices]
    if not fitting:
        raise UnsupportedError(f"device {device!r} is not supported; use cpu, cuda or, of several GPUs, cuda:1")
    if name == "auto":
        name = fitting[0]
        log.say(_log, logging.INFO, "backend", chosen=name, why=f"the best for {kind}; name one to have another")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"device {device!r} needs a GPU and a torch built for CUDA; here it must be 'cpu'")
    if name not in BACKENDS:
        raise UnsupportedError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    module, attribute, devices, _, threaded = BACKENDS[name]
    if kind not in devices:
        raise UnsupportedError(f"backend {name!r} runs on {', '.join(devices)}, not on {device!r}")
    options = {"num_threads": num_threads} if threaded else {}
    backend: Backend = getattr(import_module(module), attribute)(**options)
    return backend
