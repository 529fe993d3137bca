"""FlashInfer for a machine that can fetch and compile nothing: which kernels the benchmarks ask it for, and they built.

What is asked for is found by asking: every case goes through our adapter and FlashInfer's own planning, on the CPU,
with a GPU of compute capability 9.0 pretended and nothing launched. Run as a program in a process that can import
FlashInfer, it prints a line of JSON for each module asked for; `--build` builds those that a folder lacks, `--load`
loads them as a GPU machine would, from beside the package and with building forbidden.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: The package whose files are packed; what comes with it for the development environment; what its import needs else.
PACKAGE = "flashinfer-python"
IMPORTS = ("Jinja2", "requests", "tqdm")
VERSIONS = {PACKAGE: "0.7.4", "apache-tvm-ffi": "0.1.15.post2", "einops": "0.8.2", "nvidia-ml-py": "13.615.71"}
#: Headers of CUDA 13 that small toolkits leave out.
CURAND = "nvidia-curand==10.4.0.35"
#: The GPU: compute capability, with the features of this chip only.
ARCHITECTURE = "9.0a"
#: Subpackages for other models and chips, half of all: only what is imported of them is carried.
HEAVY = ("experimental", "fused_moe", "moe_ep")


def install() -> Path:
    """Return a folder with FlashInfer for this Python, fetched when it is not there.

    Raises:
        OSError: It cannot be fetched.
    """
    return fetched("flashinfer", *(f"{name}=={version}" for name, version in VERSIONS.items()))


def fetched(name: str, *packages: str) -> Path:
    """Return a folder below `build` with packages in it, fetched when it is not there.

    Raises:
        OSError: They cannot be fetched.
    """
    folder = ROOT / "build" / name
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            part = Path(unfinished) / name
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(part), *packages]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"cannot install {packages[0]}: {done.stderr.strip()[-300:]}")
            part.rename(folder)
    return folder


def run(*arguments: str, places: tuple[Path, ...], **variables: str) -> list[dict[str, Any]]:
    """Run this file in a process of its own and return what it printed.

    Args:
        arguments: Of the command line.
        places: Where FlashInfer and what its import needs are looked for.
        variables: Of the environment.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "FLASHINFER"))}
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "benchmarks", *places)))
    environment |= {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    environment |= {"FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE, "OMP_NUM_THREADS": "1", **variables}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@contextmanager
def pretended(load: bool) -> Iterator[dict[str, Any]]:
    """Pretend a GPU that FlashInfer plans for and launches nothing on; yields the modules it asks for, by name.

    Args:
        load: Whether modules are really found and loaded, which needs no GPU either.
    """
    import flashinfer.prefill  # noqa: F401
    import torch
    from flashinfer.jit import core
    from flashinfer.mla._batch_mla._backends import _fa_common  # noqa: F401

    asked: dict[str, Any] = {}
    chip = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, shared_memory_per_multiprocessor=228 << 10,
        shared_memory_per_block_optin=227 << 10, name="pretended",
    )  # fmt: skip
    answers = {
        "get_compute_capability": lambda device: (9, 0),
        "get_device_properties": lambda device: chip,
        "get_device_sm_count": lambda device: chip.multi_processor_count,
        "is_sm90a_supported": lambda device: True,
    }
    empty, build_and_load = torch.empty, core.JitSpec.build_and_load

    def find(spec: Any) -> Any:
        asked[spec.name] = spec
        if load:
            build_and_load(spec)
        return _Module()

    kept = [
        (module, name, getattr(module, name))
        for module in list(sys.modules.values())
        for name in answers
        if getattr(module, "__name__", "").startswith("flashinfer") and hasattr(module, name)
    ]
    for module, name, _ in kept:
        setattr(module, name, answers[name])
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    core.JitSpec.build_and_load = find
    try:
        yield asked
    finally:
        torch.empty, core.JitSpec.build_and_load = empty, build_and_load
        for module, name, value in kept:
            setattr(module, name, value)


class _Module:
    """Stands for a module's functions: plans are empty, launches are none."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: ([], 0) if name == "plan_with_staged_workspace_bytes" else []


def ask(load: bool = False) -> dict[str, Any]:
    """Take every case of the benchmark through the adapter; return the modules FlashInfer asked for, by name.

    Prints each, with whether it is there built, and each case that the adapter refuses.

    Args:
        load: As `pretended` takes it.
    """
    import gpu_attention

    from kvpool.backends.flashinfer import FlashInferBackend
    from kvpool.errors import UnsupportedError

    with pretended(load) as asked:
        for case in gpu_attention.cases("cuda", ""):
            before = set(asked)
            call = gpu_attention.Call(case, "cpu", filled=False)
            name = " ".join(str(case[key]) for key in ("case", "codec", "batch", "context", "heads"))
            try:
                call.on(FlashInferBackend)()
            except UnsupportedError as error:
                say(case=name, refused=str(error))
            for module in set(asked) - before:
                say(case=name, module=module, found=asked[module].is_aot)
    return asked


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def build(specs: dict[str, Any], folder: Path) -> None:
    """Compile the modules that a folder of `NAME.so` lacks; minutes each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, spec in specs.items():
        if (folder / f"{name}.so").exists():
            continue
        started = time.monotonic()
        print(f"compiling {name}", file=sys.stderr, flush=True)
        spec.build()
        made = folder / f"{name}.part"
        shutil.copy(spec.jit_library_path, made)
        made.rename(folder / f"{name}.so")  # whole, or not there
        say(built=name, seconds=round(time.monotonic() - started))


def toolkit(place: Path) -> Path | None:
    """Return a CUDA toolkit that links without a driver and has all headers; None where there is no compiler.

    It is made of links to the one here, a library that stands for the driver's, and curand's headers, which CUTLASS
    includes and which may have been left out.
    """
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (home / "bin" / "nvcc").exists():
        return None
    stubs = place / "lib64" / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    (place / "include").mkdir(exist_ok=True)
    files = [path for path in home.iterdir() if path.name not in ("include", "lib64", "lib")]
    files += [*(home / "lib64").glob("lib*"), *(home / "include").iterdir()]
    if not (home / "include" / "curand_kernel.h").exists():
        files += fetched("curand", CURAND).rglob("curand*.h")
    for path in files:
        link = place / (path.parent.name if path.parent != home else "") / path.name
        if not link.exists():
            link.symlink_to(path)
    command = ["gcc", "-shared", "-xc", "-", "-Wl,-soname,libcuda.so.1", "-o", str(stubs / "libcuda.so")]
    subprocess.run(command, input="void none(void) {}", text=True, check=True)
    return place


def pack(folder: Path, library: Path, kernels: Path) -> list[str]:
    """Write `flashinfer.tar.xz`: what is imported, what modules are rendered from, the modules; return their names.

    Args:
        folder: Where to.
        library: Where FlashInfer is installed.
        kernels: Its modules, `NAME.so`.
    """
    rows = run("--files", places=(library,))
    names = [row["module"] for row in rows if "module" in row]
    imported = {row["file"] for row in rows if "file" in row}
    root = library / "flashinfer"
    files = [path for path in (root / "data" / "csrc").iterdir() if path.is_file()]
    for path in root.rglob("*"):
        part = path.relative_to(root)
        wanted = part.parts[0] not in HEAVY or str(part) in imported
        if path.suffix in (".py", ".json") and part.parts[0] != "data" and wanted:
            files.append(path)
    with tarfile.open(folder / "flashinfer.tar.xz", "w:xz", preset=6) as archive:
        for path in sorted(files):
            archive.add(path, f"flashinfer/{path.relative_to(root)}")
        for name in names:
            archive.add(kernels / f"{name}.so", f"flashinfer/data/aot/{name}/{name}.so")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, help="folder of modules to fill")
    parser.add_argument("--load", action="store_true", help="find and load every module asked for")
    parser.add_argument("--files", action="store_true", help="print the files of FlashInfer that are imported")
    args = parser.parse_args()
    asked = ask(args.load)
    if args.build is not None:
        build(asked, args.build)
    if args.files:
        import flashinfer

        root = Path(flashinfer.__file__).parent
        for module in list(sys.modules.values()):
            file = Path(getattr(module, "__file__", None) or "/")
            if file.is_relative_to(root):
                say(file=str(file.relative_to(root)))


if __name__ == "__main__":
    main()
