"""How much memory there is: sizes in words, and what the system leaves. Knows no plan."""

from __future__ import annotations

import ctypes
import os
import re
from decimal import Decimal
from pathlib import Path

from kvpool.errors import PlanError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
#: Sizes and addresses are 64-bit in every kernel.
MAX_BYTES = 2**63 - 1

#: Smallest memory unit a slab grows by: a page; a CUDA virtual-memory chunk.
GRANULES = {"cpu": 4096, "cuda": 2 * 2**20}
#: Part of the free memory taken when no budget is given.
DEFAULT_FRACTION = {"cpu": 0.5, "cuda": 0.9}


def count(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an integer of at least `least`.

    Raises:
        PlanError: It is no integer, or out of range.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise PlanError(f"{name} must be an integer, got {value!r}")
    number: int = value.__index__()
    if not least <= number <= MAX_BYTES:
        raise PlanError(
            f"{name} must be at least {least}{'' if number < least else f' and at most {MAX_BYTES}'}, got {number}"
        )
    return number


def parse_bytes(value: int | str, name: str = "budget") -> int:
    """Return a number of bytes given as an integer or as text: `4GiB`, `500 MB`, `1.5e9`.

    Raises:
        PlanError: The text has no number or unit, or the size is negative or above 2^63 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PlanError(f"{name} must be bytes or text such as '4GiB', got {value!r}")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d{1,3})?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise PlanError(f"{name} {value!r} is not a size; write bytes or a number with B, KB, MB, GB, TB, KiB, MiB,"
                            f" GiB or TiB, such as '4GiB'")  # fmt: skip
        value = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if value < 0:
        raise PlanError(f"{name} must not be negative, got {value}")
    if value > MAX_BYTES:
        raise PlanError(f"{name} of {value} bytes is above the largest address, {MAX_BYTES}")
    return value


def format_bytes(value: int) -> str:
    """Return bytes for people: `4.00 GiB`, `132 B`."""
    size, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if round(abs(size), 2) < 1024 or unit == "PiB":
            break
        size /= 1024
    return f"{value} B" if unit == "B" else f"{size:.2f} {unit}"


def device_type(device: str) -> str:
    """Return `cpu` or `cuda` for a device string.

    Raises:
        PlanError: The device is neither.
    """
    kind = str(device).partition(":")[0]
    if kind not in GRANULES:
        raise PlanError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
    return kind


def free_bytes(device: str = "cpu") -> int:
    """Return the memory free now: what the cgroup and the system leave, or what the GPU reports."""
    if device_type(device) == "cuda":
        return _cuda_free(int(device.partition(":")[2] or 0))
    limits = [_meminfo_available()]
    limits += [limit for limit in (_cgroup_v2(), _cgroup_v1()) if limit is not None]
    return max(min(limits), 0)


def _meminfo_available() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cgroup_dirs(root: Path, controller: str) -> list[Path]:
    """Directories of this process's cgroup and its parents that exist under `root` (a container may see only that)."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        number, names, path = line.split(":", 2)
        if (controller in names.split(",")) if controller else (number == "0" and not names):
            leaf = root / path.lstrip("/")
            return [d for d in (leaf, *leaf.parents) if d.is_relative_to(root) and d.is_dir()]
    return [root]


def _cgroup_v2(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    left = []
    if not (root / "cgroup.controllers").exists():
        return None
    for folder in _cgroup_dirs(root, ""):
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            left.append(int(limit) - int(used) + _stat(folder / "memory.stat", "inactive_file"))
    return min(left, default=None)


def _cgroup_v1(root: Path = Path("/sys/fs/cgroup/memory")) -> int | None:
    left = []
    if not root.is_dir():
        return None
    for folder in _cgroup_dirs(root, "memory"):
        limit, used = _read(folder / "memory.limit_in_bytes").strip(), _read(folder / "memory.usage_in_bytes").strip()
        if limit.isdigit() and used.isdigit():
            left.append(int(limit) - int(used) + _stat(folder / "memory.stat", "total_inactive_file"))
    return min(left, default=None)


def _stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


def _cuda_free(index: int) -> int:
    """Ask the driver; creates the device's primary context, which the cache needs anyway."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise PlanError(
            "memory_fraction of a GPU needs the CUDA driver (libcuda.so.1); give a budget instead"
        ) from None
    calls = (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(handle), index),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle),
        ("cuCtxPushCurrent_v2", context),
        ("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)),
        ("cuCtxPopCurrent_v2", ctypes.byref(context)),
    )
    for name, *arguments in calls:
        if error := getattr(cuda, str(name))(*arguments):
            raise PlanError(f"{name} for cuda:{index} failed with driver error {error}; give a budget instead")
    return free.value
