"""Compiles for a GPU, on a machine without one, exactly the kernels that the backend would launch.

Run as a program (`python compiling.py --help`); the tests start it in a process of its own, since Triton is either
interpreted or compiled for the life of a process. Triton itself binds and specialises the backend's launches, which are
recorded; each is compiled for the target as the launch would have it, and what the compiler used is read off.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Launch:
    """One recorded launch: what Triton would compile for it, and how."""

    kernel: Any
    source: ASTSource
    options: dict[str, Any]

    def key(self) -> str:
        """Return a text equal for launches that compile to the same code."""
        return f"{self.source.hash()}{self.options}"


class Pretended:
    """Stands for the driver of a GPU that is not here, as far as a launch asks it, and for a compiled kernel."""

    function, packed_metadata = None, ()

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def launch_metadata(self, *arguments: Any) -> None:
        pass

    def run(self, *arguments: Any) -> None:
        pass


@contextmanager
def recorded(capability: int) -> Iterator[list[Launch]]:
    """Record launches: Triton binds and specialises them as it would on a GPU, and nothing is compiled or launched."""
    launches: list[Launch] = []
    pretended = Pretended(capability)

    def keep(
        kernel: Any, _: Any, signature: Any, __: int, constants: Any, options: Any, places: Any, *rest: Any
    ) -> Any:
        known = {place: attributes for place, attributes in places.items() if attributes}
        launches.append(Launch(kernel, ASTSource(kernel, signature, constants, known), dict(options.__dict__)))
        return pretended

    original = JITFunction._do_compile
    JITFunction._do_compile = keep
    driver.set_active(pretended)
    try:
        yield launches
    finally:
        JITFunction._do_compile = original


def tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def resources(asm: dict[str, Any], capability: int) -> dict[str, int]:
    """Return registers a thread takes and bytes it spills: as Triton assembled it, and as the assembler does by itself.

    Triton 3.9 asks its assembler for another register allocation (`--regAllocOptLevel=2`), which here and there holds
    a value that is needed after the loop on the stack, whatever the registers; no other Triton does.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        done = subprocess.run([tool("cuobjdump"), "-res-usage", cubin], capture_output=True, text=True, check=True)
        found = re.search(r"\bREG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
        assert found, done.stdout + done.stderr
        used = {"registers": int(found[1]), "stack": int(found[2]), "spills": 0}
        if used["stack"]:
            source = Path(folder) / "kernel.ptx"
            source.write_text(asm["ptx"])
            arch = f"-arch=sm_{capability}{'a' if capability >= 90 else ''}"
            for name in ("ptxas", "ptxas-blackwell"):  # the older one refuses what is meant for the newer
                command = [tool(name), arch, "-v", str(source), "-o", str(cubin)]
                done = subprocess.run(command, capture_output=True, text=True)
                if not done.returncode:
                    break
            sizes = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", done.stderr)
            assert len(sizes) == 3, done.stderr
            used["spills"] = sum(map(int, sizes))
    return used


#: 16-byte loads and stores, to registers or straight to shared memory.
WIDE_LOAD = re.compile(
    r"(ld\.global[\w.:]*\.v4\.b32|ld\.global[\w.:]*\.v2\.b64|cp\.async\.cg\.shared\.global [^;]*0x10)"
)
#: The same of 8 and 4 bytes.
LOAD = re.compile(r"(ld\.global[\w.:]*|cp\.async\.c[ag]\.shared\.global)")


#: Constants, arguments and results of 32 bits in Triton's first form.
CONSTANT = re.compile(r"(%[\w.]+) = arith\.constant (?:dense<)?(-?\d+)>? : (?:tensor<[\dx]+x)?i32")
ARGUMENT = re.compile(r"(%[\w.]+): i32")
RESULT = re.compile(
    r"(%[\w.]+) = (arith\.muli|arith\.addi|tt\.splat|tt\.broadcast|tt\.expand_dims) (%[\w.#]+)(?:, (%[\w.#]+))?"
    r"[^\n]*[ x]i32>? loc"
)
#: A factor from which on a product is no count of heads, rows or tokens of a tile any more.
STRIDE = 4096


def narrow_products(ttir: str) -> list[str]:
    """Return the products of 32 bits with a stride: an argument, or constants that together are as large as one.

    A block id times the stride of a block passes 2^31 elements in a few thousand blocks.
    """
    strides = {name: abs(int(value)) for name, value in CONSTANT.findall(ttir)}
    strides |= {name: STRIDE for line in ttir.splitlines() if "tt.func" in line for name in ARGUMENT.findall(line)}
    grown: dict[str, int] = {}  # by how much what was multiplied stands for more than a count
    found = []
    for name, operation, a, b in RESULT.findall(ttir):
        if operation == "arith.muli":
            grown[name] = (strides.get(a) or grown.get(a, 1)) * (strides.get(b) or grown.get(b, 1))
            found += [name] if grown[name] >= STRIDE else []
        elif operation == "arith.addi":
            grown[name] = max(grown.get(a, 1), grown.get(b, 1))
        else:
            grown[name] = grown.get(a, 1)
            strides |= {name: strides[a]} if a in strides else {}
    return found


def compile_launch(launch: Launch, capability: int) -> dict[str, Any]:
    """Compile one launch and return what it uses."""
    started = time.perf_counter()
    compiled = triton.compile(launch.source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    ptx = compiled.asm["ptx"]
    return {
        "kernel": launch.kernel.__name__,
        "shared": compiled.metadata.shared,
        **resources(compiled.asm, capability),
        "wide_loads": len(WIDE_LOAD.findall(ptx)),
        "loads": len(LOAD.findall(ptx)),
        "dots": len(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.]*", ptx)),
        "wgmma": "wgmma.mma_async" in ptx,
        "fused": len(re.findall(r"\bfma\.rn\.f32\b", ptx)),
        "flushed": len(re.findall(r"\.ftz\.", ptx)),
        "narrow": narrow_products(compiled.asm["ttir"]),
        "seconds": round(time.perf_counter() - started, 2),
    }


def explain(error: BaseException) -> str:
    """Return the messages of an error and its causes, the innermost last."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "\n".join(texts)[-1500:]


def find_launches(capability: int, only: str, every_pair: bool) -> list[tuple[str, Launch]]:
    """Return the launches that compile to different code, with the name of the first variant to make them."""
    from variants import variants

    from kvpool.backends.triton.target import Target

    target = Target.of(capability, 132)
    found: dict[str, tuple[str, Launch]] = {}
    for name, run in variants(every_pair):
        if re.search(only, name):
            with recorded(capability) as launches:
                run(target)
            for launch in launches:
                found.setdefault(launch.key(), (name, launch))
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--only", default="", help="regular expression on variant names")
    parser.add_argument("--every-pair", action="store_true", help="all pairs of codecs of keys and values, not some")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth, from the Ith")
    parser.add_argument("--max-registers", type=int, default=None, help="registers a thread may have")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)  # this process is copied, which threads do not survive
    first, step = options.part
    found = find_launches(options.capability, options.only, options.every_pair)[first::step]

    for _, launch in found:
        if options.max_registers is not None:
            launch.options["maxnreg"] = options.max_registers
    fork = multiprocessing.get_context("fork")
    turn = fork.Value("i", 0)
    workers = [fork.Process(target=compile_all, args=(found, options.capability, turn)) for _ in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(any(worker.exitcode for worker in workers))


def compile_all(found: list[tuple[str, Launch]], capability: int, turn: Any) -> None:
    """Compile launches and print a line of JSON for each, sharing them with other processes: `turn` is the next."""
    while True:
        with turn.get_lock():
            index = turn.value
            turn.value += 1
        if index >= len(found):
            return
        name, launch = found[index]
        row = {"variant": name, "kernel": launch.kernel.__name__, "capability": capability}
        row["triton"] = triton.__version__
        try:
            row |= compile_launch(launch, capability)
        except Exception as error:
            row["error"] = explain(error)
        os.write(1, f"{json.dumps(row)}\n".encode())  # whole lines of all processes


if __name__ == "__main__":
    main()
