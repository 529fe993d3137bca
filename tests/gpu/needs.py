"""What the check needs beside this checkout, and what becomes of it where something is missing. Needs no package."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

#: Of the folder that is carried to a machine without network.
MOST_BYTES = 60_000_000


@dataclass(frozen=True)
class Need:
    """A package.

    Attributes:
        module: What is imported.
        package: What it is called where packages are fetched from.
        purpose: What needs it.
        carried: Put into the folder, with what it needs itself; the others come with the GPU.
    """

    module: str
    package: str
    purpose: str
    carried: bool = True


NEEDS = (
    Need("torch", "torch", "everything", carried=False),
    Need("triton", "triton", "everything", carried=False),
    Need("numpy", "numpy", "everything", carried=False),
    Need("cuda.bindings", "cuda-bindings", "check memory: pools that grow and shrink"),
    Need("transformers", "transformers", "checks graphs, steps_in_flight and run: a model"),
    Need("typer", "typer", "check run: the command line"),
    Need("rich", "rich", "check run: the command line"),
    Need("flashinfer", "flashinfer-python", "figures beside FlashInfer's"),
)


def missing() -> list[str]:
    """Return a line for every need that is not here."""
    return [f"not here: {n.package} ({n.purpose}); {advice(n)}" for n in NEEDS if not present(n.module)]


def advice(need: Need) -> str:
    """Say how to get a package there."""
    return (
        "carry it: tests/gpu/carry DIR on a machine with network, then --carried DIR" if need.carried else "install it"
    )


def present(module: str) -> bool:
    """Say whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def unpack(paths: Iterable[Path], site: Path) -> Path:
    """Unpack wheels and archives (`.tar.xz`) side by side, and return where."""
    for path in sorted(paths):
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site)
        elif path.name.endswith(".tar.xz"):
            with tarfile.open(path) as archive:
                archive.extractall(site, filter="data")
    return site


def other_python(folder: Path) -> str:
    """Return a file that another Python than this one is needed for; empty when there is none."""
    this = f"{sys.version_info.major}{sys.version_info.minor}"
    for path in sorted(folder.iterdir()):
        found = re.search(r"-cp(\d+)-cp\1-|\.cpython-(\d+)-", path.name)
        if found and this not in found.groups():
            return path.name
    return ""


def carried_bytes(folder: Path) -> int:
    """Return the size of what is carried."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
